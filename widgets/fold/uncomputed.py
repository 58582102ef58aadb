"""Published blocks that nobody has computed: what publication before the forward pass leaves behind.

Knows events and the state after them. Must not know how such a block is shown. The page follows the same blocks in
``blocks.js``.
"""

from __future__ import annotations

from minivllm import log as ev
from minivllm.log import State


class Uncomputed(dict[int, tuple[str, int]]):
    """Block id → who was to compute it, and up to which of its tokens it must have done so."""

    def take(self, event: ev.Event, state: State, block_size: int) -> None:
        """Take one event in, which ``state`` has already."""
        if isinstance(event, ev.BlocksPublished):
            num_computed = state.requests[event.request_id].num_computed_tokens
            for block_id, index in zip(event.block_ids, event.indices, strict=True):
                end = (index + 1) * block_size
                if num_computed < end:
                    self[block_id] = (event.request_id, end)
        elif isinstance(event, ev.ChunkComputed) and self:
            done = event.start + event.num_tokens
            for block_id, (by, end) in list(self.items()):
                if by == event.request_id and end <= done:
                    del self[block_id]
        elif isinstance(event, (ev.BlocksEvicted, ev.CacheReset)):
            for block_id in event.block_ids:
                self.pop(block_id, None)
