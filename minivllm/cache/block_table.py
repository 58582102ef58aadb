"""The block table of one request: its blocks in the order of its tokens, the hashes of those that are full, and what a
look-up found for it.

Knows one request's blocks. Must not know the pool, the index or other requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from minivllm.cache.block_hash import HashChain
from minivllm.cache.block_pool import Block
from minivllm.cache.content import Collision, Content


@dataclass(frozen=True, slots=True)
class ComputedBlocks:
    """What a look-up found: published blocks, from behind those that the request holds itself to the first miss.

    Good only until the next change of the pool: nothing holds the blocks yet. ``collision`` is the block at which
    the check of token ids ended the look-up, if it did.
    """

    block_ids: tuple[int, ...]
    num_tokens: int
    collision: Collision | None = None


NOTHING_COMPUTED = ComputedBlocks((), 0)


@dataclass(slots=True)
class BlockTable:
    """The blocks of one request, and its hash chain. The first ``num_settled`` blocks need no more publishing.

    ``contents`` are what its full blocks hold: filled only under the check of token ids.
    """

    chain: HashChain
    blocks: list[Block] = field(default_factory=list)
    num_settled: int = 0
    contents: list[Content] = field(default_factory=list)

    def fork(self) -> BlockTable:
        """Return a table of its own on the same blocks, for another sample of the same prompt."""
        return BlockTable(self.chain.fork(), list(self.blocks), self.num_settled, list(self.contents))

    def is_shared_at(self, num_tokens: int, block_size: int) -> bool:
        """Whether the token after ``num_tokens`` would go into a block that other samples read, too."""
        position, offset = divmod(num_tokens, block_size)
        return bool(offset) and self.blocks[position].ref_count > 1

    def published_at(
        self, positions: Sequence[int]
    ) -> tuple[tuple[int, ...], tuple[str, ...], tuple[str, ...], tuple[int, ...]]:
        """Return block ids, hashes, parents' hashes (hexadecimal, "" for the root) and the positions themselves.

        In a run of neighbours each block's parent is the one just before.
        """
        hashes, start, end = self.chain.hashes, positions[0], positions[-1] + 1
        names = ["" if start == 0 else hashes[start - 1].hex(), *[h.hex() for h in hashes[start:end]]]
        return (
            tuple([self.blocks[position].block_id for position in positions]),
            tuple([names[position - start + 1] for position in positions]),
            tuple([names[position - start] for position in positions]),
            tuple(positions),
        )

    def duplicated_at(
        self, duplicated: Sequence[tuple[int, int]]
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[str, ...]]:
        """Return block ids, the ids of the blocks that are found instead, and hashes, of (position, found block)."""
        return (
            tuple([self.blocks[position].block_id for position, _ in duplicated]),
            tuple([found for _, found in duplicated]),
            tuple([self.chain.hashes[position].hex() for position, _ in duplicated]),
        )
