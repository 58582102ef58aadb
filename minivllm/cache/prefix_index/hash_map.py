"""The prefix index as a dictionary from block hash to block id: the default, and all that whole blocks need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from minivllm.cache.block_hash import BlockHash
from minivllm.errors import InvariantError


class HashMapIndex:
    """A dictionary from block hash to block id: one look-up a block, from the start to the first miss."""

    def __init__(self) -> None:
        self._block_ids: dict[BlockHash, int] = {}

    def longest_prefix(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Walk the chain and stop at the first miss. O(blocks found)."""
        found = []
        for block_hash in hashes:
            block_id = self._block_ids.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def get(self, block_hash: BlockHash) -> int | None:
        """Return the id of the block with this hash, or None."""
        return self._block_ids.get(block_hash)

    def insert(self, block_hash: BlockHash, block_id: int) -> None:
        """Make a block findable. Raises InvariantError if the hash is there already."""
        if block_hash in self._block_ids:
            raise InvariantError(f"hash {block_hash.hex()[:8]} is published already")
        self._block_ids[block_hash] = block_id

    def remove(self, block_hash: BlockHash) -> None:
        """Forget a hash. Raises InvariantError if it is not there."""
        if self._block_ids.pop(block_hash, None) is None:
            raise InvariantError(f"hash {block_hash.hex()[:8]} is not published")

    def items(self) -> Iterator[tuple[BlockHash, int]]:
        """Iterate over all (hash, block id)."""
        return iter(self._block_ids.items())

    def __len__(self) -> int:
        return len(self._block_ids)
