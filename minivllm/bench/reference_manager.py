"""The cache manager in the way that needs no thought: what `bench_manager.py` compares the real one with.

Content is named by all tokens before it, the free queue is a list. Right, and slow: each name holds the whole prompt up
to its block, and what leaves the middle of a list moves the rest. No hashes, no links, no events, and nothing is
checked before it is done. Knows tokens and block ids; must not know the real manager.
"""

from __future__ import annotations


class ObviousManager:
    """A dictionary of token tuples and a list of free blocks. A prompt is known by its number."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.free_blocks = list(range(1, num_blocks + 1))
        self.ref_counts = dict.fromkeys(self.free_blocks, 0)
        self.found_at: dict[tuple[int, ...], int] = {}
        self.content_of: dict[int, tuple[int, ...]] = {}
        self.names: dict[int, list[tuple[int, ...]]] = {}
        self.tables: dict[int, list[int]] = {}
        self.hits: dict[int, list[int]] = {}

    def hash(self, number: int, tokens: list[int]) -> None:
        """Name each full block by all tokens from the start to its end."""
        ends = range(self.block_size, len(tokens) + 1, self.block_size)
        self.names[number] = [tuple(tokens[:end]) for end in ends]

    def allocate_and_publish(self, number: int) -> None:
        """Take a block for each name and one for the last token; make the full ones findable."""
        names = self.names[number]
        table = self.tables[number] = [self._pop() for _ in range(len(names) + 1)]
        for name, block in zip(names, table, strict=False):
            if name not in self.found_at:
                self.found_at[name] = block
                self.content_of[block] = name

    def look_up(self, number: int) -> int:
        """Find the names in their order, to the first miss."""
        hits = self.hits[number] = []
        for name in self.names[number]:
            block = self.found_at.get(name)
            if block is None:
                break
            hits.append(block)
        return len(hits)

    def take_hits(self, number: int) -> None:
        """Count up, take out of the queue, and take one block more."""
        for block in self.hits[number]:
            if self.ref_counts[block] == 0:
                self.free_blocks.remove(block)
            self.ref_counts[block] += 1
        self.tables[number] = [*self.hits[number], self._pop()]

    def free(self, number: int) -> None:
        """Count down from the tail to the head; what nobody uses goes to the queue."""
        place = 0
        for block in reversed(self.tables.pop(number)):
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                if block in self.content_of:
                    self.free_blocks.append(block)
                else:
                    self.free_blocks.insert(place, block)
                    place += 1

    def _pop(self) -> int:
        block = self.free_blocks.pop(0)
        name = self.content_of.pop(block, None)
        if name is not None:
            del self.found_at[name]
        self.ref_counts[block] = 1
        return block
