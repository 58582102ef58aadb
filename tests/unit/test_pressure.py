"""Too little room: who is admitted, who gives way, and that everybody ends."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from minivllm.engine.core import EngineCore
from minivllm.log import events as ev
from minivllm.request import Request, RequestState
from minivllm.scheduling.policies import SchedulingPolicy
from tests.unit.small import check, events_of, run, small_core, step


def admitted(core: EngineCore) -> list[str]:
    return [e.request_id for e in events_of(core, ev.RequestAdmitted)]


def test_by_chunk_a_request_is_admitted_when_its_first_chunk_finds_room() -> None:
    core = small_core(long_prefill_token_threshold=4, admission="by-chunk")
    core.submit(list(range(20)), max_tokens=4)
    late = core.submit(list(range(50, 70)), max_tokens=4)
    step(core)
    assert late.state is RequestState.RUNNING
    run(core)
    assert late.num_preemptions > 0, "the price of admitting early"


def test_by_whole_prompt_a_request_waits_until_all_of_it_would_find_room() -> None:
    core = small_core(long_prefill_token_threshold=4, admission="whole-prompt")
    core.submit(list(range(20)), max_tokens=4)
    late = core.submit(list(range(50, 70)), max_tokens=4)
    step(core, 5)  # the first holds four blocks and more; five are asked for
    assert late.state is RequestState.WAITING
    run(core)
    assert late.num_preemptions == 0


def test_the_watermark_keeps_room_for_those_that_run() -> None:
    tokens = list(range(50, 58))
    for watermark, state in ((0.0, RequestState.RUNNING), (0.5, RequestState.WAITING)):
        core = small_core(watermark=watermark)
        core.submit(list(range(12)), max_tokens=4)
        step(core)
        late = core.submit(tokens, max_tokens=1)
        core.scheduler.schedule(99)  # three blocks are held, two are asked for, four would have to stay free
        assert late.state is state


def test_a_request_that_needs_the_reserved_room_is_admitted_when_nobody_else_runs() -> None:
    core = small_core(watermark=0.9, admission="whole-prompt")
    request = core.submit(list(range(28)), max_tokens=4)
    run(core)
    assert request.state is RequestState.FINISHED


def test_under_priority_the_more_important_goes_first_whenever_it_came() -> None:
    core = small_core(max_num_seqs=1, scheduling="priority")
    for name, priority in (("low", 5), ("high", -1), ("middle", 0), ("high-2", -1)):
        core.submit([1, 2], request_id=name, priority=priority, max_tokens=1)
    run(core)
    assert admitted(core) == ["high", "high-2", "middle", "low"]


def test_first_come_first_served_does_not_look_at_priorities() -> None:
    core = small_core(max_num_seqs=1)
    for name, priority in (("low", 5), ("high", -1)):
        core.submit([1, 2], request_id=name, priority=priority, max_tokens=1)
    run(core)
    assert admitted(core) == ["low", "high"]


@pytest.mark.parametrize(("scheduling", "victim"), [("fcfs", "new"), ("priority", "old")])
def test_the_victim_is_the_newest_or_under_priority_the_least_important(scheduling: str, victim: str) -> None:
    core = small_core(scheduling=scheduling, num_blocks=4)
    core.submit(list(range(8)), request_id="old", priority=9, max_tokens=8)
    core.submit(list(range(50, 58)), request_id="new", priority=1, max_tokens=8)
    run(core)
    assert {e.request_id for e in events_of(core, ev.RequestPreempted)} == {victim}


def test_of_the_least_important_the_newest_gives_way() -> None:
    core = small_core(scheduling="priority", num_blocks=3)
    for name, priority in (("a", 1), ("b", 7), ("c", 7)):
        core.submit([1, 2, 3, len(name)], request_id=name, priority=priority, max_tokens=5)
    step(core, 2)
    assert [e.request_id for e in events_of(core, ev.RequestPreempted)] == ["c", "b"]
    assert [request.request_id for request in core.scheduler.waiting] == ["b", "c"]
    run(core)


def test_a_preempted_request_goes_before_those_of_its_rank_and_behind_more_important_ones() -> None:
    core = small_core(scheduling="priority", num_blocks=4, max_num_seqs=2)
    core.submit(list(range(8)), request_id="a", priority=1, max_tokens=8)
    core.submit(list(range(50, 58)), request_id="b", priority=5, max_tokens=8)
    step(core)
    core.submit([1, 2], request_id="same", priority=5, max_tokens=1)
    core.submit([3, 4], request_id="better", priority=2, max_tokens=1)
    step(core)
    assert [request.request_id for request in core.scheduler.waiting] == ["better", "b", "same"]
    run(core)


def test_what_a_preempted_request_finds_again_is_its_own_and_is_counted_apart() -> None:
    core = small_core(num_blocks=6, publication="incremental")
    core.submit(list(range(8)), max_tokens=10)
    young = core.submit(list(range(50, 58)), max_tokens=10)
    run(core)
    again = [e for e in events_of(core, ev.PrefixLookedUp) if e.request_id == "r1"]
    assert [e.resumed for e in again] == [False] + [True] * young.num_preemptions
    assert young.num_preemptions > 0
    assert young.num_recovered_tokens == 0


class LongestFirst:
    """A policy as a student might write it."""

    name = "longest-first"

    def rank(self, request: Request) -> int:
        return -request.num_prompt_tokens


def test_another_policy_can_be_passed_in() -> None:
    policy: SchedulingPolicy = LongestFirst()
    core = small_core(max_num_seqs=1, scheduling=policy)
    for length in (2, 7, 5):
        core.submit(list(range(length)), request_id=str(length), max_tokens=1)
    run(core)
    assert admitted(core) == ["7", "5", "2"]


SETTINGS = list(
    itertools.product(
        ("fcfs", "priority"),
        ("by-chunk", "whole-prompt"),
        (0.0, 0.3),
        ("independent", "single-flight", "shared-prefix", "wait-or-recompute"),
    )
)


@pytest.mark.parametrize(("scheduling", "admission", "watermark", "coordination"), SETTINGS)
def test_a_thrash_of_one_agent_more_than_there_is_room_for_ends(
    scheduling: str, admission: str, watermark: float, coordination: str
) -> None:
    """Each agent needs a third of the pool; four turns each, every turn with all that was said before."""
    settings: dict[str, Any] = {
        "scheduling": scheduling,
        "admission": admission,
        "watermark": watermark,
        "coordination": coordination,
        "num_blocks": 12,
        "long_prefill_token_threshold": 8,
    }
    core = small_core(**settings)
    said = {agent: [100 * agent, 100 * agent + 1] for agent in range(4)}
    for _ in range(4):
        requests = {agent: core.submit(tokens, max_tokens=4, priority=agent % 2) for agent, tokens in said.items()}
        for _ in range(2_000):
            if not core.step():
                break
            check(core)
        for agent, request in requests.items():
            assert request.state is RequestState.FINISHED
            said[agent] = [*request.token_ids]
