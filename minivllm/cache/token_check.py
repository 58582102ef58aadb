"""The check of token ids: a hit is served only if the block holds the very tokens that were asked for.

A hash names what a block holds, and two contents may have the same hash: never under SHA-256, soon under a weak one.
With the check, what each published block holds is kept beside its hash and compared on every hit.

Knows tokens and extra keys of blocks. Must not know counts, the free queue or the index.
"""

from __future__ import annotations

from collections.abc import Set

from minivllm.cache.block_hash import block_extra_keys
from minivllm.cache.block_table import BlockTable
from minivllm.cache.content import Collision, Content
from minivllm.request import Request


class TokenCheck:
    """What every published block holds."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._held: dict[int, Content] = {}

    def collision(self, request: Request, table: BlockTable, position: int, block_id: int) -> Collision | None:
        """Return how the block differs from the request's block at ``position``, None if it holds the same."""
        wanted, held = self._content(request, table, position), self._held[block_id]
        if not held.same_as(wanted):
            return Collision(block_id, table.chain.hashes[position], wanted.token_ids, held.token_ids)
        table.contents[position] = held  # one object from here on: the next comparison ends here
        return None

    def published(self, request: Request, table: BlockTable, position: int) -> None:
        """Keep what the request's block at ``position`` holds: it can be found from now on."""
        self._held[table.blocks[position].block_id] = self._content(request, table, position)

    def forget(self, block_id: int) -> None:
        """The block cannot be found any more."""
        del self._held[block_id]

    @property
    def block_ids(self) -> Set[int]:
        """The published blocks."""
        return self._held.keys()

    def _content(self, request: Request, table: BlockTable, position: int) -> Content:
        """Return what the request's block at ``position`` holds, and keep it for the next time."""
        size, contents = self._block_size, table.contents
        for index in range(len(contents), position + 1):
            tokens = tuple(request.token_ids[index * size : (index + 1) * size])
            keys = block_extra_keys(request.extra_keys, index, size)
            contents.append(Content(contents[-1] if contents else None, tokens, keys))
        return contents[position]
