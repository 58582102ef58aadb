"""One thread owns the engine; callers get handles, and nobody ever waits for an engine that is gone."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from minivllm.cache.publication import AT_ALLOCATION, Moment
from minivllm.config import EngineConfig, policy_name
from minivllm.engine import notebook_cells
from minivllm.engine.core import EngineCore
from minivllm.engine.engine import Engine
from minivllm.engine.handle import Handle
from minivllm.engine.input_processor import Submission
from minivllm.errors import (
    ConfigError,
    DuplicateRequestError,
    EngineClosedError,
    EngineDeadError,
    InvalidRequestError,
    InvariantError,
    MiniVLLMError,
    ModelError,
    RequestFailedError,
    RowError,
    UnknownNameError,
    UnknownRequestError,
)
from minivllm.log import events as ev
from minivllm.log.replay import replay
from minivllm.request import RequestState, Sampling
from minivllm.runners.virtual import VirtualRunner
from minivllm.step import ScheduledStep

ROOT = Path(__file__).resolve().parents[2]
WAIT = 30.0
"""Seconds after which a test gives up on something that should come at once."""

PROMPT = list(range(40))


class Gate:
    """Holds every step of a virtual runner back until it is released; says when a step has come."""

    def __init__(self) -> None:
        self.arrived = threading.Semaphore(0)
        self._let_go = threading.Semaphore(0)
        self._is_open = threading.Event()
        self.fails_at: int | None = None

    def __call__(self, step: ScheduledStep) -> None:
        self.arrived.release()
        while not self._is_open.is_set() and not self._let_go.acquire(timeout=0.01):
            pass
        if step.number == self.fails_at:
            raise RuntimeError("the device is gone")

    def let(self, count: int = 1) -> None:
        """Let this many steps go on, and wait until the next one stands at the gate."""
        for _ in range(count):
            self._let_go.release()
            assert self.arrived.acquire(timeout=WAIT)

    def open(self) -> None:
        self._is_open.set()


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.open()


@contextlib.contextmanager
def gated_engine(gate: Gate, **settings: Any) -> Iterator[Engine]:
    engine = Engine(runner=lambda: VirtualRunner(on_step=gate), **settings)
    try:
        yield engine
    finally:
        gate.open()
        engine.close()


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine("virtual") as made:
        yield made


def wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT
    while not what():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.005)


def engine_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "minivllm-engine"}


# --- Handles ------------------------------------------------------------------------------------------------


def test_a_handle_yields_its_tokens_and_then_has_its_result(engine: Engine) -> None:
    handle = engine.submit("What is a block?", max_tokens=5)
    tokens = list(handle)
    result = handle.result(WAIT)
    assert [token.token_id for token in tokens] == list(result.token_ids)
    assert "".join(token.text for token in tokens) == result.text
    assert (len(tokens), result.finish_reason, result.prompt_tokens) == (5, "length", 16)
    assert list(handle) == tokens == handle.tokens
    assert handle.done


def test_tokens_can_be_read_while_the_request_runs(gate: Gate) -> None:
    with gated_engine(gate) as engine:
        handle = engine.submit(PROMPT, max_tokens=3)
        tokens = iter(handle)
        gate.let(1)
        gate.let(1)
        first = next(tokens)
        assert first == handle.tokens[0]
        assert not handle.done
        gate.open()
        assert len(list(tokens)) == 2


def test_waiting_for_a_result_may_time_out_and_the_request_goes_on(gate: Gate) -> None:
    with gated_engine(gate) as engine:
        handle = engine.submit(PROMPT, max_tokens=2, request_id="slow")
        with pytest.raises(TimeoutError, match=r"'slow' has not ended after 0\.01 s; it continues"):
            handle.result(timeout=0.01)
        gate.open()
        assert len(handle.result(WAIT).token_ids) == 2


def test_several_threads_may_wait_for_the_same_handle(engine: Engine) -> None:
    handle = engine.submit(PROMPT, max_tokens=20)
    results: list[Any] = []
    threads = [threading.Thread(target=lambda: results.append(list(handle))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert results == [handle.tokens] * 4
    assert len(handle.tokens) == 20


def test_a_coroutine_may_await_a_handle_or_iterate_it_while_others_run(gate: Gate) -> None:
    async def scenario(engine: Engine) -> tuple[list[int], int, int]:
        handle = engine.submit(PROMPT, max_tokens=4)
        other = engine.submit(PROMPT, max_tokens=4)
        turns = 0

        async def count_turns() -> None:
            nonlocal turns
            while turns < 5:
                await asyncio.sleep(0)
                turns += 1
            gate.open()  # only now can a token come: the loop was not blocked by those that wait

        counting = asyncio.create_task(count_turns())
        tokens = [token.token_id async for token in handle]
        result = await other
        await counting
        return tokens, len(result.token_ids), turns

    with gated_engine(gate) as engine:
        tokens, count, turns = asyncio.run(scenario(engine))
    assert (len(tokens), count, turns) == (4, 4, 5)


def test_awaiting_a_handle_that_has_ended_returns_at_once(engine: Engine) -> None:
    handle = engine.submit(PROMPT, max_tokens=2)
    result = handle.result(WAIT)

    async def ask() -> Any:
        return await handle, [token async for token in handle]

    assert asyncio.run(ask()) == (result, handle.tokens)


def test_an_event_loop_that_is_closed_meanwhile_harms_nobody(gate: Gate) -> None:
    with gated_engine(gate) as engine:
        handle = engine.submit(PROMPT, max_tokens=2)

        async def give_up() -> None:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(handle._wait_async(), 0.01)

        asyncio.run(give_up())
        gate.open()
        assert len(handle.result(WAIT).token_ids) == 2
        assert engine.error is None


def test_a_handle_shows_where_it_is(engine: Engine) -> None:
    handle = engine.submit(PROMPT, max_tokens=2, request_id="a")
    handle.result(WAIT)
    assert repr(handle) == "Handle('a', 2 tokens, ended)"


# --- Submitting ---------------------------------------------------------------------------------------------


def test_a_batch_arrives_before_one_and_the_same_step(engine: Engine) -> None:
    handles = engine.submit_batch([Submission(PROMPT, Sampling(max_tokens=2), f"b{i}") for i in range(4)])
    for handle in handles:
        handle.result(WAIT)
    first_rows = next(event for event in engine.log if event.kind == "step_scheduled").rows  # type: ignore[attr-defined]
    assert [row[0] for row in first_rows] == ["b0", "b1", "b2", "b3"]


def test_of_a_batch_with_one_bad_request_none_is_taken(engine: Engine) -> None:
    with pytest.raises(InvalidRequestError, match="the prompt is empty"):
        engine.submit_batch([Submission(PROMPT, request_id="good"), Submission([], request_id="bad")])
    assert engine.state().requests == {}
    assert engine.submit(PROMPT, max_tokens=1, request_id="good").result(WAIT).request_id == "good"


@pytest.mark.parametrize(
    ("prompt", "settings", "words"),
    [
        ("", {}, "the prompt is empty; give it at least one token"),
        ([], {}, "the prompt is empty"),
        ([1, 49_152], {}, "token 1 of the prompt is 49152; the vocabulary has ids 0 to 49151"),
        ([-1], {}, "token 0 of the prompt is -1"),
        ([1.5], {}, "token ids are whole numbers"),
        (b"bytes", {}, "the prompt is a bytes"),
        (7, {}, "the prompt is a int"),
        ("half \udc80", {}, "half of a surrogate pair"),
        ("hi", {"max_tokens": 0}, "max_tokens is 0; it must be a whole number of 1 or more"),
        ("hi", {"max_tokens": -3}, "max_tokens is -3"),
        ("hi", {"temperature": float("nan")}, "temperature is nan"),
        ("hi", {"temperature": -1.0}, "temperature is -1.0"),
        ("hi", {"top_p": 0.0}, "top_p is 0.0"),
        ("hi", {"top_k": -1}, "top_k is -1"),
        ("hi", {"seed": -1}, "seed is -1"),
        ("hi", {"stop": ("",)}, "stop holds ''"),
        ("hi", {"max_token": 3}, "sampling has max_tokens"),
        ("hi", {"cache_salt": 5}, "cache_salt is 5"),
        ("hi", {"request_id": ""}, "request_id is ''"),
        ([1] * 9000, {}, "shorten the prompt, lower max_tokens or raise num_blocks"),
        ([1] * 100, {"max_tokens": 1 << 21}, "can hold; shorten the prompt or lower max_tokens"),
    ],
)
def test_bad_input_is_refused_at_the_door_and_leaves_nothing(
    engine: Engine, prompt: Any, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        engine.submit(prompt, **settings)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert engine.state().requests == {}
    engine.check_invariants()
    assert engine.submit(PROMPT, max_tokens=1).result(WAIT).finish_reason == "length"


@pytest.mark.parametrize("message", ["", 5, None])
def test_an_empty_chat_message_is_refused(engine: Engine, message: Any) -> None:
    with pytest.raises(InvalidRequestError, match="the message is"):
        engine.chat(message)


def test_an_id_may_be_used_once(engine: Engine) -> None:
    engine.submit(PROMPT, max_tokens=1, request_id="a").result(WAIT)
    with pytest.raises(DuplicateRequestError, match="'a' is in use"):
        engine.submit(PROMPT, request_id="a")
    with pytest.raises(DuplicateRequestError, match="'b' is in use"):
        engine.submit_batch([Submission(PROMPT, request_id="b"), Submission(PROMPT, request_id="b")])


def test_threads_that_submit_at_the_same_time_get_their_own_ids(engine: Engine) -> None:
    handles: list[Handle] = []

    def submit_ten() -> None:
        for _ in range(10):
            handles.append(engine.submit(PROMPT, max_tokens=1))

    threads = [threading.Thread(target=submit_ten) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    results = [handle.result(WAIT) for handle in handles]
    assert len({result.request_id for result in results}) == 80
    engine.check_invariants()


def test_a_request_may_wait_for_a_token_of_another(engine: Engine) -> None:
    first, second = engine.submit_batch(
        [
            Submission(PROMPT, Sampling(max_tokens=4), "a"),
            Submission(PROMPT, Sampling(max_tokens=1), "b", after=("a", 2)),
        ]
    )
    first.result(WAIT)
    second.result(WAIT)
    kinds = [(event.kind, event.request_id) for event in engine.log if hasattr(event, "request_id")]
    assert kinds.index(("request_arrived", "b")) > kinds.index(("token_out", "a"))
    with pytest.raises(UnknownRequestError, match="after names request 'nobody'"):
        engine.submit(PROMPT, after=("nobody", 1))


# --- Taking back --------------------------------------------------------------------------------------------


PHASES = {
    "prefill": (RequestState.RUNNING, 0),
    "decode": (RequestState.RUNNING, 2),
    "waiting": (RequestState.WAITING, 0),
    "held": (RequestState.HELD, 0),
    "preempted": (RequestState.PREEMPTED, 1),
    "deferred": (RequestState.DEFERRED, 0),
}
"""The state of each phase, and how many tokens have come out at least."""


@pytest.mark.parametrize("phase", PHASES)
def test_a_request_can_be_aborted_in_every_phase(gate: Gate, phase: str) -> None:
    settings: dict[str, Any] = {"block_size": 4, "num_blocks": 32, "max_num_batched_tokens": 6}
    if phase == "preempted":
        settings["num_blocks"] = 6
    if phase == "waiting":
        settings["max_num_seqs"] = 1
    if phase == "held":
        settings["coordination"] = "single-flight"
    with gated_engine(gate, **settings) as engine:
        prompt = [5, 6, 7, 8, 9, 10, 11, 12]
        other, handle = engine.submit_batch(
            [
                Submission(prompt, Sampling(max_tokens=12), "other"),
                Submission(prompt, Sampling(max_tokens=12), "a", after=("other", 9) if phase == "deferred" else None),
            ]
        )
        assert gate.arrived.acquire(timeout=WAIT)
        request = engine._core.requests["a"]
        state, least = PHASES[phase]
        while request.state is not state or len(request.output_token_ids) < least:
            assert not other.done, f"the request never was in {phase}"
            gate.let()
        had = len(request.output_token_ids)
        answers: list[bool] = []
        aborting = threading.Thread(target=lambda: answers.append(handle.abort()))
        aborting.start()
        wait_for(lambda: engine._worker.commands.qsize() > 0)  # it is heard when the step has ended
        gate.open()
        aborting.join(WAIT)
        assert answers == [True]
        assert handle.abort() is False
        result = handle.result(WAIT)
        assert result.finish_reason == "abort"
        assert had <= len(result.token_ids) <= had + 1
        assert other.result(WAIT).finish_reason == "length"
        engine.check_invariants()
        assert len(engine.state().free_queue) == engine.config.num_blocks
        assert replay(engine.log) == engine.state()


def test_aborting_twice_or_after_the_end_says_false(engine: Engine) -> None:
    handle = engine.submit(PROMPT, max_tokens=1, request_id="a")
    handle.result(WAIT)
    assert (handle.abort(), engine.abort("a"), engine.abort("a")) == (False, False, False)
    assert handle.result().finish_reason == "length"


def test_an_unknown_id_is_an_error(engine: Engine) -> None:
    with pytest.raises(UnknownRequestError, match="no request is called 'nobody'; ask with an id"):
        engine.abort("nobody")


def test_when_a_leader_is_aborted_its_followers_finish(gate: Gate) -> None:
    with gated_engine(gate, coordination="single-flight", max_num_batched_tokens=16) as engine:
        handles = engine.submit_batch([Submission(PROMPT, Sampling(max_tokens=3)) for _ in range(4)])
        assert gate.arrived.acquire(timeout=WAIT)
        aborting = threading.Thread(target=handles[0].abort)
        aborting.start()
        wait_for(lambda: engine._worker.commands.qsize() > 0)
        gate.open()
        aborting.join(WAIT)
        assert [handle.result(WAIT).finish_reason for handle in handles] == ["abort", "length", "length", "length"]
        engine.check_invariants()


# --- Samples ------------------------------------------------------------------------------------------------

SAMPLED: dict[str, Any] = {"max_tokens": 6, "temperature": 0.8, "seed": 5, "n": 3}


def alone(seed: int, max_tokens: int = 6, prompt: list[int] = PROMPT) -> tuple[int, ...]:
    """Return the tokens of a lone request with this seed."""
    core = EngineCore(EngineConfig(), VirtualRunner())
    request = core.submit(prompt, max_tokens=max_tokens, temperature=0.8, seed=seed)
    core.run()
    return tuple(request.output_token_ids)


def while_a_step_runs(engine: Engine, gate: Gate, act: Callable[[], Any]) -> Any:
    """Call ``act`` on another thread while a step stands at the gate; let every step go; return the answer."""
    answers: list[Any] = []
    asking = threading.Thread(target=lambda: answers.append(act()))
    asking.start()
    wait_for(lambda: engine._worker.commands.qsize() > 0)  # it is heard when the step has ended
    gate.open()
    asking.join(WAIT)
    return answers[0]


def test_a_handle_has_all_samples_of_its_prompt_itself_first_and_so_has_each_of_them(engine: Engine) -> None:
    handle = engine.submit(PROMPT, request_id="a", **SAMPLED)
    assert [sample.request_id for sample in handle.samples] == ["a", "a.1", "a.2"]
    assert handle.samples[0] is handle
    assert all(sample.samples is handle.samples for sample in handle.samples)
    assert {sample.prompt_token_ids for sample in handle.samples} == {tuple(PROMPT)}
    results = [sample.result(WAIT) for sample in handle.samples]
    assert [result.token_ids for result in results] == [alone(5), alone(6), alone(7)]
    assert [result.request_id for result in results] == ["a", "a.1", "a.2"]
    assert len(set(results)) == 3
    lone = engine.submit(PROMPT, max_tokens=1)
    assert lone.samples == (lone,)


def test_of_a_batch_the_first_samples_are_returned(engine: Engine) -> None:
    sampling = Sampling(max_tokens=3, n=2, temperature=0.8, seed=1)
    handles = engine.submit_batch([Submission(PROMPT, sampling, name) for name in "ab"])
    assert [handle.request_id for handle in handles] == ["a", "b"]
    outputs = {s.request_id: s.result(WAIT).token_ids for handle in handles for s in handle.samples}
    assert outputs == {"a": alone(1, 3), "a.1": alone(2, 3), "b": alone(1, 3), "b.1": alone(2, 3)}


@pytest.mark.parametrize("model", ["virtual", "tiny"])
def test_each_sample_draws_what_a_lone_request_with_its_seed_draws_and_the_prompt_is_computed_once(model: str) -> None:
    with Engine(model, enable_prefix_caching=False) as engine:
        outputs = [sample.result(WAIT).token_ids for sample in engine.submit(PROMPT, **SAMPLED).samples]
        prefills = [e for e in engine.log if isinstance(e, ev.ChunkComputed) and e.phase == "prefill"]
        assert [(event.request_id, event.num_tokens) for event in prefills] == [("r0", 40)]
        lone = [engine.submit(PROMPT, max_tokens=6, temperature=0.8, seed=seed) for seed in (5, 6, 7)]
        assert outputs == [handle.result(WAIT).token_ids for handle in lone]
        assert len(set(outputs)) > 1


def test_each_sample_can_be_iterated_while_it_runs(gate: Gate) -> None:
    with gated_engine(gate) as engine:
        handle = engine.submit(PROMPT, **SAMPLED)
        gate.let(2)
        firsts = [next(iter(sample)) for sample in handle.samples]
        assert [token.token_id for token in firsts] == [alone(seed)[0] for seed in (5, 6, 7)]
        assert not any(sample.done for sample in handle.samples)
        gate.open()
        for seed, sample in zip((5, 6, 7), handle.samples, strict=True):
            assert tuple(token.token_id for token in sample) == alone(seed)
            assert "".join(token.text for token in sample.tokens) == sample.result(WAIT).text


def test_samples_can_be_awaited_and_iterated_side_by_side(engine: Engine) -> None:
    async def read(handle: Handle) -> tuple[int, ...]:
        return tuple([token.token_id async for token in handle])

    async def wait(handle: Handle) -> tuple[int, ...]:
        return (await handle).token_ids

    async def scenario() -> list[tuple[int, ...]]:
        handle = engine.submit(PROMPT, **SAMPLED)
        return await asyncio.gather(*map(read, handle.samples), *map(wait, handle.samples))

    assert asyncio.run(scenario()) == [alone(5), alone(6), alone(7)] * 2


STEPS_BEFORE = {"prompt": 0, "end of the prompt": 2, "first tokens": 3, "later": 5}
"""How many steps are over while the abort is asked for, of a prompt in three chunks."""


@pytest.mark.parametrize("phase", STEPS_BEFORE)
@pytest.mark.parametrize("which", [0, 1, 2])
def test_any_sample_can_be_aborted_at_any_time_and_the_others_go_on(gate: Gate, phase: str, which: int) -> None:
    with gated_engine(gate, max_num_batched_tokens=16) as engine:
        handle = engine.submit(PROMPT, request_id="a", **SAMPLED)
        assert gate.arrived.acquire(timeout=WAIT)
        gate.let(STEPS_BEFORE[phase])
        gone = handle.samples[which]
        assert while_a_step_runs(engine, gate, gone.abort) is True
        assert gone.abort() is False
        assert gone.result(WAIT).finish_reason == "abort"
        for number, sample in enumerate(handle.samples):
            if sample is not gone:
                assert sample.result(WAIT).token_ids == alone(5 + number)
        had = len(gone.result().token_ids)
        assert gone.result().token_ids == alone(5 + which)[:had]
        assert (had == 0) is (phase == "prompt")
        led = [(e.from_id, e.to_id) for e in engine.log if isinstance(e, ev.SampleLeads)]
        assert led == ([("a", "a.1")] if phase == "prompt" and which == 0 else [])
        engine.check_invariants()
        assert replay(engine.log) == engine.state()
        assert len(engine.state().free_queue) == engine.config.num_blocks


def test_when_one_first_sample_after_the_other_is_aborted_the_last_one_still_answers(gate: Gate) -> None:
    with gated_engine(gate, max_num_batched_tokens=16) as engine:
        handle = engine.submit(PROMPT, request_id="a", **SAMPLED)
        assert gate.arrived.acquire(timeout=WAIT)
        assert while_a_step_runs(engine, gate, lambda: engine.call(abort_two)) is None
        reasons = [sample.result(WAIT).finish_reason for sample in handle.samples]
        assert reasons == ["abort", "abort", "length"]
        assert handle.samples[2].result().token_ids == alone(7)


def abort_two(core: EngineCore) -> None:
    """Take the first two samples back between the same two steps."""
    core.abort("a")
    core.abort("a.1")


@pytest.mark.parametrize("steps", [0, 2, 4], ids=["prompt", "end of the prompt", "decode"])
def test_closing_the_engine_ends_every_sample(gate: Gate, steps: int) -> None:
    with gated_engine(gate, max_num_batched_tokens=16) as engine:
        handle = engine.submit(PROMPT, request_id="a", max_tokens=100, n=3)
        late = engine.submit(PROMPT, max_tokens=5, n=2, after=("a.2", 99))
        assert gate.arrived.acquire(timeout=WAIT)
        gate.let(steps)
        closing = threading.Thread(target=engine.close)
        closing.start()
        wait_for(lambda: engine._worker.commands.qsize() > 0 or not engine.is_alive)
        gate.open()
        closing.join(WAIT)
        assert not closing.is_alive()
        for sample in (*handle.samples, *late.samples):
            assert sample.result(WAIT).finish_reason == "abort"
        assert len(replay(engine.log).free_queue) == engine.config.num_blocks


@pytest.mark.parametrize("fails_at", [1, 3, 5], ids=["prompt", "end of the prompt", "decode"])
def test_when_the_engine_dies_every_sample_gets_the_cause(gate: Gate, fails_at: int) -> None:
    gate.fails_at = fails_at
    with gated_engine(gate, max_num_batched_tokens=16) as engine:
        handle = engine.submit(PROMPT, request_id="a", max_tokens=100, n=3)
        late = engine.submit(PROMPT, max_tokens=5, n=2, after=("a.1", 99))
        gate.open()
        for sample in (*handle.samples, *late.samples):
            with pytest.raises(EngineDeadError, match="the device is gone") as caught:
                sample.result(WAIT)
            assert isinstance(caught.value.__cause__, RuntimeError)
            assert sample.abort() is False
        states = replay(engine.log).requests
        assert {view.state for view in states.values()} == {RequestState.FAILED}
        assert len(replay(engine.log).free_queue) == engine.config.num_blocks


def test_a_refused_sample_leaves_no_handle_behind(engine: Engine) -> None:
    engine.submit(PROMPT, max_tokens=1, request_id="a.1").result(WAIT)
    with pytest.raises(DuplicateRequestError, match=r"'a\.1' is in use"):
        engine.submit(PROMPT, request_id="a", **SAMPLED)
    with pytest.raises(UnknownRequestError):
        engine.abort("a")
    assert engine.submit(PROMPT, max_tokens=1, request_id="a").result(WAIT).finish_reason == "length"


# --- Rows that give no number -------------------------------------------------------------------------------


def test_a_row_that_gives_no_number_is_told_to_its_handles_alone() -> None:
    class NoNumber(VirtualRunner):
        def execute(self, step: ScheduledStep) -> dict[str, int | RowError]:
            drawn = super().execute(step)
            if step.number == 2:
                drawn.update({name: RowError(f"the numbers of {name} are NaN") for name in drawn if name[0] == "b"})
            return drawn

    with Engine(runner=NoNumber) as engine:
        sampling = Sampling(max_tokens=6, n=2, temperature=0.8, seed=5)
        good, bad = engine.submit_batch([Submission(PROMPT, sampling, name) for name in ("good", "bad")])
        for sample in bad.samples:
            with pytest.raises(RequestFailedError, match=f"the numbers of {sample.request_id} are NaN") as caught:
                sample.result(WAIT)
            assert isinstance(caught.value.__cause__, RowError)
            assert len(sample.tokens) == 1
            with pytest.raises(RequestFailedError):
                list(sample)
            assert sample.abort() is False
        assert [sample.result(WAIT).token_ids for sample in good.samples] == [alone(5), alone(6)]
        assert engine.error is None
        assert engine.submit(PROMPT, max_tokens=2).result(WAIT).finish_reason == "length"
        engine.check_invariants()
    with pytest.raises(RequestFailedError, match="are NaN"):  # closed in good order since: that is not why it failed
        bad.result(WAIT)


@pytest.mark.parametrize("returned", [None, {}, [], {"r0": "1"}, {"r0": None}, {"r1": 1}])
def test_a_runner_that_returns_no_result_ends_the_engine_and_every_handle_says_why(returned: Any) -> None:
    class Confused(VirtualRunner):
        def execute(self, step: ScheduledStep) -> dict[str, int | RowError]:
            drawn: dict[str, int | RowError] = returned
            return drawn

    with Engine(runner=Confused) as engine:
        handle = engine.submit(PROMPT, max_tokens=5, n=2)
        for sample in handle.samples:
            with pytest.raises(EngineDeadError, match=r"the runner (drew|returned) ") as caught:
                sample.result(WAIT)
            assert isinstance(caught.value.__cause__, InvariantError)
        with pytest.raises(EngineDeadError, match=r"the runner (drew|returned) "):
            engine.submit(PROMPT)


# --- The end ------------------------------------------------------------------------------------------------


def test_after_close_a_submit_says_so_and_closing_again_does_nothing() -> None:
    engine = Engine("virtual")
    handle = engine.submit(PROMPT, max_tokens=2)
    handle.result(WAIT)
    engine.close()
    engine.close()
    assert not engine.is_alive
    assert repr(engine) == "Engine('virtual', 512 blocks of 16, closed)"
    for ask in (lambda: engine.submit(PROMPT), engine.state, engine.reset_cache, engine.check_invariants):
        with pytest.raises(EngineClosedError, match="the engine is closed; make a new one to continue"):
            ask()
    assert handle.result().finish_reason == "length"
    assert handle.abort() is False
    assert engine.metrics().requests["r0"].output_tokens == 2


def test_closing_while_requests_run_aborts_them_and_frees_every_block(gate: Gate) -> None:
    with gated_engine(gate, coordination="single-flight") as engine:
        handles = engine.submit_batch([Submission(PROMPT, Sampling(max_tokens=100)) for _ in range(3)])
        assert gate.arrived.acquire(timeout=WAIT)
        closing = threading.Thread(target=engine.close)
        closing.start()
        gate.open()
        closing.join(WAIT)
        assert not closing.is_alive()
        assert {handle.result(WAIT).finish_reason for handle in handles} == {"abort"}
        assert len(replay(engine.log).free_queue) == engine.config.num_blocks


def test_a_request_that_comes_while_the_engine_closes_is_answered(gate: Gate) -> None:
    with gated_engine(gate) as engine:
        engine.submit(PROMPT, max_tokens=100)
        assert gate.arrived.acquire(timeout=WAIT)
        engine._worker.stop()
        late = engine.submit(PROMPT, max_tokens=1)
        gate.open()
        with pytest.raises(MiniVLLMError, match="closed"):
            late.result(WAIT)


def test_when_a_runner_raises_every_handle_gets_the_cause_and_a_new_engine_works(gate: Gate) -> None:
    gate.fails_at = 3
    with gated_engine(gate, coordination="single-flight", release="on-completion") as engine:
        handles = engine.submit_batch([Submission(PROMPT, Sampling(max_tokens=100)) for _ in range(3)])
        gate.open()
        for handle in handles:
            with pytest.raises(EngineDeadError, match="the device is gone") as caught:
                handle.result(WAIT)
            assert isinstance(caught.value.__cause__, RuntimeError)
            with pytest.raises(EngineDeadError, match="the device is gone"):
                list(handle)
            with pytest.raises(EngineDeadError, match="the device is gone"):
                asyncio.run(handle._wait_async())
            assert handle.abort() is False
        engine._worker.thread.join(WAIT)
        with pytest.raises(EngineDeadError, match=r"the device is gone.*; make a new engine to continue") as again:
            engine.submit(PROMPT)
        assert isinstance(again.value.__cause__, RuntimeError)
        assert repr(engine).endswith("dead)")
        assert not engine.is_alive
        assert len(replay(engine.log).free_queue) == engine.config.num_blocks
        with Engine("virtual") as new:
            assert new.submit(PROMPT, max_tokens=1).result(WAIT).finish_reason == "length"


def test_a_runner_that_cannot_be_made_is_the_constructors_error() -> None:
    def broken() -> VirtualRunner:
        raise ModelError("the model is broken; fetch it again")

    before = engine_threads()
    with pytest.raises(ModelError, match="the model is broken"):
        Engine(runner=broken)
    wait_for(lambda: engine_threads() <= before)


def test_a_runner_that_fails_to_allocate_and_to_close_is_the_constructors_error_too() -> None:
    class Broken(VirtualRunner):
        def allocate(self, num_blocks: int, block_size: int) -> None:
            raise ConfigError("too many blocks; ask for fewer")

        def close(self) -> None:
            raise RuntimeError("cannot even close")

    before = engine_threads()
    with pytest.raises(ConfigError, match="too many blocks"):
        Engine(runner=Broken)
    wait_for(lambda: engine_threads() <= before)


def test_a_runner_that_fails_to_close_keeps_nobody_waiting(gate: Gate) -> None:
    class Broken(VirtualRunner):
        def close(self) -> None:
            raise RuntimeError("cannot close")

    engine = Engine(runner=lambda: Broken(on_step=gate))
    handle = engine.submit(PROMPT, max_tokens=50)
    assert gate.arrived.acquire(timeout=WAIT)
    closing = threading.Thread(target=engine.close)
    closing.start()
    gate.open()
    closing.join(WAIT)
    assert not closing.is_alive()
    assert handle.done


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"block_size": 0}, ConfigError, "block_size is 0; it must be a whole number from 1"),
        ({"num_blocks": 0}, ConfigError, "num_blocks is 0"),
        ({"max_num_batched_tokens": 0}, ConfigError, "max_num_batched_tokens is 0"),
        ({"max_num_seqs": 0}, ConfigError, "max_num_seqs is 0"),
        ({"publication": "incrementl"}, UnknownNameError, "did you mean 'incremental'"),
        ({"coordination": "singleflight"}, UnknownNameError, "did you mean 'single-flight'"),
        ({"release": "after-prefil"}, UnknownNameError, "did you mean 'after-prefill'"),
        ({"blocks": 5}, UnknownNameError, "no setting is called 'blocks'; did you mean 'num_blocks'"),
        ({"config": {"num_blocks": 5}}, ConfigError, "pass an EngineConfig"),
    ],
)
def test_a_bad_setting_is_the_constructors_error(settings: dict[str, Any], error: type[Exception], words: str) -> None:
    before = engine_threads()
    with pytest.raises(error, match=words):
        Engine("virtual", **settings)
    assert engine_threads() <= before


@pytest.mark.parametrize(
    ("model", "error", "words"),
    [
        ("smolm2", UnknownNameError, "did you mean 'smollm2'"),
        ("", UnknownNameError, "there is no model ''"),
        ("/no/such/folder", ModelError, "there is no model folder"),
    ],
)
def test_a_bad_model_is_the_constructors_error(model: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Engine(model)


def test_a_thread_that_was_forgotten_ends_by_itself() -> None:
    engine = Engine("virtual")
    handle = engine.submit(PROMPT, max_tokens=2)
    handle.result(WAIT)
    thread, reference = engine._worker.thread, weakref.ref(engine)
    del engine
    gc.collect()
    assert reference() is None
    thread.join(WAIT)
    assert not thread.is_alive()
    assert handle.result().finish_reason == "length"


def test_two_engines_serve_side_by_side() -> None:
    with Engine("virtual") as one, Engine("tiny") as two, Engine("tiny") as three:
        handles = [engine.submit(PROMPT, max_tokens=20) for engine in (one, two, three) for _ in range(3)]
        results = [handle.result(WAIT) for handle in handles]
        assert {len(result.token_ids) for result in results} == {20}
        assert results[3].token_ids == results[6].token_ids != results[0].token_ids
        two.close()
        assert three.submit(PROMPT, max_tokens=20).result(WAIT).token_ids == results[3].token_ids


# --- Between steps ------------------------------------------------------------------------------------------


def test_the_state_is_a_copy_between_two_steps_and_equals_the_replayed_log(engine: Engine) -> None:
    handles = [engine.submit(PROMPT, max_tokens=50) for _ in range(3)]
    for _ in range(20):
        state, log = engine.call(lambda core: (core.state(), core.log.since(0)))
        assert state == replay(log)
    for handle in handles:
        handle.result(WAIT)


def test_a_call_that_raises_raises_in_the_caller_and_the_engine_goes_on(engine: Engine) -> None:
    def fail(core: EngineCore) -> None:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        engine.call(fail)
    assert engine.submit(PROMPT, max_tokens=1).result(WAIT).finish_reason == "length"
    assert engine.call(lambda core: engine.call(lambda same: same is core)) is True


def test_policies_change_only_while_no_request_is_there(gate: Gate) -> None:
    with gated_engine(gate) as engine:
        handle = engine.submit(PROMPT, max_tokens=2)
        assert gate.arrived.acquire(timeout=WAIT)
        refusals: list[BaseException] = []

        def change() -> None:
            try:
                engine.set_policies(publication="incremental")
            except ConfigError as error:
                refusals.append(error)

        changing = threading.Thread(target=change)
        changing.start()
        wait_for(lambda: engine._worker.commands.qsize() > 0)
        gate.open()
        changing.join(WAIT)
        assert "policies can change only while no request is in the engine" in str(refusals[0])
        handle.result(WAIT)
        engine.set_policies(publication="incremental", coordination="single-flight")
        assert engine.config.publication == "incremental"
        assert engine.log[len(engine.log) - 1].kind == "policies_changed"


def test_a_cache_in_use_is_not_reset(gate: Gate) -> None:
    with gated_engine(gate) as engine:
        handle = engine.submit(PROMPT, max_tokens=2)
        assert gate.arrived.acquire(timeout=WAIT)
        answers: list[bool] = []
        asking = threading.Thread(target=lambda: answers.append(engine.reset_cache()))
        asking.start()
        wait_for(lambda: engine._worker.commands.qsize() > 0)
        gate.open()
        asking.join(WAIT)
        handle.result(WAIT)
        assert answers == [False]
        assert len(engine.state().prefix_index) == 2
        assert engine.reset_cache() is True
        assert engine.state().prefix_index == {}


def test_a_reset_that_aborts_ends_who_runs_and_the_others_go_on(gate: Gate) -> None:
    with gated_engine(gate, max_num_seqs=2, max_num_batched_tokens=64) as engine:
        running = engine.submit(PROMPT, max_tokens=50, n=2)
        waiting = engine.submit(PROMPT, max_tokens=6, temperature=0.8, seed=5)
        assert gate.arrived.acquire(timeout=WAIT)
        gate.let(2)
        assert while_a_step_runs(engine, gate, lambda: engine.reset_cache(abort_running=True)) is True
        assert [sample.result(WAIT).finish_reason for sample in running.samples] == ["abort", "abort"]
        assert waiting.result(WAIT).token_ids == alone(5)
        assert engine.metrics().requests[waiting.request_id].recovered_tokens == 0
        engine.check_invariants()
        assert replay(engine.log) == engine.state()


# --- A policy that is not safe on a real model ---------------------------------------------------------------


class Careless:
    """A publication policy of ones own that shows what is not computed, and says so."""

    name = "careless"
    is_safe = False

    def visible_tokens(self, num_computed_tokens: int, moment: Moment) -> int:
        return num_computed_tokens


@pytest.mark.parametrize("publication", ["at-allocation", "AT_ALLOCATION", AT_ALLOCATION, Careless()])
def test_a_real_model_refuses_an_unsafe_publication_at_the_start_and_no_thread_is_left(publication: Any) -> None:
    before = engine_threads()
    name = policy_name(EngineConfig(publication=publication).publication_policy)
    with pytest.raises(ConfigError) as caught:
        Engine("tiny", publication=publication, num_blocks=16)
    assert str(caught.value) == (
        f"publication {name!r} lets requests read K/V that was never computed; it is for teaching, on the virtual "
        f"model, or with allow_unsafe=\"{name}\" on 'tiny'"
    )
    wait_for(lambda: engine_threads() <= before)


def test_a_real_engine_cannot_change_to_an_unsafe_publication_and_goes_on_as_before() -> None:
    with Engine("tiny", num_blocks=16, coordination="single-flight") as engine:
        events = len(engine.log)
        for publication in ("at-allocation", Careless()):
            with pytest.raises(ConfigError, match="lets requests read K/V that was never computed"):
                engine.set_policies(publication=publication, coordination="independent")
        assert len(engine.log) == events
        assert (engine.config.publication, engine.config.coordination) == ("on-completion", "single-flight")
        assert engine.call(lambda core: core.coordinator.name) == "single-flight"
        engine.set_policies(publication="incremental")
        assert engine.submit(PROMPT, max_tokens=1).result(WAIT).finish_reason == "length"


@pytest.mark.parametrize("publication", ["at-allocation", Careless()])
def test_with_consent_by_name_a_real_model_runs_it_and_consent_to_one_is_none_to_another(publication: Any) -> None:
    name = policy_name(publication)
    with Engine("tiny", publication=publication, allow_unsafe=name, num_blocks=16) as engine:
        assert engine.submit(PROMPT, max_tokens=2).result(WAIT).finish_reason == "length"
        engine.check_invariants()
    with pytest.raises(ConfigError, match="never computed"):
        Engine("tiny", publication=Careless(), allow_unsafe="at-allocation", num_blocks=16)


def test_a_virtual_engine_needs_no_consent_and_may_change_to_it(engine: Engine) -> None:
    engine.set_policies(publication="at-allocation")
    handles = engine.submit_batch([Submission(PROMPT, Sampling(max_tokens=2)) for _ in range(3)])
    assert [len(handle.result(WAIT).token_ids) for handle in handles] == [2, 2, 2]
    assert [r.recovered_tokens for r in engine.metrics().requests.values()] == [0, 32, 32]


def test_listeners_hear_of_each_step_until_they_are_taken_off(engine: Engine) -> None:
    heard: list[str] = []
    remove = engine.add_listener(lambda: heard.append(threading.current_thread().name))
    engine.submit(PROMPT, max_tokens=5).result(WAIT)
    engine.state()
    assert len(heard) >= 5
    assert set(heard) == {"minivllm-engine"}
    remove()
    remove()
    count = len(heard)
    engine.submit(PROMPT, max_tokens=5).result(WAIT)
    engine.state()
    assert len(heard) == count


def test_a_listener_that_raises_is_taken_off_and_the_engine_goes_on(
    engine: Engine, capfd: pytest.CaptureFixture[str]
) -> None:
    calls: list[int] = []

    def broken() -> None:
        calls.append(1)
        raise ValueError("a view is broken")

    engine.add_listener(broken)
    with pytest.warns(RuntimeWarning, match="raised ValueError: a view is broken; it is not called again") as said:
        assert len(engine.submit(PROMPT, max_tokens=5).result(WAIT).token_ids) == 5
        engine.close()
    assert calls == [1]
    assert len(said) == 1
    assert capfd.readouterr() == ("", "")


def test_nothing_is_printed_whatever_happens(gate: Gate, capfd: pytest.CaptureFixture[str]) -> None:
    gate.fails_at = 2
    with gated_engine(gate) as engine:
        handle = engine.submit(PROMPT, max_tokens=5)
        gate.open()
        with pytest.raises(EngineDeadError):
            handle.result(WAIT)
    with Engine("virtual") as other:
        other.submit(PROMPT, max_tokens=50).abort()
    assert capfd.readouterr() == ("", "")


# --- Processes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["virtual", "tiny"])
def test_python_may_end_while_the_engine_runs(model: str) -> None:
    program = (
        "from minivllm import Engine\n"
        f"engine = Engine({model!r})\n"
        "handles = [engine.submit(list(range(40)), max_tokens=2000) for _ in range(3)]\n"
        "next(iter(handles[0]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_killed_process_leaves_nothing_that_hinders_the_next(tmp_path: Path) -> None:
    program = (
        "from minivllm import Engine\n"
        "engine = Engine('tiny')\n"
        "handle = engine.submit(list(range(40)), max_tokens=4000)\n"
        "next(iter(handle)); print('running', flush=True); handle.result()\n"
    )
    first = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None
    with first:
        assert first.stdout.readline() == "running\n"
        first.kill()
    assert first.returncode == -9
    again = program.replace("4000", "2").replace("handle.result()", "print(handle.result().token_ids)")
    done = subprocess.run(
        [sys.executable, "-c", again], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("running\n(")


# --- Notebooks ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def real_kernel() -> Iterator[tuple[Any, Any]]:
    """Start a kernel that runs cells in the repository, and give its manager and a client."""
    from jupyter_client.manager import KernelManager

    manager = KernelManager(kernel_name="python3")
    assert manager.kernel_spec is not None
    manager.kernel_spec.argv[0] = sys.executable
    manager.start_kernel(cwd=str(ROOT))
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=60)
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def kernel() -> Iterator[Any]:
    """A client of a kernel that these tests share."""
    with real_kernel() as (_, client):
        yield client


def run_cell(client: Any, code: str, cell_id: str | None = None) -> tuple[str, str]:
    """Run a cell as JupyterLab does, with its id. Returns what it printed and its error ("" for none)."""
    content = {"code": code, "silent": False, "store_history": True, "user_expressions": {}, "allow_stdin": False}
    message = client.session.msg("execute_request", content, metadata={"cellId": cell_id} if cell_id else {})
    client.shell_channel.send(message)
    printed, error = "", ""
    while True:
        reply = client.get_iopub_msg(timeout=60)
        if reply["parent_header"].get("msg_id") != message["header"]["msg_id"]:
            continue
        kind, body = reply["msg_type"], reply["content"]
        if kind == "stream":
            printed += body["text"]
        elif kind == "error":
            error = f"{body['ename']}: {body['evalue']}"
        elif kind == "status" and body["execution_state"] == "idle":
            return printed, error


ALIVE = "import threading; print(sum(t.name == 'minivllm-engine' for t in threading.enumerate()))"


@pytest.mark.parametrize("cell_id", ["a-cell", None])
def test_running_a_cell_again_closes_the_engines_it_made_before(kernel: Any, cell_id: str | None) -> None:
    make = f"from minivllm import Engine\nfirst = Engine('virtual')\nsecond = Engine('virtual')  # {cell_id}"
    run_cell(kernel, "from minivllm import Engine\nother = Engine('virtual')", "another-cell")
    assert run_cell(kernel, make, cell_id) == ("", "")
    assert run_cell(kernel, "old = first; print(first.is_alive, second.is_alive)", "x") == ("True True\n", "")
    assert run_cell(kernel, make, cell_id) == ("", "")
    asked = "print(old.is_alive, first.is_alive, second.is_alive, other.is_alive)"
    assert run_cell(kernel, asked, "y") == ("False True True True\n", "")
    _, error = run_cell(kernel, "old.submit('hi')", "z")
    assert error == "EngineClosedError: the engine is closed; make a new one to continue"
    run_cell(kernel, "first.close(); second.close(); other.close()", "end")
    assert run_cell(kernel, ALIVE, "count") == ("0\n", "")


def test_a_cell_whose_engine_did_not_start_can_be_mended_and_run_again(kernel: Any) -> None:
    _, error = run_cell(kernel, "from minivllm import Engine\nengine = Engine('smolm2')", "mended")
    assert error.startswith("UnknownNameError: ")
    assert run_cell(kernel, "from minivllm import Engine\nengine = Engine('virtual')", "mended") == ("", "")
    assert run_cell(kernel, "from minivllm import Engine\nengine = Engine('virtual')", "mended") == ("", "")
    assert run_cell(kernel, ALIVE, "count") == ("1\n", "")
    run_cell(kernel, "engine.close()", "end")


def test_a_cell_may_await_a_handle(kernel: Any) -> None:
    code = (
        "from minivllm import Engine\n"
        "with Engine('virtual') as engine:\n"
        "    handle = engine.submit('hello', max_tokens=3)\n"
        "    print(len([token async for token in handle]), len((await handle).token_ids))"
    )
    assert run_cell(kernel, code, "await") == ("3 3\n", "")


def test_an_interrupted_cell_leaves_an_engine_that_works(kernel: Any) -> None:
    code = (
        "from minivllm import Engine\nimport signal\n"
        "engine = Engine('virtual')\n"
        "handle = engine.submit(list(range(40)), max_tokens=5)\n"
        "signal.raise_signal(signal.SIGINT)\nhandle.result()"
    )
    _, error = run_cell(kernel, code, "interrupted")
    assert error.startswith("KeyboardInterrupt")
    assert run_cell(kernel, "print(handle.result(30).finish_reason, engine.is_alive)", "after") == ("length True\n", "")
    run_cell(kernel, "engine.close()", "end")


def test_a_kernel_that_was_killed_while_its_engine_ran_starts_afresh() -> None:
    running = (
        "from minivllm import Engine\n"
        "engine = Engine('tiny')\n"
        "handle = engine.submit(list(range(40)), max_tokens=4000, ignore_eos=True)\n"
        "print(next(iter(handle)).token_id >= 0)"
    )
    with real_kernel() as (manager, client):
        assert run_cell(client, running) == ("True\n", "")
        manager.signal_kernel(signal.SIGKILL)
        manager.restart_kernel(now=True)
        client.wait_for_ready(timeout=60)
        assert run_cell(client, running) == ("True\n", "")
        assert run_cell(client, "print(handle.abort())\nengine.check_invariants()\nengine.close()") == ("True\n", "")


def test_outside_a_notebook_there_is_no_cell() -> None:
    assert notebook_cells.current_cell() is None
    with Engine("virtual", EngineConfig()) as one, Engine("virtual") as two:
        assert one.is_alive and two.is_alive
