"""The runner that computes with a real model, on Metal, CUDA or the CPU.

One step is one call of the model for all rows of one token (they differ only in where they stand), and one
call for each longer chunk. The model is mlx-lm's own, unchanged: it is given `LayerView`s for its cache. Rows
of one step do not see what the others write in it.

Everything here belongs to one thread: the one that loads, allocates, executes and closes. Only Python values
leave. Knows MLX, the model and scheduled rows. Must not know the scheduler, publication, flights or who
shares a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from minivllm.clock import Clock, WallClock
from minivllm.cpu_blas import make_fast

make_fast()  # must come before the first import of MLX; the second call of a process changes nothing

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402

from minivllm.errors import ConfigError, InvariantError  # noqa: E402
from minivllm.models import LoadedModel, load_model  # noqa: E402
from minivllm.runners.forward import Forward  # noqa: E402
from minivllm.runners.memory import free_bytes, mib  # noqa: E402
from minivllm.runners.paged_cache import BlockPoolArrays, Call, LayerView  # noqa: E402
from minivllm.runners.sampler import draw_each  # noqa: E402
from minivllm.step import ScheduledRow, ScheduledStep, Tokenizer  # noqa: E402

T = TypeVar("T")

_FILL = 0.9
"""Share of the free memory that a pool may take; the rest is for the model's own work."""


class MLXRunner:
    """Runs any dense mlx-lm model over a paged K/V pool. Make it, use it and close it in one thread."""

    clock: Clock

    def __init__(self, loaded: LoadedModel) -> None:
        """Take a loaded model. Loading has refused those that are not dense."""
        self.name: str = loaded.name
        self.clock = WallClock()
        self.tokenizer: Tokenizer = loaded.tokenizer
        self.vocab_size: int = loaded.vocab_size
        self.max_model_len: int = loaded.max_model_len
        self.eos_token_ids: frozenset[int] = frozenset(loaded.tokenizer.eos_token_ids)
        self._loaded: LoadedModel | None = loaded
        self._forward: Forward | None = None
        self._pool: BlockPoolArrays | None = None

    @classmethod
    def load(cls, name: str, progress: Callable[[str, int, int | None], None] | None = None) -> MLXRunner:
        """Load a model by name and make its runner. Raises ModelError or UnknownNameError."""
        return cls(load_model(name, progress=progress))

    @property
    def pool_bytes(self) -> int:
        """Bytes of the K/V pool: 0 before `allocate` and after `close`, and constant between."""
        return 0 if self._pool is None else self._pool.num_bytes

    def block_bytes(self, block_size: int) -> int:
        """Return the bytes of one block: keys and values of ``block_size`` tokens in every layer."""
        return block_size * self._require(self._loaded).kv_bytes_per_token

    def allocate(self, num_blocks: int, block_size: int) -> None:
        """Make the K/V pool, once: ``num_blocks`` blocks and block 0 as scratch, all zero.

        Raises ConfigError if it does not fit in the free memory, InvariantError the second time.
        """
        loaded = self._require(self._loaded)
        if self._pool is not None:
            raise InvariantError("the K/V pool is there already; a runner allocates once")
        block_bytes = self.block_bytes(block_size)
        asked = f"{num_blocks} blocks of {block_size} tokens take {mib((num_blocks + 1) * block_bytes)}"
        room = int(free_bytes() * _FILL)
        if (num_blocks + 1) * block_bytes > room:
            raise ConfigError(
                f"{asked} for {loaded.name}, but {mib(room)} are free: "
                f"{max(room // block_bytes - 1, 0)} blocks would fit, so ask for fewer or free some memory"
            )
        try:
            self._pool = BlockPoolArrays(
                loaded.num_layers, num_blocks, loaded.num_kv_heads, block_size, loaded.head_dim, loaded.dtype
            )
        except (RuntimeError, MemoryError) as error:  # a limit of the GPU that cannot be asked for
            raise ConfigError(
                f"{asked} for {loaded.name}, which the system does not give; "
                "ask for fewer blocks or raise its limit"
            ) from error
        self._forward = Forward(loaded.model)

    def execute(self, step: ScheduledStep) -> dict[str, int]:
        """Write the K/V of every row and return the next token of each row that samples, by request id."""
        single = [row for row in step.rows if row.num_tokens == 1]
        drawn = self._run_single_tokens(single) if single else {}
        for row in step.rows:
            if row.num_tokens != 1:
                drawn |= self._run_chunk(row)
        return drawn

    def forget(self, request_id: str) -> None:
        """Do nothing: all that is known of a request comes with each row."""

    def close(self) -> None:
        """Free the pool and let go of the model. Safe after an error, and twice."""
        self._pool = None
        self._forward = None
        self._loaded = None
        mx.clear_cache()

    def _run_single_tokens(self, rows: Sequence[ScheduledRow]) -> dict[str, int]:
        """One call for rows in decode, and for prefills of which one token is left."""
        pool, forward = self._require(self._pool), self._require(self._forward)
        views = self._views(Call.of_single_tokens(rows, pool))
        logits = forward.last_logits(mx.array([row.token_ids for row in rows]), views)
        return self._draw(rows, logits)

    def _run_chunk(self, row: ScheduledRow) -> dict[str, int]:
        """One call for one row's chunk."""
        pool, forward = self._require(self._pool), self._require(self._forward)
        views = self._views(Call.of_chunk(row, pool))
        tokens = mx.array([row.token_ids])
        if row.samples:
            return self._draw([row], forward.last_logits(tokens, views))
        forward.write_only(tokens, views)
        pool.evaluate()
        return {}

    def _draw(self, rows: Sequence[ScheduledRow], logits: mx.array) -> dict[str, int]:
        """Draw from ``logits`` ``[rows, vocabulary]``. The one place where the call is computed."""
        requests = [row.request for row in rows]
        tokens = draw_each(
            logits,
            [request.sampling for request in requests],
            [request.seed for request in requests],
            [len(request.output_token_ids) for request in requests],
        )
        # Pool and tokens in one go: a write to the pool that waits until the next call would be done by
        # copying.
        self._require(self._pool).evaluate(tokens)
        ids = np.array(tokens)
        return {row.request_id: int(token) for row, token in zip(rows, ids, strict=True) if row.samples}

    def _views(self, call: Call) -> list[LayerView]:
        pool = self._require(self._pool)
        return [LayerView(pool, layer, call) for layer in range(self._require(self._loaded).num_layers)]

    @staticmethod
    def _require(thing: T | None) -> T:
        if thing is None:
            raise InvariantError("the runner is closed, or was not allocated before its first step")
        return thing


def leave_thread() -> None:
    """Give up this thread's MLX streams: the last act of a thread, after it closed its runners.

    Streams belong to threads. Python may abort on its way out if a thread ended with its streams open.
    """
    mx.clear_cache()
    mx.clear_streams()
