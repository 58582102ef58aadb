"""How a token is drawn from logits.

The draw of output token i depends on the logits, the request's seed and i, and on nothing else: not on the
batch, on chunks, on preemption or on the thread. Therefore there is no random state to carry along: each draw
makes its own key. Knows logits and `Sampling`. Must not know rows, blocks or the model.
"""

from __future__ import annotations

import hashlib
import struct

import mlx.core as mx

from minivllm.request import Sampling

_COLDEST = 1e-6
"""Temperatures below this draw as this one does: dividing by still less overflows fp32."""


def draw_key(seed: int, index: int) -> mx.array:
    """Return the random key for output token ``index`` of a request with ``seed``.

    The two are hashed together: with seed + index, request 7 would repeat request 8's draws one token later.
    """
    digest = hashlib.blake2b(struct.pack("<QQ", seed, index), digest_size=8).digest()
    return mx.random.key(int.from_bytes(digest, "little"))


def draw(logits: mx.array, sampling: Sampling, seed: int, index: int) -> mx.array:
    """Return the token for ``logits`` of shape ``[vocabulary]`` as a scalar array, not yet evaluated.

    Temperature first, then the ``top_k`` likeliest, then the fewest of these that reach ``top_p``, as most
    engines do it. Temperature 0 takes the likeliest.
    """
    if sampling.temperature == 0:
        return mx.argmax(logits)
    scaled = logits.astype(mx.float32)
    scaled = (scaled - scaled.max()) / max(sampling.temperature, _COLDEST)
    key = draw_key(seed, index)
    if sampling.top_p >= 1 and not 0 < sampling.top_k < logits.size:
        return mx.random.categorical(scaled, key=key)
    order = mx.argsort(-scaled)
    if 0 < sampling.top_k < logits.size:  # a larger one keeps all, and may not fit a slice index
        order = order[: sampling.top_k]
    kept = scaled[order]
    if sampling.top_p < 1:
        probabilities = mx.softmax(kept)
        # What lies above a token, without itself: the likeliest always stays, and the last one kept crosses
        # top_p.
        above = mx.cumsum(probabilities) - probabilities
        stays = mx.logical_or(above < sampling.top_p, mx.arange(kept.size) == 0)
        kept = mx.where(stays, kept, -mx.inf)
    # Back in the order of the vocabulary, where each token has a random number of its own. In order of likelihood the
    # number would belong to the rank: two unlikely tokens that change places by a rounding error, as between a batch
    # and a row alone, would change the draw.
    remaining = mx.full(scaled.shape, -mx.inf)
    remaining[order] = kept
    return mx.random.categorical(remaining, key=key)


def draw_each(logits: mx.array, samplings: list[Sampling], seeds: list[int], indices: list[int]) -> mx.array:
    """Return one token per row of ``logits`` ``[rows, vocabulary]``: an array ``[rows]``, still lazy."""
    if all(sampling.temperature == 0 for sampling in samplings):
        return mx.argmax(logits, axis=-1)
    return mx.stack([draw(logits[row], *args) for row, args in enumerate(zip(samplings, seeds, indices, strict=True))])
