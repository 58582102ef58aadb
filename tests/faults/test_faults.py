"""Whatever breaks outside the engine: nothing hangs, everybody hears of it, no block is lost, and work goes on."""

from __future__ import annotations

import threading

import pytest

from tests.faults.many_threads import many_threads
from tests.faults.runner import Trouble
from tests.faults.runs import many_runs
from tests.faults.watchdog import Hang, within

SEED = 1
RUNS, PARTS = 1_000, 10


@pytest.mark.parametrize("part", range(PARTS))
def test_in_runs_that_go_wrong_every_handle_ends_and_no_block_is_lost(part: int) -> None:
    count = RUNS // PARTS
    counts = many_runs(part * count, count, SEED)
    assert counts["runs on the virtual model"] + counts["runs on the tiny model"] == count
    assert counts["runs on the tiny model"] > 0
    # All that may happen does happen.
    assert all(counts[trouble.value] for trouble in Trouble)
    for end in ("that died", "that were closed", "that went on"):
        assert counts[f"engines {end}"] > 0


def test_64_threads_that_submit_abort_and_iterate_at_once_all_come_to_an_end() -> None:
    counts = many_threads(64, 10.0, SEED)
    assert all(counts[what] > 0 for what in ("result", "iterate", "abort", "leave", "await", "look", "reset"))
    assert counts["a row came out as NaN"] > 0


def test_what_does_not_end_is_shown_with_the_stacks_of_all_threads() -> None:
    never = threading.Event()

    def wait_in_vain() -> None:
        never.wait()

    with pytest.raises(Hang, match="wait_in_vain"):
        within(0.2, wait_in_vain, "a wait")
    never.set()
