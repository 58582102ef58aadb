"""How long a second ``binder/start-lab`` takes until JupyterLab's page answers.

    python tests/benchmarks/start_lab.py [--runs 5]

Everything must be set up already (``binder/start-lab --prepare-only``). Each run starts the lab on a free port, asks
for ``/lab`` until it answers, and stops it with Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import statistics
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

START_LAB = Path(__file__).resolve().parents[2] / "binder" / "start-lab"
LIMIT_S = 10.0
GIVE_UP_S = 120.0


def seconds_to_answer() -> float:
    """Start the lab and return the seconds until it answers. Raises RuntimeError if it never does."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    start = time.perf_counter()
    process = subprocess.Popen(
        [START_LAB, "--no-browser", "--port", str(port)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        while process.poll() is None and time.perf_counter() - start < GIVE_UP_S:
            try:
                opener.open(f"http://127.0.0.1:{port}/lab", timeout=GIVE_UP_S).close()
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.02)
            else:
                return time.perf_counter() - start
        raise RuntimeError(f"the lab did not answer; run {START_LAB} by hand to see why")
    finally:
        os.killpg(process.pid, signal.SIGINT)
        process.wait()


def main() -> None:
    """Print one line."""
    parser = argparse.ArgumentParser(description="Seconds from start-lab to the first answer of its page.")
    parser.add_argument("--runs", type=int, default=5, help="starts that count, after one that does not (default: 5)")
    runs = parser.parse_args().runs
    times = [seconds_to_answer() for _ in range(runs + 1)][1:]
    kept = "kept" if statistics.median(times) <= LIMIT_S else "MISSED"
    print(f"/lab answers after {statistics.median(times):.1f} s   ({min(times):.1f} to {max(times):.1f})")
    print(f"limit {LIMIT_S:.0f} s: {kept}")


if __name__ == "__main__":
    main()
