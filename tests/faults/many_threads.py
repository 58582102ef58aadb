"""Many threads that submit, abort and iterate at once, on one engine.

Knows the engine from outside, as a caller does. Must not know anything of what happens inside.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter

from minivllm import Engine, EngineConfig, Handle, VirtualRunner, replay
from minivllm.errors import RequestFailedError, RowError
from tests.faults.runner import FaultyRunner, Trouble
from tests.faults.runs import PATIENCE, random_prompt, random_sampling
from tests.faults.watchdog import Hang, stacks

NAN_EVERY = 40
"""Each so many steps a row comes out as NaN."""


class NowAndThen(dict[int, Trouble]):
    """What goes wrong for many threads: what fails one request, and never the engine."""

    def get(self, number: int, default: object = None) -> Trouble | None:  # type: ignore[override]
        return Trouble.NAN if number % NAN_EVERY == 0 else None


def many_threads(num_threads: int, seconds: float, seed: int) -> Counter[str]:
    """Let many threads use one engine for so long. Returns what happened.

    Raises AssertionError, or Hang with the stacks.
    """
    config = EngineConfig(
        block_size=4,
        num_blocks=96,
        max_num_seqs=16,
        publication="incremental",
        coordination="shared-prefix",
        adoption=True,
    )
    counts: Counter[str] = Counter()
    errors: list[BaseException] = []
    adding = threading.Lock()
    end = time.monotonic() + seconds

    def live(number: int) -> None:
        rng, mine = random.Random(f"{seed}/{number}"), Counter[str]()
        try:
            while time.monotonic() < end and not errors:
                mine[_do_something(rng, engine)] += 1
        except BaseException as error:
            errors.append(error)
        with adding:
            counts.update(mine)

    with Engine(config=config, runner=lambda: FaultyRunner(VirtualRunner(), NowAndThen(), _nobody)) as engine:
        threads = [
            threading.Thread(target=live, args=(n,), name=f"caller {n}", daemon=True) for n in range(num_threads)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()) + PATIENCE)
            if thread.is_alive():
                raise Hang(f"{thread.name} has not ended\n{stacks()}")
        if errors:
            raise errors[0]
        engine.check_invariants()
        state = engine.state()
        assert replay(engine.log) == state
        assert all(request.state.is_ended for request in state.requests.values())
        assert len(state.free_queue) == config.num_blocks
        assert len(engine.submit([1, 2, 3], max_tokens=2).result(PATIENCE).token_ids) == 2
        counts["steps"] = engine.log[-1].step
    return counts


def _nobody(name: str) -> None:
    raise AssertionError("nobody is withdrawn here")


def _do_something(rng: random.Random, engine: Engine) -> str:
    """Do one thing that a caller does, and see it through."""
    often = rng.random() < 0.97
    what = rng.choice(
        ["result", "iterate", "iterate", "abort", "abort", "leave", "await"] if often else ["look", "reset"]
    )
    if what == "look":
        engine.metrics()
        engine.check_invariants()
        return what
    if what == "reset":
        engine.reset_cache(abort_running=rng.random() < 0.1)
        return what
    handle = engine.submit(random_prompt(rng), random_sampling(rng))
    try:
        if what == "iterate":
            assert [token.token_id for token in handle] == [token.token_id for token in handle.tokens]
        elif what == "abort":
            for number, _ in enumerate(handle):
                if number == 1:
                    handle.abort()
        elif what == "leave":
            assert [sample.abort() in (True, False) for sample in handle.samples] == [True] * len(handle.samples)
        elif what == "await":
            asyncio.run(asyncio.wait_for(_wait(handle), PATIENCE))
        for sample in handle.samples:
            result = sample.result(PATIENCE)
            assert result.finish_reason in ("length", "abort")
            assert len(result.token_ids) <= 4
    except RequestFailedError as error:
        assert isinstance(error.__cause__, RowError)
        for sample in handle.samples:
            _wait_for_any_end(sample)
        return "a row came out as NaN"
    return what


def _wait_for_any_end(handle: Handle) -> None:
    try:
        handle.result(PATIENCE)
    except RequestFailedError as error:
        assert isinstance(error.__cause__, RowError)


async def _wait(handle: Handle) -> None:
    async for _ in handle:
        pass
    await handle
