"""Blocks, the free queue, and the two orders of forgetting."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from minivllm.block_pool import SCRATCH_BLOCK_ID, Block, BlockPool, FreeBlockQueue
from minivllm.errors import InvariantError, OutOfBlocksError
from minivllm.eviction import EVICTION_POLICIES, LRU, MRU


def ids(blocks: Iterable[Block]) -> list[int]:
    return [block.block_id for block in blocks]


def make_queue(count: int) -> tuple[FreeBlockQueue, list[Block]]:
    blocks = [Block(number) for number in range(1, count + 1)]
    return FreeBlockQueue(blocks), blocks


# -- The free queue ----------------------------------------------------------------------------------------


def test_blocks_are_reused_from_the_head_and_appended_at_the_end() -> None:
    queue, blocks = make_queue(3)
    first = queue.popleft()
    assert first is blocks[0]
    queue.append(first)
    assert ids(queue) == [2, 3, 1]
    assert len(queue) == queue.num_free == 3


def test_a_block_in_the_middle_leaves_and_its_neighbours_close_up() -> None:
    queue, blocks = make_queue(3)
    queue.remove(blocks[1])
    assert ids(queue) == [1, 3]
    assert blocks[1] not in queue
    assert blocks[2] in queue
    assert [queue.popleft().block_id for _ in range(2)] == [1, 3]


def test_blocks_at_both_ends_leave_like_any_other() -> None:
    queue, blocks = make_queue(3)
    queue.remove(blocks[0])
    queue.remove(blocks[2])
    assert ids(queue) == [2]
    queue.remove(blocks[1])
    assert ids(queue) == []
    queue.append(blocks[2])
    assert ids(queue) == [3]


def test_blocks_put_to_the_front_are_reused_in_the_order_given() -> None:
    queue, blocks = make_queue(4)
    for block in blocks[:3]:
        queue.remove(block)
    queue.prepend_all([blocks[2], blocks[0], blocks[1]])
    assert ids(queue) == [3, 1, 2, 4]


def test_an_empty_queue_says_so_and_what_to_do() -> None:
    queue, _ = make_queue(0)
    with pytest.raises(OutOfBlocksError, match="wait for a request to end"):
        queue.popleft()
    assert queue.num_free == 0


def test_a_block_cannot_enter_the_queue_twice() -> None:
    queue, blocks = make_queue(2)
    with pytest.raises(InvariantError, match="block 1 is in the free queue already"):
        queue.append(blocks[0])
    with pytest.raises(InvariantError, match="block 2 is in the free queue already"):
        queue.prepend_all([blocks[1]])
    assert ids(queue) == [1, 2]
    assert queue.num_free == 2


def test_a_block_that_is_not_in_the_queue_cannot_leave_it() -> None:
    queue, blocks = make_queue(2)
    queue.remove(blocks[0])
    with pytest.raises(InvariantError, match="block 1 is not in the free queue"):
        queue.remove(blocks[0])
    assert queue.num_free == 1


# -- The pool ----------------------------------------------------------------------------------------------


def test_the_scratch_block_is_apart_and_never_handed_out() -> None:
    pool = BlockPool(3)
    assert pool.num_blocks == pool.num_free == 3
    assert ids(pool.take(3)) == [1, 2, 3]
    assert pool.scratch.block_id == SCRATCH_BLOCK_ID
    assert pool.scratch.ref_count == 0


def test_taking_more_than_is_free_says_how_many_and_changes_nothing() -> None:
    """Example 13."""
    pool = BlockPool(4)
    pool.take(1)
    with pytest.raises(OutOfBlocksError, match="5 blocks were asked for and 3 of 4 are free"):
        pool.take(5)
    assert ids(pool.free_queue) == [2, 3, 4]
    assert [block.ref_count for block in pool.blocks] == [1, 0, 0, 0]


def test_taking_nothing_is_fine() -> None:
    pool = BlockPool(1)
    assert pool.take(0) == []
    assert pool.num_free == 1


def test_sharing_a_free_block_takes_it_out_of_the_queue_once() -> None:
    pool = BlockPool(3)
    block = pool.blocks[1]
    pool.share(block)
    pool.share(block)
    assert block.ref_count == 2
    assert ids(pool.free_queue) == [1, 3]


def test_only_the_last_user_frees_a_block() -> None:
    pool = BlockPool(2)
    block = pool.take(1)[0]
    pool.share(block)
    assert pool.drop(block) is False
    assert pool.drop(block) is True
    assert block.ref_count == 0


def test_a_count_below_0_is_an_error_at_once() -> None:
    pool = BlockPool(1)
    block = pool.take(1)[0]
    pool.drop(block)
    with pytest.raises(InvariantError, match="freed once too often"):
        pool.drop(block)
    assert block.ref_count == 0


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
