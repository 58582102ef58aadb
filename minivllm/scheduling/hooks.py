"""What the scheduler asks while it makes a step, and the answers.

Knows requests and what was found for them. Must not know who answers.
"""

from __future__ import annotations

import enum
from typing import Protocol

from minivllm.cache.block_table import ComputedBlocks
from minivllm.request import Request


class Verdict(enum.Enum):
    """The answer of `SchedulerHooks.may_admit`."""

    GO = "go"
    HOLD = "hold"  # another request computes what it needs: held until it is released
    LOOK_AGAIN = "look again"  # the hook published more blocks for it: repeat the look-up


class SchedulerHooks(Protocol):
    """What the scheduler calls while it makes a step: its only access to coordination and publication."""

    def may_admit(self, request: Request, computed: ComputedBlocks, budget_left: int) -> Verdict:
        """Whether a waiting request may run, given its cached prefix and the rest of the step's token budget."""
        ...

    def admitted(self, request: Request) -> None:
        """A request was admitted: it is running, and its hits count as computed tokens."""
        ...

    def preempted(self, request: Request) -> None:
        """A running request was preempted: its blocks are freed."""
        ...

    def allocated(self, request: Request, num_tokens: int) -> None:
        """A request has blocks for its first ``num_tokens`` tokens: as many as are computed after this step."""
        ...
