"""What every test needs, whatever it tests: a fast BLAS, and Jupyter and IPython without anybody's own settings.

Where several workers run the tests at once (tests/run starts two), it also says what stays together on one worker, and
what starts first. Knows: environment variables, and which files take long. Must not know: the engine.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest

from minivllm.models.cpu_blas import make_fast

ROOT = Path(__file__).resolve().parents[1]

ISOLATED = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")
"""Each gets a fresh empty folder. Kernels and servers that a test starts inherit them."""

_isolation = pytest.StashKey[Path]()

LONG_FIRST = ("tests/browser", "labs", "tests/setup", "tests/faults", "tests/parity", "tests/cli")
"""What takes long starts first, so that no worker is left alone with it at the end; then the rest, file by file."""

ONE_BY_ONE = ("tests/lint", "tests/cli", "tests/faults", "tests/setup/test_setup.py", "tests/setup/test_start_lab.py")
"""Where tests are long and share nothing that is dear to make: any worker may take any of them."""

TOGETHER = ("tests/browser",)
"""Folders whose files share something dear (a server, a browser): one worker takes all of them."""


def pytest_configure(config: pytest.Config) -> None:
    """Set the environment before the first kernel starts: nbval starts them outside any fixture."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # As in a script's background job; what a test starts would inherit it, and then Ctrl-C does nothing to it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if workers := getattr(config, "workerinput", {}).get("workercount"):
        threads = max(1, (os.cpu_count() or 1) // workers)  # so that no worker's BLAS takes another's processor
        os.environ.setdefault("OPENBLAS_NUM_THREADS", str(threads))
    make_fast()  # before any test module imports MLX
    home = Path(tempfile.mkdtemp(prefix="minivllm-tests-"))
    config.stash[_isolation] = home
    for name in ISOLATED:
        folder = home / name.lower()
        folder.mkdir()
        os.environ[name] = str(folder)
    os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On one of several workers: keep the tests of a file together, as they share fixtures, and start what is long."""
    if not hasattr(config, "workerinput"):
        return
    for item in items:
        if (group := group_of(path_of(item))) is not None and not any(item.iter_markers("xdist_group")):
            item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: rank_of(path_of(item)))


def path_of(item: pytest.Item) -> str:
    """Return a test's file, from the root of the project."""
    return item.path.relative_to(ROOT).as_posix() if item.path.is_relative_to(ROOT) else str(item.path)


def group_of(path: str) -> str | None:
    """Return the name under which a file's tests stay on one worker, or None if each may go where it likes."""
    if path.startswith(ONE_BY_ONE):
        return None
    return next((folder for folder in TOGETHER if path.startswith(f"{folder}/")), path)


def rank_of(path: str) -> int:
    """Return when a file's turn is: the lower, the earlier."""
    ranks = (rank for rank, start in enumerate(LONG_FIRST) if path.startswith(start))
    return next(ranks, len(LONG_FIRST))


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the folders; what a dying kernel still holds open is no reason to fail."""
    if home := config.stash.get(_isolation, None):
        shutil.rmtree(home, ignore_errors=True)
