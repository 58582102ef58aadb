"""Blocks, the free queue, and the two orders of forgetting."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from minivllm.cache.block_pool import SCRATCH_BLOCK_ID, Block, BlockPool, FreeBlockQueue
from minivllm.cache.eviction.lru import LRU
from minivllm.cache.eviction.mru import MRU
from minivllm.cache.eviction.names import EVICTION_POLICIES
from minivllm.errors import InvariantError, OutOfBlocksError
from minivllm.log.states import BLOCK_TRANSITIONS, BlockAction, BlockState


def ids(blocks: Iterable[Block]) -> list[int]:
    return [block.block_id for block in blocks]


def make_queue(count: int) -> tuple[FreeBlockQueue, list[Block]]:
    blocks = [Block(number) for number in range(1, count + 1)]
    return FreeBlockQueue(blocks), blocks


# -- The free queue ----------------------------------------------------------------------------------------


def test_blocks_are_reused_from_the_head_and_appended_at_the_end() -> None:
    queue, blocks = make_queue(3)
    first = queue.popleft_n(1)[0]
    assert first is blocks[0]
    queue.append_n([first])
    assert ids(queue) == [2, 3, 1]
    assert len(queue) == queue.num_free == 3


def test_a_block_in_the_middle_leaves_and_its_neighbours_close_up() -> None:
    queue, blocks = make_queue(3)
    queue.remove_n([blocks[1]])
    assert ids(queue) == [1, 3]
    assert blocks[1] not in queue
    assert blocks[2] in queue
    assert [queue.popleft_n(1)[0].block_id for _ in range(2)] == [1, 3]


def test_blocks_at_both_ends_leave_like_any_other() -> None:
    queue, blocks = make_queue(3)
    queue.remove_n([blocks[0]])
    queue.remove_n([blocks[2]])
    assert ids(queue) == [2]
    queue.remove_n([blocks[1]])
    assert ids(queue) == []
    queue.append_n([blocks[2]])
    assert ids(queue) == [3]


def test_blocks_put_to_the_front_are_reused_in_the_order_given() -> None:
    queue, blocks = make_queue(4)
    for block in blocks[:3]:
        queue.remove_n([block])
    queue.prepend_n([blocks[2], blocks[0], blocks[1]])
    assert ids(queue) == [3, 1, 2, 4]


def test_an_empty_queue_says_so_and_what_to_do() -> None:
    queue, _ = make_queue(0)
    with pytest.raises(OutOfBlocksError, match="wait for a request to end"):
        queue.popleft_n(1)[0]
    assert queue.num_free == 0


def test_a_block_cannot_enter_the_queue_twice() -> None:
    queue, blocks = make_queue(2)
    with pytest.raises(InvariantError, match="block 1 is in the free queue already"):
        queue.append_n([blocks[0]])
    with pytest.raises(InvariantError, match="block 2 is in the free queue already"):
        queue.prepend_n([blocks[1]])
    assert ids(queue) == [1, 2]
    assert queue.num_free == 2


def test_a_block_that_is_not_in_the_queue_cannot_leave_it() -> None:
    queue, blocks = make_queue(2)
    queue.remove_n([blocks[0]])
    with pytest.raises(InvariantError, match="block 1 is not in the free queue"):
        queue.remove_n([blocks[0]])
    assert queue.num_free == 1


def links(blocks: Iterable[Block]) -> list[tuple[Block | None, Block | None]]:
    return [(block.prev_free, block.next_free) for block in blocks]


def test_many_blocks_leave_the_head_in_their_order() -> None:
    queue, blocks = make_queue(5)
    assert queue.popleft_n(3) == blocks[:3]
    assert ids(queue) == [4, 5]
    assert queue.num_free == 2
    assert links(blocks[:3]) == [(None, None)] * 3
    assert queue.popleft_n(0) == []
    assert queue.popleft_n(2) == blocks[3:]
    assert ids(queue) == []
    queue.append_n([blocks[2]])
    assert ids(queue) == [3]


def test_more_blocks_than_the_queue_holds_leave_it_as_it_was() -> None:
    queue, blocks = make_queue(3)
    before = links(blocks)
    with pytest.raises(OutOfBlocksError, match="4 blocks were asked for and 3 are free; wait for a request to end"):
        queue.popleft_n(4)
    assert ids(queue) == [1, 2, 3]
    assert links(blocks) == before
    assert queue.num_free == 3


def test_many_blocks_join_the_end_in_their_order() -> None:
    queue, _ = make_queue(5)
    taken = queue.popleft_n(4)
    queue.append_n([taken[2], taken[0]])
    assert ids(queue) == [5, 3, 1]
    queue.append_n([])
    queue.append_n([taken[1], taken[3]])
    assert ids(queue) == [5, 3, 1, 2, 4]
    assert queue.num_free == 5
    assert [queue.popleft_n(1)[0].block_id for _ in range(5)] == [5, 3, 1, 2, 4]


@pytest.mark.parametrize("chosen", [[1, 2, 5], [5, 1, 2], [1, 2, 1], [1, 1], [5]])
def test_if_one_of_many_is_in_the_queue_already_or_comes_twice_none_of_them_joins(chosen: list[int]) -> None:
    for put in (FreeBlockQueue.append_n, FreeBlockQueue.prepend_n):
        queue, blocks = make_queue(6)
        queue.popleft_n(3)
        before = links(blocks)
        with pytest.raises(InvariantError, match=r"block [15] is in the free queue already"):
            put(queue, [blocks[number - 1] for number in chosen])
        assert ids(queue) == [4, 5, 6]
        assert queue.num_free == 3
        assert links(blocks) == before
        queue.append_n(blocks[:3])
        assert ids(queue) == [4, 5, 6, 1, 2, 3]


def test_many_blocks_leave_from_wherever_they_are() -> None:
    queue, blocks = make_queue(7)
    gone = [blocks[number - 1] for number in (4, 3, 6, 1, 7)]
    queue.remove_n(gone)
    assert ids(queue) == [2, 5]
    assert queue.num_free == 2
    assert links(gone) == [(None, None)] * 5


def test_removing_a_block_that_is_not_in_the_queue_keeps_the_length_right() -> None:
    queue, blocks = make_queue(3)
    with pytest.raises(InvariantError, match="block 2 is not in the free queue"):
        queue.remove_n([blocks[1], blocks[1]])
    assert ids(queue) == [1, 3]
    assert queue.num_free == 2


# -- The pool ----------------------------------------------------------------------------------------------


def test_the_scratch_block_is_apart_and_never_handed_out() -> None:
    pool = BlockPool(3)
    assert pool.num_blocks == pool.num_free == 3
    assert ids(pool.get_new_blocks(3)) == [1, 2, 3]
    assert pool.scratch.block_id == SCRATCH_BLOCK_ID
    assert pool.scratch.ref_count == 0


def test_taking_more_than_is_free_says_how_many_and_changes_nothing() -> None:
    """Example 13."""
    pool = BlockPool(4)
    pool.get_new_blocks(1)
    with pytest.raises(OutOfBlocksError, match="5 blocks were asked for and 3 of 4 are free"):
        pool.get_new_blocks(5)
    assert ids(pool.free_queue) == [2, 3, 4]
    assert [block.ref_count for block in pool.blocks] == [1, 0, 0, 0]


def test_taking_nothing_is_fine() -> None:
    pool = BlockPool(1)
    assert pool.get_new_blocks(0) == []
    assert pool.num_free == 1


def test_sharing_a_free_block_takes_it_out_of_the_queue_once() -> None:
    pool = BlockPool(3)
    block = pool.blocks[1]
    pool.touch([block])
    pool.touch([block])
    assert block.ref_count == 2
    assert ids(pool.free_queue) == [1, 3]


def test_only_the_last_user_frees_a_block() -> None:
    pool = BlockPool(2)
    block = pool.get_new_blocks(1)[0]
    pool.touch([block])
    assert pool.free_blocks([block]).still_held == [block]
    assert pool.free_blocks([block]).freed == [block]
    assert block.ref_count == 0


def test_a_count_below_0_is_an_error_at_once() -> None:
    pool = BlockPool(1)
    block = pool.get_new_blocks(1)[0]
    pool.free_blocks([block])
    with pytest.raises(InvariantError, match="freed once too often"):
        pool.free_blocks([block])
    assert block.ref_count == 0


def test_sharing_many_counts_each_and_takes_the_free_ones_out_of_the_queue() -> None:
    pool = BlockPool(5)
    used = pool.get_new_blocks(2)
    pool.touch([used[0], pool.blocks[4], used[1], pool.blocks[3]])
    assert [block.ref_count for block in pool.blocks] == [2, 2, 0, 1, 1]
    assert ids(pool.free_queue) == [3]
    pool.touch([])
    assert ids(pool.free_queue) == [3]


def test_a_free_block_that_is_hit_twice_in_one_call_leaves_the_queue_once() -> None:
    """Two blocks of one prompt can have one weak hash."""
    pool = BlockPool(3)
    pool.touch([pool.blocks[1], pool.blocks[1]])
    assert pool.blocks[1].ref_count == 2
    assert ids(pool.free_queue) == [1, 3]


def test_dropping_many_tells_the_freed_from_those_still_held_in_their_order() -> None:
    pool = BlockPool(5)
    taken = pool.get_new_blocks(5)
    pool.touch(taken[1:3])
    dropped = pool.free_blocks(taken[::-1])
    assert ids(dropped.freed) == [5, 4, 1]
    assert ids(dropped.still_held) == [3, 2]
    assert [block.ref_count for block in taken] == [0, 1, 1, 0, 0]
    assert pool.free_blocks([]) == ([], [])


def test_a_block_that_is_dropped_twice_in_one_call_is_freed_by_the_second() -> None:
    pool = BlockPool(1)
    block = pool.get_new_blocks(1)[0]
    pool.touch([block])
    assert pool.free_blocks([block, block]) == ([block], [block])
    assert block.ref_count == 0


@pytest.mark.parametrize("order", [[1, 2, 3], [3, 1, 2], [1, 2, 2], [1, 2, 1]])
def test_if_one_of_many_was_freed_once_too_often_no_count_changes(order: list[int]) -> None:
    pool = BlockPool(3)
    pool.free_blocks([pool.get_new_blocks(3)[2]])
    with pytest.raises(InvariantError, match=r"block [123] was freed once too often"):
        pool.free_blocks([pool.blocks[number - 1] for number in order])
    assert [block.ref_count for block in pool.blocks] == [1, 1, 0]


def test_a_block_s_state_is_read_off_its_count_and_its_hash() -> None:
    pool = BlockPool(1)
    block = pool.blocks[0]
    states = [block.state]
    pool.get_new_blocks(1)
    states.append(block.state)
    block.block_hash = b"x" * 32
    states.append(block.state)
    pool.free_blocks([block])
    states.append(block.state)  # nobody uses it, and it is found
    block.block_hash = None
    states.append(block.state)
    assert [state.value for state in states] == ["free", "owned", "published", "published", "free"]


def test_the_table_of_transitions_says_what_may_happen_to_a_block_and_nothing_else() -> None:
    may = {state: {a.name for s, a in BLOCK_TRANSITIONS if s is state} for state in BlockState}
    assert may == {
        BlockState.FREE: {"ALLOCATE"},
        BlockState.OWNED: {"PUBLISH", "FORK", "FREE"},
        BlockState.PUBLISHED: {"HIT", "FORK", "FREE", "EVICT", "RESET"},
    }
    assert {action for _, action in BLOCK_TRANSITIONS} == set(BlockAction)
    assert set(BLOCK_TRANSITIONS.values()) == set(BlockState)


def test_a_block_shows_its_count_and_hash_when_printed() -> None:
    block = Block(7)
    assert repr(block) == "Block(7, ref_count=0, no hash)"
    block.block_hash = bytes(range(32))
    assert repr(block) == "Block(7, ref_count=0, 00010203)"


# -- Where freed blocks go ---------------------------------------------------------------------------------


def freed_blocks() -> list[Block]:
    """Blocks 4 to 1, tail first, of which 4 and 3 have no hash."""
    blocks = [Block(number) for number in (4, 3, 2, 1)]
    for block in blocks[2:]:
        block.block_hash = bytes([block.block_id]) * 32
    return blocks


def test_lru_reuses_blocks_without_a_hash_next_and_published_ones_last() -> None:
    placement = LRU().place(freed_blocks())
    assert ids(placement.to_front) == [4, 3]
    assert ids(placement.to_back) == [2, 1]


def test_mru_reuses_what_was_just_freed_next() -> None:
    placement = MRU().place(freed_blocks())
    assert ids(placement.to_front) == [4, 3, 2, 1]
    assert placement.to_back == []


@pytest.mark.parametrize("name", sorted(EVICTION_POLICIES))
def test_every_policy_keeps_the_tail_before_the_head(name: str) -> None:
    """A chain without its first block can never be found again, so the head must be forgotten last."""
    placement = EVICTION_POLICIES[name].place(freed_blocks())
    order = ids([*placement.to_front, *placement.to_back])
    assert order.index(2) < order.index(1)
    assert order.index(4) < order.index(3)


@pytest.mark.parametrize("name", sorted(EVICTION_POLICIES))
def test_placing_changes_no_block(name: str) -> None:
    freed = freed_blocks()
    before = [(block.block_id, block.ref_count, block.block_hash, block.next_free) for block in freed]
    EVICTION_POLICIES[name].place(freed)
    assert [(block.block_id, block.ref_count, block.block_hash, block.next_free) for block in freed] == before


@pytest.mark.parametrize("count", [-1, 1.5, True, "2", None])
def test_a_number_of_blocks_that_is_none_is_refused_with_nothing_changed(count: Any) -> None:
    pool = BlockPool(4)
    for call in (pool.get_new_blocks, pool.free_queue.popleft_n):
        with pytest.raises(InvariantError, match="must be a whole number of 0 or more"):
            call(count)
    assert (pool.num_free, len(list(pool.free_queue))) == (4, 4)
