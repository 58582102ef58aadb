"""Live many random lives, in several processes, and say what happened in them.

Every life has a number and draws from a source of its own, so that each can be lived again alone. Knows how lives
are distributed, counted and reported; must not know what any action does.
"""

from __future__ import annotations

import random
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from multiprocessing import get_context

from tests.property.actions import POLICIES, SWITCHES, Action, Finish, Setup, chooser, draw_action, draw_setup
from tests.property.cell import cell
from tests.property.life import Life
from tests.property.shrink import Failure, shrink

SHORTEST, LONGEST = 30, 120
"""Actions of one life."""

LIVES_AT_ONCE = 24
"""Lives that a process is handed at a time."""

NUM_COMBINATIONS = len(POLICIES) * len(SWITCHES)

FIGURES = {
    "steps": "step_scheduled",
    "preemptions": "request_preempted",
    "aborts": "request_aborted",
    "failures": "request_failed",
    "hand-overs": "flight_handed_over",
    "samples that took the lead": "sample_leads",
    "evicted blocks": "blocks that were evicted",
    "adoptions": "blocks_adopted",
    "forks": "samples_forked",
    "copies on write": "block_copied",
    "prefix waits": "prefix_awaited",
    "recomputations chosen": "recompute_chosen",
    "flights joined": "flight_joined",
    "collisions seen": "hash_collision",
    "engines that died": "step_failed",
    "resets": "cache_reset",
    "wrong reads (at-allocation only)": "wrong reads",
    "results that came out as NaN": "spoilt rows",
}
"""What is told at the end, and the kind of event that is counted for it."""


@dataclass
class Tally:
    """What was done in some lives. ``failed`` is the number of the life that did not go well, and how it did not."""

    num_lives: int = 0
    actions: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    failed: tuple[int, str] | None = None

    def add(self, other: Tally) -> None:
        """Take another's counts in."""
        self.num_lives += other.num_lives
        self.actions += other.actions
        self.kinds += other.kinds
        self.failed = self.failed or other.failed

    def lines(self) -> Iterator[str]:
        """Yield the report, line by line."""
        total = self.actions.total()
        yield f"{total:,} actions in {self.num_lives:,} lives: " + ", ".join(
            f"{name} {count:,}" for name, count in self.actions.most_common()
        )
        yield ", ".join(f"{name} {self.kinds[kind]:,}" for name, kind in FIGURES.items())


def plan_of(seed: int, number: int) -> tuple[Setup, random.Random, int]:
    """Return a life's setup, its source of chance and how many actions it has.

    One life after the other goes through all combinations of policies and switches, in an order of the seed's.
    """
    order = list(range(NUM_COMBINATIONS))
    random.Random(f"{seed}").shuffle(order)
    place = order[number % NUM_COMBINATIONS]
    rng = random.Random(f"{seed}/{number}")
    setup = draw_setup(chooser(rng), POLICIES[place // len(SWITCHES)], SWITCHES[place % len(SWITCHES)])
    return setup, rng, rng.randint(SHORTEST, LONGEST)


def live_one(seed: int, number: int, tally: Tally) -> Failure | None:
    """Live one life to the end of everybody, and count it. Returns how it failed, if it did."""
    setup, rng, length = plan_of(seed, number)
    choose = chooser(rng)
    life = Life(setup)
    done: list[Action] = []
    failure = None
    try:
        while len(done) < length:
            action = Finish() if len(done) == length - 1 else draw_action(choose, life)
            done.append(action)
            if life.apply(action) is None:
                done.pop()
    except Exception as error:
        failure = Failure(setup, tuple(done), error)
    tally.num_lives += 1
    tally.actions += life.done
    tally.kinds += life.kinds
    tally.kinds["wrong reads"] += life.num_wrong_reads + life.runner.num_wrong_reads
    tally.kinds["spoilt rows"] += len(life.runner.spoilt)
    return failure


def live_some(seed: int, numbers: range) -> Tally:
    """Live some lives, up to the first that fails."""
    tally = Tally()
    for number in numbers:
        failure = live_one(seed, number, tally)
        if failure is not None:
            error = failure.error
            tally.failed = number, "".join(traceback.format_exception(error)[-6:])
            break
    return tally


def soak(
    num_actions: int, seed: int, jobs: int, say: Callable[[str], None], *, every_s: float = 5.0
) -> tuple[Tally, bool]:
    """Live lives until ``num_actions`` actions are done. Returns what was done, and whether it was not interrupted.

    ``say`` hears how far it is. Each life is lived in one of ``jobs`` processes.
    """
    tally, start = Tally(), time.monotonic()
    told, next_life = start, 0
    with ProcessPoolExecutor(jobs, get_context("spawn"), _leave_interrupts_to_the_parent) as pool:
        running: set[Future[Tally]] = set()
        try:
            while tally.actions.total() < num_actions and tally.failed is None:
                while len(running) < jobs * 2:
                    running.add(pool.submit(live_some, seed, range(next_life, next_life + LIVES_AT_ONCE)))
                    next_life += LIVES_AT_ONCE
                finished, running = wait(running, timeout=every_s, return_when=FIRST_COMPLETED)
                for future in finished:
                    tally.add(future.result())
                if (now := time.monotonic()) - told >= every_s:
                    told = now
                    say(_progress(tally, num_actions, now - start))
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            return tally, False
        for future in running:
            future.cancel()
    return tally, True


def _progress(tally: Tally, num_actions: int, seconds: float) -> str:
    done = tally.actions.total()
    rate = done / seconds
    left = (num_actions - done) / rate / 60 if rate else float("inf")
    return f"{done:,} of {num_actions:,} actions, {rate:,.0f} a second, {max(left, 0):.0f} minutes left"


def _leave_interrupts_to_the_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def report_failure(seed: int, number: int, say: Callable[[str], None]) -> bool:
    """Live one life again; if it fails, shrink it and print the cell. Returns whether it went well."""
    failure = live_one(seed, number, Tally())
    again = f"tests/soak --seed {seed} --life {number}"
    if failure is None:
        say(f"life {number} of seed {seed} goes well ({again})")
        return True
    say(f"life {number} of seed {seed} failed at its action {len(failure.actions)}; shrinking it")
    small = shrink(failure)
    say(f"{len(small.actions)} actions are left ({small.kind}). The life again: {again}\n")
    say(cell(small))
    return False
