"""What the scheduler hands to a runner, and what a runner is.

One step is one pass of the model over a batch of rows: first the rows in decode (one token each), then prefill
chunks. Knows tokens, positions and block ids; must not know how a runner computes, nor why a row was chosen.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from minivllm.clock import Clock
from minivllm.errors import RowError
from minivllm.request import Request


class Phase(enum.Enum):
    """What a row does in a step."""

    PREFILL = "prefill"  # tokens that were known before: prompt, or output to be computed again
    DECODE = "decode"  # the one token that came out last


@dataclass(frozen=True, slots=True)
class ScheduledRow:
    """One request's part in a step: compute the K/V of ``num_tokens`` tokens from position ``start`` on.

    ``block_ids`` is the block table: logical block i of the request is in physical block ``block_ids[i]``; it
    covers all positions up to ``start + num_tokens - 1``. ``sampled`` are the requests whose next token the row's
    logits give: nobody while the row does not reach the last known token, then the request itself, and at the end
    of a prompt with several samples all of them.
    """

    request: Request
    start: int
    num_tokens: int
    block_ids: tuple[int, ...]
    phase: Phase
    sampled: tuple[Request, ...] = ()

    @property
    def samples(self) -> bool:
        """Whether the row's last logits are drawn from."""
        return bool(self.sampled)

    @property
    def is_withdrawn(self) -> bool:
        """Whether the request has ended since the step was scheduled: then the row is not computed."""
        return self.request.state.is_ended

    @property
    def request_id(self) -> str:
        """Id of the request."""
        return self.request.request_id

    @property
    def token_ids(self) -> list[int]:
        """The token ids to compute, ``num_tokens`` of them."""
        return self.request.token_ids[self.start : self.start + self.num_tokens]


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy the K/V of block ``source`` to block ``target``, before any row is computed (copy on write)."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """The rows of one step, those in decode first. ``number`` counts from 1.

    ``copies`` come first: all sources are read before any target is written.
    """

    number: int
    rows: tuple[ScheduledRow, ...]
    copies: tuple[BlockCopy, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens computed in the step, over all rows."""
        return sum(row.num_tokens for row in self.rows)


class Detokenizer(Protocol):
    """Turns one request's tokens into text as they come (mlx-lm's streaming detokenizers are like this)."""

    def add_token(self, token: int) -> None:
        """Take the next token."""
        ...

    def finalize(self) -> None:
        """No more tokens: let out what was kept back, such as half a character."""
        ...

    @property
    def last_segment(self) -> str:
        """The text that became certain since the last time this was asked."""
        ...


class Tokenizer(Protocol):
    """What the engine needs of a tokenizer (mlx-lm's ``TokenizerWrapper`` has it)."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of ``text``."""
        ...

    @property
    def detokenizer(self) -> Detokenizer:
        """A new streaming detokenizer, for one request."""
        ...


class Runner(Protocol):
    """Computes steps. The engine drives it and knows no more of it than this."""

    @property
    def name(self) -> str:
        """What the runner computes with, for messages and tables."""
        ...

    @property
    def clock(self) -> Clock:
        """The engine's time: passes while steps are computed."""
        ...

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; any thread may use it."""
        ...

    @property
    def vocab_size(self) -> int:
        """Token ids go from 0 to one below this."""
        ...

    @property
    def max_model_len(self) -> int:
        """The longest prompt plus output, in tokens."""
        ...

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a request, unless it ignores them."""
        ...

    @property
    def is_real(self) -> bool:
        """Whether K/V is computed, so that reading what was never written gives wrong answers."""
        ...

    @property
    def adapters(self) -> frozenset[str] | None:
        """Names of the adapters that rows may use. None: any name."""
        ...

    @property
    def accepts_multimodal(self) -> bool:
        """Whether tokens may stand for images and the like."""
        ...

    def allocate(self, num_blocks: int, block_size: int) -> None:
        """Make the K/V pool, once, before the first step: blocks 1 to ``num_blocks``, and block 0 as scratch."""
        ...

    def execute(self, step: ScheduledStep) -> Mapping[str, int | RowError]:
        """Do the copies, write the K/V of every row, and draw the next token of each request in ``row.sampled``.

        Returns the drawn token by request id, or a RowError where the numbers came out as NaN or infinite (for a
        row that does not sample, under its own request's id): that fails the request alone. Rows that are
        withdrawn are left out. Rows of one step may share blocks only for reading.
        """
        ...

    def forget(self, request_id: str) -> None:
        """The request has ended: drop what is kept for it. Unknown ids are fine."""
        ...

    def close(self) -> None:
        """Free everything. Called once, by the thread that computed."""
        ...
