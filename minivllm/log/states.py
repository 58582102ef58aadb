"""The states of a block, and what may happen to it in each."""

from __future__ import annotations

import enum


class BlockState(enum.Enum):
    """What a block holds, and who may use it."""

    FREE = "free"  # no content that anybody may read
    OWNED = "owned"  # being filled by one request, or by the samples of one prompt
    PUBLISHED = "published"  # full, hashed, findable; in the free queue exactly while its count is 0


class BlockAction(enum.Enum):
    """What can happen to a block."""

    ALLOCATE = "allocate"  # popped from the free queue for a request
    PUBLISH = "publish"  # full and computed: its hash enters the index
    HIT = "hit"  # found by its hash: one more user
    FORK = "fork"  # a further sample of the same prompt: one more user
    FREE = "free"  # its last user lets go of it (others before only lower the count)
    EVICT = "evict"  # popped for another request: its hash leaves the index first
    RESET = "reset"  # nobody uses any block, and all hashes are forgotten


BLOCK_TRANSITIONS: dict[tuple[BlockState, BlockAction], BlockState] = {
    (BlockState.FREE, BlockAction.ALLOCATE): BlockState.OWNED,
    (BlockState.OWNED, BlockAction.PUBLISH): BlockState.PUBLISHED,
    (BlockState.OWNED, BlockAction.FORK): BlockState.OWNED,
    (BlockState.OWNED, BlockAction.FREE): BlockState.FREE,
    (BlockState.PUBLISHED, BlockAction.HIT): BlockState.PUBLISHED,
    (BlockState.PUBLISHED, BlockAction.FORK): BlockState.PUBLISHED,
    (BlockState.PUBLISHED, BlockAction.FREE): BlockState.PUBLISHED,
    (BlockState.PUBLISHED, BlockAction.EVICT): BlockState.FREE,
    (BlockState.PUBLISHED, BlockAction.RESET): BlockState.FREE,
}
"""The one table of a block's transitions: a log that breaks it is refused by the replay, tests walk through it and the
diagram is drawn from it. What is not in it cannot happen: a block that nobody has published is never hit, and one in
use is never evicted (its count is above 0)."""
