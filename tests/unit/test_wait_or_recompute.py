"""Waiting for a block or computing it as well: each reason flips the choice, with all else the same."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from minivllm import CostModel, Engine, EngineConfig, EngineCore, Sampling, Submission, VirtualRunner
from minivllm.coordination.wait_or_recompute import TwoRequests, WaitOrRecompute, predict
from minivllm.log import events as ev
from minivllm.request import RequestState
from tests.unit.small import check, events_of, run, step

COST = CostModel(step_ms=12.0, prefill_ms=1.0, decode_one_ms=0.0, decode_base_ms=0.0, decode_row_ms=0.0)

SMALL_SHARE = TwoRequests(
    leader_left=64, until_shared=8, shared=8, own=56, chunk_limit=2048, budget=2048, first_budget=1984
)
"""Eight tokens that a leader is about to compute in its next step: less than what one more step costs."""


def choice_in(log: Iterable[ev.Event]) -> str:
    """Return what a log's one choice was: "waits" or "computes"."""
    kinds = {type(event) for event in log} & {ev.PrefixAwaited, ev.RecomputeChosen}
    assert len(kinds) == 1
    return "waits" if ev.PrefixAwaited in kinds else "computes"


def two(shared: int = 8, leader: int = 64, follower: int = 64, **settings: Any) -> EngineCore:
    """Run two prompts of these lengths that share their first tokens, submitted together."""
    runner = settings.pop("runner", None) or VirtualRunner(COST)
    config = EngineConfig(**{"block_size": 8, "coordination": "wait-or-recompute", **settings})
    core = EngineCore(config, runner)
    for number, length in ((1, leader), (2, follower)):
        own = range(10_000 * number, 10_000 * number + length - shared)
        core.submit([*range(shared), *own], max_tokens=2)
    run(core)
    return core


def ttft(core: EngineCore, name: str) -> float:
    arrived = next(e for e in events_of(core, ev.RequestArrived) if e.request_id == name)
    return next(e for e in events_of(core, ev.TokenOut) if e.request_id == name).ms - arrived.ms


# -- The prediction ----------------------------------------------------------------------------------------


def test_a_small_share_is_sooner_computed_than_awaited() -> None:
    # Waiting: a step of the leader's 64, then one of the 56 own. Computing: one step of all 128.
    assert (predict(SMALL_SHARE, COST).wait_ms, predict(SMALL_SHARE, COST).recompute_ms) == (
        12 + 64 + 12 + 56,
        12 + 128,
    )


def test_a_large_share_is_sooner_awaited() -> None:
    prediction = predict(replace(SMALL_SHARE, until_shared=48, shared=48, own=16), COST)
    assert (prediction.wait_ms, prediction.recompute_ms) == (12 + 64 + 12 + 16, 12 + 128)


def test_chunks_and_budget_count() -> None:
    case = TwoRequests(leader_left=40, until_shared=40, shared=40, own=10, chunk_limit=20, budget=30, first_budget=10)
    # Waiting: two steps of 20, then 10. Computing: 20 + 10, 20 + 10 beside the leader, then 20, then 10.
    assert predict(case, COST).wait_ms == (12 + 20) * 2 + 12 + 10
    assert predict(case, COST).recompute_ms == (12 + 30) * 2 + (12 + 20) + (12 + 10)


def test_a_leader_that_is_far_from_the_block_is_not_worth_waiting_for() -> None:
    near = TwoRequests(leader_left=20, until_shared=16, shared=16, own=4, chunk_limit=10, budget=100, first_budget=90)
    far = replace(near, leader_left=120, until_shared=116)
    assert predict(near, COST).wait_ms < predict(near, COST).recompute_ms
    assert predict(far, COST).wait_ms > predict(far, COST).recompute_ms


def test_a_leader_that_takes_the_whole_budget_is_waited_out() -> None:
    case = replace(SMALL_SHARE, leader_left=30, until_shared=0, chunk_limit=10, budget=10, first_budget=0)
    assert predict(case, COST).recompute_ms == 3 * 22 + 6 * 22 + 16


@pytest.mark.parametrize("shared", [8, 16, 24, 32, 40, 56])
@pytest.mark.parametrize("budget", [96, 2048])
def test_the_prediction_is_what_happens_on_the_virtual_clock(shared: int, budget: int) -> None:
    core = two(shared, max_num_batched_tokens=budget)
    event = next(e for e in core.log if isinstance(e, (ev.PrefixAwaited, ev.RecomputeChosen)))
    waits = isinstance(event, ev.PrefixAwaited)
    assert event.wait_ms is not None and event.recompute_ms is not None
    predicted = event.wait_ms if waits else event.recompute_ms
    assert ttft(core, "r1") == pytest.approx(event.ms + predicted)
    other = two(shared, max_num_batched_tokens=budget, coordination="independent" if waits else "shared-prefix")
    assert ttft(other, "r1") >= ttft(core, "r1")


# -- The choice: each reason flips it, with all else the same, on every model --------------------------------

on_every_model = pytest.mark.parametrize("model", ["virtual", "tiny", pytest.param("smollm2", marks=pytest.mark.model)])


def chosen_on(model: str, *, leader: int = 64, follower: int = 64, **settings: Any) -> str:
    """Return what the second of two requests does that share eight tokens and are submitted together."""
    config = EngineConfig(**{"block_size": 8, "coordination": "wait-or-recompute", "cost": COST, **settings})
    with Engine(model, config) as engine:
        batch = [
            Submission([*range(8), *range(start, start + length - 8)], Sampling(max_tokens=1))
            for start, length in ((10, leader), (150, follower))
        ]
        for handle in engine.submit_batch(batch):
            handle.result()
        engine.check_invariants()
        return choice_in(engine.log)


@on_every_model
def test_the_cost_model_flips_the_choice(model: str) -> None:
    assert chosen_on(model) == "computes"
    assert chosen_on(model, cost=replace(COST, step_ms=4.0)) == "waits"


@on_every_model
def test_the_followers_own_share_flips_the_choice(model: str) -> None:
    """With six tokens more of its own, what it computes itself takes a step more; what it waits for does not."""
    assert chosen_on(model, follower=64, long_prefill_token_threshold=64) == "computes"
    assert chosen_on(model, follower=70, long_prefill_token_threshold=64) == "waits"


@on_every_model
def test_a_target_for_the_first_token_flips_the_choice(model: str) -> None:
    assert chosen_on(model) == "computes"
    assert chosen_on(model, ttft_target_ms=143.0) == "computes", "waiting takes 144 ms: too late"
    assert chosen_on(model, ttft_target_ms=145.0) == "waits", "soon enough, and eight tokens are not computed twice"


@on_every_model
def test_what_the_leader_has_left_flips_the_choice(model: str) -> None:
    """A leader that leaves too few tokens of a step is waited for: computing would take a step more as well."""
    assert chosen_on(model, leader=64, max_num_batched_tokens=128) == "computes"
    assert chosen_on(model, leader=120, max_num_batched_tokens=128) == "waits"


def test_the_runners_own_cost_model_is_asked_unless_one_is_given() -> None:
    cheap_steps = replace(COST, step_ms=4.0)
    assert choice_in(two(runner=VirtualRunner(cheap_steps)).log) == "waits"
    assert choice_in(two(runner=VirtualRunner(cheap_steps), cost=COST).log) == "computes"


def test_a_choice_is_said_once_though_there_is_no_room_yet() -> None:
    core = EngineCore(EngineConfig(block_size=8, coordination="wait-or-recompute", num_blocks=16), VirtualRunner(COST))
    core.submit([*range(8), *range(100, 156)], max_tokens=40)
    core.submit([*range(8), *range(200, 256)], max_tokens=1)
    core.submit(list(range(300, 364)), max_tokens=1)
    run(core)
    assert len(events_of(core, ev.RecomputeChosen)) <= 1


def test_the_policy_can_be_given_as_a_class_with_its_own_cost_and_target() -> None:
    policy = WaitOrRecompute.choosing(cost=replace(COST, step_ms=4.0))
    assert choice_in(two(coordination=policy).log) == "waits"
    assert choice_in(two(coordination=WaitOrRecompute.choosing(ttft_target_ms=200.0)).log) == "waits"
    assert WaitOrRecompute.cost is None and WaitOrRecompute.ttft_target_ms is None


def test_an_aborted_request_that_had_chosen_leaves_nothing_behind() -> None:
    core = EngineCore(
        EngineConfig(block_size=8, coordination="wait-or-recompute", num_blocks=10, max_num_seqs=2), VirtualRunner(COST)
    )
    core.submit([*range(8), *range(100, 156)], max_tokens=9)
    late = core.submit([*range(8), *range(200, 256)], max_tokens=1)
    step(core)
    core.abort(late.request_id)
    check(core)
    run(core)
    assert late.state is RequestState.ABORTED
    assert events_of(core, ev.RecomputeChosen) == []
