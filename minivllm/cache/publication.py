"""When a full block becomes visible to others.

A policy answers one question: of the tokens that are computed, up to which one may others see the K/V now? The
manager publishes the full blocks up to there. Nothing is ever visible that was not computed. Knows a number of
tokens and a moment; must not know blocks, the index or flights.

One policy breaks that rule on purpose, to show what it costs: see `AtAllocation`.
"""

from __future__ import annotations

import enum
from typing import Protocol


class Moment(enum.Enum):
    """When a policy is asked."""

    ALLOCATED = "allocated"  # the request has blocks for what the coming step will compute
    STEP_DONE = "step done"  # the forward pass of a step has ended
    FINISHED = "finished"  # the request ended normally (never asked for an aborted or failed one)


class PublicationPolicy(Protocol):
    """Decides how much of a request others may see."""

    name: str

    def visible_tokens(self, num_computed_tokens: int, moment: Moment) -> int:
        """Return how many tokens from the start may be visible: at most ``num_computed_tokens``.

        A policy with ``is_safe = False`` is also asked at `Moment.ALLOCATED`, with what the step will have computed.
        """
        ...


class OnCompletion:
    """Visible when the request ends normally: the simplest rule, and the cause of the cold-cache race."""

    name = "on-completion"

    def visible_tokens(self, num_computed_tokens: int, moment: Moment) -> int:
        """Return all at the end, nothing before."""
        return num_computed_tokens if moment is Moment.FINISHED else 0


class Incremental:
    """Visible after the step that filled the block: shared while the first request still generates."""

    name = "incremental"

    def visible_tokens(self, num_computed_tokens: int, moment: Moment) -> int:
        """Return all that is computed, at any moment."""
        return num_computed_tokens


class AtAllocation:
    """Visible as soon as the blocks are there, *before* they are computed. For teaching only: unsafe.

    Requests admitted in one step share at once. That is sound only where each layer writes the K/V of the whole step
    before it attends, and never if a request is withdrawn before it is computed: its blocks stay findable and hold
    what was there before. Real engines have shipped this fault. An engine with a real model refuses it unless it is
    asked for by name.
    """

    name = "at-allocation"
    is_safe = False

    def visible_tokens(self, num_computed_tokens: int, moment: Moment) -> int:
        """Return all, at any moment."""
        return num_computed_tokens


ON_COMPLETION = OnCompletion()
INCREMENTAL = Incremental()
AT_ALLOCATION = AtAllocation()

PUBLICATION_POLICIES: dict[str, PublicationPolicy] = {
    policy.name: policy for policy in (ON_COMPLETION, INCREMENTAL, AT_ALLOCATION)
}


def is_safe(policy: PublicationPolicy) -> bool:
    """Whether the policy shows computed blocks only. One that does not say so is: the manager holds it to that."""
    return bool(getattr(policy, "is_safe", True))
