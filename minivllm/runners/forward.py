"""From tokens to the logits of the last token, with an unchanged mlx-lm model.

A model's call returns logits for all tokens, but only the last token's are used, and the vocabulary product
is a large part of a small model's work. Most models are a body, which gives hidden states, and one product
over the vocabulary. Where the two can be found and give the same as the whole, only the last hidden state
goes through the product; where not (some models scale their logits in between), the whole model is called.

Knows how mlx-lm models are built. Must not know rows, requests or blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

_BODIES = ("model", "transformer")
_EMBEDDINGS = ("embed_tokens", "wte", "tok_embeddings")
_PROBE = [[1, 2]]
"""Two token ids that every vocabulary has."""

Layer = Callable[[mx.array], mx.array]


class Forward:
    """The calls of a model that a runner needs. All results are lazy: computed when they are evaluated."""

    def __init__(self, model: Any) -> None:
        """Look for the model's body and vocabulary product, and check them with one call of two tokens."""
        self._model = model
        self._body: Any = None
        self._head: Layer | None = None
        body = next((getattr(model, name) for name in _BODIES if hasattr(model, name)), None)
        head = _find_head(model, body)
        if body is not None and head is not None and _same(model, body, head):
            self._body, self._head = body, head

    @property
    def splits(self) -> bool:
        """Whether only the last hidden state goes through the vocabulary product."""
        return self._head is not None

    def last_logits(self, tokens: mx.array, cache: Sequence[object]) -> mx.array:
        """Return the logits of each row's last token: ``[B, L]`` token ids in, ``[B, vocabulary]`` out."""
        if self._head is None:
            return self._model(tokens, cache=cache)[:, -1]
        return self._head(self._body(tokens, cache=cache)[:, -1])

    def write_only(self, tokens: mx.array, cache: Sequence[object]) -> None:
        """Let the layers write the K/V of ``tokens`` ``[B, L]``.

        What comes out is dropped: as MLX is lazy, the last layer's output and the vocabulary product are
        never computed, only what the K/V need.
        """
        self._model(tokens, cache=cache)


def _find_head(model: Any, body: Any) -> Layer | None:
    """Return the vocabulary product. It looks its module up in each call: an adapter may have put another one there."""
    if getattr(model, "lm_head", None) is not None:
        return lambda hidden: model.lm_head(hidden)
    for name in _EMBEDDINGS:
        if hasattr(body, name):
            return lambda hidden: getattr(body, name).as_linear(hidden)
    return None


def _same(model: Any, body: Any, head: Layer) -> bool:
    """Whether body and head give what the model gives. A model that cannot be called this way does not."""
    tokens = mx.array(_PROBE)
    whole = model(tokens)
    try:
        split = head(body(tokens))
    except (TypeError, ValueError, AttributeError):
        return False
    if split.shape != whole.shape:
        return False
    whole, split = whole.astype(mx.float32), split.astype(mx.float32)
    # Both do the same arithmetic; the margin is for backends that order sums differently between two calls.
    margin = 1e-3 * mx.abs(whole).max()
    return bool((mx.abs(whole - split).max() <= margin).item())
