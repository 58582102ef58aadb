"""One log, the state as a fold over it, and figures counted from it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

import pytest

from minivllm.cost import CostModel
from minivllm.engine.core import EngineCore
from minivllm.log import events as ev
from minivllm.log.event import EVENT_KINDS, event_from_dict
from minivllm.log.event_log import EventLog
from minivllm.log.metrics import HitRate, Metrics
from minivllm.log.replay import fold, replay
from minivllm.log.state import State
from minivllm.log.states import BlockState
from minivllm.request import RequestState
from tests.unit.small import FULL_PROMPT, events_of, run, small_core, step

Story = Callable[[], EngineCore]


def eventful_core() -> EngineCore:
    """Return an engine that has done, to its end, everything that an event could say at first, but a failing step."""
    core = small_core(num_blocks=9, publication="incremental", coordination="single-flight", release="on-completion")
    core.submit(FULL_PROMPT, max_tokens=12, request_id="a", cache_salt="s")
    core.submit(FULL_PROMPT, max_tokens=12, request_id="b", cache_salt="s")
    core.submit(FULL_PROMPT, max_tokens=2, request_id="c", cache_salt="s")
    core.submit([50, 51, 52, 53, 54], max_tokens=16, request_id="other")
    core.submit([50, 51, 52, 53, 55], max_tokens=16, request_id="twin")
    core.submit([60], max_tokens=1, request_id="late", after=("other", 2))
    core.abort("a")
    core.abort("c")
    step(core, 2)
    core.fail("late", ValueError("told to"))
    run(core)
    core.reset_cache()
    core.set_policies(publication="on-completion", release="after-prefill")
    for _ in range(3):
        core.submit(FULL_PROMPT, max_tokens=12)
    core.submit([50, 51, 52, 53, 54], max_tokens=12)
    run(core)
    return core


def core_of_shared_prefixes() -> EngineCore:
    """Return an engine in which requests had samples, waited for a shared prefix, computed beside it, and adopted."""
    document = list(range(100, 126))
    core = small_core(
        num_blocks=32,
        coordination="shared-prefix",
        publication="incremental",
        adoption=True,
        max_num_batched_tokens=20,
        long_prefill_token_threshold=8,
        cost=CostModel(step_ms=50.0),
    )
    core.submit(document, max_tokens=3, request_id="leader", n=3, temperature=0.8)
    core.submit([*document[:16], 7, 8], max_tokens=3, request_id="held")
    step(core)
    core.abort("leader")
    run(core)
    core.reset_cache()
    core.set_policies(coordination="wait-or-recompute")
    core.submit([*document[:4], 1, 2, 3, 4, 5], max_tokens=2, request_id="first")
    core.submit([*document[:4], 6, 7, 8], max_tokens=2, request_id="beside it")
    run(core)
    core.submit(document[8:], max_tokens=2, request_id="awaited")
    core.submit(document[8:], max_tokens=2, request_id="waits")
    run(core)
    core.reset_cache()
    core.set_policies(coordination="independent")
    for name, prompt in (("ahead", document), ("between", document[:8]), ("adopts", document)):
        core.submit(prompt, max_tokens=2, request_id=name)
    run(core)
    return core


def core_of_collisions() -> EngineCore:
    """Return an engine whose hash of four bits has given the same name to different blocks."""
    core = small_core(num_blocks=32, publication="incremental", block_hash="weak-4", check_token_ids=True)
    for number in range(6):
        core.submit(list(range(20 * number, 20 * number + 13)), max_tokens=2)
    run(core)
    return core


STORIES = (eventful_core, core_of_shared_prefixes, core_of_collisions)

in_each_story = pytest.mark.parametrize("story", STORIES)


# -- The log -----------------------------------------------------------------------------------------------


def test_events_are_numbered_from_0_without_gaps_and_dated_by_step_and_clock() -> None:
    times = iter([0.0, 1.5, 1.5])
    log = EventLog(lambda: next(times))
    for number in range(3):
        log.step = number
        log.append(ev.PrefillFinished("a"))
    assert [(event.seq, event.step, event.ms) for event in log] == [(0, 0, 0.0), (1, 1, 1.5), (2, 2, 1.5)]
    assert [event.seq for event in log.since(1)] == [event.seq for event in log[1:]] == [1, 2]
    assert log[-1].seq == 2
    assert len(log) == 3


def test_reading_the_log_does_not_follow_what_comes_later() -> None:
    log = EventLog(lambda: 0.0)
    log.append(ev.PrefillFinished("a"))
    reader, tail = iter(log), log.since(0)
    log.append(ev.PrefillFinished("b"))
    assert len(list(reader)) == len(tail) == 1
    assert len(log) == 2


def test_a_log_begins_with_how_the_engine_is_set_up() -> None:
    first, other = eventful_core().log[0], core_of_collisions().log[0]
    assert isinstance(first, ev.EngineStarted) and isinstance(other, ev.EngineStarted)
    assert (first.num_blocks, first.block_size, first.coordination) == (9, 4, "single-flight")
    assert (first.scheduling, first.block_hash) == ("fcfs", "sha256")
    assert (other.coordination, other.block_hash) == ("independent", "weak-4")
    assert isinstance(small_core(scheduling="priority").log[0], ev.EngineStarted)
    assert small_core(scheduling="priority").log[0].as_dict()["scheduling"] == "priority"


@in_each_story
def test_every_log_begins_with_the_engine_and_time_never_goes_back(story: Story) -> None:
    core = story()
    assert isinstance(core.log[0], ev.EngineStarted)
    times = [event.ms for event in core.log]
    steps = [event.step for event in core.log]
    assert times == sorted(times) and times[-1] > 0
    assert steps == sorted(steps)
    assert [event.seq for event in core.log] == list(range(len(core.log)))


def test_the_stories_that_these_tests_use_have_every_kind_of_event_but_a_failed_step() -> None:
    kinds = {event.kind for story in STORIES for event in story().log}
    assert kinds == EVENT_KINDS.keys() - {"step_failed"}


# -- As plain values ---------------------------------------------------------------------------------------


def test_every_kind_is_written_in_snake_case_and_known_by_it() -> None:
    for kind, cls in EVENT_KINDS.items():
        assert kind == cls.kind
        assert kind.replace("_", "") == cls.__name__.lower()
    assert {"blocks_hit", "flight_handed_over", "step_scheduled"} <= EVENT_KINDS.keys()


@in_each_story
def test_an_event_survives_json(story: Story) -> None:
    for event in story().log:
        text = json.dumps(event.as_dict())
        again = event_from_dict(json.loads(text))
        assert again.ms == round(event.ms, 6)
        assert again.as_dict() == event.as_dict()
        assert type(again) is type(event)
        for field in dataclasses.fields(event):
            if field.name != "ms":
                assert getattr(again, field.name) == getattr(event, field.name)


def test_an_event_as_a_dictionary_says_its_kind_first() -> None:
    event = ev.BlocksHit("a", (1, 2))
    assert event.as_dict() == {
        "kind": "blocks_hit",
        "seq": -1,
        "step": 0,
        "ms": 0.0,
        "request_id": "a",
        "block_ids": [1, 2],
    }
    assert list(event.as_dict())[:4] == ["kind", "seq", "step", "ms"]


def test_an_event_of_an_unknown_kind_is_refused() -> None:
    data = {**ev.PrefillFinished("a").as_dict(), "kind": "of_the_future"}
    with pytest.raises(ValueError, match="no event of kind 'of_the_future'"):
        event_from_dict(data)


@in_each_story
def test_events_hold_plain_values_only(story: Story) -> None:
    """They are read from other threads and written as JSON: no object of the engine may leak into one."""

    def plain(value: object) -> bool:
        return isinstance(value, (int, float, str)) or (isinstance(value, tuple) and all(map(plain, value)))

    for event in story().log:
        for field in dataclasses.fields(event):
            value = getattr(event, field.name)
            may_be_none = field.name in ("wait_ms", "recompute_ms")  # under a coordinator that predicts nothing
            assert plain(value) or (value is None and may_be_none), event


def test_only_a_coordinator_that_predicts_says_times() -> None:
    log = core_of_shared_prefixes().log
    changed = next(event.seq for event in log if isinstance(event, ev.PoliciesChanged))
    awaited = [event for event in log if isinstance(event, ev.PrefixAwaited)]
    assert {(e.wait_ms, e.recompute_ms) for e in awaited if e.seq < changed} == {(None, None)}
    later = [e for e in log.since(changed) if isinstance(e, (ev.PrefixAwaited, ev.RecomputeChosen))]
    first_choices = {e.request_id: e for e in reversed(later)}.values()
    assert {e.kind for e in first_choices} == {"prefix_awaited", "recompute_chosen"}
    for event in first_choices:
        assert event.wait_ms is not None and event.recompute_ms is not None
        assert (event.wait_ms > event.recompute_ms) is isinstance(event, ev.RecomputeChosen)


# -- The fold ----------------------------------------------------------------------------------------------


@in_each_story
def test_replaying_the_log_gives_the_engine_and_so_does_its_recording(story: Story) -> None:
    core = story()
    assert replay(core.log) == core.state()
    recording = json.loads(json.dumps([event.as_dict() for event in core.log]))
    assert replay(map(event_from_dict, recording)) == core.state()


@in_each_story
def test_folding_event_by_event_gives_the_same_as_replaying_up_to_there(story: Story) -> None:
    log = story().log
    state = State()
    for event in log:
        fold(state, event)
        assert state == replay(log, event.seq + 1)


@in_each_story
def test_replaying_changes_neither_the_log_nor_what_it_gave_before(story: Story) -> None:
    core = story()
    before = [event.as_dict() for event in core.log]
    first = replay(core.log)
    copy = first.as_dict()
    replay(core.log)
    assert [event.as_dict() for event in core.log] == before
    assert first.as_dict() == copy


def test_of_no_events_the_state_is_empty() -> None:
    assert replay([]) == State()
    assert replay(eventful_core().log, 0) == State()


def test_two_states_differ_when_only_the_order_of_the_free_queue_does() -> None:
    core = small_core()
    other = core.state()
    other.free_queue.move_to_end(1)
    assert other != core.state()
    assert sorted(other.free_queue) == sorted(core.state().free_queue)


def test_a_block_is_free_then_owned_then_published_then_free_again() -> None:
    core = small_core(num_blocks=3)
    core.submit([1, 2, 3, 4, 5], max_tokens=4, request_id="a")
    run(core)
    core.submit(list(range(50, 59)), max_tokens=1, request_id="b")
    run(core)
    seen: list[BlockState] = []
    state = State()
    for event in core.log:
        now = fold(state, event).blocks[2].state
        if not seen or seen[-1] is not now:
            seen.append(now)
    assert seen[:5] == [
        BlockState.FREE,
        BlockState.OWNED,
        BlockState.PUBLISHED,
        BlockState.FREE,
        BlockState.OWNED,
    ]


@in_each_story
def test_the_state_between_two_events_of_a_step_holds_together_too(story: Story) -> None:
    """A view may stop at any event: no count is below 0, and who is in the free queue has no user."""
    state = State()
    for event in story().log:
        fold(state, event)
        for block_id, block in state.blocks.items():
            assert block.ref_count >= 0
            assert (block_id in state.free_queue) == (block.ref_count == 0)
            assert (block.state is BlockState.PUBLISHED) == bool(block.block_hash)
        assert {b.block_hash: i for i, b in state.blocks.items() if b.block_hash} == state.prefix_index
        for request_id in state.running:
            assert state.requests[request_id].state is RequestState.RUNNING
        held = {name for name, request in state.requests.items() if request.state is RequestState.HELD}
        assert {name for names in state.samples.values() for name in names} | state.awaiting.keys() <= held


def test_who_waits_for_whom_is_part_of_the_state_and_of_its_plain_values() -> None:
    core = small_core(num_blocks=32, coordination="shared-prefix", long_prefill_token_threshold=4)
    core.submit(FULL_PROMPT, max_tokens=2, request_id="a", n=3)
    core.submit([*FULL_PROMPT[:8], 50], max_tokens=2, request_id="b")
    step(core)
    state = replay(core.log)
    assert (state.samples, state.awaiting) == ({"a": ["a.1", "a.2"]}, {"b": "a"})
    data = json.loads(json.dumps(state.as_dict()))
    assert (data["samples"], data["awaiting"]) == (state.samples, state.awaiting)
    run(core)
    assert (core.state().samples, core.state().awaiting) == ({}, {})


def test_adopted_tokens_are_part_of_the_state_and_counted_apart() -> None:
    core = core_of_shared_prefixes()
    view = replay(core.log).requests["adopts"]
    assert (view.num_recovered_tokens, view.num_adopted_tokens) == (0, 4)
    assert core.state().as_dict()["requests"]["adopts"]["num_adopted_tokens"] == 4
    assert [e.num_tokens for e in events_of(core, ev.BlocksAdopted) if e.request_id == "adopts"] == [4]


def test_a_block_that_samples_share_may_have_several_users_before_it_is_published() -> None:
    core = small_core(num_blocks=32)
    core.submit(FULL_PROMPT, max_tokens=2, n=3)
    step(core)
    blocks = [replay(core.log).blocks[block_id] for block_id in (1, 2, 3)]
    assert [(block.state, block.ref_count, block.block_hash) for block in blocks] == [(BlockState.OWNED, 3, "")] * 3


# -- Figures -----------------------------------------------------------------------------------------------


def test_the_hit_rate_is_a_ratio_of_sums_over_the_last_requests() -> None:
    """Example 10: a window of five requests."""
    rate = HitRate(window=5)
    assert rate.rate is None
    seen: list[float | None] = []
    for observed in ((1, 20, 9), (4, 80, 16), (1, 10, 2)):
        rate.observe(*observed)
        seen.append(rate.rate)
    assert seen == [pytest.approx(0.45), pytest.approx(0.25), pytest.approx(0.2)]


def test_no_query_is_not_a_rate_of_0() -> None:
    assert Metrics.of(small_core().log).hit_rate.rate is None
    core = small_core()
    core.submit([1], max_tokens=1)
    run(core)
    assert Metrics.of(core.log).hit_rate.rate == 0


def test_chunks_retries_and_resumptions_count_as_one_query() -> None:
    """The fault it guards against: each refusal, each chunk and each recompute counted again."""
    core = small_core(num_blocks=7, publication="incremental", max_num_batched_tokens=4)
    for number in range(3):
        core.submit(list(range(100 * number, 100 * number + 9)), max_tokens=12, request_id=f"r{number}")
    run(core)
    figures = Metrics.of(core.log)
    assert events_of(core, ev.RequestPreempted)
    assert figures.queried_tokens == 27
    assert figures.recovered_tokens == 0
    assert figures.requests["r0"].resumed_recovered_tokens == 0
    assert sum(request.resumed_recovered_tokens for request in figures.requests.values()) > 0


def test_computed_and_recovered_tokens_add_up_to_what_was_needed() -> None:
    core = small_core(num_blocks=32, publication="incremental")
    core.submit(FULL_PROMPT, max_tokens=3)
    run(core)
    core.submit(FULL_PROMPT, max_tokens=3)
    run(core)
    figures = Metrics.of(core.log)
    assert figures.recovered_tokens == 8
    assert figures.computed_tokens + figures.recovered_tokens == 2 * (9 + 2)


def test_figures_that_are_brought_up_to_date_step_by_step_are_those_of_the_whole_log() -> None:
    core = small_core(num_blocks=32)
    core.submit(FULL_PROMPT, max_tokens=5)
    core.submit(FULL_PROMPT, max_tokens=3)
    figures = Metrics()
    while core.step():
        figures.update(core.log)
        figures.update(core.log)
    assert figures.as_dict() == Metrics.of(core.log).as_dict()
    assert figures.rows() == Metrics.of(core.log).rows()


def test_times_are_the_engines_clock() -> None:
    core = small_core()
    core.submit(FULL_PROMPT, max_tokens=3, request_id="a")
    run(core)
    figures = Metrics.of(core.log).requests["a"]
    outs = [event.ms for event in events_of(core, ev.TokenOut)]
    assert figures.ttft_ms == outs[0]
    assert figures.completion_ms == outs[-1]
    assert figures.tpot_ms == pytest.approx((outs[-1] - outs[0]) / 2)
