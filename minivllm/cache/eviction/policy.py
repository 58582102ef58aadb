"""Which free block is forgotten first.

The free queue is popped at its head. So the order of forgetting is decided when blocks are put into it. Knows
blocks that have just become free; must not know counts of others, requests or the index: safety stays with the
manager, and no policy can make it hand out a block in use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from minivllm.cache.block_pool import Block


@dataclass(frozen=True, slots=True)
class Placement:
    """Where blocks go in the free queue: ``to_front[0]`` is reused next, ``to_back[-1]`` last of all."""

    to_front: list[Block]
    to_back: list[Block]

    def is_whole(self, freed: Sequence[Block]) -> bool:
        """Whether each freed block is placed once, and nothing else."""
        placed = {*self.to_front, *self.to_back}
        return placed == set(freed) and len(self.to_front) + len(self.to_back) == len(freed)


class EvictionPolicy(Protocol):
    """Decides the place of blocks that have just become free."""

    name: str

    def place(self, freed: Sequence[Block]) -> Placement:
        """Place every block of ``freed``, which comes tail first. Changes nothing itself."""
        ...
