"""The step that a scheduler passes to a runner, and the interface of a runner.

One step is one forward pass over a batch of rows: first the rows in decode (one token each), then prefill chunks. Knows
tokens, positions and block ids; must not know how a runner computes, nor why a row was chosen.
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

    PREFILL = "prefill"  # known tokens: of the prompt, or output computed again after a preemption
    DECODE = "decode"  # the one token that was drawn last


@dataclass(frozen=True, slots=True)
class ScheduledRow:
    """One request's part of a step: compute the K/V of ``num_tokens`` tokens from position ``start`` on.

    ``block_ids`` is the block table: logical block i of the request is physical block ``block_ids[i]``. It covers all
    positions up to ``start + num_tokens - 1``. ``sampled`` are the requests whose next token is drawn from the row's
    last logits: none if the row ends before the last known token, otherwise the request itself, and all samples of its
    prompt if the row completes a prompt with several.
    """

    request: Request
    start: int
    num_tokens: int
    block_ids: tuple[int, ...]
    phase: Phase
    sampled: tuple[Request, ...] = ()

    @property
    def samples(self) -> bool:
        """Whether a token is drawn from the row's last logits."""
        return bool(self.sampled)

    @property
    def is_withdrawn(self) -> bool:
        """Whether the request has ended since the step was scheduled. Such a row is not computed."""
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

    The runner does ``copies`` before any row, and reads all their sources before it writes any target.
    """

    number: int
    rows: tuple[ScheduledRow, ...]
    copies: tuple[BlockCopy, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens computed in the step, over all rows."""
        return sum(row.num_tokens for row in self.rows)


class Detokenizer(Protocol):
    """Turns one request's tokens into text, token by token (the interface of mlx-lm's streaming detokenizers)."""

    def add_token(self, token: int) -> None:
        """Add the next token."""
        ...

    def finalize(self) -> None:
        """End the text: flush what was kept back, such as an incomplete character."""
        ...

    @property
    def last_segment(self) -> str:
        """The text that became final since the last read. Reading it changes it."""
        ...


class Tokenizer(Protocol):
    """What the engine needs of a tokenizer (mlx-lm's ``TokenizerWrapper`` implements it)."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of ``text``."""
        ...

    @property
    def detokenizer(self) -> Detokenizer:
        """A new streaming detokenizer, for one request."""
        ...


class Runner(Protocol):
    """Computes steps. This is all that the engine uses of it."""

    @property
    def name(self) -> str:
        """Name of the model, for messages and tables."""
        ...

    @property
    def clock(self) -> Clock:
        """The engine's clock; it advances while steps are computed."""
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
        """Tokens that end a request, unless it sets ``ignore_eos``."""
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
        """Allocate the K/V pool, once, before the first step: blocks 1 to ``num_blocks``, and block 0 as scratch."""
        ...

    def execute(self, step: ScheduledStep) -> Mapping[str, int | RowError]:
        """Do the copies, write the K/V of every row, and draw the next token of each request in ``row.sampled``.

        Returns by request id the drawn token, or a RowError if the results are NaN or infinite (for a row that does
        not sample, under its own request's id): only that request fails. Withdrawn rows are left out. Rows of one
        step may share blocks only for reading.
        """
        ...

    def forget(self, request_id: str) -> None:
        """Drop what is kept for a request that has ended. Unknown ids are fine."""
        ...

    def close(self) -> None:
        """Free everything. Called once, on the thread that ran the steps."""
        ...
