"""How several workers share the tests: what stays together on one of them, and what starts first.

Knows: paths of tests, which of them take long, and pytest-xdist's scheduler. Must not know what any test does.
"""

from __future__ import annotations

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

LONG_FIRST = ("tests/browser/", "labs/", "tests/setup/", "tests/faults/", "tests/parity/", "tests/cli/")
"""What takes long starts first, so that no worker is left alone with it at the end; then the rest, file by file."""

ONE_BY_ONE = (
    "tests/lint/",
    "tests/cli/",
    "tests/faults/",
    "tests/setup/test_setup.py",
    "tests/setup/test_start_lab.py",
)
"""Where tests are long and share nothing that is dear to make: any worker may take any of them."""

TOGETHER = ("tests/browser/",)
"""Folders whose files share something dear (a server, a browser): one worker takes all of them."""


def group_of(test: str) -> str:
    """Return the name under which a test stays on one worker: its file, unless said otherwise above."""
    if test.startswith(ONE_BY_ONE):
        return test
    return next((folder for folder in TOGETHER if test.startswith(folder)), test.split("::")[0])


def rank_of(test: str) -> int:
    """Return when a test's turn is: the lower, the earlier."""
    return next((rank for rank, start in enumerate(LONG_FIRST) if test.startswith(start)), len(LONG_FIRST))


class Scheduler(LoadScopeScheduling):
    """Hands out group after group, to whichever worker is nearly through with its own."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


def make_scheduler(config: pytest.Config, log: Producer) -> Scheduler | None:
    """Return the scheduler, or None where the command line asks for another one."""
    return Scheduler(config, log) if config.getoption("dist") == "loadscope" else None
