"""A step is schedule, execute, publish, output: input, triggers, ends, faults and state of the synchronous engine."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from minivllm.config import EngineConfig
from minivllm.engine.core import EngineCore
from minivllm.engine.input_processor import Submission
from minivllm.engine.output import Output
from minivllm.errors import (
    ConfigError,
    DuplicateRequestError,
    EngineClosedError,
    EngineDeadError,
    InvalidRequestError,
    InvariantError,
    RowError,
    UnknownNameError,
    UnknownRequestError,
)
from minivllm.log import events as ev
from minivllm.log.replay import replay
from minivllm.request import Request, RequestState, Sampling
from minivllm.runners.virtual import VirtualRunner
from minivllm.step import ScheduledStep
from tests.unit.small import FULL_PROMPT, check, events_of, recovered, run, small_core, step

FINISHED, ABORTED, FAILED = RequestState.FINISHED, RequestState.ABORTED, RequestState.FAILED


ONE = Sampling(max_tokens=1)


class Fault(RuntimeError):
    """What a device would raise."""


def failing_at(number: int, error: BaseException | None = None) -> Callable[[ScheduledStep], None]:
    """Return a hook that raises in step ``number``."""

    def on_step(scheduled: ScheduledStep) -> None:
        if scheduled.number == number:
            raise error or Fault("the device is gone")

    return on_step


def arrivals(core: EngineCore) -> list[tuple[str, int]]:
    """Return (request id, step after which it arrived)."""
    return [(event.request_id, event.step) for event in events_of(core, ev.RequestArrived)]


# -- Input ------------------------------------------------------------------------------------------------


def test_a_request_is_named_numbered_and_returned() -> None:
    core = small_core()
    first, second = core.submit([1, 2], max_tokens=1), core.submit("ab", max_tokens=1, request_id="mine")
    assert (first.request_id, first.arrival, first.prompt_token_ids) == ("r0", 0, (1, 2))
    assert (second.request_id, second.arrival, second.prompt_token_ids) == ("mine", 1, (97, 98))
    assert list(core.requests.values()) == [first, second]


def test_a_name_of_ones_own_is_not_given_again() -> None:
    core = small_core()
    core.submit([1], request_id="r0", max_tokens=1)
    assert core.submit([1], max_tokens=1).request_id == "r1"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty; give it at least one token"),
        ("", "the prompt is empty"),
        ([1, -1], r"token 1 of the prompt is -1; the vocabulary has ids 0 to 49151"),
        ([49_152], "token 0 of the prompt is 49152; the vocabulary"),
        ([1.0], "token 0 of the prompt is 1.0; token ids are whole numbers"),
        ([True], "token 0 of the prompt is True"),
        (["1"], "token 0 of the prompt is '1'"),
        ([None], "token 0 of the prompt is None"),
        (7, "the prompt is a int; give a string or a list of token ids"),
        (b"bytes", "the prompt is a bytes"),
        (None, "the prompt is a NoneType"),
    ],
)
def test_a_prompt_that_makes_no_sense_is_refused(prompt: Any, message: str) -> None:
    core = small_core()
    with pytest.raises(InvalidRequestError, match=message):
        core.submit(prompt, max_tokens=1)
    assert core.requests == {}
    assert len(core.log) == 1


def test_a_request_that_can_never_fit_the_pool_is_refused_with_both_numbers() -> None:
    core = small_core()
    with pytest.raises(InvalidRequestError, match=r"31 tokens and max_tokens is 3: that needs 9 blocks.* has 8"):
        core.submit(list(range(31)), max_tokens=3)
    assert core.requests == {}


def test_the_token_that_comes_out_last_needs_no_room() -> None:
    core = small_core()
    request = core.submit(list(range(31)), max_tokens=2)
    run(core)
    assert len(request.output_token_ids) == 2


def test_a_request_longer_than_the_model_is_refused() -> None:
    core = EngineCore(EngineConfig(), VirtualRunner(max_model_len=20))
    with pytest.raises(InvalidRequestError, match=r"15 tokens and max_tokens is 7.* more than the 20"):
        core.submit(list(range(15)), max_tokens=7)
    core.submit(list(range(15)), max_tokens=6)  # the last token has no position: nothing is computed from it


def test_a_prompt_as_long_as_the_model_can_draw_one_token() -> None:
    core = EngineCore(EngineConfig(), VirtualRunner(max_model_len=20))
    request = core.submit(list(range(20)), max_tokens=1)
    core.run()
    assert len(request.output_token_ids) == 1


@pytest.mark.parametrize("salt", [1, b"a", ["a"]])
def test_a_salt_that_is_no_string_is_refused(salt: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"cache_salt is .* must be a string"):
        small_core().submit([1], max_tokens=1, cache_salt=salt)


@pytest.mark.parametrize("name", ["", 7])
def test_a_request_id_that_is_no_name_is_refused(name: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"request_id is .* must be a string of one character or more"):
        small_core().submit([1], max_tokens=1, request_id=name)


def test_an_id_in_use_is_refused_even_after_that_request_has_ended() -> None:
    core = small_core()
    core.submit([1], max_tokens=1, request_id="a")
    run(core)
    with pytest.raises(DuplicateRequestError, match="'a' is in use; choose another"):
        core.submit([1], max_tokens=1, request_id="a")


def test_sampling_is_given_whole_or_by_field_and_not_both() -> None:
    core = small_core()
    assert core.submit([1], Sampling(max_tokens=3)).sampling.max_tokens == 3
    assert core.submit([1], max_tokens=4).sampling == Sampling(max_tokens=4)
    with pytest.raises(InvalidRequestError, match="pass either sampling= or max_tokens, not both"):
        core.submit([1], Sampling(), max_tokens=4)
    with pytest.raises(InvalidRequestError, match="sampling has max_tokens, temperature"):
        core.submit([1], heat=1)
    with pytest.raises(InvalidRequestError, match="temperature is nan"):
        core.submit([1], temperature=math.nan)
    with pytest.raises(InvalidRequestError, match=r"pass a Sampling\(\.\.\.\)"):
        core.submit_batch([Submission([1], "greedy")])  # type: ignore[arg-type]


BAD = [
    Submission([]),
    Submission([1], request_id="good"),
    Submission([1], request_id="old"),
    Submission([10**9]),
    Submission([1], Sampling(max_tokens=1000)),
    Submission([1], Sampling(max_tokens=1), after=("ghost", 1)),
    Submission([1], Sampling(max_tokens=1), after=("old", 0)),
]


@pytest.mark.parametrize("bad", BAD, ids=["empty", "twice", "in use", "vocabulary", "too long", "after", "token 0"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_of_a_batch_with_one_bad_submission_nothing_is_left(bad: Submission, place: int) -> None:
    core = small_core(coordination="single-flight")
    core.submit(FULL_PROMPT, max_tokens=2, request_id="old")
    before, events = core.state(), len(core.log)
    batch = [Submission([1, 2], Sampling(max_tokens=1), "good"), Submission([3], Sampling(max_tokens=1), "also good")]
    batch.insert(place, bad)
    with pytest.raises((InvalidRequestError, DuplicateRequestError, UnknownRequestError)):
        core.submit_batch(batch)
    assert core.state() == before
    assert len(core.log) == events
    assert core.submit_batch(batch[:place] + batch[place + 1 :])
    run(core)


def test_a_batch_arrives_together_and_in_its_order() -> None:
    core = small_core()
    core.submit_batch(Submission([n], Sampling(max_tokens=1), name) for n, name in enumerate("cab"))
    step(core)
    assert arrivals(core) == [("c", 0), ("a", 0), ("b", 0)]
    assert [row[0] for row in events_of(core, ev.StepScheduled)[0].rows] == ["c", "a", "b"]


# -- Triggers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_request_arrives_when_the_other_has_put_its_nth_token_out(count: int) -> None:
    core = small_core()
    core.submit([1, 2], max_tokens=6, request_id="a")
    late = core.submit([3], max_tokens=1, request_id="late", after=("a", count))
    assert late.state is RequestState.DEFERRED
    run(core)
    assert arrivals(core) == [("a", 0), ("late", count)]
    assert late.state is FINISHED


def test_a_request_arrives_at_the_end_of_one_that_ends_sooner() -> None:
    core = small_core()
    core.submit([1, 2], max_tokens=2, request_id="a")
    core.submit([3], max_tokens=1, request_id="late", after=("a", 100))
    run(core)
    assert arrivals(core) == [("a", 0), ("late", 2)]


@pytest.mark.parametrize("end", [ABORTED, FAILED])
def test_a_request_arrives_when_the_other_ends_early(end: RequestState) -> None:
    core = small_core()
    core.submit([1, 2], max_tokens=20, request_id="a")
    late = core.submit([3], max_tokens=1, request_id="late", after=("a", 10))
    step(core)
    core.abort("a") if end is ABORTED else core.fail("a", Fault())
    assert late.state is RequestState.WAITING
    run(core)
    assert late.state is FINISHED


def test_a_request_after_a_token_that_is_out_already_arrives_at_once() -> None:
    core = small_core()
    core.submit([1, 2], max_tokens=8, request_id="a")
    step(core, 3)
    assert core.submit([3], max_tokens=1, after=("a", 3)).state is RequestState.WAITING
    assert core.submit([4], max_tokens=1, after=("a", 4)).state is RequestState.DEFERRED
    run(core)
    assert core.submit([5], max_tokens=1, after=("a", 99)).state is RequestState.WAITING
    run(core)


def test_triggers_make_a_chain() -> None:
    core = small_core()
    batch = [Submission([1], Sampling(max_tokens=3), "a")]
    batch += [
        Submission([n], Sampling(max_tokens=3), name, after=(chr(ord(name) - 1), 2)) for n, name in enumerate("bcd")
    ]
    core.submit_batch(batch)
    run(core)
    assert arrivals(core) == [("a", 0), ("b", 2), ("c", 4), ("d", 6)]


def test_several_requests_may_wait_for_different_tokens_of_one() -> None:
    core = small_core(num_blocks=32)
    core.submit([1], max_tokens=6, request_id="a")
    for name, count in (("x", 3), ("y", 1), ("z", 3)):
        core.submit([2], max_tokens=1, request_id=name, after=("a", count))
    run(core)
    assert arrivals(core) == [("a", 0), ("y", 1), ("x", 3), ("z", 3)]


def test_a_deferred_request_that_is_aborted_never_arrives_and_those_behind_it_do() -> None:
    core = small_core()
    core.submit([1], max_tokens=6, request_id="a")
    core.submit([2], max_tokens=1, request_id="b", after=("a", 3))
    third = core.submit([3], max_tokens=1, request_id="c", after=("b", 1))
    assert core.abort("b")
    check(core)
    assert third.state is RequestState.WAITING
    run(core)
    assert arrivals(core) == [("a", 0), ("c", 0)]
    assert core.abort("b") is False


def test_a_deferred_request_neither_leads_nor_follows_before_it_arrives() -> None:
    core = small_core(num_blocks=32, coordination="single-flight", release="on-completion")
    core.submit([1], max_tokens=3, request_id="a")
    core.submit(FULL_PROMPT, max_tokens=2, request_id="deferred", after=("a", 2))
    assert core.submit(FULL_PROMPT, max_tokens=9, request_id="b").state is RequestState.WAITING
    step(core, 2)
    assert core.requests["deferred"].state is RequestState.HELD
    run(core)
    assert recovered(list(core.requests.values())) == [0, 8, 0]


def test_a_trigger_on_an_unknown_request_is_refused() -> None:
    with pytest.raises(UnknownRequestError, match="after names request 'ghost', which is not known"):
        small_core().submit([1], max_tokens=1, after=("ghost", 1))


def test_a_request_cannot_wait_for_itself() -> None:
    """It would never arrive, and nobody would ever hear of it again."""
    core = small_core()
    with pytest.raises(UnknownRequestError, match="after names request 'a', which is not known"):
        core.submit([1], max_tokens=1, request_id="a", after=("a", 1))
    with pytest.raises(UnknownRequestError, match="after names request 'r0', which is not known"):
        core.submit([1], max_tokens=1, after=("r0", 1))
    assert core.requests == {}


def test_a_request_cannot_wait_for_a_later_one_of_its_batch() -> None:
    core = small_core()
    with pytest.raises(UnknownRequestError):
        core.submit_batch([Submission([1], ONE, "a", after=("b", 1)), Submission([1], ONE, "b")])
    assert core.requests == {}


@pytest.mark.parametrize("count", [0, -1, 1.5, "1", None, True])
def test_the_token_of_a_trigger_is_a_whole_number_from_1(count: Any) -> None:
    core = small_core()
    core.submit([1], max_tokens=1, request_id="a")
    with pytest.raises(InvalidRequestError, match="the first output token is 1"):
        core.submit([1], max_tokens=1, after=("a", count))


@pytest.mark.parametrize("after", ["a", ("a",), ("a", 1, 2), 5, [["a"], 1]])
def test_a_trigger_that_is_no_pair_is_refused_in_a_sentence(after: Any) -> None:
    core = small_core()
    core.submit([1], max_tokens=1, request_id="a")
    with pytest.raises(InvalidRequestError, match=r"after is .*; give \(request id, output token\)"):
        core.submit([1], max_tokens=1, after=after)


# -- Tokens and text ---------------------------------------------------------------------------------------


def test_tokens_come_out_when_the_step_ends_and_the_listener_hears_each() -> None:
    heard: list[Output] = []
    core = small_core(listener=heard.append)
    request = core.submit([1, 2], max_tokens=3)
    step(core)
    assert [(o.token_id, o.end) for o in heard] == [(request.output_token_ids[0], None)]
    run(core)
    assert [o.token_id for o in heard] == request.output_token_ids
    assert [o.end for o in heard] == [None, None, FINISHED]
    assert "".join(o.text for o in heard) == core.runner.tokenizer.decode(request.output_token_ids)  # type: ignore[attr-defined]
    assert request.finish_reason == "length"


def test_an_end_of_sequence_token_ends_the_request_and_writes_no_text() -> None:
    for ignore, count in ((False, 2), (True, 4)):
        core = small_core()
        probe = core.submit([1, 2], max_tokens=4)
        run(core)
        core = small_core()
        core.runner.eos_token_ids = frozenset({probe.output_token_ids[1]})  # type: ignore[misc]
        request = core.submit([1, 2], max_tokens=4, ignore_eos=ignore)
        run(core)
        assert request.output_token_ids == probe.output_token_ids[:count]
        assert request.finish_reason == ("length" if ignore else "stop")
        texts = [event.text for event in events_of(core, ev.TokenOut)]
        assert (texts[1] == "") is not ignore


def test_a_stop_string_ends_the_request_and_is_no_part_of_its_text() -> None:
    core = small_core()
    probe = core.submit([1, 2], max_tokens=6)
    run(core)
    words = core.runner.tokenizer.decode(probe.output_token_ids).split()  # type: ignore[attr-defined]
    core = small_core()
    request = core.submit([1, 2], max_tokens=6, stop=words[2])
    run(core)
    assert "".join(event.text for event in events_of(core, ev.TokenOut)) == f"{words[0]} {words[1]} "
    assert request.finish_reason == "stop"
    assert len(request.output_token_ids) == 3


def test_text_that_was_kept_back_for_a_stop_string_comes_out_at_the_end() -> None:
    core = small_core()
    probe = core.submit([1, 2], max_tokens=3)
    run(core)
    text = core.runner.tokenizer.decode(probe.output_token_ids)  # type: ignore[attr-defined]
    core = small_core()
    core.submit([1, 2], max_tokens=3, stop=text + "never")
    run(core)
    assert [event.text for event in events_of(core, ev.TokenOut)] == ["", "", text]


def test_a_seed_repeats_and_without_one_the_order_of_arrival_gives_it() -> None:
    core = small_core(num_blocks=64)
    requests = [core.submit([1, 2], max_tokens=5, temperature=0.8, seed=seed) for seed in (7, 7, None, None)]
    run(core)
    outputs = [tuple(request.output_token_ids) for request in requests]
    assert outputs[0] == outputs[1]
    assert len(set(outputs)) == 3
    assert [request.seed for request in requests] == [7, 7, 2, 3]


# -- Ends --------------------------------------------------------------------------------------------------


def test_an_abort_frees_at_once_and_a_second_one_says_that_it_is_over() -> None:
    heard: list[Output] = []
    core = small_core(listener=heard.append)
    request = core.submit(FULL_PROMPT, max_tokens=9, request_id="a")
    step(core, 2)
    assert core.abort("a") is True
    check(core)
    assert core.manager.pool.num_free == 8
    assert (request.state, request.finish_reason) == (ABORTED, "abort")
    assert heard[-1] == Output("a", None, "", ABORTED)
    events = len(core.log)
    assert core.abort("a") is False
    assert len(core.log) == events


def test_an_unknown_request_cannot_be_aborted() -> None:
    with pytest.raises(UnknownRequestError, match="no request is called 'ghost'"):
        small_core().abort("ghost")


def test_one_request_can_fail_while_the_engine_goes_on() -> None:
    heard: list[Output] = []
    core = small_core(listener=heard.append)
    first = core.submit([1], max_tokens=4, request_id="a")
    second = core.submit([2], max_tokens=4, request_id="b")
    step(core)
    error = Fault("bad row")
    assert core.fail("a", error)
    assert heard[-1] == Output("a", None, "", FAILED, error)
    assert events_of(core, ev.RequestFailed)[0].error == "Fault: bad row"
    run(core)
    assert (first.state, second.state) == (FAILED, FINISHED)


# -- Faults ------------------------------------------------------------------------------------------------


def busy_core(on_step: Callable[[ScheduledStep], None], heard: list[Output] | None = None) -> EngineCore:
    """Return an engine with a leader, a held follower, a waiting and a deferred request."""
    core = small_core(
        num_blocks=16,
        coordination="single-flight",
        release="on-completion",
        max_num_seqs=2,
        on_step=on_step,
        listener=heard.append if heard is not None else None,
    )
    core.submit(FULL_PROMPT, max_tokens=9, request_id="leader")
    core.submit(FULL_PROMPT, max_tokens=9, request_id="follower")
    core.submit([1, 2, 3], max_tokens=9, request_id="other")
    core.submit([4, 5, 6], max_tokens=9, request_id="waiting")
    core.submit([7], max_tokens=1, request_id="deferred", after=("leader", 9))
    return core


def test_a_runner_that_raises_fails_every_request_and_frees_every_block() -> None:
    heard: list[Output] = []
    error = Fault("the device is gone")
    core = busy_core(failing_at(3, error), heard)
    step(core, 2)
    with pytest.raises(EngineDeadError, match="stopped in step 3: Fault: the device is gone") as caught:
        core.step()
    assert caught.value.__cause__ is error
    check(core)
    assert {request.state for request in core.requests.values()} == {FAILED}
    assert core.manager.pool.num_free == 16
    ends = {output.request_id: output.error for output in heard if output.end is FAILED}
    assert ends == dict.fromkeys(core.requests, error)
    assert not core.has_work


def test_nothing_of_the_step_that_failed_is_published() -> None:
    """The fault it guards against: blocks published, the step withdrawn, the next request hits unwritten K/V."""
    core = small_core(num_blocks=16, publication="incremental", max_num_batched_tokens=8, on_step=failing_at(2))
    core.submit(list(range(24)), max_tokens=2)
    step(core)
    published = dict(core.manager.index.items())
    assert len(published) == 2
    with pytest.raises(EngineDeadError):
        core.step()
    check(core)
    assert dict(core.manager.index.items()) == published
    failed = events_of(core, ev.StepFailed)[0]
    assert [event for event in core.log.since(failed.seq) if isinstance(event, ev.BlocksPublished)] == []


def test_a_dying_engine_makes_nobody_leader_and_lets_nobody_arrive() -> None:
    core = busy_core(failing_at(1))
    core.submit([8], max_tokens=1, request_id="behind the deferred one", after=("deferred", 1))
    with pytest.raises(EngineDeadError):
        core.step()
    check(core)
    assert events_of(core, ev.FlightHandedOver) == []
    assert [event.request_ids for event in events_of(core, ev.FlightReleased)] == [()]
    assert arrivals(core)[-1] == ("waiting", 0)
    assert {request.state for request in core.requests.values()} == {FAILED}


def test_a_dead_engine_says_so_with_the_cause_and_a_new_one_works() -> None:
    error = Fault("the device is gone")
    core = busy_core(failing_at(1, error))
    with pytest.raises(EngineDeadError):
        core.step()
    for call in (
        lambda: core.submit([1], max_tokens=1),
        lambda: core.submit_batch([]),
        core.step,
        core.reset_cache,
        lambda: core.reset_cache(abort_running=True),
        core.set_policies,
    ):
        with pytest.raises(EngineDeadError, match=r"the device is gone.*make a new engine") as caught:
            call()
        assert caught.value.__cause__ is error
    assert core.abort("leader") is False
    core.close()
    fresh = busy_core(lambda scheduled: None)
    run(fresh)
    assert {request.state for request in fresh.requests.values()} == {FINISHED}


def test_an_interrupt_in_mid_step_ends_the_engine_and_is_passed_on_as_it_is() -> None:
    core = busy_core(failing_at(2, KeyboardInterrupt()))
    step(core)
    with pytest.raises(KeyboardInterrupt):
        core.step()
    check(core)
    assert {request.state for request in core.requests.values()} == {FAILED}
    with pytest.raises(EngineDeadError, match="KeyboardInterrupt"):
        core.submit([1])


@pytest.mark.parametrize(
    "change",
    [lambda drawn: {}, lambda drawn: {**drawn, "ghost": 1}, lambda drawn: {"ghost": 1}],
    ids=["none", "more", "another"],
)
def test_a_runner_that_draws_for_the_wrong_requests_ends_the_engine(change: Any) -> None:
    class Confused(VirtualRunner):
        def execute(self, step: ScheduledStep) -> dict[str, int | RowError]:
            drawn: dict[str, int | RowError] = change(super().execute(step))
            return drawn

    core = EngineCore(EngineConfig(block_size=4, num_blocks=8, publication="incremental"), Confused())
    core.submit(FULL_PROMPT, max_tokens=2, request_id="a")
    with pytest.raises(EngineDeadError, match=r"the runner drew tokens for .*, not for \['a'\]") as caught:
        core.step()
    assert isinstance(caught.value.__cause__, InvariantError)
    check(core)
    assert len(core.manager.index) == 0
    assert core.requests["a"].output_token_ids == []


@pytest.mark.parametrize(
    "change",
    [
        lambda drawn: None,
        lambda drawn: list(drawn.items()),
        lambda drawn: {**drawn, 5: 1},
        lambda drawn: dict.fromkeys(drawn),
        lambda drawn: {name: str(token) for name, token in drawn.items()},
        lambda drawn: {name: float(token) for name, token in drawn.items()},
        lambda drawn: dict.fromkeys(drawn, True),
        lambda drawn: dict.fromkeys(drawn, ValueError("returned and not raised")),
        lambda drawn: {name: token for name, token in drawn.items() if name != "a.1"},
        lambda drawn: {**drawn, "a.2": 1},
    ],
    ids=["nothing", "a list", "a key", "None", "text", "a float", "a bool", "an error", "a sample less", "one more"],
)
def test_a_runner_that_returns_what_is_no_result_ends_the_engine_and_says_what_it_was(change: Any) -> None:
    class Confused(VirtualRunner):
        def execute(self, step: ScheduledStep) -> dict[str, int | RowError]:
            drawn: dict[str, int | RowError] = change(super().execute(step))
            return drawn

    core = EngineCore(EngineConfig(block_size=4, num_blocks=16, publication="incremental"), Confused())
    core.submit(FULL_PROMPT, max_tokens=2, request_id="a", n=2)
    core.submit([1, 2], max_tokens=2, request_id="b")
    with pytest.raises(
        EngineDeadError, match=r"stopped in step 1: InvariantError: the runner (drew|returned) "
    ) as caught:
        core.step()
    assert isinstance(caught.value.__cause__, InvariantError)
    check(core)
    assert {request.state for request in core.requests.values()} == {FAILED}
    assert len(core.manager.index) == 0
    assert events_of(core, ev.TokenOut) == []


def test_a_policy_that_raises_ends_the_engine_like_a_runner_that_does() -> None:
    class Broken:
        name = "broken"

        def visible_tokens(self, num_computed_tokens: int, moment: object) -> int:
            raise Fault("no answer")

    core = small_core(publication=Broken())
    core.submit([1], max_tokens=2)
    with pytest.raises(EngineDeadError, match="Fault: no answer"):
        core.step()
    check(core)
    assert core.manager.pool.num_free == 8


def test_policies_of_ones_own_need_no_name() -> None:
    class Mine:
        def visible_tokens(self, num_computed_tokens: int, moment: object) -> int:
            return num_computed_tokens

    core = small_core(publication=Mine())
    assert events_of(core, ev.EngineStarted)[0].publication == "Mine"
    core.submit(FULL_PROMPT, max_tokens=2)
    run(core)
    core.set_policies(release="on-completion")
    assert events_of(core, ev.PoliciesChanged)[0].publication == "Mine"
    assert len(core.manager.index) == 2


# -- Between steps -----------------------------------------------------------------------------------------


def test_run_stops_after_the_steps_that_were_asked_for() -> None:
    core = small_core()
    core.submit([1], max_tokens=5)
    assert core.run(max_steps=2) == 2
    assert core.has_work
    assert core.run() == 3


def test_a_reset_forgets_everything_when_nothing_is_in_use() -> None:
    core = small_core()
    core.submit(FULL_PROMPT, max_tokens=3, request_id="a")
    step(core)
    assert core.reset_cache() is False
    run(core)
    assert core.reset_cache() is True
    check(core)
    again = core.submit(FULL_PROMPT, max_tokens=1)
    run(core)
    assert again.num_recovered_tokens == 0


RESETS: dict[str, dict[str, Any]] = {
    "independent": {},
    "single-flight": {"coordination": "single-flight", "release": "on-completion"},
    "shared-prefix": {"coordination": "shared-prefix"},
    "wait-or-recompute": {"coordination": "wait-or-recompute"},
}


@pytest.mark.parametrize("setting", RESETS)
@pytest.mark.parametrize("steps", [1, 2, 4], ids=["first chunk", "prompt computed", "decode"])
def test_a_reset_that_aborts_ends_who_runs_and_everybody_else_goes_on_from_nothing(setting: str, steps: int) -> None:
    heard: list[Output] = []
    core = small_core(
        num_blocks=32,
        max_num_seqs=4,
        long_prefill_token_threshold=8,
        publication="incremental",
        listener=heard.append,
        **RESETS[setting],
    )
    fields: dict[str, Any] = {"max_tokens": 8, "temperature": 0.8}
    core.submit(FULL_PROMPT, request_id="a", n=2, seed=1, **fields)
    core.submit(FULL_PROMPT, request_id="b", n=2, seed=5, **fields)
    core.submit([1, 2, 3], request_id="c", seed=9, **fields)
    core.submit([4, 5, 6], request_id="late", seed=10, after=("a", 8), **fields)
    core.submit([7, 8, 9], request_id="never", seed=11, after=("late", 100), **fields)
    step(core, steps)
    running = {request.request_id for request in core.scheduler.running}
    others = core.requests.keys() - running
    assert running and {"c", "late", "never"} & others
    assert core.reset_cache(abort_running=True) is True
    check(core)
    assert {name for name, request in core.requests.items() if request.state is ABORTED} == running
    assert {output.request_id for output in heard if output.end is ABORTED} == running
    assert len(core.manager.index) == 0
    assert core.manager.pool.num_free == 32
    assert core.log[-1].kind == "cache_reset"
    run(core)
    fresh = EngineCore(EngineConfig(), VirtualRunner())
    for name in others:
        request = core.requests[name]
        alone = fresh.submit(request.prompt_token_ids, seed=request.seed, **fields)
        fresh.run()
        assert (request.state, request.output_token_ids) == (FINISHED, alone.output_token_ids)


def test_a_reset_that_aborts_leaves_a_preempted_request_which_finds_nothing_of_its_own_any_more() -> None:
    core = small_core(num_blocks=6, publication="incremental")
    core.submit(list(range(8)), max_tokens=10, request_id="old")
    young = core.submit(list(range(50, 58)), max_tokens=10, request_id="young")
    while young.state is not RequestState.PREEMPTED:
        step(core)
    before = list(young.output_token_ids)
    assert before
    assert core.reset_cache(abort_running=True) is True
    assert young.state is RequestState.PREEMPTED
    resets = len(core.log)
    run(core)
    assert young.state is FINISHED
    assert young.output_token_ids[: len(before)] == before
    first_look = next(e for e in core.log.since(resets) if isinstance(e, ev.PrefixLookedUp))
    assert (first_look.request_id, first_look.resumed, first_look.num_recovered_tokens) == ("young", True, 0)


def test_a_reset_that_aborts_makes_the_next_sample_the_first_and_it_computes_the_prompt() -> None:
    core = small_core(num_blocks=32, long_prefill_token_threshold=4, publication="incremental")
    core.submit(FULL_PROMPT, max_tokens=2, request_id="a", n=3)
    step(core, 2)
    assert core.reset_cache(abort_running=True) is True
    check(core)
    assert [(e.from_id, e.to_id) for e in events_of(core, ev.SampleLeads)] == [("a", "a.1")]
    assert core.requests["a.1"].state is RequestState.WAITING
    assert core.requests["a.2"].state is RequestState.HELD
    run(core)
    assert [core.requests[name].state for name in core.samples_of("a")] == [ABORTED, FINISHED, FINISHED]
    assert core.requests["a.1"].num_recovered_tokens == 0


def test_a_reset_that_may_abort_does_what_any_other_does_when_nobody_runs() -> None:
    core = small_core()
    assert core.reset_cache(abort_running=True) is True
    core.submit(FULL_PROMPT, max_tokens=1, request_id="a")
    core.submit([1], max_tokens=1, request_id="waits")
    run(core)
    waiting = core.submit(FULL_PROMPT, max_tokens=1)
    assert core.reset_cache(abort_running=True) is True
    assert (waiting.state, core.requests["a"].state) == (RequestState.WAITING, FINISHED)
    run(core)
    assert waiting.num_recovered_tokens == 0


def test_policies_change_only_while_no_request_is_in_the_engine() -> None:
    core = small_core(num_blocks=32)
    first = core.submit(FULL_PROMPT, max_tokens=2)
    with pytest.raises(ConfigError, match="wait or abort them"):
        core.set_policies(publication="incremental")
    assert core.config.publication == "on-completion"
    run(core)
    core.set_policies(publication="incremental", coordination="single-flight", release="on-completion")
    check(core)
    assert events_of(core, ev.PoliciesChanged) == [core.log[-1]]
    core.reset_cache()
    requests = [core.submit(FULL_PROMPT, max_tokens=2) for _ in range(3)]
    run(core)
    assert recovered([first, *requests]) == [0, 0, 8, 8]


def test_a_policy_that_does_not_exist_changes_nothing() -> None:
    core = small_core()
    before, events = core.config, len(core.log)
    with pytest.raises(UnknownNameError, match="did you mean 'incremental'"):
        core.set_policies(publication="incremetal", coordination="single-flight")
    assert core.config is before
    assert core.coordinator.name == "independent"
    assert len(core.log) == events


def test_closing_aborts_what_is_left_and_closing_again_does_nothing() -> None:
    closed: list[int] = []

    class Counting(VirtualRunner):
        def close(self) -> None:
            closed.append(1)

    core = EngineCore(EngineConfig(block_size=4, num_blocks=8), Counting())
    request = core.submit(FULL_PROMPT, max_tokens=9)
    step(core)
    core.close()
    check(core)
    core.close()
    assert request.state is ABORTED
    assert closed == [1]
    assert not core.has_work
    for call in (lambda: core.submit([1]), core.step, core.reset_cache):
        with pytest.raises(EngineClosedError, match="make a new one"):
            call()


def test_the_runner_is_told_of_every_end() -> None:
    forgotten: list[str] = []

    class Listening(VirtualRunner):
        def forget(self, request_id: str) -> None:
            forgotten.append(request_id)
            super().forget(request_id)

    core = EngineCore(EngineConfig(block_size=4, num_blocks=8), Listening())
    for name, count in (("long", 9), ("short", 1), ("gone", 9)):
        core.submit([1], max_tokens=count, request_id=name)
    step(core)
    core.abort("gone")
    run(core)
    assert forgotten == ["short", "gone", "long"]


def test_nothing_is_kept_for_requests_that_have_ended_but_themselves() -> None:
    core = busy_core(lambda scheduled: None)
    step(core, 2)
    core.abort("other")
    run(core)
    assert core._lifecycle.num_kept == 0


# -- State -------------------------------------------------------------------------------------------------


def test_two_engines_share_nothing() -> None:
    first, second = small_core(), small_core()
    first.submit(FULL_PROMPT, max_tokens=2)
    run(first)
    late = second.submit(FULL_PROMPT, max_tokens=2)
    run(second)
    assert late.request_id == "r0"
    assert late.num_recovered_tokens == 0


def test_the_same_workload_writes_the_same_log() -> None:
    logs = []
    for _ in range(2):
        core = busy_core(lambda scheduled: None)
        run(core)
        logs.append([event.as_dict() for event in core.log])
    assert logs[0] == logs[1]


def _listed_twice(core: EngineCore) -> None:
    core.scheduler.waiting.append(core.requests["waiting"])


def _in_no_list(core: EngineCore) -> None:
    core.scheduler.waiting.clear()


def _held_by_nobody(core: EngineCore) -> None:
    core.scheduler.held.clear()


def _wrong_state(core: EngineCore) -> None:
    core.requests["waiting"].state = RequestState.RUNNING


def _follower_of_nobody(core: EngineCore) -> None:
    core._sharing.coordinator = EngineCore(core.config, VirtualRunner()).coordinator


def _computed_without_blocks(core: EngineCore) -> None:
    core.requests["leader"].num_computed_tokens += 8


def _ended_with_blocks(core: EngineCore) -> None:
    core.scheduler.running.remove(core.requests["leader"])
    core.requests["leader"].state = FINISHED


@pytest.mark.parametrize(
    "damage",
    [
        _listed_twice,
        _in_no_list,
        _held_by_nobody,
        _wrong_state,
        _follower_of_nobody,
        _computed_without_blocks,
        _ended_with_blocks,
    ],
)
def test_the_check_of_the_books_finds_every_kind_of_damage(damage: Callable[[EngineCore], None]) -> None:
    core = busy_core(lambda scheduled: None)
    step(core, 2)
    damage(core)
    with pytest.raises(InvariantError):
        core.check_invariants()


def test_the_state_at_any_moment_is_that_of_the_log_up_to_there() -> None:
    core = busy_core(lambda scheduled: None)
    moments = [(len(core.log), core.state())]
    while core.step():
        moments.append((len(core.log), core.state()))
    for seq, state in moments:
        assert replay(core.log, seq) == state


def test_a_request_has_what_the_state_says() -> None:
    core = small_core()
    request: Request = core.submit(FULL_PROMPT, max_tokens=3, request_id="a")
    step(core, 2)
    view = core.state().requests["a"]
    assert view.state is RequestState.RUNNING
    assert view.num_computed_tokens == request.num_computed_tokens == 10
    assert view.output_token_ids == request.output_token_ids
    assert view.block_ids == [1, 2, 3]
