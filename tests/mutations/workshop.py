"""Copies of the tree in which edits are tried: put one in, run tests, take it out again.

The working tree is never changed, and never what runs: each run reports from where it imported the package, and a run
that imported another is an error. Knows files and processes. Must not know which edits there are.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_NOT_COPIED = shutil.ignore_patterns(
    ".git", ".venv", ".venv.lock", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info", "node_modules", "build"
)


class WorkshopError(Exception):
    """The tool itself cannot go on: the edit does not fit, or the wrong package was run."""


@dataclass(slots=True)
class Run:
    """What one run of tests came to. ``hung`` tests are among the ``failed`` ones."""

    seconds: float
    started: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    hung: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    was_killed: bool = False

    @property
    def is_green(self) -> bool:
        """Whether every test passed, and there was one."""
        return bool(self.started) and not (self.failed or self.unread or self.was_killed)


class Copy:
    """One copy of the tree, for one worker."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._is_over = False
        shutil.copytree(ROOT, folder, ignore=_NOT_COPIED, symlinks=True)

    @contextlib.contextmanager
    def edited(self, module: str, old: str, new: str) -> Iterator[None]:
        """Have one edit in force for a while. Raises WorkshopError unless ``old`` is there exactly once."""
        path = self.folder / "minivllm" / f"{module}.py"
        text = path.read_text(encoding="utf-8")
        times = text.count(old)
        if times != 1:
            raise WorkshopError(f"minivllm/{module}.py holds the text {times} times, not once: {old!r}")
        self._write(path, text.replace(old, new))
        try:
            yield
        finally:
            self._write(path, text)

    @staticmethod
    def _write(path: Path, text: str) -> None:
        """Write a module and forget its compiled form, which Python recognises only by time and size."""
        path.write_text(text, encoding="utf-8")
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()

    def run(self, paths: Sequence[str], *, most_seconds: float, compile_all: bool = False) -> Run:
        """Run tests in this copy. Raises WorkshopError if they did not run this copy's package.

        With ``compile_all`` Python keeps what it compiles, for the runs to come.
        """
        record = self.folder / "record.jsonl"
        record.unlink(missing_ok=True)
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.folder),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # of what others bring along, these tests need nothing
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        if not compile_all:
            environment["PYTHONDONTWRITEBYTECODE"] = "1"
        started = time.monotonic()
        command = [sys.executable, "-m", "tests.mutations.child", str(record), *paths]
        with self._lock:
            if self._is_over:
                raise WorkshopError("stopped")
            self._process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # so that what the tests start can be ended with them
            )
        was_killed = False
        try:
            self._process.wait(most_seconds)
        except subprocess.TimeoutExpired:
            was_killed = True
        finally:
            self._kill()
        run = self._read(record, Run(time.monotonic() - started, was_killed=was_killed))
        if self._is_over:
            raise WorkshopError("stopped")
        return run

    def _read(self, record: Path, run: Run) -> Run:
        package = status = None
        lines = record.read_text(encoding="utf-8").splitlines() if record.exists() else []
        for text in lines:
            line = json.loads(text)
            package = line.get("package", package)
            status = line.get("status", status)
            for name, values in (("started", run.started), ("failed", run.failed), ("hung", run.hung)):
                if name in line and line[name] not in values:
                    values.append(line[name])
            if "unread" in line:
                run.unread.append(f"{line['unread']}: {line['why']}")
        if package is not None and not Path(package).is_relative_to(self.folder):
            raise WorkshopError(f"the tests ran {package}, which is not the copy in {self.folder}")
        if package is None and not run.unread and not run.was_killed and not self._is_over:
            raise WorkshopError(f"the tests in {self.folder} ended without a word")
        if status is None and run.started:  # killed, or crashed outright: in the test that had begun
            for values in (run.hung, run.failed):
                if run.started[-1] not in values:
                    values.append(run.started[-1])
        return run

    def _kill(self) -> None:
        process = self._process
        if process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def stop(self) -> None:
        """End what runs, from another thread; nothing can be run here any more."""
        with self._lock:
            self._is_over = True
        self._kill()
