"""When other requests may use a full block.

A policy answers one question: how many of a request's computed tokens may other requests see now? The KV cache manager
then publishes the full blocks among them. Blocks that are not computed are never published, except by `AtAllocation`,
which breaks this rule on purpose to show the consequences.

Knows a number of tokens and a moment; must not know blocks, the index or flights.
"""

from __future__ import annotations

import enum
from typing import Protocol


class Moment(enum.Enum):
    """When a policy is asked."""

    ALLOCATED = "allocated"  # blocks are allocated for the tokens that the coming step computes
    STEP_DONE = "step done"  # the step's forward pass has ended
    FINISHED = "finished"  # the request finished normally; not asked for aborted or failed requests


class PublicationPolicy(Protocol):
    """Decides how many tokens of a request other requests may see."""

    name: str

    def visible_tokens(self, num_computed_tokens: int, moment: Moment) -> int:
        """Return how many tokens, from the start, others may see: at most ``num_computed_tokens``.

        A policy with ``is_safe = False`` is also asked at `Moment.ALLOCATED`. Then ``num_computed_tokens`` includes
        the tokens that the coming step computes.
        """
        ...


class OnCompletion:
    """Publish when the request finishes normally: the simplest rule, and the cause of the cold-cache race."""

    name = "on-completion"

    def visible_tokens(self, num_computed_tokens: int, moment: Moment) -> int:
        """Return all tokens when the request finishes, and 0 before."""
        return num_computed_tokens if moment is Moment.FINISHED else 0


class Incremental:
    """Publish each block after the step that fills it, so that others can use it while its request still runs."""

    name = "incremental"

    def visible_tokens(self, num_computed_tokens: int, moment: Moment) -> int:
        """Return all that is computed, at any moment."""
        return num_computed_tokens


class AtAllocation:
    """Publish blocks when they are allocated, *before* they are computed. Unsafe, for teaching only.

    Requests admitted in the same step can already share blocks. This is correct only if each layer writes the K/V of
    the whole step before it attends. It is wrong whenever a request ends before its blocks are computed: they stay in
    the index and hold stale K/V. Real engines have shipped this bug. An engine with a real model refuses this policy
    unless ``allow_unsafe`` names it.
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
    """Whether the policy publishes computed blocks only: yes if it has no ``is_safe``, and the manager checks that."""
    return bool(getattr(policy, "is_safe", True))
