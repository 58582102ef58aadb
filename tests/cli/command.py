"""Runs ``python -m minivllm`` as a process of its own, with nothing of the caller's settings that could matter.

Knows processes. Must not know what any command does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

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
