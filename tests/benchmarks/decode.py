"""Paged decode against mlx-lm's own batch cache: same model, same keys and values, same tokens, one process.

    python tests/benchmarks/decode.py --rows 8 --context 1000

The two take turns, so that what slows the machine slows both. The tokens of both are compared too: a fast wrong
answer is no result.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from minivllm.models.cpu_blas import make_fast

BLAS = make_fast()

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402
from mlx_lm.models.cache import BatchKVCache  # noqa: E402

from minivllm.errors import MiniVLLMError  # noqa: E402
from minivllm.models.folder import LoadedModel  # noqa: E402
from minivllm.request import Request  # noqa: E402
from minivllm.runners.mlx import MLXRunner  # noqa: E402
from minivllm.runners.paged_cache import Call, LayerView  # noqa: E402
from minivllm.step import Phase, ScheduledRow, ScheduledStep  # noqa: E402
from tests.benchmarks.machine import Spread, describe  # noqa: E402

LIMIT = 1.35
"""The most that paged decode may take, as a multiple of mlx-lm's batch cache."""


class Paged:
    """The runner, its pool filled with ``context`` tokens per row."""

    def __init__(self, runner: MLXRunner, loaded: LoadedModel, rows: int, context: int, steps: int) -> None:
        self.runner = runner
        self.context = context
        blocks = -(-(context + steps) // 16)
        runner.allocate(rows * blocks, 16)
        # Scattered tables, as they are after a while, not the neat ones of a fresh pool.
        ids = np.random.default_rng(0).permutation(rows * blocks) + 1
        self.tables = [tuple(int(block) for block in part) for part in ids.reshape(rows, blocks)]
        self.prompts = np.random.default_rng(1).integers(2, loaded.vocab_size, (rows, context)).tolist()
        self.requests: list[Request] = []

    def fill(self, row: int, layer: int, keys: mx.array, values: mx.array) -> None:
        """Put keys and values ``[1, heads, context, dim]`` into the row's blocks."""
        pool = self.runner._pool
        assert pool is not None
        request = Request(f"r{row}", tuple(self.prompts[row]))
        part = ScheduledRow(request, 0, self.context, self.tables[row], Phase.PREFILL)
        LayerView(pool, layer, Call.of_chunk(part, pool)).update_and_fetch(keys, values)
        pool.evaluate()

    def begin(self, first: list[int]) -> None:
        """Put every row back to the end of its context, with one token to go on from."""
        self.requests = [
            Request(f"r{row}", tuple(prompt), output_token_ids=[token])
            for row, (prompt, token) in enumerate(zip(self.prompts, first, strict=True))
        ]

    def scheduled(self) -> ScheduledStep:
        """The next step: one token for every row."""
        return ScheduledStep(
            1,
            tuple(
                ScheduledRow(request, request.num_tokens - 1, 1, table, Phase.DECODE, (request,))
                for request, table in zip(self.requests, self.tables, strict=True)
            ),
        )

    def step(self) -> list[int]:
        """One token for every row."""
        drawn = self.runner.execute(self.scheduled())
        for request in self.requests:
            token = drawn[request.request_id]
            assert isinstance(token, int)
            request.append_output(token)
        return [request.output_token_ids[-1] for request in self.requests]

    def plan(self) -> Call:
        """What the runner works out in Python before the model is called."""
        pool = self.runner._pool
        assert pool is not None
        return Call.of_single_tokens(self.scheduled().rows, pool)


class Batch:
    """mlx-lm's model over its own batch cache, decoded as its generator does, without its extras."""

    def __init__(self, loaded: LoadedModel, rows: int) -> None:
        self.model = loaded.model
        self.cache = [BatchKVCache([0] * rows) for _ in range(loaded.num_layers)]
        self.tokens = mx.zeros((rows, 1), mx.int32)
        self.taken = 0

    def begin(self, first: list[int]) -> None:
        """Put every row back to the end of its context, with one token to go on from."""
        for layer in self.cache:
            layer.trim(self.taken)
        self.taken = 0
        self.tokens = mx.array(first)[:, None]
        mx.eval(self.tokens, [layer.state for layer in self.cache])

    def step(self) -> list[int]:
        """One token for every row."""
        logits = self.model(self.tokens, cache=self.cache)[:, -1]
        self.tokens = mx.argmax(logits, axis=-1)[:, None]
        mx.eval(self.tokens, [layer.state for layer in self.cache])
        self.taken += 1
        return [int(token) for token in np.array(self.tokens)[:, 0]]


def timed(side: Paged | Batch, first: list[int], steps: int) -> tuple[list[float], list[list[int]]]:
    """Decode ``steps`` tokens per row; return the ms of each step, and the tokens."""
    side.begin(first)
    times, tokens = [], []
    for _ in range(steps):
        start = time.perf_counter()
        tokens.append(side.step())
        times.append((time.perf_counter() - start) * 1e3)
    return times, tokens


def main() -> int:
    """Measure and print. Returns 1 if the tokens differ or the limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="model name, hub name or folder (default: smollm2)")
    parser.add_argument("--rows", type=int, default=8, help="rows decoded together (default: 8)")
    parser.add_argument("--context", type=int, default=1000, help="tokens each row has already (default: 1000)")
    parser.add_argument("--steps", type=int, default=20, help="tokens decoded per row and run (default: 20)")
    parser.add_argument("--runs", type=int, default=5, help="runs of each side, in turn (default: 5)")
    args = parser.parse_args()
    if min(args.rows, args.context, args.steps, args.runs) < 1:
        parser.error("--rows, --context, --steps and --runs must be 1 or more")
    try:
        return measure(args.model, args.rows, args.context, args.steps, args.runs)
    except MiniVLLMError as error:
        print(f"decode.py: {error}", file=sys.stderr)
        return 1


def measure(model: str, rows: int, context: int, steps: int, runs: int) -> int:
    """Fill both caches alike, let them decode in turn, print the table."""
    runner = MLXRunner.load(model)
    loaded = runner._loaded
    assert loaded is not None
    paged, batch = Paged(runner, loaded, rows, context, steps), Batch(loaded, rows)
    shape = (rows, loaded.num_kv_heads, context, loaded.head_dim)
    for layer, cache in enumerate(batch.cache):
        # Random content: the time does not depend on it, and prefilling would take much longer than measuring.
        keys, values = (mx.random.normal(shape, loaded.dtype, key=mx.random.key(2 * layer + kind)) for kind in (0, 1))
        for row in range(rows):
            paged.fill(row, layer, keys[row : row + 1], values[row : row + 1])
        mx.eval(cache.update_and_fetch(keys, values))

    first = [int(token) for token in np.random.default_rng(2).integers(2, loaded.vocab_size, rows)]
    ours: list[float] = []
    theirs: list[float] = []
    ratios: list[float] = []
    same = True
    for run in range(-1, runs):  # the first run warms both up
        batch_ms, batch_tokens = timed(batch, first, steps)
        paged_ms, paged_tokens = timed(paged, first, steps)
        same &= batch_tokens == paged_tokens
        if run >= 0:
            ours += paged_ms
            theirs += batch_ms
            ratios.append(Spread.of(paged_ms).median / Spread.of(batch_ms).median)

    planning = []
    for _ in range(50):
        start = time.perf_counter()
        paged.plan()
        planning.append((time.perf_counter() - start) * 1e3)

    ratio = Spread.of(ours).median / Spread.of(theirs).median
    print(f"{loaded.name}, {rows} rows of {context} tokens, {runs} runs of {steps} steps each, in turn")
    print(describe(BLAS))
    print(f"  mlx-lm batch cache, a step  {Spread.of(theirs)}")
    print(f"  paged K/V, a step           {Spread.of(ours)}")
    print(f"    of which planning         {Spread.of(planning)}")
    print(f"  ratio                       {ratio:9.2f}      ({min(ratios):.2f} to {max(ratios):.2f} per run)")
    print(f"  limit                       {LIMIT:9.2f}      {'kept' if ratio <= LIMIT else 'MISSED'}")
    print(f"  tokens                      {'the same' if same else 'DIFFERENT'}")
    runner.close()
    return 0 if same and ratio <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
