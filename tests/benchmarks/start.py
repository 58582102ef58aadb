"""How long it takes to begin: a bare Python, ``import minivllm``, and ``minivllm --help``.

    python tests/benchmarks/start.py [--runs 15]

The three take turns as new processes; the cost of the package is the difference to the bare Python of the same turn.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = {
    "python": ["-c", "pass"],
    "import minivllm": ["-c", "import minivllm, sys; assert 'mlx' not in sys.modules"],
    "minivllm --help": ["-m", "minivllm", "--help"],
}


def seconds(arguments: list[str]) -> float:
    """Return the seconds that a new Python takes. Raises CalledProcessError if it fails."""
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], cwd=ROOT, check=True, capture_output=True)
    return time.perf_counter() - start


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description="Start-up times, each beside a bare Python of the same turn.")
    parser.add_argument("--runs", type=int, default=15, help="turns that count, after one that does not (default: 15)")
    runs = parser.parse_args().runs
    taken: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for turn in range(runs + 1):
        for name, arguments in COMMANDS.items():
            elapsed = seconds(arguments)
            if turn:
                taken[name].append(elapsed)
    bare = taken["python"]
    print(f"{'command':18} {'median s':>9} {'min':>7} {'max':>7} {'over bare Python':>17}")
    for name, times in taken.items():
        over = statistics.median(a - b for a, b in zip(times, bare, strict=True))
        print(f"{name:18} {statistics.median(times):9.3f} {min(times):7.3f} {max(times):7.3f} {over:17.3f}")


if __name__ == "__main__":
    main()
