"""K/V in blocks: the pool, and the view of it that an unchanged mlx-lm model takes for its own cache.

A model touches its cache in four ways only: it asks for a mask, reads ``offset`` for its rotary positions,
hands over new keys and values, and gets back all of them up to now. `LayerView` does these four over a
`BlockPoolArrays`; what is the same for every layer of a call (where to write, what to read, which positions)
is worked out once, in a `Call`.

The pool of a layer is ``[1 + num_blocks, num_kv_heads, block_size, head_dim]``. Block 0 is scratch: it pads
short block tables, is read only under a mask, is never written, and so stays zero (a NaN there would leak
through the mask, as 0 x NaN is NaN). For the same reason whoever drives the model lets no NaN stay in any other
block: it wipes what came out as no number.

Knows MLX arrays and block ids. Must not know the scheduler, requests' states or sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from minivllm.cache.block_pool import SCRATCH_BLOCK_ID
from minivllm.errors import InvariantError, ModelError
from minivllm.step import BlockCopy, ScheduledRow


class BlockPoolArrays:
    """The keys and values of all blocks, one pair of arrays per layer.

    A write is done in place only while nobody else holds the array: a second reference, or a gather that is
    still to be evaluated, turns it into a copy of the whole pool. So nothing hands these arrays out, and
    whoever drives the model calls `evaluate` after every call of the model.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
        dtype: mx.Dtype,
    ) -> None:
        self.num_blocks = num_blocks
        self.num_kv_heads = num_kv_heads
        self.block_size = block_size
        self.head_dim = head_dim
        shape = (1 + num_blocks, num_kv_heads, block_size, head_dim)
        self._keys = [mx.zeros(shape, dtype) for _ in range(num_layers)]
        self._values = [mx.zeros(shape, dtype) for _ in range(num_layers)]
        self.evaluate()

    @property
    def num_bytes(self) -> int:
        """Bytes of the pool, scratch block included. The same from the first step to the last."""
        return sum(array.nbytes for array in (*self._keys, *self._values))

    def evaluate(self, *others: mx.array) -> None:
        """Compute all writes that were asked for, and ``others`` in the same go."""
        mx.eval(self._keys, self._values, *others)

    def write(self, layer: int, call: Call, keys: mx.array, values: mx.array) -> None:
        """Put the new keys and values, ``[B, num_kv_heads, L, head_dim]`` each, where ``call`` says."""
        # The two index arrays stand around a slice, so the indexed positions come first: [B * L, heads,
        # head_dim].
        self._keys[layer][call.write_blocks, :, call.write_offsets] = _by_token(keys)
        self._values[layer][call.write_blocks, :, call.write_offsets] = _by_token(values)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole blocks in all layers: all sources are read before any target is written. Evaluated at once.

        Raises InvariantError for a block that the pool has not.
        """
        ids = [block_id for copy in copies for block_id in (copy.source, copy.target)]
        if min(ids) <= SCRATCH_BLOCK_ID or max(ids) > self.num_blocks:
            raise InvariantError(
                f"block copies name ids from {min(ids)} to {max(ids)}; the pool has 1 to {self.num_blocks}"
            )
        sources = mx.array([copy.source for copy in copies])
        targets = mx.array([copy.target for copy in copies])
        halves = (*self._keys, *self._values)
        contents = [half[sources] for half in halves]
        # Before the writes are asked for: a read of the pool in the same go would make each of them copy the pool.
        mx.eval(contents)
        for half, content in zip(halves, contents, strict=True):
            half[targets] = content
        del half, halves
        self.evaluate()

    def wipe(self, call: Call, row: int) -> None:
        """Put zeros into the slots, in all layers, that one row of ``call`` wrote. Evaluated at once."""
        written = slice(row * call.num_tokens, (row + 1) * call.num_tokens)
        blocks, offsets = call.write_blocks[written], call.write_offsets[written]
        for half in (*self._keys, *self._values):
            half[blocks, :, offsets] = mx.zeros((), half.dtype)
        self.evaluate()

    def read(self, layer: int, call: Call) -> tuple[mx.array, mx.array]:
        """Return the keys and values that ``call`` attends to, ``[B, num_kv_heads, S, head_dim]`` each."""
        return self._gather(self._keys[layer], call), self._gather(self._values[layer], call)

    def _gather(self, pool: mx.array, call: Call) -> mx.array:
        # One head's part of a block is contiguous. Gathering these parts in the order (row, head, block)
        # gives the final layout with one copy; gathering whole blocks would need a second one to bring the
        # heads to the front.
        parts = pool.reshape(-1, self.block_size * self.head_dim)
        gathered = mx.take(parts, call.read_parts, axis=0)
        batch, heads, num_blocks, _ = gathered.shape
        joined = gathered.reshape(batch, heads, num_blocks * self.block_size, self.head_dim)
        return joined if call.length is None else joined[:, :, : call.length]


def _by_token(new: mx.array) -> mx.array:
    """``[B, heads, L, D]`` to ``[B * L, heads, D]``."""
    batch, heads, length, dim = new.shape
    return new.transpose(0, 2, 1, 3).reshape(batch * length, heads, dim)


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the model, as all its layers see it.

    ``batch`` rows of ``num_tokens`` tokens each. ``offset`` is the position of each row's first token: an int
    for one row, an int array ``[B]`` for several (never an int there: it would put all rows at one position).
    ``write_blocks`` and ``write_offsets``, ``[B * L]`` each, are the slots of the new tokens. ``read_parts``,
    ``[B, num_kv_heads, blocks]``, are the parts of the pool that hold the rows' tokens. ``length`` cuts what
    was read to the row's true length; with several rows of different lengths ``mask``, ``[B, 1, 1, S]``,
    hides the rest.
    """

    batch: int
    num_tokens: int
    offset: int | mx.array
    write_blocks: mx.array
    write_offsets: mx.array
    read_parts: mx.array
    length: int | None
    mask: mx.array | None

    @classmethod
    def of_chunk(cls, row: ScheduledRow, pool: BlockPoolArrays) -> Call:
        """Plan a call for one row of any number of tokens. It reads its own true length and no more."""
        table = _checked_table(row, pool)
        end = row.start + row.num_tokens
        positions = range(row.start, end)
        return cls(
            batch=1,
            num_tokens=row.num_tokens,
            offset=row.start,
            write_blocks=mx.array([table[position // pool.block_size] for position in positions]),
            write_offsets=mx.array([position % pool.block_size for position in positions]),
            read_parts=_parts([table], pool),
            length=end,
            mask=None,
        )

    @classmethod
    def of_single_tokens(cls, rows: Sequence[ScheduledRow], pool: BlockPoolArrays) -> Call:
        """Plan a call for several rows of one token each, of different lengths."""
        if len(rows) == 1:
            return cls.of_chunk(rows[0], pool)  # no padding, so no mask
        tables = [_checked_table(row, pool) for row in rows]
        width = max(len(table) for table in tables)
        starts = mx.array([row.start for row in rows])
        padded = [[*table, *[SCRATCH_BLOCK_ID] * (width - len(table))] for table in tables]
        visible = mx.arange(width * pool.block_size)[None] <= starts[:, None]
        return cls(
            batch=len(rows),
            num_tokens=1,
            offset=starts,
            write_blocks=mx.array([table[-1] for table in tables]),
            write_offsets=mx.array([row.start % pool.block_size for row in rows]),
            read_parts=_parts(padded, pool),
            length=None,
            mask=visible[:, None, None, :],
        )


def _checked_table(row: ScheduledRow, pool: BlockPoolArrays) -> tuple[int, ...]:
    """Return the part of the block table that the row reads and writes.

    Raises InvariantError if the table is too short or names a block that the pool has not: MLX does not check
    indices, and would read or write memory that is not the pool's.
    """
    needed = -(-(row.start + row.num_tokens) // pool.block_size)
    table = row.block_ids[:needed]
    if row.num_tokens < 1 or len(table) < needed:
        raise InvariantError(
            f"request {row.request_id!r} computes {row.num_tokens} tokens from position {row.start} with "
            f"{len(row.block_ids)} blocks of {pool.block_size}; it needs 1 token or more and {needed} blocks"
        )
    if min(table) <= SCRATCH_BLOCK_ID or max(table) > pool.num_blocks:
        raise InvariantError(
            f"request {row.request_id!r} has block ids from {min(table)} to {max(table)}; "
            f"the pool has 1 to {pool.num_blocks}"
        )
    return table


def _parts(tables: Sequence[Sequence[int]], pool: BlockPoolArrays) -> mx.array:
    """Block ids ``[B, blocks]`` to parts ``[B, heads, blocks]``: head h of block b is part b * heads + h."""
    ids = mx.array(list(tables))
    heads = mx.arange(pool.num_kv_heads)
    return ids[:, None, :] * pool.num_kv_heads + heads[None, :, None]


class LayerView:
    """What one layer of an mlx-lm model takes for its cache during one call.

    It must have no attribute ``bits`` (models read it as "quantized") and no length (a cache of length 0 is
    falsy, and models then attend without it, without a word).
    """

    __slots__ = ("_call", "_layer", "_pool", "_written")

    def __init__(self, pool: BlockPoolArrays, layer: int, call: Call) -> None:
        self._pool = pool
        self._layer = layer
        self._call = call
        self._written: tuple[mx.array, mx.array] | None = None

    @property
    def offset(self) -> int | mx.array:
        """Position of the first new token of the row, or of each row."""
        return self._call.offset

    def make_mask(
        self, num_tokens: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """Return the mask of the call: None for all, "causal" for a chunk, or an array.

        Raises ModelError if the layer wants a sliding window.
        """
        call = self._call
        if window_size is not None:
            raise ModelError(
                f"the model attends to a sliding window of {window_size} tokens, which a K/V pool in blocks "
                "does not serve; choose a dense model"
            )
        if call.num_tokens == 1:
            return call.mask
        if return_array:
            assert isinstance(call.offset, int) and call.length is not None
            queries = mx.arange(call.offset, call.length)
            return queries[:, None] >= mx.arange(call.length)[None]
        return "causal"  # MLX lines the last query up with the last key

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write the new keys and values and return all up to now: ``[B, heads, L, D]`` in, ``[B, heads, S,
        D]`` out.

        Raises ModelError if the shapes are not those of the pool and the call.
        """
        pool, call = self._pool, self._call
        expected = (call.batch, pool.num_kv_heads, call.num_tokens, pool.head_dim)
        if keys.shape != expected or values.shape != expected:
            raise ModelError(
                f"layer {self._layer} made keys {keys.shape} and values {values.shape} where the pool "
                f"takes {expected}; choose a dense model whose rows may stand at different positions"
            )
        pool.write(self._layer, call, keys, values)
        self._written = keys, values
        return pool.read(self._layer, call)

    def wrote_numbers(self) -> mx.array:
        """Return for each row whether all that it wrote is finite: booleans ``[B]``, still lazy.

        In the last layer, that speaks for the layers before: a NaN in a token's K/V or hidden state reaches its
        hidden state in the next layer. Raises InvariantError if the layer was not called.
        """
        if self._written is None:
            raise InvariantError(f"layer {self._layer} of the model did not write its keys and values")
        keys, values = self._written
        return mx.isfinite(keys).all(axis=(1, 2, 3)) & mx.isfinite(values).all(axis=(1, 2, 3))
