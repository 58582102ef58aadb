"""Blocks, their states, and the queue of free ones.

    FREE ──allocate──► OWNED ──publish──► PUBLISHED ──evict, reset──► FREE
     ▲                   │ ▲ fork          │ ▲ hit, fork, free: stays PUBLISHED
     └──────free─────────┘ └─┘             └─┘

    head ⇄ 7 ⇄ 3 ⇄ 9 ⇄ ... ⇄ 2 ⇄ tail        reused from the head, appended at the end

All blocks are made once, when the engine starts. The free queue is a doubly linked list whose links are fields
of the blocks themselves, so that a block in the middle leaves in constant time when a request hits it (vLLM's
structure). A block that was published keeps its content and hash while it is free: it is found until it is
popped. Block 0 is the scratch block: it pads short block tables, and is never written or handed out.

Long prompts move a thousand blocks at a time, so the pool moves many with one call: O(1) a block, and the queue is
cut or joined once. Knows blocks and their order. Must not know tokens, requests or the index: `kv_cache_manager.py`
is the one caller that changes a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from minivllm.cache.block_hash import BlockHash
from minivllm.errors import InvariantError, OutOfBlocksError
from minivllm.log.states import BlockState

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

    @property
    def state(self) -> BlockState:
        """Which of the three it is; read off its hash and its count."""
        if self.block_hash is not None:
            return BlockState.PUBLISHED
        return BlockState.OWNED if self.ref_count else BlockState.FREE

    def __repr__(self) -> str:
        content = self.block_hash.hex()[:8] if self.block_hash else "no hash"
        return f"Block({self.block_id}, ref_count={self.ref_count}, {content})"


class FreeBlockQueue:
    """Doubly linked list of free blocks between two sentinels; every move is O(1) a block."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._head, self._tail = Block(-1), Block(-1)
        self._head.next_free, self._tail.prev_free = self._tail, self._head
        self.num_free = 0
        self.append_n(blocks)

    def popleft_n(self, num_blocks: int) -> list[Block]:
        """Take blocks from the head, in their order.

        Raises OutOfBlocksError, with nothing changed, for too many, and InvariantError for a number below 0.
        """
        check_count(num_blocks)
        if num_blocks > self.num_free:
            raise OutOfBlocksError(
                f"{num_blocks} blocks were asked for and {self.num_free} are free; "
                "wait for a request to end or make a larger pool"
            )
        taken = []
        block = self._head.next_free
        for _ in range(num_blocks):
            assert block is not None
            taken.append(block)
            after = block.next_free
            block.prev_free = block.next_free = None
            block = after
        assert block is not None
        self._head.next_free, block.prev_free = block, self._head
        self.num_free -= len(taken)
        return taken

    def remove_n(self, blocks: Sequence[Block]) -> None:
        """Unlink blocks from wherever they are. Raises InvariantError at the first one that is not in the queue.

        A freed chain lies there tail first, so the hits on it, head first, are neighbours: such a run is cut as one.
        """
        before: Block | None = None  # around the run that is being cut
        after: Block | None = None
        for block in blocks:
            if block is not before:
                self._close_up(before, after)
                after = block.next_free
            before = block.prev_free
            if before is None:
                self.num_free = sum(1 for _ in self)  # those before it have left
                raise InvariantError(f"block {block.block_id} is not in the free queue")
            block.prev_free = block.next_free = None
        self._close_up(before, after)
        self.num_free -= len(blocks)

    @staticmethod
    def _close_up(before: Block | None, after: Block | None) -> None:
        """Make two blocks neighbours, if there are any."""
        if before is not None and after is not None:
            before.next_free, after.prev_free = after, before

    def append_n(self, blocks: Sequence[Block]) -> None:
        """Put blocks at the end, so that ``blocks[-1]`` is reused last of all."""
        assert self._tail.prev_free is not None
        self._insert(self._tail.prev_free, blocks, self._tail)

    def prepend_n(self, blocks: Sequence[Block]) -> None:
        """Put blocks at the head, so that ``blocks[0]`` is reused next, then ``blocks[1]``, and so on."""
        assert self._head.next_free is not None
        self._insert(self._head, blocks, self._head.next_free)

    def _insert(self, before: Block, blocks: Sequence[Block], after: Block) -> None:
        """Link blocks, in their order, between two neighbours.

        Raises InvariantError, with nothing changed, if one is in the queue already or comes twice.
        """
        last = before
        for block in blocks:
            if block.prev_free is not None:
                while last is not before:  # walk back over what was linked so far
                    assert last.prev_free is not None
                    linked, last = last, last.prev_free
                    linked.prev_free = linked.next_free = None
                before.next_free = after
                raise InvariantError(f"block {block.block_id} is in the free queue already")
            block.prev_free, last.next_free = last, block
            last = block
        last.next_free, after.prev_free = after, last
        self.num_free += len(blocks)

    def __iter__(self) -> Iterator[Block]:
        block = self._head.next_free
        while block is not None and block is not self._tail:
            yield block
            block = block.next_free

    def __contains__(self, block: Block) -> bool:
        return block.next_free is not None

    def __len__(self) -> int:
        return self.num_free


def check_count(count: int) -> None:
    """Raise InvariantError for a number of blocks or tokens that is none, such as -1 or 1.5."""
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise InvariantError(
            f"{count!r} was given as a number of blocks or tokens; it must be a whole number of 0 or more"
        )


class Dropped(NamedTuple):
    """Blocks that lost one user: those that nobody uses now, and those that others still hold."""

    freed: list[Block]
    still_held: list[Block]


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

    def get_new_blocks(self, num_blocks: int) -> list[Block]:
        """Pop blocks from the head of the free queue and count one user for each. All or nothing.

        The blocks may still carry the hash of what they held: the caller forgets it before anything else.
        Raises OutOfBlocksError, with nothing changed, if fewer are free, and InvariantError for a number below 0.
        """
        check_count(num_blocks)
        if num_blocks > self.num_free:
            raise OutOfBlocksError(
                f"{num_blocks} blocks were asked for and {self.num_free} of {self.num_blocks} are free; "
                "wait for a request to end or make a larger pool"
            )
        taken = self.free_queue.popleft_n(num_blocks)
        for block in taken:
            block.ref_count = 1
        return taken

    def touch(self, blocks: Sequence[Block]) -> None:
        """Count one more user of each block (published, or shared by samples); those in the free queue leave it."""
        freed = []
        for block in blocks:
            count = block.ref_count
            if count == 0:
                freed.append(block)
            block.ref_count = count + 1
        self.free_queue.remove_n(freed)

    def free_blocks(self, blocks: Sequence[Block]) -> Dropped:
        """Count one user less of each block, in their order.

        The caller then puts those that became free back into the free queue. Raises InvariantError, with nothing
        changed, for a count below 0.
        """
        freed: list[Block] = []
        still_held: list[Block] = []
        for block in blocks:
            count = block.ref_count - 1
            if count < 0:
                for dropped in (*freed, *still_held):
                    dropped.ref_count += 1
                raise InvariantError(f"block {block.block_id} was freed once too often")
            block.ref_count = count
            if count:
                still_held.append(block)
            else:
                freed.append(block)
        return Dropped(freed, still_held)
