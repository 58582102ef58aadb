"""When a full block becomes visible to others.

A policy answers one question: of the tokens that are computed, up to which one may others see the K/V now? The
manager publishes the full blocks up to there. Nothing is ever visible that was not computed. Knows a number of
tokens and a moment; must not know blocks, the index or flights.
"""

from __future__ import annotations

import enum
from typing import Protocol


class Moment(enum.Enum):
    """When a policy is asked."""

    STEP_DONE = "step done"  # the forward pass of a step has ended
    FINISHED = "finished"  # the request ended normally (never asked for an aborted or failed one)


class PublicationPolicy(Protocol):
    """Decides how much of a request others may see."""

    name: str

    def visible_tokens(self, num_computed_tokens: int, moment: Moment) -> int:
        """Return how many tokens from the start may be visible: at most ``num_computed_tokens``."""
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


ON_COMPLETION = OnCompletion()
INCREMENTAL = Incremental()

PUBLICATION_POLICIES: dict[str, PublicationPolicy] = {policy.name: policy for policy in (ON_COMPLETION, INCREMENTAL)}
