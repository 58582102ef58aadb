"""Blocks, and the queue of those that nobody uses.

    head ⇄ 7 ⇄ 3 ⇄ 9 ⇄ ... ⇄ 2 ⇄ tail        reused from the head, appended at the end

All blocks are made once, when the engine starts. The free queue is a doubly linked list whose links are fields
of the blocks themselves, so that a block in the middle leaves in constant time when a request hits it (vLLM's
structure). A block that was published keeps its content and hash while it is free: it is found until it is
popped. Block 0 is the scratch block: padding is written there; it is never handed out.

Knows blocks and their order. Must not know tokens, requests or the index: `kv_cache_manager.py` is the one
caller that changes a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from minivllm.block_hash import BlockHash
from minivllm.errors import InvariantError, OutOfBlocksError

SCRATCH_BLOCK_ID = 0


class Block:
    """A page of KV cache: ``block_size`` tokens in every layer.

    ``ref_count`` is the number of block tables that it is in. ``block_hash`` is set exactly while it is
    published.
    """

    __slots__ = ("block_hash", "block_id", "next_free", "prev_free", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.block_hash: BlockHash | None = None
        self.prev_free: Block | None = None
        self.next_free: Block | None = None

    def __repr__(self) -> str:
        content = self.block_hash.hex()[:8] if self.block_hash else "no hash"
        return f"Block({self.block_id}, ref_count={self.ref_count}, {content})"


class FreeBlockQueue:
    """Doubly linked list of free blocks between two sentinels; every move is O(1) a block."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._head, self._tail = Block(-1), Block(-1)
        self._head.next_free, self._tail.prev_free = self._tail, self._head
        self.num_free = 0
        for block in blocks:
            self.append(block)

    def popleft(self) -> Block:
        """Take the block at the head. Raises OutOfBlocksError if there is none."""
        block = self._head.next_free
        if block is None or block is self._tail:
            raise OutOfBlocksError("no block is free; wait for a request to end or make a larger pool")
        self.remove(block)
        return block

    def remove(self, block: Block) -> None:
        """Unlink a block from wherever it is. Raises InvariantError if it is not in the queue."""
        before, after = block.prev_free, block.next_free
        if before is None or after is None:
            raise InvariantError(f"block {block.block_id} is not in the free queue")
        before.next_free, after.prev_free = after, before
        block.prev_free = block.next_free = None
        self.num_free -= 1

    def append(self, block: Block) -> None:
        """Put a block at the end: reused last."""
        assert self._tail.prev_free is not None
        self._link(block, self._tail.prev_free, self._tail)

    def prepend_all(self, blocks: Sequence[Block]) -> None:
        """Put blocks at the head, so that ``blocks[0]`` is reused next, then ``blocks[1]``, and so on."""
        for block in reversed(blocks):
            assert self._head.next_free is not None
            self._link(block, self._head, self._head.next_free)

    def _link(self, block: Block, before: Block, after: Block) -> None:
        if block.next_free is not None:
            raise InvariantError(f"block {block.block_id} is in the free queue already")
        block.prev_free, block.next_free = before, after
        before.next_free = after.prev_free = block
        self.num_free += 1

    def __iter__(self) -> Iterator[Block]:
        block = self._head.next_free
        while block is not None and block is not self._tail:
            yield block
            block = block.next_free

    def __contains__(self, block: Block) -> bool:
        return block.next_free is not None

    def __len__(self) -> int:
        return self.num_free


class BlockPool:
    """All blocks of the engine, and which of them are free."""

    def __init__(self, num_blocks: int) -> None:
        self.scratch = Block(SCRATCH_BLOCK_ID)
        self.blocks = [Block(block_id) for block_id in range(1, num_blocks + 1)]
        self.free_queue = FreeBlockQueue(self.blocks)

    @property
    def num_blocks(self) -> int:
        """Usable blocks; the scratch block is not one."""
        return len(self.blocks)

    @property
    def num_free(self) -> int:
        """Blocks with a count of 0, published ones included."""
        return self.free_queue.num_free

    def take(self, num_blocks: int) -> list[Block]:
        """Pop blocks from the head of the free queue and count one user for each. All or nothing.

        The blocks may still carry the hash of what they held: the caller forgets it before anything else.
        Raises OutOfBlocksError, with nothing changed, if fewer are free.
        """
        if num_blocks > self.num_free:
            raise OutOfBlocksError(
                f"{num_blocks} blocks were asked for and {self.num_free} of {self.num_blocks} are free; "
                "wait for a request to end or make a larger pool"
            )
        taken = [self.free_queue.popleft() for _ in range(num_blocks)]
        for block in taken:
            block.ref_count = 1
        return taken

    def share(self, block: Block) -> None:
        """Count one more user of a published block; it leaves the free queue if it was there."""
        if block.ref_count == 0:
            self.free_queue.remove(block)
        block.ref_count += 1

    def drop(self, block: Block) -> bool:
        """Count one user less and return whether that was the last one.

        The caller then puts the block back into the free queue. Raises InvariantError for a count below 0.
        """
        if block.ref_count < 1:
            raise InvariantError(f"block {block.block_id} was freed once too often")
        block.ref_count -= 1
        return block.ref_count == 0
