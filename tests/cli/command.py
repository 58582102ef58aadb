"""Runs the command line, with nothing of the caller's settings that could matter.

``minivllm`` runs it as a process of its own; ``in_process`` runs it here, which saves the starting of Python and the
imports, for tests of what a command says and not of how a process begins and ends. Knows processes, streams and
signals. Must not know what any command does.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, TextIO
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
WAIT = 120.0
"""Seconds after which a command counts as hanging."""

NOBODY = "http://127.0.0.1:9"
"""An address where nobody listens: what a machine without a network sees."""


def environment(**changes: str) -> dict[str, str]:
    """Return the environment of a command, which is run from any folder."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "HF_"))}
    return {**own, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONIOENCODING": "utf-8", **changes}


def minivllm(
    *arguments: str, stdin: str | bytes = "", before: Callable[[], None] | None = None, **changes: str
) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end. ``before`` runs in the new process; ``changes`` are of the environment."""
    done = subprocess.run(
        [sys.executable, "-m", "minivllm", *arguments],
        input=stdin if isinstance(stdin, bytes) else stdin.encode(),
        capture_output=True,
        env=environment(**changes),
        preexec_fn=before,
        timeout=WAIT,
        check=False,
    )
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def in_process(*arguments: str, stdin: str = "", **changes: str) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end in this process, which is then as it was.

    ``changes`` are of the environment, as far as it is read while a command runs: what Python itself reads when it
    starts (``PYTHON...``) and what a library reads when it is imported needs ``minivllm``.
    """
    from minivllm.cli.main import main

    handlers = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    with (
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,
        mock.patch.dict(os.environ, environment(**changes), clear=True),
        mock.patch("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin.encode()))),
        warnings.catch_warnings(),
    ):
        _warn_as_python_does()
        try:
            with _written_to("stdout", 1, out), _written_to("stderr", 2, err):
                status = main(arguments)
        finally:
            for each, handler in handlers.items():
                signal.signal(each, handler)
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(arguments, status, out.read().decode(), err.read().decode())


@contextlib.contextmanager
def _written_to(name: str, descriptor: int, file: IO[bytes]) -> Iterator[None]:
    """Send a standard stream to a file: Python's, and what libraries write below Python.

    The stream is not closed: a logger that was made meanwhile keeps it, and writes to wherever the descriptor goes.
    """
    stream: TextIO = open(descriptor, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    getattr(sys, name).flush()
    before = os.dup(descriptor)
    os.dup2(file.fileno(), descriptor)
    try:
        with mock.patch.object(sys, name, stream):
            yield
            stream.flush()
    finally:
        os.dup2(before, descriptor)
        os.close(before)


def _warn_as_python_does() -> None:
    """Show warnings on standard error, as a fresh Python does: pytest would keep them for itself."""
    warnings.resetwarnings()
    for ignored in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", ignored)
    warnings.showwarning = lambda message, category, filename, lineno, file=None, line=None: print(
        warnings.formatwarning(message, category, filename, lineno, line), end="", file=sys.stderr
    )


def in_shell(script: str, **changes: str) -> subprocess.CompletedProcess[str]:
    """Run a line of shell in which ``minivllm`` is the command."""
    quoted = f"minivllm() {{ '{sys.executable}' -m minivllm \"$@\"; }}; {script}"
    return subprocess.run(
        ["bash", "-c", quoted],
        capture_output=True,
        text=True,
        env=environment(**changes),
        timeout=WAIT,
        check=False,
    )


@contextlib.contextmanager
def started(*arguments: str, **changes: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command in a process group of its own, as a terminal does; whatever is left of it is killed."""
    process = subprocess.Popen(
        [sys.executable, "-m", "minivllm", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(PYTHONUNBUFFERED="1", **changes),
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with process:
            pass


def read_until(stream: IO[bytes] | None, what: bytes) -> bytes:
    """Read from a pipe until ``what`` has come."""
    assert stream is not None
    seen = b""
    while what not in seen:
        piece = os.read(stream.fileno(), 4096)
        assert piece, f"{what!r} never came, but {seen!r}"
        seen += piece
    return seen


def is_gone(group: int) -> bool:
    """Return whether no process of a group is left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # macOS says this of a group of which only a zombie is left
        return True
    return False


def one_sentence(done: subprocess.CompletedProcess[Any], status: int) -> str:
    """Check that a command failed in one line, and return the line without the command's name."""
    assert done.returncode == status, (done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stdout + done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("minivllm: ")
    return lines[0].removeprefix("minivllm: ")
