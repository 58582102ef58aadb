"""The runner that computes with a real model, on Metal, CUDA or the CPU.

One step is one call of the model for all rows of one token (they differ only in where they stand), and one
call for each longer chunk; rows of different adapters are in different calls. The model is mlx-lm's own,
unchanged: it is given `LayerView`s for its cache. Rows of one step do not see what the others write in it.

A row whose numbers come out as NaN or infinite fails alone. What it wrote is wiped at once, since masked slots of
a block are read, too: 0 x NaN is NaN, and the block's next owner would fail with it.

Everything here belongs to one thread: the one that loads, allocates, executes and closes. Only Python values
leave. Knows MLX, the model and scheduled rows. Must not know the scheduler, publication, flights or who
shares a block.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from minivllm.clock import Clock, WallClock
from minivllm.models.cpu_blas import make_fast

make_fast()  # must come before the first import of MLX; the second call of a process changes nothing

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402

from minivllm.errors import ConfigError, InvariantError, RowError  # noqa: E402
from minivllm.models.adapters import Adapters  # noqa: E402
from minivllm.models.folder import LoadedModel  # noqa: E402
from minivllm.models.load import load_model  # noqa: E402
from minivllm.request import Request  # noqa: E402
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

    def __init__(self, loaded: LoadedModel, adapters: Adapters | None = None) -> None:
        """Take a loaded model, and adapters of this very model. Loading has refused those that are not dense."""
        self.name: str = loaded.name
        self.clock = WallClock()
        self.tokenizer: Tokenizer = loaded.tokenizer
        self.vocab_size: int = loaded.vocab_size
        self.max_model_len: int = loaded.max_model_len
        self.eos_token_ids: frozenset[int] = frozenset(loaded.tokenizer.eos_token_ids)
        self.is_real = True
        self.accepts_multimodal = False
        self.adapters: frozenset[str] | None = frozenset() if adapters is None else adapters.names
        self._adapters: Adapters | None = adapters or Adapters(loaded)
        self._loaded: LoadedModel | None = loaded
        self._forward: Forward | None = None
        self._pool: BlockPoolArrays | None = None

    @classmethod
    def load(
        cls,
        name: str,
        progress: Callable[[str, int, int | None], None] | None = None,
        adapters: Mapping[str, str | os.PathLike[str]] | None = None,
    ) -> MLXRunner:
        """Load a model by name, and adapters for it by name and folder, and make the runner.

        Raises ModelError, UnknownNameError or ConfigError.
        """
        loaded = load_model(name, progress=progress)
        return cls(loaded, Adapters(loaded, adapters))

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
                f"{asked} for {loaded.name}, which the system does not give; ask for fewer blocks or raise its limit"
            ) from error
        self._forward = Forward(loaded.model)

    def execute(self, step: ScheduledStep) -> dict[str, int | RowError]:
        """Copy blocks, write the K/V of every row, and return the next token of each request in ``row.sampled``.

        In place of a token, or for a row that does not sample under its own request's id, stands a RowError if the
        row's logits, or what it wrote in the last layer, are not finite.
        """
        if step.copies:
            self._require(self._pool).copy_blocks(step.copies)
        rows = [row for row in step.rows if not row.is_withdrawn]
        outcome: dict[str, int | RowError] = {}
        # In the order in which they come, so that each adapter is put in place once.
        for adapter in dict.fromkeys(row.request.adapter for row in rows):
            with self._require(self._adapters).applied(adapter):
                own = [row for row in rows if row.request.adapter == adapter]
                single = [row for row in own if row.num_tokens == 1]
                if single:
                    outcome |= self._call(single)
                for row in own:
                    if row.num_tokens != 1:
                        outcome |= self._call([row])
        return outcome

    def forget(self, request_id: str) -> None:
        """Do nothing: all that is known of a request comes with each row."""

    def close(self) -> None:
        """Free the pool and the model. Safe after an error, and twice."""
        self._pool = None
        self._forward = None
        self._adapters = None
        self._loaded = None
        mx.clear_cache()

    def _call(self, rows: Sequence[ScheduledRow]) -> dict[str, int | RowError]:
        """One call of the model: for one row, or for several of one token each. The one place that computes."""
        pool, forward = self._require(self._pool), self._require(self._forward)
        call = Call.of_single_tokens(rows, pool)
        views = [LayerView(pool, layer, call) for layer in range(self._require(self._loaded).num_layers)]
        tokens = mx.array([row.token_ids for row in rows])
        drawing = [(index, request) for index, row in enumerate(rows) for request in row.sampled]
        lazy: dict[str, mx.array] = {}
        if drawing:
            logits = forward.last_logits(tokens, views)
            lazy["drawn"] = _draw(logits, drawing)
            lazy["logits"] = mx.isfinite(logits).all(axis=-1)
        else:
            forward.write_only(tokens, views)
        lazy["keys or values"] = views[-1].wrote_numbers()
        # Pool and the rest in one go: a write to the pool that waits until the next call would be done by copying.
        pool.evaluate(*lazy.values())
        known = {name: np.array(values) for name, values in lazy.items()}
        outcome: dict[str, int | RowError] = {
            request.request_id: int(token) for (_, request), token in zip(drawing, known.pop("drawn", ()), strict=True)
        }
        for index, row in enumerate(rows):
            bad = [name for name, are_finite in known.items() if not are_finite[index]]
            if not row.samples:
                bad = [name for name in bad if name != "logits"]  # of a row beside others that do draw: nobody's
            if bad:
                pool.wipe(call, index)
                for request in (row.request, *row.sampled):
                    outcome[request.request_id] = _row_error(row, request, " and ".join(bad))
        return outcome

    @staticmethod
    def _require(thing: T | None) -> T:
        if thing is None:
            raise InvariantError("the runner is closed, or was not allocated before its first step")
        return thing


def _draw(logits: mx.array, drawing: Sequence[tuple[int, Request]]) -> mx.array:
    """Draw one token for each (row of ``logits`` ``[rows, vocabulary]``, request): an array, still lazy.

    Several samples of a prompt draw from the same logits, each with its own seed and index.
    """
    indices = [index for index, _ in drawing]
    if indices != list(range(len(logits))):
        logits = logits[mx.array(indices)]
    requests = [request for _, request in drawing]
    return draw_each(
        logits,
        [request.sampling for request in requests],
        [request.seed for request in requests],
        [len(request.output_token_ids) for request in requests],
    )


def _row_error(row: ScheduledRow, request: Request, what: str) -> RowError:
    last = row.start + row.num_tokens - 1
    positions = f"position {last}" if row.num_tokens == 1 else f"positions {row.start} to {last}"
    adapter = "" if request.adapter is None else f" and adapter {request.adapter!r}"
    return RowError(
        f"the {what} of request {request.request_id!r} at {positions} came out as NaN or infinite; "
        f"check the model{adapter} with this prompt, other requests go on"
    )


def leave_thread() -> None:
    """Give up this thread's MLX streams: the last act of a thread, after it closed its runners.

    Streams belong to threads. Python may abort on its way out if a thread ended with its streams open.
    """
    mx.clear_cache()
    mx.clear_streams()
