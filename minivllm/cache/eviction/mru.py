"""Most recently used first: the order to compare LRU with."""

from __future__ import annotations

from collections.abc import Sequence

from minivllm.cache.block_pool import Block
from minivllm.cache.eviction.policy import Placement


class MRU:
    """Most recently used first: what was just freed is forgotten next. Here to be compared, not to be used."""

    name = "mru"

    def place(self, freed: Sequence[Block]) -> Placement:
        """Put everything at the front, blocks without a hash before the published ones."""
        plain = [block for block in freed if block.block_hash is None]
        published = [block for block in freed if block.block_hash is not None]
        return Placement(to_front=[*plain, *published], to_back=[])
