"""A runner that computes nothing: a cost model moves a clock, and a stand-in draws the tokens.

The engine cannot tell it from a real one, so that scheduling, publication and coordination run as they are, in
no time and the same on every machine. Tokens are a function of the prompt, the sampling and the place: equal
requests draw equal tokens, as with a real model. Must not import MLX.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from dataclasses import dataclass

from minivllm.clock import VirtualClock
from minivllm.request import Request
from minivllm.step import Detokenizer, Phase, ScheduledStep


@dataclass(frozen=True, slots=True)
class CostModel:
    """Milliseconds that a step takes.

    ``step_ms`` is a fixed part, ``prefill_ms`` a part per prefilled token. Decode costs ``decode_one_ms`` for a
    single row and ``decode_base_ms + decode_row_ms * rows`` from two rows on, since a single row takes a faster
    matrix-vector path on many GPUs. A row that finishes its prefill draws a token too, and counts as a decode row
    beside its prefilled tokens.

    The defaults follow from the published figures of mini-vllm-rs (4-bit Qwen2.5 0.5B, Metal GPU of a Mac mini):
    followers' mean TTFT of 1,357.5 and 1,757.9 ms for two and four requests gives about 1.05 ms a prefilled
    token and 12.1 ms a decoded one; its two completion figures give the line from two rows on.
    """

    step_ms: float = 12.0
    prefill_ms: float = 1.05
    decode_one_ms: float = 0.1
    decode_base_ms: float = 5.0
    decode_row_ms: float = 5.4

    def step(self, num_prefill_tokens: int, num_decode_rows: int) -> float:
        """Return the milliseconds of one step."""
        ms = self.step_ms + self.prefill_ms * num_prefill_tokens
        if num_decode_rows == 1:
            ms += self.decode_one_ms
        elif num_decode_rows > 1:
            ms += self.decode_base_ms + self.decode_row_ms * num_decode_rows
        return ms


_FIRST_WORD = 256
_CONSONANTS = "bdfgklmnprstvz"
_VOWELS = "aeiou"


class VirtualTokenizer:
    """Bytes as token ids 0 to 255; ids above stand for made-up syllables, so that output can be read."""

    def encode(self, text: str) -> list[int]:
        """Return the UTF-8 bytes of ``text``."""
        return list(text.encode("utf-8", "surrogatepass"))

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of some tokens."""
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
    """The stand-in for a model and its device.

    ``on_step`` is called with each step before it counts: a lab or a test may raise there, as a device would.
    """

    name = "virtual"

    def __init__(
        self,
        cost: CostModel | None = None,
        *,
        vocab_size: int = 49_152,
        max_model_len: int = 1 << 20,
        on_step: Callable[[ScheduledStep], None] | None = None,
    ) -> None:
        self.cost = cost or CostModel()
        self.clock = VirtualClock()
        self.tokenizer = VirtualTokenizer()
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.eos_token_ids: frozenset[int] = frozenset()
        self._on_step = on_step
        self._digests: dict[str, bytes] = {}

    def allocate(self, num_blocks: int, block_size: int) -> None:
        """There is no pool."""

    def execute(self, step: ScheduledStep) -> dict[str, int]:
        """Let the step's time pass and draw the tokens."""
        if self._on_step is not None:
            self._on_step(step)
        prefilled = sum(row.num_tokens for row in step.rows if row.phase is Phase.PREFILL)
        sampling = sum(row.samples for row in step.rows)
        self.clock.advance(self.cost.step(prefilled, sampling))
        return {row.request_id: self._draw(row.request) for row in step.rows if row.samples}

    def _draw(self, request: Request) -> int:
        """Return a token that depends on the prompt, the place and, above temperature 0, the seed."""
        digest = self._digests.get(request.request_id)
        if digest is None:
            tokens = request.prompt_token_ids
            digest = hashlib.sha256(struct.pack(f"<{len(tokens)}Q", *tokens)).digest()
            if request.sampling.temperature > 0:
                digest = hashlib.sha256(digest + struct.pack("<Q", request.seed)).digest()
            self._digests[request.request_id] = digest
        place = struct.pack("<Q", len(request.output_token_ids))
        number = int.from_bytes(hashlib.sha256(digest + place).digest()[:8], "little")
        if self.vocab_size <= _FIRST_WORD:
            return number % self.vocab_size
        return _FIRST_WORD + number % (self.vocab_size - _FIRST_WORD)

    def forget(self, request_id: str) -> None:
        """Drop what is kept for a request."""
        self._digests.pop(request_id, None)

    def close(self) -> None:
        """Nothing to free."""
        self._digests.clear()
