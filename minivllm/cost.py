"""What a step costs: a small formula in milliseconds.

The virtual runner moves its clock by it, and a coordinator may ask it whether waiting or computing is sooner. Knows
numbers of tokens and rows; must not know requests, blocks or engines.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from minivllm.errors import ConfigError


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

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                raise ConfigError(f"{field.name} is {value!r}; it must be a number of milliseconds, 0 or more")

    def step(self, num_prefill_tokens: int, num_decode_rows: int) -> float:
        """Return the milliseconds of one step."""
        ms = self.step_ms + self.prefill_ms * num_prefill_tokens
        if num_decode_rows == 1:
            ms += self.decode_one_ms
        elif num_decode_rows > 1:
            ms += self.decode_base_ms + self.decode_row_ms * num_decode_rows
        return ms
