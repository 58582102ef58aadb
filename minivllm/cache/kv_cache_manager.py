"""The KV cache manager: it looks up, allocates, publishes and frees blocks. No other part changes a block.

To publish a block is to insert its hash into the prefix index, so that other requests can find it. A block that needs
no publishing (any more) is settled: it was published or taken as a hit, or another block with the same content is
published.

A request's block table lists its blocks in token order. It only grows until the request frees all of it, with one
exception: samples of one prompt share its partly filled last block, and a sample that writes into it gets a copy
(copy on write). An allocation that does not fit raises OutOfBlocksError and changes nothing.

`block_pool.py` draws the states of a block; `block_table.py` has the block table and the result of a look-up. Knows
requests' tokens and blocks; must not know the scheduler, flights, when to publish, or how K/V is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from minivllm.cache.block_hash import SHA256, BlockHash, BlockHasher, HashChain
from minivllm.cache.block_pool import Block, BlockPool
from minivllm.cache.block_table import NOTHING_COMPUTED, BlockTable, ComputedBlocks
from minivllm.cache.eviction.policy import EvictionPolicy
from minivllm.cache.invariants import check_pool
from minivllm.cache.prefix_index.index import PrefixIndex
from minivllm.cache.token_check import TokenCheck
from minivllm.errors import InvariantError, OutOfBlocksError
from minivllm.log import events as ev
from minivllm.request import Request
from minivllm.step import BlockCopy


class KVCacheManager:
    """The block tables of all requests, over one block pool.

    Without ``enable_prefix_caching`` nothing is hashed. ``check_token_ids`` also compares the tokens of each hit, so
    that a hash collision is not served.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        index: PrefixIndex,
        eviction: EvictionPolicy,
        emit: Callable[[ev.Event], None],
        *,
        enable_prefix_caching: bool = True,
        hasher: BlockHasher = SHA256,
        check_token_ids: bool = False,
    ) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(num_blocks)
        self.index = index
        self.eviction = eviction
        self.hasher = hasher
        self._tables: dict[str, BlockTable] = {}
        self._duplicates: set[int] = set()  # ids of blocks in use, reported as duplicates
        self._check = TokenCheck(block_size) if check_token_ids else None
        self._emit = emit

    # -- Queries: nothing changes --------------------------------------------------------------------------

    def block_ids(self, request_id: str) -> tuple[int, ...]:
        """Return the ids of the request's blocks in token order; empty if it has none."""
        table = self._tables.get(request_id)
        return tuple(block.block_id for block in table.blocks) if table else ()

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks ``num_tokens`` tokens need; the last one may be partly filled."""
        return -(-num_tokens // self.block_size)

    def get_computed_blocks(self, request: Request) -> ComputedBlocks:
        """Find the request's longest cached prefix: published blocks from its first block to the first miss.

        Finds at most ``num_tokens - 1`` tokens: the last token must be computed, because its logits give the next
        one. So a prompt whose length is a multiple of the block size computes its last block even if it is cached.
        Finds nothing without prefix caching. Changes no reference count, no queue order and no statistics.
        """
        return self._look_up(request, self._table(request), 0)

    def get_adoptable_blocks(self, request: Request) -> ComputedBlocks:
        """Find blocks that a running prefill can take ("adopt") because others published them since its last look-up.

        Finds nothing unless the request is at a block boundary: a block that it has partly filled is not replaced.
        Changes nothing.
        """
        table = self._tables.get(request.request_id)
        if table is None or request.num_computed_tokens % self.block_size:
            return NOTHING_COMPUTED
        return self._look_up(request, table, request.num_computed_tokens // self.block_size)

    def _look_up(self, request: Request, table: BlockTable, first: int) -> ComputedBlocks:
        most = (request.num_tokens - 1) // self.block_size
        block_ids = self.index.longest_prefix(table.chain.hashes[first:most])
        collision = None
        if self._check is not None:
            for place, block_id in enumerate(block_ids):
                collision = self._check.collision(request, table, first + place, block_id)
                if collision is not None:
                    del block_ids[place:]
                    break
        return ComputedBlocks(tuple(block_ids), len(block_ids) * self.block_size, collision)

    def chain_hashes(self, request: Request) -> Sequence[BlockHash]:
        """Return the hashes of the request's full blocks; empty without prefix caching. Callers must not change it."""
        return self._table(request).chain.hashes

    def has_room(
        self,
        request: Request,
        num_new_tokens: int,
        computed: ComputedBlocks = NOTHING_COMPUTED,
        *,
        num_spare: int = 0,
    ) -> bool:
        """Whether `allocate_slots` would succeed with the same arguments and leave ``num_spare`` blocks free."""
        needed = self._num_blocks_needed(request, num_new_tokens, computed, self._hits(computed))
        return needed + num_spare <= self.pool.num_free

    def _hits(self, computed: ComputedBlocks) -> list[Block]:
        blocks = self.pool.blocks
        return [blocks[block_id - 1] for block_id in computed.block_ids]

    def _num_blocks_needed(
        self, request: Request, num_new_tokens: int, computed: ComputedBlocks, hits: Sequence[Block]
    ) -> int:
        """Return how many free blocks an allocation takes: new blocks, free hits, and the target of a copy on write."""
        table = self._tables.get(request.request_id)
        num_held = len(table.blocks) if table else 0
        num_known = request.num_computed_tokens + computed.num_tokens
        num_new = self.num_blocks_for(num_known + num_new_tokens) - num_held - len(hits)
        num_free_hits = [block.ref_count for block in hits].count(0)
        copied = table is not None and not hits and table.is_shared_at(num_known, self.block_size)
        return max(num_new, 0) + num_free_hits + copied

    # -- Changes -------------------------------------------------------------------------------------------

    def allocate_slots(
        self, request: Request, num_new_tokens: int, computed: ComputedBlocks = NOTHING_COMPUTED
    ) -> BlockCopy | None:
        """Append the hits in ``computed`` to the block table, then new blocks for ``num_new_tokens`` more tokens.

        The order matters: check that enough blocks are free; take the hits (reference count up, out of the free
        queue); only then pop new blocks from the queue and evict their old content. Otherwise a pop could evict a hit.

        If the next token goes into a block that other samples read too, the request gets a block of its own in that
        place, and the copy is returned that the runner must do before it computes the step. Otherwise returns None.
        Raises OutOfBlocksError, with nothing changed, if too few blocks are free, and InvariantError if there are
        hits and the request is not at a block boundary.
        """
        hits = self._hits(computed)
        needed = self._num_blocks_needed(request, num_new_tokens, computed, hits)
        if needed > self.pool.num_free:
            raise OutOfBlocksError(
                f"request {request.request_id!r} asks for {needed} blocks and {self.pool.num_free} of "
                f"{self.pool.num_blocks} are free; wait for a request to end or make a larger pool"
            )
        table = self._table(request)
        if hits:
            self._take_hits(request, table, computed, hits)
        if computed.collision is not None:
            self._emit(computed.collision.event(request.request_id))
        num_known = request.num_computed_tokens + computed.num_tokens
        num_new = self.num_blocks_for(num_known + num_new_tokens) - len(table.blocks)
        copied = table.is_shared_at(num_known, self.block_size)
        if num_new + copied <= 0:
            return None
        taken = self.pool.get_new_blocks(num_new + copied)
        self._forget(request.request_id, taken)
        copy = self._copy_on_write(request, table, num_known, taken.pop(0)) if copied else None
        if taken:
            table.blocks.extend(taken)
            self._emit(ev.BlocksAllocated(request.request_id, tuple([block.block_id for block in taken])))
        return copy

    def _take_hits(self, request: Request, table: BlockTable, computed: ComputedBlocks, hits: Sequence[Block]) -> None:
        """Add a reference to each hit, and append the hits to the block table."""
        if len(table.blocks) * self.block_size != request.num_computed_tokens:
            raise InvariantError(f"request {request.request_id!r} is inside a block of its own and cannot take hits")
        self.pool.touch(hits)
        if table.num_settled == len(table.blocks):
            table.num_settled += len(hits)
        adopted = bool(table.blocks)
        table.blocks.extend(hits)
        if adopted:
            self._emit(ev.BlocksAdopted(request.request_id, computed.block_ids, computed.num_tokens))
        else:
            self._emit(ev.BlocksHit(request.request_id, computed.block_ids))

    def _copy_on_write(self, request: Request, table: BlockTable, num_known: int, block: Block) -> BlockCopy:
        """Replace the shared, partly filled last block with ``block``. The other samples keep the old one."""
        position, num_tokens = divmod(num_known, self.block_size)
        source = table.blocks[position]
        self.pool.free_blocks([source])  # the others still reference it, so it does not become free
        table.blocks[position] = block
        self._emit(ev.BlockCopied(request.request_id, source.block_id, block.block_id, num_tokens))
        return BlockCopy(source.block_id, block.block_id)

    def fork(self, request: Request, samples: Sequence[Request]) -> None:
        """Give further samples of the request's prompt the same blocks, including the partly filled last one.

        Adds one reference per sample to each block. Raises InvariantError if a sample has blocks already.
        """
        table = self._tables[request.request_id]
        for sample in samples:
            if self.block_ids(sample.request_id):
                raise InvariantError(f"sample {sample.request_id!r} holds blocks already")
            self.pool.touch(table.blocks)
            self._tables[sample.request_id] = table.fork()
        names = tuple(sample.request_id for sample in samples)
        self._emit(ev.SamplesForked(request.request_id, names, self.block_ids(request.request_id)))

    def _forget(self, request_id: str, taken: Sequence[Block]) -> None:
        """Evict: remove the hashes of blocks popped from the free queue, before they are written."""
        evicted = [(block.block_id, block.block_hash) for block in taken if block.block_hash is not None]
        if not evicted:
            return
        for block in taken:
            if block.block_hash is not None:
                self._forget_hash(block)
        ids, hashes = zip(*evicted, strict=True)
        self._emit(ev.BlocksEvicted(request_id, ids, tuple([h.hex() for h in hashes])))

    def _forget_hash(self, block: Block) -> None:
        assert block.block_hash is not None
        self.index.remove(block.block_hash)
        block.block_hash = None
        if self._check is not None:
            self._check.forget(block.block_id)

    def publish(self, request: Request, num_tokens: int, *, before_computed: bool = False) -> Sequence[BlockHash]:
        """Publish the request's full blocks within its first ``num_tokens`` tokens (vLLM: `cache_blocks`).

        Returns the hashes of the blocks that this call settles. A look-up finds each of them from now on, in this
        request's block or in one published before. (With the token check it may reject what it finds, if that block
        has the same hash and other tokens.)

        A partly filled block is not hashed: its hash would change with every token. If two blocks have the same
        content, the index keeps the first one published; the other is a duplicate and stays private until freed.

        Raises InvariantError if ``num_tokens`` tokens are not computed yet, because hits must hold valid K/V. Only
        the unsafe teaching policy `AtAllocation` sets ``before_computed``, which skips this check.
        """
        if num_tokens > request.num_computed_tokens and not before_computed:
            raise InvariantError(
                f"request {request.request_id!r} would publish {num_tokens} tokens "
                f"and has computed {request.num_computed_tokens}"
            )
        table = self._tables.get(request.request_id)
        if not self.enable_prefix_caching or table is None:
            return ()
        first, last = table.num_settled, num_tokens // self.block_size
        if last <= first:
            return ()
        table.chain.extend_to(request.token_ids)
        hashes, blocks, index = table.chain.hashes, table.blocks, self.index
        published: list[int] = []  # positions in the block table
        duplicated: list[tuple[int, int]] = []  # (position, indexed block id)
        for position in range(first, last):
            block, block_hash = blocks[position], hashes[position]
            twin = index.get(block_hash)
            if twin is None:
                index.insert(block_hash, block.block_id)
                block.block_hash = block_hash
                self._duplicates.discard(block.block_id)  # the block in the index was evicted since
                published.append(position)
            elif twin != block.block_id and block.block_id not in self._duplicates:
                # Not a duplicate if it is itself in the index (adopted, or published by another sample); and a
                # duplicate is reported only once.
                duplicated.append((position, twin))
                self._duplicates.add(block.block_id)
        table.num_settled = last
        if self._check is not None:
            for position in published:
                self._check.published(request, table, position)
            # A block with the same hash and other tokens is no duplicate: it stays private, as a duplicate does.
            collisions = [(pair, self._check.collision(request, table, *pair)) for pair in duplicated]
            duplicated = [pair for pair, collision in collisions if collision is None]
            for _, collision in collisions:
                if collision is not None:
                    self._emit(collision.event(request.request_id))
        if published:
            self._emit(ev.BlocksPublished(request.request_id, *table.published_at(published)))
        if duplicated:
            self._emit(ev.BlocksDuplicated(request.request_id, *table.duplicated_at(duplicated)))
        return hashes[first:last]

    def prompt_is_published(self, request: Request) -> bool:
        """Whether all full blocks of the request's prompt are settled."""
        table = self._tables.get(request.request_id)
        return table is not None and table.num_settled >= request.num_prompt_tokens // self.block_size

    def free(self, request: Request) -> None:
        """Free all blocks of the request, the last one first.

        Published blocks stay findable until they are evicted. Does nothing for a request without blocks. Raises
        InvariantError if the eviction policy does not place each freed block exactly once.
        """
        table = self._tables.pop(request.request_id, None)
        if table is None or not table.blocks:
            return
        freed, still_held = self.pool.free_blocks(table.blocks[::-1])
        if self._duplicates:
            self._duplicates.difference_update([block.block_id for block in freed])
        placement = self.eviction.place(freed)
        if not placement.is_whole(freed):
            name = type(self.eviction).__name__
            raise InvariantError(f"eviction policy {name} did not place each freed block once")
        self.pool.free_queue.prepend_n(placement.to_front)
        self.pool.free_queue.append_n(placement.to_back)
        self._emit(
            ev.BlocksFreed(
                request.request_id,
                tuple([block.block_id for block in placement.to_front]),
                tuple([block.block_id for block in placement.to_back]),
                tuple([block.block_id for block in still_held]),
            )
        )

    def reset(self) -> bool:
        """Unpublish all blocks (vLLM: `reset_prefix_cache`). Returns False and changes nothing if a block is in use."""
        if self.pool.num_free != self.pool.num_blocks:
            return False
        forgotten = [block for block in self.pool.blocks if block.block_hash is not None]
        for block in forgotten:
            self._forget_hash(block)
        self._emit(ev.CacheReset(tuple(block.block_id for block in forgotten)))
        return True

    def _table(self, request: Request) -> BlockTable:
        """Return the request's block table, with all of its full blocks hashed. Made at the first call.

        It is kept while the request waits for room, so that the prompt is hashed once and not in every step.
        """
        table = self._tables.get(request.request_id)
        if table is None:
            table = BlockTable(HashChain(self.block_size, request.extra_keys, self.hasher))
            self._tables[request.request_id] = table
        if self.enable_prefix_caching:
            table.chain.extend_to(request.token_ids)
        return table

    def check_invariants(self) -> None:
        """Raise InvariantError if reference counts, free queue, index and block tables contradict each other."""
        check_pool(self.pool, self.index, self._tables, self._duplicates, self._check)
