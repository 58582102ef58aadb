"""The one owner of a block's life, held to the examples of how a correct prefix cache behaves.

The numbered examples use blocks of 16 tokens and ten blocks, ids 1 to 10, and were first run on another engine.
Here a block is published after its tokens are computed, so each helper call computes before it publishes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from minivllm.cache.block_hash import HashChain
from minivllm.cache.block_pool import Block
from minivllm.cache.block_table import ComputedBlocks
from minivllm.cache.eviction.lru import LRU
from minivllm.cache.eviction.mru import MRU
from minivllm.cache.eviction.policy import EvictionPolicy, Placement
from minivllm.cache.kv_cache_manager import KVCacheManager
from minivllm.cache.prefix_index.hash_map import HashMapIndex
from minivllm.errors import InvariantError, OutOfBlocksError
from minivllm.log import events as ev
from minivllm.request import Request, make_extra_keys

SHARED = list(range(100, 148))
"""48 tokens: three full blocks of 16."""


class Cache:
    """A manager with the moves of a request: admit, compute, publish, free."""

    def __init__(
        self,
        num_blocks: int = 10,
        block_size: int = 16,
        *,
        caching: bool = True,
        eviction: EvictionPolicy | None = None,
    ) -> None:
        self.events: list[ev.Event] = []
        self.manager = KVCacheManager(
            num_blocks,
            block_size,
            HashMapIndex(),
            eviction or LRU(),
            self.events.append,
            enable_prefix_caching=caching,
        )
        self._count = 0

    def admit(self, tokens: Sequence[int], *, publish: bool = True, salt: str | None = None) -> Request:
        """Look up, allocate, compute and (unless told not to) publish a prompt. Checks the invariants."""
        self._count += 1
        request = Request(f"q{self._count}", tuple(tokens), extra_keys=make_extra_keys(cache_salt=salt))
        computed = self.manager.get_computed_blocks(request)
        self.manager.allocate_slots(request, request.num_tokens - computed.num_tokens, computed)
        request.num_recovered_tokens = computed.num_tokens
        request.num_computed_tokens = request.num_tokens
        if publish:
            self.manager.publish(request, request.num_computed_tokens)
        self.manager.check_invariants()
        return request

    def grow(self, request: Request, tokens: Sequence[int]) -> None:
        """Let a request compute and publish more tokens."""
        self.manager.allocate_slots(request, len(tokens))
        for token in tokens:
            request.append_output(token)
        request.num_computed_tokens = request.num_tokens
        self.manager.publish(request, request.num_computed_tokens)
        self.manager.check_invariants()

    def free(self, request: Request) -> None:
        self.manager.free(request)
        self.manager.check_invariants()

    def table(self, request: Request) -> list[int]:
        return list(self.manager.block_ids(request.request_id))

    def counts(self, *block_ids: int) -> list[int]:
        return [self.manager.pool.blocks[block_id - 1].ref_count for block_id in block_ids]

    def hashed(self) -> list[int]:
        return [block.block_id for block in self.manager.pool.blocks if block.block_hash is not None]

    def free_ids(self) -> list[int]:
        return [block.block_id for block in self.manager.pool.free_queue]

    def everything(self) -> Any:
        """Return all that a call without effect must leave as it was."""
        blocks = [(b.block_id, b.ref_count, b.block_hash) for b in self.manager.pool.blocks]
        return blocks, self.free_ids(), sorted(self.manager.index.items()), len(self.events)


# -- The examples ------------------------------------------------------------------------------------------


def test_a_cold_prompt_of_55_tokens_recovers_nothing_and_its_three_full_blocks_are_hashed() -> None:
    """Example 1."""
    cache = Cache()
    request = cache.admit([*SHARED, *range(7)])
    assert request.num_recovered_tokens == 0
    assert cache.table(request) == [1, 2, 3, 4]
    assert cache.hashed() == [1, 2, 3]


def test_meanwhile_a_second_prompt_shares_48_tokens_and_takes_one_new_block() -> None:
    """Example 2."""
    cache = Cache()
    cache.admit([*SHARED, *range(7)])
    second = cache.admit([*SHARED, *range(50, 55)])
    assert second.num_recovered_tokens == 48
    assert cache.table(second) == [1, 2, 3, 5]
    assert cache.counts(1, 2, 3, 4, 5) == [2, 2, 2, 1, 1]
    assert cache.manager.pool.num_free == 5


def test_when_both_have_ended_tails_are_reused_before_heads() -> None:
    """Example 3."""
    cache = Cache()
    first = cache.admit([*SHARED, *range(7)])
    second = cache.admit([*SHARED, *range(50, 55)])
    cache.free(first)
    cache.free(second)
    assert cache.free_ids() == [5, 4, 6, 7, 8, 9, 10, 3, 2, 1]


@pytest.mark.parametrize(("num_tokens", "recovered"), [(16, 0), (32, 16), (47, 32), (48, 32), (49, 48)])
def test_the_same_prompt_again_always_leaves_a_token_to_compute(num_tokens: int, recovered: int) -> None:
    """Example 4."""
    cache = Cache()
    prompt = list(range(num_tokens))
    cache.free(cache.admit(prompt))
    assert cache.admit(prompt).num_recovered_tokens == recovered


def test_a_reused_block_has_lost_its_hash() -> None:
    """Example 5."""
    cache = Cache(num_blocks=1)
    prompt = list(range(16))
    cache.free(cache.admit(prompt))
    assert cache.hashed() == [1]
    other = cache.admit(range(50, 65))
    assert cache.table(other) == [1]
    assert cache.hashed() == []
    assert cache.manager.get_computed_blocks(Request("late", (*prompt, 99))).num_tokens == 0


def test_without_caching_blocks_are_only_room() -> None:
    """Example 6."""
    cache = Cache(num_blocks=4, block_size=4, caching=False)
    first = cache.admit(range(10))
    assert cache.table(first) == [1, 2, 3]
    cache.free(first)
    second = cache.admit(range(16))
    assert second.num_recovered_tokens == 0
    assert len(cache.table(second)) == 4
    assert cache.hashed() == []
    assert not cache.manager.has_room(Request("third", (1, 2, 3, 4)), 4)
    with pytest.raises(OutOfBlocksError):
        cache.admit([1, 2, 3, 4])


def test_a_block_is_hashed_when_decode_fills_it_and_the_one_being_filled_is_not() -> None:
    """Example 7."""
    cache = Cache()
    request = cache.admit([*SHARED, *range(7)])
    cache.grow(request, range(4))
    assert cache.table(request) == [1, 2, 3, 4]
    assert cache.hashed() == [1, 2, 3]
    cache.grow(request, range(19))
    assert cache.table(request) == [1, 2, 3, 4, 5]
    assert cache.hashed() == [1, 2, 3, 4]


@pytest.mark.parametrize(("salt", "recovered"), [("a", 48), ("b", 0), (None, 0), ("", 0)])
def test_a_salt_shares_with_itself_alone(salt: str | None, recovered: int) -> None:
    """Example 8."""
    cache = Cache()
    prompt = [*SHARED, 1]
    cache.free(cache.admit(prompt, salt="a"))
    assert cache.admit(prompt, salt=salt).num_recovered_tokens == recovered


@pytest.mark.parametrize("salt", [None, ""])
def test_an_empty_salt_shares_with_no_salt(salt: str | None) -> None:
    cache = Cache()
    cache.free(cache.admit([*SHARED, 1], salt=None))
    assert cache.admit([*SHARED, 1], salt=salt).num_recovered_tokens == 48


def test_asking_for_more_blocks_than_are_free_says_how_many_of_each() -> None:
    """Example 13."""
    cache = Cache()
    cache.admit(range(100))
    with pytest.raises(OutOfBlocksError, match=r"asks for 4 blocks and 3 of 10 are free"):
        cache.admit(range(200, 264))


# -- Look-up -----------------------------------------------------------------------------------------------


def test_a_lookup_changes_no_count_no_order_and_writes_no_event() -> None:
    cache = Cache()
    cache.free(cache.admit([*SHARED, 1]))
    request = Request("r", (*SHARED, 2))
    before = cache.everything()
    for _ in range(3):
        assert cache.manager.get_computed_blocks(request) == ComputedBlocks((1, 2, 3), 48)
    assert cache.everything() == before
    assert cache.table(request) == []


def test_a_full_hit_computes_its_whole_last_block_in_a_block_of_its_own() -> None:
    cache = Cache(num_blocks=8, block_size=4)
    prompt = list(range(8))
    first = cache.admit(prompt)
    second = cache.admit(prompt)
    assert second.num_recovered_tokens == 4
    assert cache.table(first) == [1, 2]
    assert cache.table(second) == [1, 3]


def test_a_prompt_shorter_than_a_block_publishes_and_recovers_nothing() -> None:
    cache = Cache(num_blocks=8, block_size=4)
    cache.free(cache.admit([1, 2, 3]))
    assert cache.hashed() == []
    assert cache.admit([1, 2, 3]).num_recovered_tokens == 0


def test_generated_tokens_are_found_like_those_of_a_prompt() -> None:
    cache = Cache(num_blocks=8, block_size=4)
    request = cache.admit([1, 2, 3])
    cache.grow(request, [4, 5, 6, 7, 8, 9])
    cache.free(request)
    assert cache.admit([1, 2, 3, 4, 5, 6, 7, 8, 99]).num_recovered_tokens == 8


# -- Allocation --------------------------------------------------------------------------------------------


def test_a_failed_allocation_leaves_no_trace_even_after_hits() -> None:
    """The fault it guards against: hits counted up before the check for room, and never counted down."""
    cache = Cache(num_blocks=4, block_size=4)
    cache.free(cache.admit(range(9)))
    request = Request("big", tuple(range(20)))
    computed = cache.manager.get_computed_blocks(request)
    assert computed.num_tokens == 8
    before = cache.everything()
    with pytest.raises(OutOfBlocksError, match="asks for 5 blocks and 4 of 4 are free"):
        cache.manager.allocate_slots(request, request.num_tokens - computed.num_tokens, computed)
    assert cache.everything() == before
    assert cache.table(request) == []
    cache.manager.check_invariants()


def test_hits_that_are_free_use_up_room_and_hits_in_use_do_not() -> None:
    """Shared blocks are charged once, to nobody who comes later: 3 of 4 are in use, and a sharer still fits."""
    cache = Cache(num_blocks=4, block_size=4)
    first = cache.admit(range(9))
    sharer = Request("sharer", (*range(8), 50))
    computed = cache.manager.get_computed_blocks(sharer)
    assert cache.manager.has_room(sharer, 1, computed)
    cache.free(first)
    cache.admit([70, 71], publish=False)
    # Now the two hits lie in the free queue: with the new block they need all three that are left.
    assert cache.manager.pool.num_free == 3
    assert cache.manager.has_room(sharer, 1, computed)
    cache.admit([80, 81], publish=False)
    computed = cache.manager.get_computed_blocks(sharer)
    assert cache.manager.pool.num_free == 2
    assert not cache.manager.has_room(sharer, 1, computed)


def test_hits_are_taken_before_new_blocks_are_popped_so_that_a_hit_is_never_evicted_for_its_own_request() -> None:
    cache = Cache(num_blocks=3, block_size=4)
    cache.free(cache.admit(range(9)))  # free queue: 3, then the chain's tail 2, its head 1
    cache.admit([90], publish=False)  # takes 3
    request = cache.admit([*range(4), 50, 51])  # hits 1, and must pop 2
    assert request.num_recovered_tokens == 4
    assert cache.table(request) == [1, 2]


def test_growing_within_a_block_takes_no_new_one() -> None:
    cache = Cache(num_blocks=2, block_size=4)
    request = cache.admit([1, 2])
    cache.grow(request, [3, 4])
    assert cache.table(request) == [1]
    cache.grow(request, [5])
    assert cache.table(request) == [1, 2]


def test_a_request_that_holds_blocks_takes_no_hits() -> None:
    cache = Cache(num_blocks=8, block_size=4)
    cache.admit(range(9))
    request = cache.admit([50, 51], publish=False)
    with pytest.raises(InvariantError, match="cannot take hits"):
        cache.manager.allocate_slots(request, 1, ComputedBlocks((1,), 4))


def test_eviction_forgets_the_hash_before_the_block_is_handed_out_and_says_which() -> None:
    cache = Cache(num_blocks=2, block_size=4)
    cache.free(cache.admit(range(8)))
    chain = HashChain(4)
    chain.extend_to(range(8))
    cache.events.clear()
    cache.admit(range(50, 55), publish=False)
    evicted, allocated = cache.events
    assert isinstance(evicted, ev.BlocksEvicted)
    assert isinstance(allocated, ev.BlocksAllocated)
    assert evicted.block_ids == allocated.block_ids == (2, 1)
    assert evicted.block_hashes == (chain.hashes[1].hex(), chain.hashes[0].hex())
    assert len(cache.manager.index) == 0


def test_under_pressure_the_end_of_a_chain_goes_before_its_beginning() -> None:
    """The fault it guards against: the first block evicted, and thousands of later ones useless."""
    cache = Cache(num_blocks=4, block_size=4)
    cache.free(cache.admit(range(16)))
    cache.free(cache.admit([90, 91], publish=False))  # one block is forgotten: the chain's last
    assert cache.admit([*range(12), 99]).num_recovered_tokens == 12


def test_a_block_in_use_is_never_evicted() -> None:
    cache = Cache(num_blocks=4, block_size=4)
    keeper = cache.admit(range(8))
    for number in range(5):
        cache.free(cache.admit(range(100 * number + 50, 100 * number + 58)))
    assert cache.table(keeper) == [1, 2]
    assert cache.manager.get_computed_blocks(Request("r", (*range(8), 1))).block_ids == (1, 2)


# -- Publication -------------------------------------------------------------------------------------------


def test_nothing_is_published_that_was_not_computed() -> None:
    cache = Cache(num_blocks=8, block_size=4)
    request = Request("r", tuple(range(8)))
    cache.manager.allocate_slots(request, 8)
    request.num_computed_tokens = 4
    with pytest.raises(InvariantError, match="would publish 8 tokens and has computed 4"):
        cache.manager.publish(request, 8)
    assert cache.hashed() == []
    cache.manager.publish(request, 4)
    assert cache.hashed() == [1]


def test_a_block_is_published_once_with_its_parent_and_place() -> None:
    cache = Cache(num_blocks=8, block_size=4)
    request = cache.admit(range(8), publish=False)
    cache.events.clear()
    cache.manager.publish(request, 4)
    cache.manager.publish(request, 7)
    cache.manager.publish(request, 8)
    cache.manager.publish(request, 8)
    chain = HashChain(4)
    chain.extend_to(range(8))
    first, second = (block_hash.hex() for block_hash in chain.hashes)
    published = [event for event in cache.events if isinstance(event, ev.BlocksPublished)]
    assert len(published) == len(cache.events) == 2
    assert [(e.block_ids, e.indices) for e in published] == [((1,), (0,)), ((2,), (1,))]
    assert [(e.block_hashes, e.parent_hashes) for e in published] == [((first,), ("",)), ((second,), (first,))]


def test_of_two_blocks_with_the_same_content_the_first_published_is_found_and_the_other_stays_private() -> None:
    cache = Cache(num_blocks=8, block_size=4)
    first, second = (cache.admit(range(9), publish=False) for _ in range(2))
    cache.manager.publish(first, 9)
    cache.manager.publish(second, 9)
    assert cache.table(first)[:2] == [1, 2]
    assert cache.table(second)[:2] == [4, 5]
    assert cache.hashed() == [1, 2]
    duplicated = cache.events[-1]
    assert isinstance(duplicated, ev.BlocksDuplicated)
    assert (duplicated.block_ids, duplicated.twin_block_ids) == ((4, 5), (1, 2))
    cache.free(second)
    assert cache.free_ids()[:3] == [6, 5, 4]  # never published: reused first
    assert cache.admit(range(9)).num_recovered_tokens == 8


def test_a_hit_is_not_published_again() -> None:
    cache = Cache(num_blocks=8, block_size=4)
    cache.free(cache.admit(range(9)))
    cache.events.clear()
    cache.admit([*range(8), 50, 51, 52, 53, 54])
    published = [event for event in cache.events if isinstance(event, ev.BlocksPublished)]
    assert [(event.indices, event.block_ids) for event in published] == [((2,), (3,))]
    assert not any(isinstance(event, ev.BlocksDuplicated) for event in cache.events)


def test_a_prompt_counts_as_published_with_all_its_full_blocks_and_not_before() -> None:
    cache = Cache(num_blocks=8, block_size=4)
    request = cache.admit(range(9), publish=False)
    assert not cache.manager.prompt_is_published(request)
    cache.manager.publish(request, 4)
    assert not cache.manager.prompt_is_published(request)
    cache.manager.publish(request, 8)
    assert cache.manager.prompt_is_published(request)
    twin = cache.admit(range(9))
    assert cache.manager.prompt_is_published(twin)
    cache.free(twin)
    assert not cache.manager.prompt_is_published(twin)


def test_without_caching_publishing_does_nothing() -> None:
    cache = Cache(num_blocks=8, block_size=4, caching=False)
    request = cache.admit(range(9))
    assert cache.hashed() == []
    assert not cache.manager.prompt_is_published(request)


# -- Freeing and resetting ---------------------------------------------------------------------------------


def test_a_freed_published_block_is_found_until_it_is_popped() -> None:
    cache = Cache(num_blocks=3, block_size=4)
    cache.free(cache.admit(range(8)))
    assert cache.manager.get_computed_blocks(Request("r", tuple(range(9)))).num_tokens == 8
    cache.free(cache.admit(range(50, 58), publish=False))
    assert cache.manager.get_computed_blocks(Request("s", tuple(range(9)))).num_tokens == 4


def test_freeing_what_holds_nothing_is_fine_and_freeing_twice_counts_once() -> None:
    cache = Cache(num_blocks=4, block_size=4)
    cache.free(Request("never", (1,)))
    first, second = cache.admit(range(5)), cache.admit(range(5))
    cache.free(first)
    cache.free(first)
    assert cache.counts(1) == [1]
    assert cache.table(second) == [1, 3]


def test_the_event_of_freeing_says_where_each_block_went() -> None:
    cache = Cache(num_blocks=8, block_size=4)
    first = cache.admit(range(9))
    second = cache.admit([*range(4), 50, 51, 52, 53, 54])
    cache.free(second)
    freed = cache.events[-1]
    assert isinstance(freed, ev.BlocksFreed)
    assert (freed.to_front, freed.to_back, freed.still_held) == ((5,), (4,), (1,))
    cache.free(first)
    assert cache.free_ids() == [3, 5, 6, 7, 8, 4, 2, 1]


def test_under_mru_what_was_just_freed_is_forgotten_next() -> None:
    cache = Cache(num_blocks=4, block_size=4, eviction=MRU())
    cache.free(cache.admit(range(9)))
    assert cache.free_ids() == [3, 2, 1, 4]
    cache.free(cache.admit(range(50, 59)))
    assert cache.manager.get_computed_blocks(Request("r", tuple(range(9)))).num_tokens == 0


def test_a_reset_is_refused_while_a_block_is_in_use_and_changes_nothing() -> None:
    cache = Cache(num_blocks=4, block_size=4)
    request = cache.admit(range(9))
    before = cache.everything()
    assert cache.manager.reset() is False
    assert cache.everything() == before
    cache.free(request)
    assert cache.manager.reset() is True
    assert cache.hashed() == []
    assert cache.admit(range(9)).num_recovered_tokens == 0
    cache.manager.check_invariants()


class _Forgetful:
    """An eviction policy with a fault: it loses the last block."""

    name = "forgetful"

    def place(self, freed: Sequence[Block]) -> Placement:
        return Placement(to_front=list(freed[:-1]), to_back=[])


def test_an_eviction_policy_that_loses_a_block_is_found_out_at_once() -> None:
    cache = Cache(num_blocks=4, block_size=4, eviction=_Forgetful())
    request = cache.admit(range(9))
    with pytest.raises(InvariantError, match="_Forgetful did not place each freed block once"):
        cache.manager.free(request)


# -- The check itself --------------------------------------------------------------------------------------


def _count_too_high(manager: KVCacheManager) -> None:
    manager.pool.blocks[0].ref_count += 1


def _free_and_in_use(manager: KVCacheManager) -> None:
    manager.pool.free_queue.append_n([manager.pool.blocks[0]])


def _lost(manager: KVCacheManager) -> None:
    manager.pool.free_queue.popleft_n(1)[0]


def _hash_without_entry(manager: KVCacheManager) -> None:
    manager.pool.blocks[5].block_hash = b"x" * 32


def _entry_without_hash(manager: KVCacheManager) -> None:
    manager.pool.blocks[0].block_hash = None


def _entry_of_another_block(manager: KVCacheManager) -> None:
    (block_hash, _), *_ = manager.index.items()
    manager.index.remove(block_hash)
    manager.index.insert(block_hash, 6)


def _wrong_hash(manager: KVCacheManager) -> None:
    block = manager.pool.blocks[0]
    assert block.block_hash is not None
    manager.index.remove(block.block_hash)
    block.block_hash = b"x" * 32
    manager.index.insert(block.block_hash, block.block_id)


def _wrong_length(manager: KVCacheManager) -> None:
    manager.pool.free_queue.num_free -= 1


def _scratch_handed_out(manager: KVCacheManager) -> None:
    manager.pool.scratch.ref_count = 1


@pytest.mark.parametrize(
    "damage",
    [
        _count_too_high,
        _free_and_in_use,
        _lost,
        _hash_without_entry,
        _entry_without_hash,
        _entry_of_another_block,
        _wrong_hash,
        _wrong_length,
        _scratch_handed_out,
    ],
)
def test_the_check_of_the_books_finds_every_kind_of_damage(damage: Any) -> None:
    cache = Cache(num_blocks=8, block_size=4)
    cache.admit(range(9))
    damage(cache.manager)
    with pytest.raises(InvariantError):
        cache.manager.check_invariants()
