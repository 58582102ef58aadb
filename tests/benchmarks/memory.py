"""The memory that a lab takes: Jupyter's server and the lab's kernel together, at their peak.

    python tests/benchmarks/memory.py [labs/01_the_cold_cache_race.ipynb ...]

Each lab is run from top to bottom in a new kernel, beside a JupyterLab server. Shared pages are counted once (PSS)
where the system reports them, else resident pages are added up. Binder gives 2 GB.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import nbformat
import psutil
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]
LIMIT_MB = 1800


def process_mb(process: psutil.Process) -> float:
    """Return the megabytes of a process, 0 if it has gone."""
    try:
        info = process.memory_full_info()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return 0.0
    return float(getattr(info, "pss", info.rss)) / 1e6


class Peak:
    """Watches this process's children (server and kernel) on a thread and keeps the highest sum."""

    def __init__(self) -> None:
        self.mb = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(0.1):
            children = psutil.Process().children(recursive=True)
            self.mb = max(self.mb, sum(map(process_mb, children)))

    def stop(self) -> float:
        """Stop watching and return the peak in megabytes."""
        self._stop.set()
        self._thread.join()
        return self.mb


def run_lab(path: Path, folder: str) -> float:
    """Run a lab beside a server and return the peak in megabytes."""
    server = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "jupyterlab",
            "--no-browser",
            "--allow-root",
            "--ServerApp.port=0",
            f"--notebook-dir={ROOT}",
        ],
        env={**os.environ, "JUPYTER_CONFIG_DIR": folder, "JUPYTER_RUNTIME_DIR": folder, "JUPYTER_DATA_DIR": folder},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    peak = Peak()
    try:
        time.sleep(3)  # so that the server's own start is in the sum
        notebook = nbformat.read(path, as_version=4)
        NotebookClient(
            notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": path.parent}}
        ).execute()
        if server.poll() is not None:
            raise RuntimeError("the server ended while the lab ran")
    finally:
        server.terminate()
        server.wait()
        mb = peak.stop()
    return mb


def main() -> None:
    """Print one line a lab."""
    parser = argparse.ArgumentParser(description="Peak memory of server and kernel together, for each lab.")
    parser.add_argument("labs", nargs="*", type=Path, help="notebooks (default: all in labs/)")
    labs = parser.parse_args().labs or sorted(ROOT.glob("labs/*.ipynb"))
    print(f"{'lab':36} {'peak MB':>8}   limit {LIMIT_MB} MB")
    for lab in labs:
        with tempfile.TemporaryDirectory() as folder:
            print(f"{lab.name:36} {run_lab(lab, folder):8.0f}", flush=True)


if __name__ == "__main__":
    main()
