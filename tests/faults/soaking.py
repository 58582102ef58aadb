"""The long form of these tests: as many runs and as much time as one asks for.

Knows how much is done and what is said of it. Must not know how a run goes.
"""

from __future__ import annotations

import os
import traceback
from collections import Counter
from collections.abc import Callable

from tests.faults.many_threads import many_threads
from tests.faults.runs import many_runs
from tests.faults.watchdog import Hang

NUM_THREADS = 64


def soak_faults(runs: int, seconds: float, seed: int, say: Callable[[str], None]) -> int:
    """Do the runs, then let many threads use one engine. Returns the exit status."""
    try:
        say(_report(many_runs(0, runs, seed, say)))
        say(f"{NUM_THREADS} threads for {seconds:g} s")
        say(_report(many_threads(NUM_THREADS, seconds, seed)))
    except Hang as error:
        say(str(error))
        os._exit(1)  # the thread that hangs would keep Python from ending
    except AssertionError:
        say(traceback.format_exc())
        return 1
    except KeyboardInterrupt:
        say("stopped by Ctrl-C")
        return 130
    say("nothing found")
    return 0


def _report(counts: Counter[str]) -> str:
    return ", ".join(f"{what}: {count:,}" for what, count in sorted(counts.items()))
