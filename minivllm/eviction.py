"""Which free block is forgotten first.

The free queue is popped at its head. So the order of forgetting is decided when blocks are put into it. Knows
blocks that have just become free; must not know counts of others, requests or the index: safety stays with the
manager, and no policy can make it hand out a block in use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from minivllm.block_pool import Block


@dataclass(frozen=True, slots=True)
class Placement:
    """Where blocks go in the free queue: ``to_front[0]`` is reused next, ``to_back[-1]`` last of all."""

    to_front: list[Block]
    to_back: list[Block]


class EvictionPolicy(Protocol):
    """Decides the place of blocks that have just become free."""

    name: str

    def place(self, freed: Sequence[Block]) -> Placement:
        """Place every block of ``freed``, which comes tail first. Changes nothing itself."""
        ...


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


class MRU:
    """Most recently used first: what was just freed is forgotten next. Here to be compared, not to be used."""

    name = "mru"

    def place(self, freed: Sequence[Block]) -> Placement:
        """Put everything at the front, blocks without a hash before the published ones."""
        plain = [block for block in freed if block.block_hash is None]
        published = [block for block in freed if block.block_hash is not None]
        return Placement(to_front=[*plain, *published], to_back=[])


EVICTION_POLICIES: dict[str, EvictionPolicy] = {policy.name: policy for policy in (LRU(), MRU())}
