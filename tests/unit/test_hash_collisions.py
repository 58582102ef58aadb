"""What a weak hash does: different tokens with one hash. Unchecked it serves other K/V; checked it does not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from minivllm.cache.block_hash import WeakHash
from minivllm.engine.core import EngineCore
from minivllm.log import events as ev
from tests.unit.small import check, events_of, run, small_core

WEAK = WeakHash(4)
LAST = [99]
"""The token that must be computed in any case."""


def blocks_with(hash_of: list[int], parent: bytes = WEAK.root) -> Iterator[list[int]]:
    """Yield blocks of four tokens whose hash under ``parent`` is that of the block ``hash_of``."""
    wanted = WEAK.hash_block(parent, hash_of)
    for number in range(10_000):
        block = [number, 1, 2, 3]
        if block != hash_of and WEAK.hash_block(parent, block) == wanted:
            yield block


ONE = [7, 7, 7, 7]
OTHER = next(blocks_with(ONE))


def weak_core(**settings: Any) -> EngineCore:
    return small_core(**{"block_hash": WEAK, "num_blocks": 32, **settings})


def test_unchecked_a_collision_serves_the_kv_of_other_tokens() -> None:
    core = weak_core()
    core.submit(ONE + LAST, max_tokens=1)
    run(core)
    wrong = core.submit(OTHER + LAST, max_tokens=1)
    run(core)
    assert wrong.num_recovered_tokens == 4, "it reads the K/V of [7, 7, 7, 7]"
    assert events_of(core, ev.HashCollision) == []


def test_checked_a_collision_is_seen_said_and_not_served() -> None:
    core = weak_core(check_token_ids=True)
    core.submit(ONE + LAST, max_tokens=1)
    run(core)
    right = core.submit(OTHER + LAST, max_tokens=1)
    run(core)
    assert right.num_recovered_tokens == 0
    found, later = events_of(core, ev.HashCollision)
    assert (found.request_id, found.block_id) == ("r1", 1)
    assert (found.token_ids, found.held_token_ids) == (tuple(OTHER), tuple(ONE))
    assert found.block_hash == WEAK.hash_block(WEAK.root, ONE).hex()
    assert later.held_token_ids == tuple(ONE), "and its own block cannot be published beside the other"


def test_checked_the_same_tokens_still_share() -> None:
    core = weak_core(check_token_ids=True)
    for _ in range(2):
        request = core.submit(ONE + OTHER + LAST, max_tokens=1)
        run(core)
    assert request.num_recovered_tokens == 8
    assert events_of(core, ev.HashCollision) == []


def test_checked_with_a_good_hash_nothing_changes() -> None:
    core = small_core(check_token_ids=True, num_blocks=32)
    for _ in range(2):
        request = core.submit(ONE + OTHER + LAST, max_tokens=1)
        run(core)
    assert request.num_recovered_tokens == 8


def test_checked_equal_tokens_behind_another_past_are_a_collision_too() -> None:
    """The blocks agree, the blocks before them do not: the hash of the second was to say so, and cannot."""
    core = weak_core(check_token_ids=True)
    tail = [1, 1, 1, 1]
    core.submit(ONE + tail + LAST, max_tokens=1)
    run(core)
    assert WEAK.hash_block(WEAK.hash_block(WEAK.root, ONE), tail) == WEAK.hash_block(
        WEAK.hash_block(WEAK.root, OTHER), tail
    )
    # Free the first block alone, so that the other tokens' first block can take its name.
    first = core.manager.index.get(WEAK.hash_block(WEAK.root, ONE))
    assert first is not None
    core.manager._forget_hash(core.manager.pool.blocks[first - 1])
    core.manager.check_invariants()
    core.submit(OTHER + LAST, max_tokens=1)
    core.run()
    request = core.submit(OTHER + tail + LAST, max_tokens=1)
    core.run()
    assert request.num_recovered_tokens == 4
    collision = events_of(core, ev.HashCollision)[0]
    assert collision.token_ids == collision.held_token_ids == tuple(tail)


def test_two_requests_that_share_a_hash_and_run_together_keep_their_own_blocks() -> None:
    core = weak_core(check_token_ids=True, publication="incremental")
    requests = [core.submit(block + LAST, max_tokens=1) for block in (ONE, OTHER)]
    run(core)
    assert [r.num_recovered_tokens for r in requests] == [0, 0]
    assert events_of(core, ev.BlocksDuplicated) == []
    assert [e.request_id for e in events_of(core, ev.HashCollision)] == ["r1"]


@pytest.mark.parametrize("coordination", ["shared-prefix", "wait-or-recompute", "single-flight"])
def test_a_request_held_for_a_block_that_only_shares_the_hash_goes_on_and_computes_its_own(coordination: str) -> None:
    core = weak_core(check_token_ids=True, coordination=coordination)
    requests = [core.submit([*block, 5, 5, 5, 5, *LAST], max_tokens=2) for block in (ONE, OTHER)]
    for _ in range(50):
        if not core.step():
            break
        check(core)
    assert [r.finish_reason for r in requests] == ["length", "length"]
    assert requests[1].num_recovered_tokens == 0


def test_the_check_forgets_what_is_evicted_or_reset() -> None:
    core = weak_core(check_token_ids=True, num_blocks=3)
    for start in range(0, 60, 10):
        core.submit(list(range(start, start + 9)), max_tokens=1)
        run(core)
    core.reset_cache()
    check(core)
    assert core.manager._check is not None and not core.manager._check.block_ids


def test_unchecked_one_block_may_be_served_for_two_of_a_prompt_and_the_books_still_add_up() -> None:
    core = weak_core()
    prompt = [*range(10, 18), 18]  # both blocks have the hash 0e
    core.submit(prompt, max_tokens=1)
    run(core)
    twice = core.submit(prompt, max_tokens=3)
    run(core)
    assert twice.num_recovered_tokens == 8
    assert [e.block_ids for e in events_of(core, ev.BlocksHit)] == [(1, 1)]
