"""Least recently used first, the default."""

from __future__ import annotations

from collections.abc import Sequence

from minivllm.cache.block_pool import Block
from minivllm.cache.eviction.policy import Placement


class LRU:
    """Least recently used first; within a request, the tail before the head (vLLM's order).

    A block without a hash goes to the front: nothing is lost by reusing it. A published one goes to the back.
    A request is freed from its tail, so that under pressure the end of a chain goes before its beginning: a
    chain that has lost its first block can never be found again.
    """

    name = "lru"

    def place(self, freed: Sequence[Block]) -> Placement:
        """Split by whether the block has a hash, keeping the order."""
        placement = Placement([], [])
        for block in freed:
            (placement.to_front if block.block_hash is None else placement.to_back).append(block)
        return placement
