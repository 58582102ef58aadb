"""The command tests/soak: random lives of the engine for as long as one likes.

Knows the command line and what is printed. Must not know how a life is lived.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence

from tests.faults.soaking import soak_faults
from tests.property.soaking import report_failure, soak


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    made = argparse.ArgumentParser(
        prog="tests/soak",
        description="Random lives of the engine: every action is checked against a slow, obvious model.",
        epilog="Exit status: 0 nothing found, 1 a fault (printed as a cell to paste into a notebook), 2 wrong use, "
        "130 stopped by Ctrl-C.",
    )
    made.add_argument(
        "what",
        nargs="?",
        choices=["lives", "faults"],
        default="lives",
        help="lives: actions on the core (the default); faults: 1,000 runs of the threaded engine in which something "
        "breaks, then 64 threads for a minute",
    )
    made.add_argument("--actions", type=_whole, default=1_000_000, metavar="N", help="how many (default: 1,000,000)")
    made.add_argument("--seed", type=int, help="of all chance (default: another one each time; it is printed)")
    made.add_argument("--jobs", type=_whole, default=2, metavar="N", help="processes at once (default: 2)")
    made.add_argument("--life", type=int, metavar="NUMBER", help="live this one of the seed's lives alone")
    made.add_argument("--runs", type=_whole, default=1_000, metavar="N", help="of faults: how many runs")
    made.add_argument("--seconds", type=_whole, default=60, metavar="S", help="of faults: how long 64 threads go on")
    return made


def _whole(text: str) -> int:
    value = int(text.replace(",", "").replace("_", ""))
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of 1 or more")
    return value


def say(text: str) -> None:
    """Print at once, whoever reads."""
    print(text, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    given = parser().parse_args(arguments)
    seed = random.SystemRandom().randrange(1_000_000) if given.seed is None else given.seed
    say(f"seed {seed}")
    start = time.monotonic()
    if given.what == "faults":
        return soak_faults(given.runs, given.seconds, seed, say)
    if given.life is not None:
        return 0 if report_failure(seed, given.life, say) else 1
    tally, is_whole = soak(given.actions, seed, given.jobs, say)
    for line in tally.lines():
        say(line)
    say(f"{(time.monotonic() - start) / 60:.1f} minutes, seed {seed}")
    if not is_whole:
        say("stopped by Ctrl-C")
        return 130
    if tally.failed is None:
        say("nothing found")
        return 0
    number, trace = tally.failed
    say(trace)
    report_failure(seed, number, say)
    return 1


if __name__ == "__main__":
    sys.exit(main())
