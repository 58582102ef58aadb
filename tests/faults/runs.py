"""One run of a threaded engine in which things go wrong, and what must be true when it is over.

Every handle has ended, with a result or a cause; every block is back; the log gives the engine's own state; and the
next request is served, or refused with a sentence that says why. Knows the engine from outside, as a caller does.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from minivllm import (
    Engine,
    EngineClosedError,
    EngineConfig,
    EngineDeadError,
    Handle,
    RequestResult,
    Sampling,
    Submission,
    replay,
)
from minivllm.errors import RequestFailedError, RowError
from minivllm.log.states import BlockState
from minivllm.runners.factory import runner_factory
from tests.faults.runner import FaultyRunner, Trouble
from tests.faults.watchdog import within
from tests.property.actions import COORDINATIONS

PATIENCE = 60.0
"""Seconds after which something that comes at once is taken to hang."""

LAST_STEP = 15


def random_run(seed: int, number: int, model: str = "virtual") -> Counter[str]:
    """Live run ``number``. Returns what happened. Raises AssertionError, or Hang with the stacks."""
    return within(PATIENCE, lambda: _run(random.Random(f"{seed}/{number}"), model), f"run {number} of seed {seed}")


def _run(rng: random.Random, model: str) -> Counter[str]:
    config = _config(rng)
    troubles = {rng.randint(1, LAST_STEP): rng.choice(list(Trouble)) for _ in range(rng.choice([0, 1, 2, 3, 8]))}
    runners: list[FaultyRunner] = []
    engines: list[Engine] = []

    def make() -> Any:
        def withdraw(name: str) -> None:
            engines[0].call(lambda core: core.abort(name))

        runners.append(FaultyRunner(runner_factory(model)(), troubles, withdraw))
        return runners[0]

    engine = Engine(config=config, runner=make)
    engines.append(engine)
    try:
        handles, closed = _use(rng, engine)
        counts = Counter(trouble.value for trouble in runners[0].met)
        counts += _check_ends(handles)
        counts += _check_next(engine, closed)
    finally:
        engine.close()
    _check_over(engine, handles)
    return counts


def _config(rng: random.Random) -> EngineConfig:
    return EngineConfig(
        block_size=rng.choice([2, 4]),
        num_blocks=rng.choice([12, 16, 40]),
        max_num_batched_tokens=rng.choice([4, 16, 64]),
        max_num_seqs=rng.choice([2, 4, 8]),
        publication=rng.choice(["incremental", "on-completion"]),
        coordination=rng.choice(COORDINATIONS),
        release=rng.choice(["after-prefill", "on-completion"]),
        scheduling=rng.choice(["fcfs", "priority"]),
        adoption=rng.random() < 0.3,
    )


def random_prompt(rng: random.Random) -> list[int]:
    """Return a prompt of 1 to 20 tokens of any vocabulary: often the beginning of another one."""
    return [*range(60, 60 + rng.choice([0, 4, 8, 9, 16])), *(rng.randrange(10, 14) for _ in range(rng.randint(1, 4)))]


def random_sampling(rng: random.Random) -> Sampling:
    """Return a sampling of few tokens."""
    n = rng.choice([1, 1, 1, 2])
    return Sampling(max_tokens=rng.randint(1, 4), temperature=rng.choice([0.0, 0.7]), seed=3, ignore_eos=True, n=n)


def _use(rng: random.Random, engine: Engine) -> tuple[list[Handle], bool]:
    """Submit, abort, reset and perhaps close, while steps go wrong. Returns all handles, and whether it was closed."""
    handles: list[Handle] = []
    for _ in range(rng.randint(3, 10)):
        what = rng.choice(["submit", "submit", "submit", "abort", "reset", "wait", "close"])
        if what == "close" and rng.random() < 0.7:
            what = "submit"
        try:
            if what == "submit":
                batch = [
                    Submission(random_prompt(rng), random_sampling(rng), priority=rng.randint(0, 2))
                    for _ in range(rng.randint(1, 4))
                ]
                for handle in engine.submit_batch(batch):
                    handles.extend(handle.samples)
            elif what == "abort" and handles:
                rng.choice(handles).abort()
            elif what == "reset":
                engine.reset_cache(abort_running=rng.random() < 0.5)
            elif what == "wait" and handles:
                with contextlib.suppress(RequestFailedError):
                    rng.choice(handles).result(PATIENCE)
            elif what == "close":
                engine.close()
                return handles, True
        except EngineDeadError:
            break
    return handles, False


def _check_ends(handles: list[Handle]) -> Counter[str]:
    """Every handle ends: with a result, or with what ended it."""
    counts: Counter[str] = Counter()
    for handle in handles:
        try:
            result = handle.result(PATIENCE)
        except RequestFailedError as error:
            assert isinstance(error.__cause__, RowError), error.__cause__
            counts["requests that failed alone"] += 1
        except EngineDeadError as error:
            assert error.__cause__ is not None
            counts["requests that died with the engine"] += 1
        else:
            assert isinstance(result, RequestResult)
            assert result.finish_reason in ("length", "abort")
            counts[f"requests that ended by {result.finish_reason}"] += 1
        assert handle.done
    return counts


def _check_next(engine: Engine, closed: bool) -> Counter[str]:
    """Another request is served, or the engine says what is the matter. A step of it may go wrong as well."""
    for _ in range(LAST_STEP):
        try:
            handle = engine.submit([60, 61, 62, 63, 64], max_tokens=2, ignore_eos=True)
        except EngineDeadError as error:
            assert "make a new engine" in str(error)
            assert error.__cause__ is engine.error is not None
            return Counter({"engines that died": 1})
        except EngineClosedError as error:
            assert closed
            assert "make a new one" in str(error)
            return Counter({"engines that were closed": 1})
        try:
            result = handle.result(PATIENCE)
        except (RequestFailedError, EngineDeadError):
            continue
        if result.finish_reason == "abort":  # withdrawn
            continue
        assert len(result.token_ids) == 2
        engine.check_invariants()
        assert replay(engine.log) == engine.state()
        return Counter({"engines that went on": 1})
    raise AssertionError("the engine neither serves nor says why not")


def _check_over(engine: Engine, handles: list[Handle]) -> None:
    """The engine is closed: no block is lost, and nobody is in it."""
    state = replay(engine.log)
    assert len(state.free_queue) == engine.config.num_blocks
    assert all(block.ref_count == 0 and block.state is not BlockState.OWNED for block in state.blocks.values())
    assert all(request.state.is_ended for request in state.requests.values())
    assert not (state.waiting or state.running or state.flights or state.samples or state.awaiting)
    assert not state.released_request_ids
    assert all(handle.done for handle in handles)
    assert not engine.is_alive


def many_runs(
    first: int, count: int, seed: int, say: Callable[[str], None] = lambda text: None, *, real_every: int = 10
) -> Counter[str]:
    """Live many runs; each ``real_every``-th computes with the tiny model. Returns what happened in all."""
    counts: Counter[str] = Counter()
    for number in range(first, first + count):
        model = "tiny" if number % real_every == 0 else "virtual"
        counts += random_run(seed, number, model)
        counts[f"runs on the {model} model"] += 1
        if (number + 1 - first) % 100 == 0:
            say(f"{number + 1 - first:,} of {count:,} runs")
    return counts
