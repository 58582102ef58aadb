"""Small models, steps made directly, and mlx-lm's own cache as the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from minivllm.runners.mlx import MLXRunner  # before mlx: it loads the fast BLAS

import mlx.core as mx  # isort: skip
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import llama, qwen2, qwen3
from mlx_lm.models.cache import make_prompt_cache

from minivllm.errors import RowError
from minivllm.models.adapters import Adapters
from minivllm.models.folder import LoadedModel
from minivllm.request import Request, Sampling, make_extra_keys
from minivllm.step import BlockCopy, Phase, ScheduledRow, ScheduledStep

VOCAB = 97
_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
}
_FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (llama, {"head_dim": 16, "rope_traditional": True, "tie_word_embeddings": True}),
    "qwen2": (qwen2, {"tie_word_embeddings": False}),
    "qwen3": (qwen3, {"head_dim": 32, "tie_word_embeddings": True}),
    "llama3-rope": (
        llama,
        {
            "head_dim": 16,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "yarn-rope": (
        qwen2,
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    ),
}
FAMILIES = tuple(_FAMILIES)


class Numbers:
    """A tokenizer for models that never see text."""

    eos_token_ids = frozenset({0})


def small_model(family: str = "llama", seed: int = 0, **changes: Any) -> LoadedModel:
    """Return a model of a real mlx-lm class, with random weights that are the same on every machine."""
    module, own = _FAMILIES[family]
    sizes = {**_SIZES, **own, **changes}
    model = module.Model(module.ModelArgs.from_dict({"model_type": module.__name__.split(".")[-1], **sizes}))
    draw = np.random.default_rng(seed)
    parameters: Any = tree_flatten(model.parameters())
    weights = [(name, mx.array(_weights(draw, old.shape), mx.float32)) for name, old in parameters]
    model.update(tree_unflatten(weights))
    mx.eval(model.parameters())
    heads, width = sizes["num_key_value_heads"], sizes["hidden_size"]
    return LoadedModel(
        name=f"small-{family}",
        model=model,
        tokenizer=Numbers(),
        vocab_size=sizes["vocab_size"],
        max_model_len=sizes["max_position_embeddings"],
        num_layers=sizes["num_hidden_layers"],
        num_kv_heads=heads,
        head_dim=sizes.get("head_dim") or width // sizes["num_attention_heads"],
        dtype=mx.float32,
    )


def _weights(draw: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Norms near 1; matrices larger than usual, so that attention is sharp and one token stands out."""
    noise = draw.standard_normal(shape)
    return 1.0 + 0.1 * noise if len(shape) == 1 else noise * 2.0 / shape[-1] ** 0.5


def prompt(length: int, seed: int = 1) -> list[int]:
    """Return random token ids."""
    return [int(token) for token in np.random.default_rng(seed).integers(1, VOCAB, length)]


@dataclass
class Reference:
    """What mlx-lm computes by itself for one prompt, with its own cache and the prompt in one piece."""

    tokens: list[int]
    logits: list[np.ndarray]

    @classmethod
    def of(cls, loaded: LoadedModel, prompt_ids: Sequence[int], count: int) -> Reference:
        """Generate ``count`` greedy tokens."""
        cache = make_prompt_cache(loaded.model)
        tokens: list[int] = []
        logits: list[np.ndarray] = []
        new = list(prompt_ids)
        for _ in range(count):
            last = loaded.model(mx.array([new]), cache=cache)[0, -1].astype(mx.float32)
            logits.append(np.array(last))
            new = [int(np.argmax(logits[-1]))]
            tokens += new
        return cls(tokens, logits)


@dataclass
class StepDriver:
    """Drives a runner step by step, as a scheduler would, with block tables chosen by the test."""

    runner: MLXRunner
    block_size: int
    num_blocks: int
    number: int = 0
    free: list[int] = field(default_factory=list)
    tables: dict[str, list[int]] = field(default_factory=dict)
    logits: dict[str, list[np.ndarray]] = field(default_factory=dict)
    _seen: list[mx.array] = field(default_factory=list)

    @classmethod
    def over(
        cls, loaded: LoadedModel, *, block_size: int = 4, num_blocks: int = 96, adapters: Adapters | None = None
    ) -> StepDriver:
        """Make a runner with a pool. Blocks are given out in a scrambled order."""
        runner = MLXRunner(loaded, adapters)
        runner.allocate(num_blocks, block_size)
        free = [int(block) + 1 for block in np.random.default_rng(5).permutation(num_blocks)]
        driver = cls(runner, block_size, num_blocks, free=free)
        forward = runner._forward
        assert forward is not None
        original = forward.last_logits

        def spy(tokens: mx.array, cache: Sequence[object]) -> mx.array:
            driver._seen.append(original(tokens, cache))
            return driver._seen[-1]

        forward.last_logits = spy  # type: ignore[method-assign]
        return driver

    def request(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: Sampling | None = None,
        seed: int = 0,
        adapter: str | None = None,
    ) -> Request:
        """Make a request with an empty block table."""
        self.tables[request_id] = []
        self.logits[request_id] = []
        keys = make_extra_keys(adapter=adapter)
        return Request(request_id, tuple(prompt_ids), sampling or Sampling(), keys, seed=seed)

    def share(self, donor: Request, request: Request, num_tokens: int) -> None:
        """Put the donor's first blocks at the head of the request's table: these tokens need no computing."""
        assert num_tokens % self.block_size == 0
        self.tables[request.request_id] = self.tables[donor.request_id][: num_tokens // self.block_size]
        request.num_computed_tokens = num_tokens

    def preempt(self, request: Request) -> None:
        """Take all blocks away. They go to the far end of the free list, so others come next time."""
        self.free += self.tables[request.request_id]
        self.tables[request.request_id] = []
        request.num_computed_tokens = 0

    def contents(self, request: Request) -> np.ndarray:
        """Return what the pool holds for the request's computed tokens: [layers, 2, heads, tokens, dim]."""
        pool = self.runner._pool
        assert pool is not None
        table = mx.array(self.tables[request.request_id])
        halves = [
            np.array(half[table]).transpose(1, 0, 2, 3).reshape(pool.num_kv_heads, -1, pool.head_dim)
            for pair in zip(pool._keys, pool._values, strict=True)
            for half in pair
        ]
        whole = np.stack(halves).reshape(-1, 2, *halves[0].shape)
        return whole[:, :, :, : request.num_computed_tokens]

    def step(
        self,
        *parts: tuple[Request, int],
        samples: dict[str, tuple[Request, ...]] | None = None,
        copies: Sequence[BlockCopy] = (),
    ) -> dict[str, int | RowError]:
        """Run one step in which each request computes so many tokens, and return what was drawn.

        ``samples`` names further requests that draw from the logits of a request's row.
        """
        rows = []
        for request, count in parts:
            end = request.num_computed_tokens + count
            table = self.tables[request.request_id]
            while len(table) * self.block_size < end:
                table.append(self.free.pop(0))
            phase = Phase.DECODE if request.is_decoding else Phase.PREFILL
            sampled = (request, *(samples or {}).get(request.request_id, ())) if end == request.num_tokens else ()
            rows.append(ScheduledRow(request, request.num_computed_tokens, count, tuple(table), phase, sampled))
        self.number += 1
        self._seen.clear()
        drawn = self.runner.execute(ScheduledStep(self.number, tuple(rows), tuple(copies)))
        self._keep_logits([row for row in rows if not row.is_withdrawn])
        for row in rows:
            if row.is_withdrawn:
                continue
            row.request.num_computed_tokens += row.num_tokens
            for request in row.sampled:
                token = drawn[request.request_id]
                if not isinstance(token, RowError):
                    request.append_output(token)
        return drawn

    def _keep_logits(self, rows: list[ScheduledRow]) -> None:
        """Match the calls of the step with its rows: for each adapter the call for single tokens, then the chunks."""
        calls = []
        for adapter in dict.fromkeys(row.request.adapter for row in rows):
            own = [row for row in rows if row.request.adapter == adapter]
            single = [row for row in own if row.num_tokens == 1]
            calls += [single] if any(row.samples for row in single) else []
            calls += [[row] for row in own if row.num_tokens > 1 and row.samples]
        for group, seen in zip(calls, self._seen, strict=True):
            for row, logits in zip(group, np.array(seen.astype(mx.float32)), strict=True):
                if row.samples:
                    self.logits[row.request_id].append(logits)

    def prefill(self, request: Request, chunk: int | None = None) -> None:
        """Compute all that is known of the request, at most ``chunk`` tokens a step, and draw a token."""
        while (left := request.num_uncomputed_tokens) > 0:
            before = request.num_tokens
            self.step((request, min(left, chunk or left)))
            if request.num_tokens > before:
                return

    def decode(self, *requests: Request, steps: int) -> None:
        """Decode all requests together."""
        for _ in range(steps):
            self.step(*((request, 1) for request in requests))

    def check(self, request: Request, reference: Reference) -> None:
        """Assert that tokens and logits are those of mlx-lm."""
        assert request.output_token_ids == reference.tokens[: len(request.output_token_ids)]
        mine, theirs = np.stack(self.logits[request.request_id]), np.stack(reference.logits)
        assert len(mine) == len(request.output_token_ids)
        np.testing.assert_allclose(mine, theirs[: len(mine)], rtol=2e-3, atol=2e-3)
