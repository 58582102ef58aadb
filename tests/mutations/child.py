"""Run tests in a copy of the tree and write down, line by line, what happens: ``python -m tests.mutations.child FILE``.

Every line is JSON: which package is imported and from where, each test that starts, each that fails, each that hangs,
and at the end the status. Written as it happens, so that a run that must be killed has reported how far it came. Knows
pytest. Must not know what was edited.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import Phase, settings

SECONDS_A_TEST = 20
"""A test of these takes well under a second. One that takes so long is in an endless loop."""
MOST_HANGS = 2
"""After so many endless loops the rest of the tests would say nothing new."""


class Hung(BaseException):
    """A test has taken too long. No subclass of Exception, so that no engine takes it for a fault of its runner."""


class _Recorder:
    """A pytest plugin that writes the lines, and breaks endless loops."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8", buffering=1)
        self._num_hangs = 0

    def write(self, **line: Any) -> None:
        """Write one line, at once."""
        print(json.dumps(line), file=self._file, flush=True)

    def _ring(self, signum: int, frame: FrameType | None) -> None:
        self._num_hangs += 1
        raise Hung(f"no end after {SECONDS_A_TEST} seconds")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        """Set the clock for one test."""
        self.write(started=item.nodeid.split("[")[0])
        before = self._num_hangs
        signal.signal(signal.SIGALRM, self._ring)
        signal.setitimer(signal.ITIMER_REAL, SECONDS_A_TEST, 5)  # again and again: somebody may have caught the first
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            if self._num_hangs > before:
                self.write(hung=item.nodeid.split("[")[0])
            if self._num_hangs >= MOST_HANGS:
                item.session.shouldstop = "too many tests do not end"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write a failure down."""
        if report.failed:
            self.write(failed=report.nodeid.split("[")[0])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Write down that tests could not even be read."""
        if report.failed:
            self.write(unread=report.nodeid, why=str(report.longrepr)[-400:])


def main() -> None:
    """Run the tests named on the command line, after the file to write to."""
    path, *paths = sys.argv[1:]
    # That there is a failing example is enough; looking for the smallest one would take minutes.
    settings.register_profile("unshrunk", phases=[Phase.explicit, Phase.generate])
    settings.load_profile("unshrunk")
    recorder = _Recorder(Path(path))
    try:
        import minivllm

        recorder.write(package=minivllm.__file__)
    except BaseException as error:
        recorder.write(unread="minivllm", why=repr(error))
    status = pytest.main(["-q", "--tb=no", "-p", "no:cacheprovider", *paths], plugins=[recorder])
    recorder.write(status=int(status))
    os._exit(int(status))  # whatever thread still runs in an endless loop, or waits for one


if __name__ == "__main__":
    main()
