"""What every test needs, whatever it tests: a fast BLAS, and Jupyter and IPython without anybody's own settings.

Where several workers run the tests at once (tests/run starts two), `tests.workers` says how they share them.
Knows: environment variables. Must not know: the engine.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest

from minivllm.models.cpu_blas import make_fast

ISOLATED = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")
"""Each gets a fresh empty folder. Kernels and servers that a test starts inherit them."""

_isolation = pytest.StashKey[Path]()


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
    """On one of several workers: what takes long starts first."""
    if hasattr(config, "workerinput"):
        from tests.workers import rank_of

        items.sort(key=lambda item: rank_of(item.nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """Say how several workers share the tests."""
    from tests.workers import make_scheduler

    return make_scheduler(config, log)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the folders; what a dying kernel still holds open is no reason to fail."""
    if home := config.stash.get(_isolation, None):
        shutil.rmtree(home, ignore_errors=True)
