"""What is published, and where it is found.

A hash map is enough to find a prefix: a block's hash contains its whole past through its parent's, so the chain
*is* the prefix tree, written down without one. Knows hashes and block ids. Must not know counts, the free queue
or requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from minivllm.cache.block_hash import BlockHash


class PrefixIndex(Protocol):
    """Finds published blocks. `HashMapIndex` is the one that ships; a lab can write another."""

    def longest_prefix(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Return the ids of the published blocks of the chain, from its start to its first miss.

        Changes nothing: no counts, no order, no statistics.
        """
        ...

    def get(self, block_hash: BlockHash) -> int | None:
        """Return the id of the block with this hash, or None. Changes nothing."""
        ...

    def insert(self, block_hash: BlockHash, block_id: int) -> None:
        """Make a block findable. Raises InvariantError if the hash is there already."""
        ...

    def remove(self, block_hash: BlockHash) -> None:
        """Forget a hash. Raises InvariantError if it is not there."""
        ...

    def items(self) -> Iterator[tuple[BlockHash, int]]:
        """Iterate over all (hash, block id)."""
        ...

    def __len__(self) -> int: ...
