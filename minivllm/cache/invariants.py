"""Whether pool, index and block tables agree: the invariants of the cache.

Slow and plain, for tests and for a cell: everything is counted anew. Knows all parts of the cache, and changes none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from minivllm.cache.block_pool import BlockPool
from minivllm.cache.block_table import BlockTable
from minivllm.cache.prefix_index.index import PrefixIndex
from minivllm.cache.token_check import TokenCheck
from minivllm.errors import InvariantError
from minivllm.log.states import BLOCK_TRANSITIONS, BlockAction


def check_pool(
    pool: BlockPool,
    index: PrefixIndex,
    tables: Mapping[str, BlockTable],
    duplicates: set[int],
    check: TokenCheck | None,
) -> None:
    """Raise InvariantError for the first contradiction. O(blocks + entries of all tables)."""
    users = Counter(block.block_id for table in tables.values() for block in table.blocks)
    free_ids = [block.block_id for block in pool.free_queue]
    if len(set(free_ids)) != len(free_ids) or len(free_ids) != pool.num_free:
        raise InvariantError("the free queue holds a block twice, or its length is wrong")
    in_queue = set(free_ids)
    hashed: dict[int, bytes] = {}
    for block in pool.blocks:
        if block.ref_count != users[block.block_id]:
            raise InvariantError(f"{block!r} is in {users[block.block_id]} block tables")
        if (block.ref_count == 0) != (block.block_id in in_queue):
            raise InvariantError(f"{block!r} is in the free queue and in use, or in neither")
        if block.ref_count and (block.state, BlockAction.FREE) not in BLOCK_TRANSITIONS:
            raise InvariantError(f"{block!r} is {block.state.value} and in use, and could never be freed")
        if block.block_hash is not None:
            hashed[block.block_id] = block.block_hash
    if dict(map(reversed, index.items())) != hashed:  # type: ignore[arg-type]
        raise InvariantError("the prefix index differs from the blocks' hashes")
    _check_shared_places(tables.values())
    if not duplicates <= users.keys() or not duplicates.isdisjoint(hashed):
        raise InvariantError("a block that is a duplicate is in no block table, or is published itself")
    for request_id, table in tables.items():
        for block, block_hash in zip(table.blocks, table.chain.hashes, strict=False):
            if block.block_hash is not None and block.block_hash != block_hash:
                raise InvariantError(f"request {request_id!r} holds {block!r} under another hash")
    if check is not None and check.block_ids != hashed.keys():
        raise InvariantError("the check of token ids knows other blocks than those that are published")
    if pool.scratch.ref_count or pool.scratch.block_hash is not None:
        raise InvariantError("the scratch block was handed out")


def _check_shared_places(tables: Iterable[BlockTable]) -> None:
    """Raise InvariantError for a block that samples share at two places of their tables.

    A published block may stand at two places, but only where a collision of hashes was served unchecked.
    """
    places: dict[int, int] = {}
    for table in tables:
        for place, block in enumerate(table.blocks):
            if block.block_hash is None and places.setdefault(block.block_id, place) != place:
                raise InvariantError(f"{block!r} is block {place} of one request and another of a second")
