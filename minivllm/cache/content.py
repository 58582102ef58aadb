"""What a full block really holds, and a block that was found by its hash and holds something else.

Knows tokens and extra keys. Must not know counts, the pool or the index.
"""

from __future__ import annotations

from dataclasses import dataclass

from minivllm.cache.block_hash import BlockHash, BlockKeys
from minivllm.log import events as ev


@dataclass(frozen=True, slots=True)
class Collision:
    """A block that was found by its hash and holds other tokens than the ones that were asked for."""

    block_id: int
    block_hash: BlockHash
    token_ids: tuple[int, ...]
    held_token_ids: tuple[int, ...]

    def event(self, request_id: str) -> ev.HashCollision:
        """Return what the log says of it."""
        return ev.HashCollision(request_id, self.block_id, self.block_hash.hex(), self.token_ids, self.held_token_ids)


@dataclass(slots=True, eq=False)
class Content:
    """What a full block really holds: its tokens and keys after those of all blocks before."""

    parent: Content | None
    token_ids: tuple[int, ...]
    extra_keys: BlockKeys

    def same_as(self, other: Content) -> bool:
        """Compare whole chains. They usually meet in one object after a step, so this is O(1) a block."""
        mine: Content | None = self
        theirs: Content | None = other
        while mine is not theirs:
            if mine is None or theirs is None:
                return False
            if mine.token_ids != theirs.token_ids or mine.extra_keys != theirs.extra_keys:
                return False
            mine, theirs = mine.parent, theirs.parent
        return True
