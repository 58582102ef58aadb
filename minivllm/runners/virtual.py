"""A runner without a model: a cost model advances a virtual clock, and tokens are drawn from a hash.

To the engine it is like a real runner, so scheduling, publication and coordination run unchanged, at once, and with the
same result on every machine. A token depends on all that a real model's token depends on: the prompt, the adapter, the
content of multimodal items, the position and, above temperature 0, the seed. So equal requests draw equal tokens.
Blocks hold no K/V, so block copies need no work. Must not import MLX.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable

from minivllm.clock import VirtualClock
from minivllm.cost import CostModel
from minivllm.errors import RowError
from minivllm.request import CACHE_SALT, Request
from minivllm.step import Detokenizer, Phase, ScheduledStep

__all__ = ["CostModel", "VirtualRunner", "VirtualTokenizer"]

_FIRST_WORD = 256
_CONSONANTS = "bdfgklmnprstvz"
_VOWELS = "aeiou"


class VirtualTokenizer:
    """Token ids 0 to 255 are bytes; higher ones decode to made-up syllables, so that output is readable."""

    def encode(self, text: str) -> list[int]:
        """Return the UTF-8 bytes of ``text``."""
        return list(text.encode("utf-8", "surrogatepass"))

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of the tokens."""
        detokenizer = self.detokenizer
        out = []
        for token_id in token_ids:
            detokenizer.add_token(token_id)
            out.append(detokenizer.last_segment)
        detokenizer.finalize()
        return "".join(out) + detokenizer.last_segment

    @property
    def detokenizer(self) -> Detokenizer:
        """A new streaming detokenizer."""
        return _VirtualDetokenizer()


class _VirtualDetokenizer:
    def __init__(self) -> None:
        self._bytes = b""
        self._text = ""

    def add_token(self, token: int) -> None:
        if token < _FIRST_WORD:
            self._bytes += bytes([token])
            try:
                self._text += self._bytes.decode()
                self._bytes = b""
            except UnicodeDecodeError:
                if len(self._bytes) >= 4:
                    self.finalize()
            return
        self.finalize()
        self._text += _syllables(token - _FIRST_WORD) + " "

    def finalize(self) -> None:
        self._text += self._bytes.decode("utf-8", "replace")
        self._bytes = b""

    @property
    def last_segment(self) -> str:
        text, self._text = self._text, ""
        return text


def _syllables(number: int) -> str:
    out = ""
    while True:
        number, place = divmod(number, len(_CONSONANTS) * len(_VOWELS))
        out += _CONSONANTS[place // len(_VOWELS)] + _VOWELS[place % len(_VOWELS)]
        if not number:
            return out


class VirtualRunner:
    """Simulates a model and its device.

    ``on_step`` is called with each step before the clock advances. A lab or a test may raise there, as a device would,
    or abort requests of the step; their rows are then not computed. ``adapters`` are the names that requests may use
    (None: any name).
    """

    name = "virtual"

    def __init__(
        self,
        cost: CostModel | None = None,
        *,
        vocab_size: int = 49_152,
        max_model_len: int = 1 << 20,
        on_step: Callable[[ScheduledStep], None] | None = None,
        adapters: Iterable[str] | None = None,
    ) -> None:
        self.cost = cost or CostModel()
        self.clock = VirtualClock()
        self.tokenizer = VirtualTokenizer()
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.eos_token_ids: frozenset[int] = frozenset()
        self.is_real = False
        self.adapters: frozenset[str] | None = None if adapters is None else frozenset(adapters)
        self.accepts_multimodal = True
        self._on_step = on_step
        self._digests: dict[str, bytes] = {}

    def allocate(self, num_blocks: int, block_size: int) -> None:
        """Do nothing: there is no K/V pool."""

    def execute(self, step: ScheduledStep) -> dict[str, int | RowError]:
        """Advance the clock by the cost of the step, and draw the tokens. Returns them by request id."""
        if self._on_step is not None:
            self._on_step(step)
        rows = [row for row in step.rows if not row.is_withdrawn]
        prefilled = sum(row.num_tokens for row in rows if row.phase is Phase.PREFILL)
        sampling = sum(len(row.sampled) for row in rows)
        self.clock.advance(self.cost.step(prefilled, sampling))
        return {request.request_id: self._draw(request) for row in rows for request in row.sampled}

    def _draw(self, request: Request) -> int:
        """Return a token: a hash of the prompt, its extra keys, the position and, above temperature 0, the seed."""
        digest = self._digests.get(request.request_id)
        if digest is None:
            digest = _digest(request)
            if not request.state.is_ended:  # `forget` was already called for a withdrawn sample
                self._digests[request.request_id] = digest
        place = struct.pack("<Q", len(request.output_token_ids))
        number = int.from_bytes(hashlib.sha256(digest + place).digest()[:8], "little")
        if self.vocab_size <= _FIRST_WORD:
            return number % self.vocab_size
        return _FIRST_WORD + number % (self.vocab_size - _FIRST_WORD)

    def forget(self, request_id: str) -> None:
        """Drop the digest of a request."""
        self._digests.pop(request_id, None)

    def close(self) -> None:
        """Drop all digests; there is nothing else to free."""
        self._digests.clear()


def _digest(request: Request) -> bytes:
    """Return a digest in place of the model's state after the prompt. Without the cache salt: it changes no K/V."""
    tokens = request.prompt_token_ids
    digest = hashlib.sha256(struct.pack(f"<{len(tokens)}Q", *tokens)).digest()
    for key in request.extra_keys:
        if key[0] != CACHE_SALT:
            for part in key:
                data = str(part).encode("utf-8", "surrogatepass")
                digest = hashlib.sha256(digest + struct.pack("<I", len(data)) + data).digest()
    if request.sampling.temperature > 0:
        digest = hashlib.sha256(digest + struct.pack("<Q", request.seed)).digest()
    return digest
