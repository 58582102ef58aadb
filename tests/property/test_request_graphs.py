"""Who waits for whom: requests with shared prefixes, at random, under the two policies that hold for a prefix.

A random tree of prompts, in a random order, with requests that are aborted, fail, come late and give way. Nobody
waits in a circle, nobody waits for one that does not run, and nobody waits for ever. Where nothing is evicted and
everybody waits, no block is computed twice.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm import EngineConfig, EngineCore
from minivllm.log import events as ev
from minivllm.request import RequestState
from tests.property.models import SlotRunner
from tests.property.steady import STEADY

BLOCK_SIZE = 4
MOST_STEPS = 3_000

Prompt = tuple[int, ...]


@st.composite
def prompt_trees(draw: st.DrawFn) -> list[Prompt]:
    """Return prompts that grow out of each other: a beginning of an earlier one, and something of its own."""
    prompts: list[Prompt] = []
    for number in range(draw(st.integers(2, 12))):
        old = draw(st.sampled_from(prompts)) if prompts else ()
        shared = draw(st.sampled_from([len(old), len(old), 4, 8, 12, 5]))
        own = draw(st.sampled_from([0, 1, 4, 8, 9, 3]))
        first = 100 * (number + 1)
        prompts.append((*old[:shared], *range(first, first + own)) or (1,))
    return prompts


def check_who_waits(core: EngineCore) -> None:
    """Raise AssertionError for a circle, or for one that waits for nobody who works."""
    awaiting = core.coordinator.awaiting
    for name in awaiting:
        seen, at = {name}, name
        while at in awaiting:
            at = awaiting[at]
            assert at not in seen, f"{name} waits in a circle: {awaiting}"
            seen.add(at)
        assert core.requests[at].state is RequestState.RUNNING, f"{name} waits for {at}, which does not run"
    assert {name for name, r in core.requests.items() if r.state is RequestState.HELD} == set(awaiting)
    for name, leader in awaiting.items():
        # What it waits for is really to come from that one: their prompts agree beyond what both have.
        mine, theirs = core.requests[name].token_ids, core.requests[leader].prompt_token_ids
        shared = next(
            (i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs))
        )
        assert shared >= BLOCK_SIZE


def make_core(coordination: str, publication: str, **fields: Any) -> EngineCore:
    """Return an engine with little budget, so that prompts take several steps."""
    return EngineCore(
        EngineConfig(block_size=BLOCK_SIZE, coordination=coordination, publication=publication, **fields),
        SlotRunner(),
    )


@pytest.mark.parametrize("publication", ["incremental", "on-completion"])
@pytest.mark.parametrize("coordination", ["shared-prefix", "wait-or-recompute"])
@settings(STEADY, max_examples=60)
@given(
    prompts=prompt_trees(),
    num_blocks=st.sampled_from([16, 12, 200]),
    budget=st.sampled_from([4, 7, 16, 64]),
    rows=st.sampled_from([4, 8, 2, 1]),
    adoption=st.booleans(),
    target=st.sampled_from([None, 20.0, 400.0]),
    data=st.data(),
)
def test_nobody_waits_in_a_circle_or_for_ever(
    coordination: str,
    publication: str,
    prompts: list[Prompt],
    num_blocks: int,
    budget: int,
    rows: int,
    adoption: bool,
    target: float | None,
    data: st.DataObject,
) -> None:
    core = make_core(
        coordination,
        publication,
        num_blocks=num_blocks,
        max_num_batched_tokens=budget,
        max_num_seqs=rows,
        adoption=adoption,
        ttft_target_ms=target,
    )
    coming = [prompt for prompt in prompts if len(prompt) + 2 <= num_blocks * BLOCK_SIZE]
    for _ in range(MOST_STEPS):
        if coming:
            for _ in range(data.draw(st.sampled_from([1, 2, 0, 12]))):
                if coming:
                    core.submit(coming.pop(0), max_tokens=3)
        live = [name for name, request in core.requests.items() if not request.state.is_ended]
        if live and data.draw(st.sampled_from([False] * 9 + [True])):
            name = data.draw(st.sampled_from(live))
            core.abort(name)
        worked = core.step()
        core.check_invariants()
        check_who_waits(core)
        if not worked and not coming:
            break
    assert all(request.state.is_ended for request in core.requests.values())
    assert core.coordinator.awaiting == {}
    assert core.manager.pool.num_free == num_blocks


@pytest.mark.parametrize("publication", ["incremental", "on-completion"])
@settings(STEADY, max_examples=80)
@given(
    prompts=prompt_trees(),
    budget=st.sampled_from([4, 7, 16, 64]),
    rows=st.sampled_from([4, 8, 2, 16]),
    late=st.lists(st.integers(0, 3), min_size=12, max_size=12),
)
def test_with_room_enough_no_block_is_computed_by_two(
    publication: str, prompts: list[Prompt], budget: int, rows: int, late: list[int]
) -> None:
    core = make_core("shared-prefix", publication, num_blocks=400, max_num_batched_tokens=budget, max_num_seqs=rows)
    for prompt, steps in zip(prompts, late, strict=False):
        core.submit(prompt, max_tokens=2)
        core.run(steps)
    core.run(MOST_STEPS)
    assert all(request.state is RequestState.FINISHED for request in core.requests.values())
    computed: Counter[Prompt] = Counter()
    for request in core.requests.values():
        prompt = request.prompt_token_ids
        chunks = [e for e in core.log if isinstance(e, ev.ChunkComputed) and e.request_id == request.request_id]
        for end in range(BLOCK_SIZE, len(prompt), BLOCK_SIZE):  # the last token is always computed, so not its block
            if any(chunk.start < end <= chunk.start + chunk.num_tokens for chunk in chunks):
                computed[prompt[:end]] += 1
    # A block may end a prompt of its own: who asks for no more than that computes its last token again.
    assert all(count == 1 for count in computed.values())
