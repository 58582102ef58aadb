"""The one owner of a block's life: look up, allocate, publish, free.

    FREE ──allocate──► OWNED ──publish──► PUBLISHED ──evict──► FREE
     ▲                   │                  count ≥ 0; in the free queue exactly while it is 0
     └──────free─────────┘

A request's block table lists its blocks in the order of its tokens and only grows, until all of it is freed.
Every change is all or nothing: what cannot be done whole leaves no trace. Knows requests' tokens and blocks;
must not know the scheduler, flights, when to publish, or how K/V is computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from minivllm import events as ev
from minivllm.block_hash import ROOT_HASH, HashChain
from minivllm.block_pool import Block, BlockPool
from minivllm.errors import InvariantError, OutOfBlocksError
from minivllm.eviction import EvictionPolicy
from minivllm.prefix_index import PrefixIndex
from minivllm.request import Request


@dataclass(frozen=True, slots=True)
class ComputedBlocks:
    """What a look-up found: published blocks from the start of the prompt.

    Good only until the next change of the pool: nothing holds the blocks yet.
    """

    block_ids: tuple[int, ...]
    num_tokens: int


NOTHING_COMPUTED = ComputedBlocks((), 0)


@dataclass(slots=True)
class _BlockTable:
    """The blocks of one request, and its hash chain. ``num_settled`` blocks need no more publishing."""

    chain: HashChain
    blocks: list[Block] = field(default_factory=list)
    num_settled: int = 0


class KVCacheManager:
    """Block tables of all requests over one pool."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        index: PrefixIndex,
        eviction: EvictionPolicy,
        emit: Callable[[ev.Event], None],
        *,
        enable_prefix_caching: bool = True,
    ) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(num_blocks)
        self.index = index
        self.eviction = eviction
        self._tables: dict[str, _BlockTable] = {}
        self._emit = emit

    # -- Questions: nothing changes ------------------------------------------------------------------------

    def block_ids(self, request_id: str) -> tuple[int, ...]:
        """Return the request's block table, empty if it holds nothing."""
        table = self._tables.get(request_id)
        return tuple(block.block_id for block in table.blocks) if table else ()

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks ``num_tokens`` tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)

    def get_computed_blocks(self, request: Request) -> ComputedBlocks:
        """Look the request's tokens up, from the start to the first miss.

        At most ``num_tokens - 1`` tokens are found: the last one must be computed, because its logits give the
        next token. So a prompt of whole blocks that are all published computes its last block again. Changes no
        count, no order and no statistics.
        """
        if not self.enable_prefix_caching:
            return NOTHING_COMPUTED
        most = (request.num_tokens - 1) // self.block_size
        table = self._table(request)
        block_ids = self.index.longest_prefix(table.chain.hashes[:most])
        return ComputedBlocks(tuple(block_ids), len(block_ids) * self.block_size)

    def has_room(self, request: Request, num_new_tokens: int, computed: ComputedBlocks = NOTHING_COMPUTED) -> bool:
        """Whether `allocate_slots` with the same arguments would succeed."""
        return self._num_blocks_needed(request, num_new_tokens, computed) <= self.pool.num_free

    def _num_blocks_needed(self, request: Request, num_new_tokens: int, computed: ComputedBlocks) -> int:
        """Free blocks that an allocation uses up: new ones, and hits that lie in the free queue now."""
        table = self._tables.get(request.request_id)
        num_held = len(table.blocks) if table else 0
        num_known = request.num_computed_tokens + computed.num_tokens
        num_new = self.num_blocks_for(num_known + num_new_tokens) - num_held - len(computed.block_ids)
        num_free_hits = sum(self.pool.blocks[i - 1].ref_count == 0 for i in computed.block_ids)
        return max(num_new, 0) + num_free_hits

    # -- Changes -------------------------------------------------------------------------------------------

    def allocate_slots(
        self, request: Request, num_new_tokens: int, computed: ComputedBlocks = NOTHING_COMPUTED
    ) -> None:
        """Give the request blocks for ``num_new_tokens`` more tokens, after the hits in ``computed``.

        In this order: check that there is room; take the hits (a count up, out of the free queue); only then
        pop new blocks, forgetting what they held. Raises OutOfBlocksError with nothing changed at all.
        """
        needed = self._num_blocks_needed(request, num_new_tokens, computed)
        if needed > self.pool.num_free:
            raise OutOfBlocksError(
                f"request {request.request_id!r} asks for {needed} blocks and {self.pool.num_free} of "
                f"{self.pool.num_blocks} are free; wait for a request to end or make a larger pool"
            )
        table = self._table(request)
        if computed.block_ids:
            if table.blocks:
                raise InvariantError(f"request {request.request_id!r} holds blocks already and cannot take hits")
            hits = [self.pool.blocks[block_id - 1] for block_id in computed.block_ids]
            for block in hits:
                self.pool.share(block)
            table.blocks.extend(hits)
            table.num_settled = len(hits)
            self._emit(ev.BlocksHit(request.request_id, computed.block_ids))
        num_known = request.num_computed_tokens + computed.num_tokens
        num_new = self.num_blocks_for(num_known + num_new_tokens) - len(table.blocks)
        if num_new > 0:
            taken = self.pool.take(num_new)
            self._forget(request.request_id, taken)
            table.blocks.extend(taken)
            self._emit(ev.BlocksAllocated(request.request_id, tuple(block.block_id for block in taken)))

    def _forget(self, request_id: str, taken: Sequence[Block]) -> None:
        """Remove the hashes of blocks that were popped, before anybody writes into them."""
        evicted = [(block.block_id, block.block_hash) for block in taken if block.block_hash is not None]
        if not evicted:
            return
        for block in taken:
            if block.block_hash is not None:
                self.index.remove(block.block_hash)
                block.block_hash = None
        ids, hashes = zip(*evicted, strict=True)
        self._emit(ev.BlocksEvicted(request_id, ids, tuple(h.hex() for h in hashes)))

    def publish(self, request: Request, num_tokens: int) -> None:
        """Make the request's full blocks within its first ``num_tokens`` tokens findable.

        Only full blocks are hashed: a block that still grows would change its name with every token. Of two
        blocks with the same content the first one published is found; the other stays private until freed.
        Raises InvariantError for tokens that are not computed.
        """
        if num_tokens > request.num_computed_tokens:
            raise InvariantError(
                f"request {request.request_id!r} would publish {num_tokens} tokens "
                f"and has computed {request.num_computed_tokens}"
            )
        table = self._tables.get(request.request_id)
        if not self.enable_prefix_caching or table is None:
            return
        first, last = table.num_settled, num_tokens // self.block_size
        if last <= first:
            return
        table.chain.extend_to(request.token_ids)
        published: list[tuple[int, str, str, int]] = []  # block id, hash, parent's hash, place in the table
        duplicated: list[tuple[int, int, str]] = []  # block id, the twin that is found, hash
        for position in range(first, last):
            block, block_hash = table.blocks[position], table.chain.hashes[position]
            twin = self.index.get(block_hash)
            if twin is None:
                self.index.insert(block_hash, block.block_id)
                block.block_hash = block_hash
                parent = table.chain.parent_of(position)
                parent_hex = "" if parent is ROOT_HASH else parent.hex()
                published.append((block.block_id, block_hash.hex(), parent_hex, position))
            else:
                duplicated.append((block.block_id, twin, block_hash.hex()))
        table.num_settled = last
        if published:
            self._emit(ev.BlocksPublished(request.request_id, *zip(*published, strict=True)))
        if duplicated:
            self._emit(ev.BlocksDuplicated(request.request_id, *zip(*duplicated, strict=True)))

    def prompt_is_published(self, request: Request) -> bool:
        """Whether all full blocks of the request's prompt were published, or hit, or have a published twin."""
        table = self._tables.get(request.request_id)
        return table is not None and table.num_settled >= request.num_prompt_tokens // self.block_size

    def free(self, request: Request) -> None:
        """Let go of the request's whole block table, from its tail to its head.

        What was published stays findable until it is popped. A request that holds nothing is fine.
        """
        table = self._tables.pop(request.request_id, None)
        if table is None or not table.blocks:
            return
        freed: list[Block] = []
        still_held: list[Block] = []
        for block in reversed(table.blocks):
            (freed if self.pool.drop(block) else still_held).append(block)
        placement = self.eviction.place(freed)
        if Counter(map(id, freed)) != Counter(map(id, [*placement.to_front, *placement.to_back])):
            name = type(self.eviction).__name__
            raise InvariantError(f"eviction policy {name} did not place each freed block once")
        self.pool.free_queue.prepend_all(placement.to_front)
        for block in placement.to_back:
            self.pool.free_queue.append(block)
        self._emit(
            ev.BlocksFreed(
                request.request_id,
                tuple(block.block_id for block in placement.to_front),
                tuple(block.block_id for block in placement.to_back),
                tuple(block.block_id for block in still_held),
            )
        )

    def reset(self) -> bool:
        """Forget every published block. Returns False, with nothing changed, while any block is in use."""
        if self.pool.num_free != self.pool.num_blocks:
            return False
        forgotten = [block for block in self.pool.blocks if block.block_hash is not None]
        for block in forgotten:
            assert block.block_hash is not None
            self.index.remove(block.block_hash)
            block.block_hash = None
        self._emit(ev.CacheReset(tuple(block.block_id for block in forgotten)))
        return True

    def _table(self, request: Request) -> _BlockTable:
        """Return the request's block table, with all its full blocks hashed.

        An empty one is kept from the first look-up on, so that a request that must wait is hashed once.
        """
        table = self._tables.get(request.request_id)
        if table is None:
            table = _BlockTable(HashChain(self.block_size, request.extra_keys))
            self._tables[request.request_id] = table
        table.chain.extend_to(request.token_ids)
        return table

    # -- Books ---------------------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Raise InvariantError if counts, free queue, index and block tables contradict each other."""
        users = Counter(block.block_id for table in self._tables.values() for block in table.blocks)
        free_ids = [block.block_id for block in self.pool.free_queue]
        if len(set(free_ids)) != len(free_ids) or len(free_ids) != self.pool.num_free:
            raise InvariantError("the free queue holds a block twice, or its length is wrong")
        in_queue = set(free_ids)
        hashed: dict[int, bytes] = {}
        for block in self.pool.blocks:
            if block.ref_count != users[block.block_id]:
                raise InvariantError(f"{block!r} is in {users[block.block_id]} block tables")
            if (block.ref_count == 0) != (block.block_id in in_queue):
                raise InvariantError(f"{block!r} is in the free queue and in use, or in neither")
            if block.block_hash is not None:
                hashed[block.block_id] = block.block_hash
            elif block.ref_count > 1:
                raise InvariantError(f"{block!r} is shared and was never published")
        if dict(map(reversed, self.index.items())) != hashed:  # type: ignore[arg-type]
            raise InvariantError("the prefix index differs from the blocks' hashes")
        for request_id, table in self._tables.items():
            for block, block_hash in zip(table.blocks, table.chain.hashes, strict=False):
                if block.block_hash is not None and block.block_hash != block_hash:
                    raise InvariantError(f"request {request_id!r} holds {block!r} under another hash")
        if self.pool.scratch.ref_count or self.pool.scratch.block_hash is not None:
            raise InvariantError("the scratch block was handed out")
