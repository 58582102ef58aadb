"""What a student's own policy may do wrong: the engine says so to everybody who waits, and nothing hangs or leaks."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from minivllm import (
    ConfigError,
    Engine,
    EngineConfig,
    EngineCore,
    EngineDeadError,
    InvalidRequestError,
    MiniVLLMError,
    Sampling,
    Submission,
    VirtualRunner,
)
from minivllm.bench.race import run_race
from minivllm.bench.workloads import Race
from minivllm.cache.block_hash import BlockHash, Sha256
from minivllm.cache.block_pool import Block
from minivllm.cache.eviction.policy import Placement
from minivllm.cache.publication import Moment
from minivllm.coordination.coordinator import IndependentCoordinator
from minivllm.coordination.shared_prefix import SharedPrefixCoordinator
from minivllm.errors import DuplicateRequestError, InvariantError, RequestFailedError
from minivllm.log import events as ev
from minivllm.log.replay import replay
from minivllm.log.states import Role
from minivllm.request import Request
from minivllm.step import ScheduledStep

PROMPT = list(range(10, 19))
ONE = Sampling(max_tokens=1)


class PlacesNothing:
    """An eviction policy that forgets the blocks that it is given."""

    name = "places-nothing"

    def place(self, freed: Sequence[Block]) -> Placement:
        return Placement([], [])


class RaisesAtTheThird(IndependentCoordinator):
    """A coordinator that breaks when a third request arrives."""

    name = "raises-at-the-third"

    def arrive(self, request: Request, missing: Sequence[BlockHash] | None = None) -> Role | None:
        if request.request_id == "r2":
            raise ValueError("three is too many")
        return super().arrive(request, missing)


class ClosableRunner(VirtualRunner):
    """Knows whether it was closed."""

    closed = False

    def close(self) -> None:
        self.closed = True
        super().close()


class Says:
    """A publication policy that answers whatever it was made with."""

    name = "says"

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def visible_tokens(self, num_computed_tokens: int, moment: Moment) -> int:
        answer: int = self.answer
        return answer


class Ranks:
    """A scheduling policy that gives some requests these ranks, and 0 to all others."""

    name = "ranks"

    def __init__(self, ranks: dict[str, Any]) -> None:
        self.ranks = ranks

    def rank(self, request: Request) -> int:
        rank: int = self.ranks.get(request.request_id, 0)
        return rank


def test_a_race_on_an_engine_whose_eviction_policy_loses_blocks_ends_with_the_cause() -> None:
    with Engine("virtual", EngineConfig(eviction=PlacesNothing())) as engine:
        with pytest.raises(EngineDeadError) as caught:
            run_race(Race(num_requests=2, prompt_tokens=20, max_tokens=2), engine=engine)
        assert isinstance(caught.value.__cause__, InvariantError)


def test_every_handle_hears_of_an_error_outside_a_step_and_the_runner_is_closed() -> None:
    runner = ClosableRunner()
    engine = Engine(config=EngineConfig(coordination=RaisesAtTheThird), runner=lambda: runner)
    batch = [Submission(PROMPT, Sampling(max_tokens=3)) for _ in range(3)]
    for handle in engine.submit_batch(batch):
        with pytest.raises(EngineDeadError) as caught:
            handle.result(30)
        assert isinstance(caught.value.__cause__, ValueError)
    engine.close()
    assert runner.closed
    with pytest.raises(EngineDeadError, match="three is too many"):
        engine.submit(PROMPT)


@pytest.mark.parametrize("answer", [None, -1, 2.5, "all"])
def test_a_publication_policy_must_answer_with_a_number_of_tokens(answer: Any) -> None:
    core = EngineCore(EngineConfig(block_size=4, num_blocks=8, publication=Says(answer)), VirtualRunner())
    core.submit(PROMPT, max_tokens=2)
    with pytest.raises(EngineDeadError, match="whole number of 0 or more") as caught:
        core.run()
    assert isinstance(caught.value.__cause__, ConfigError)
    core.manager.check_invariants()
    assert core.manager.pool.num_free == 8


@pytest.mark.parametrize("rank", [None, 1.5, "first"])
def test_a_scheduling_policy_must_rank_with_whole_numbers_and_a_request_that_it_cannot_rank_is_not_taken(
    rank: Any,
) -> None:
    core = EngineCore(EngineConfig(block_size=4, num_blocks=16, scheduling=Ranks({"bad": rank})), VirtualRunner())
    good = core.submit(PROMPT, max_tokens=2, request_id="good")
    before, events = core.state(), len(core.log)
    message = f"scheduling policy 'ranks' gives request 'bad' rank {rank!r}; it must return a whole number"
    with pytest.raises(ConfigError, match=re.escape(message)):
        core.submit_batch([Submission(PROMPT, ONE, "also good"), Submission(PROMPT, ONE, "bad")])
    assert (core.state(), len(core.log), list(core.requests)) == (before, events, ["good"])
    core.check_invariants()
    core.run()
    assert len(good.output_token_ids) == 2


def test_ranks_may_be_below_0_and_equal_ones_keep_the_order_of_arrival() -> None:
    ranks = Ranks({"a": 3, "b": -5, "c": 3, "d": -5})
    core = EngineCore(EngineConfig(block_size=4, num_blocks=16, max_num_seqs=1, scheduling=ranks), VirtualRunner())
    for name in "abcd":
        core.submit([1], max_tokens=1, request_id=name)
    core.run()
    admitted = [event.request_id for event in core.log if isinstance(event, ev.RequestAdmitted)]
    assert admitted == ["b", "d", "a", "c"]


@pytest.mark.parametrize("call", ["may_admit", "admitted", "published", "wants_blocks", "request_ended"])
def test_a_coordinator_that_raises_in_any_call_ends_the_engine_and_every_handle_hears_of_it(call: str) -> None:
    def broken(*args: Any, **fields: Any) -> Any:
        raise ValueError(f"no answer to {call}")

    faulty = type("Faulty", (SharedPrefixCoordinator,), {"name": "faulty", call: broken})
    with Engine("virtual", coordination=faulty, publication="incremental", block_size=4) as engine:
        for handle in engine.submit_batch([Submission(PROMPT, Sampling(max_tokens=3, n=2)) for _ in range(3)]):
            for sample in handle.samples:
                with pytest.raises(EngineDeadError, match=f"ValueError: no answer to {call}"):
                    sample.result(30)
        assert len(replay(engine.log).free_queue) == engine.config.num_blocks


@pytest.mark.parametrize("digest", [lambda data: b"short", lambda data: None, lambda data: 1 / 0])
def test_a_hasher_that_gives_no_hash_ends_the_engine_and_no_block_is_lost(digest: Callable[[bytes], Any]) -> None:
    class Faulty(Sha256):
        name = "faulty"

        def __init__(self) -> None:
            self.root = b"0" * 32

        def digest(self, data: bytes) -> bytes:
            made: bytes = digest(data)
            return made

    core = EngineCore(EngineConfig(block_size=4, num_blocks=8, block_hash=Faulty()), VirtualRunner())
    request = core.submit(PROMPT, max_tokens=2)
    with contextlib.suppress(EngineDeadError):
        core.run()
    assert request.state.is_ended
    assert core.manager.pool.num_free == 8


def test_policies_that_cannot_be_made_leave_the_engine_as_it_was() -> None:
    class CannotBeMade(IndependentCoordinator):
        def __init__(self, *args: Any) -> None:
            raise ValueError("no")

    core = EngineCore(EngineConfig(), VirtualRunner())
    config, coordinator, events = core.config, core.coordinator, len(core.log)
    with pytest.raises(ValueError, match="no"):
        core.set_policies(publication="incremental", coordination=CannotBeMade)
    assert (core.config, core.coordinator, len(core.log)) == (config, coordinator, events)


def test_an_id_that_was_taken_since_it_was_prepared_is_refused_and_nothing_changes() -> None:
    core = EngineCore(EngineConfig(), VirtualRunner())
    early = core.prepare([Submission(PROMPT, request_id="a"), Submission(PROMPT, request_id="b")])
    core.submit(PROMPT, request_id="b")
    before, state = len(core.log), core.state()
    with pytest.raises(DuplicateRequestError):
        core.enter(early)
    assert (len(core.log), core.state()) == (before, state)


def test_a_race_and_submits_at_the_same_time_keep_their_requests_apart() -> None:
    race = Race(num_requests=2, prompt_tokens=20, max_tokens=2)
    with Engine("virtual") as engine:
        handles: list[Any] = []

        def submit_many() -> None:
            handles.extend(engine.submit(PROMPT, max_tokens=3) for _ in range(40))

        other = threading.Thread(target=submit_many)
        other.start()
        while other.is_alive():
            try:
                result = run_race(race, engine=engine)
            except ConfigError as error:  # a race wants the engine for itself
                assert "busy" in str(error)
            else:
                assert [request.output_tokens for request in result.requests] == [2, 2]
        other.join()
        assert [len(handle.result(30).token_ids) for handle in handles] == [3] * 40
        engine.check_invariants()


def test_a_request_that_fails_alone_says_so_while_the_engine_goes_on() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def wait_in_the_step(step: ScheduledStep) -> None:
        begun.set()
        assert go_on.wait(30)

    with Engine(runner=lambda: VirtualRunner(on_step=wait_in_the_step)) as engine:
        handle = engine.submit(PROMPT, max_tokens=50)
        assert begun.wait(30)
        fail = threading.Thread(target=lambda: engine.call(lambda core: core.fail(handle.request_id, KeyError("x"))))
        fail.start()
        while engine._worker.commands.empty():  # the command must wait for the end of this very step
            fail.join(0.01)
        go_on.set()
        with pytest.raises(RequestFailedError):
            handle.result(30)
        fail.join()
        assert len(engine.submit(PROMPT, max_tokens=2).result(30).token_ids) == 2


def test_metrics_are_a_copy_that_changes_no_more() -> None:
    with Engine("virtual") as engine:
        engine.submit(PROMPT, max_tokens=2).result(30)
        before = engine.metrics()
        engine.submit(PROMPT, max_tokens=2).result(30)
        assert len(before.requests) == 1
        assert len(engine.metrics().requests) == 2


def test_waiting_on_the_engines_own_thread_is_an_error_and_not_a_hang() -> None:
    with Engine("virtual") as engine:
        waits: list[Callable[[Any], Any]] = [lambda handle: handle.result(), lambda handle: list(handle)]
        for wait in waits:

            def submit_and_wait(core: EngineCore, wait: Callable[[Any], Any] = wait) -> Any:
                return wait(engine.submit(PROMPT, max_tokens=2))

            with pytest.raises(MiniVLLMError, match="engine's own thread"):
                engine.call(submit_and_wait)


@pytest.mark.parametrize("batch", [["a", "b"], None, Submission("a"), "text", 5])
def test_a_batch_must_hold_submissions(batch: Any) -> None:
    core = EngineCore(EngineConfig(), VirtualRunner())
    with pytest.raises(InvalidRequestError, match="Submission"):
        core.submit_batch(batch)
    assert not core.requests


@pytest.mark.parametrize("model", [None, 5, b"tiny"])
def test_a_model_must_be_a_name_or_a_folder(model: Any) -> None:
    with pytest.raises(ConfigError, match="name"):
        Engine(model)


def test_numbers_of_other_libraries_become_pythons_own() -> None:
    sampling = Sampling(max_tokens=np.int64(3), temperature=np.float32(0.5), seed=np.uint8(7))  # type: ignore[arg-type]
    assert [type(v) for v in (sampling.max_tokens, sampling.temperature, sampling.seed)] == [int, float, int]
    assert sampling == Sampling(max_tokens=3, temperature=0.5, seed=7)
