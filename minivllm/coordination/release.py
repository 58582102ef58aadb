"""When the followers of a flight are released.

Knows how many wait. Must not know who they are, blocks or time.
"""

from __future__ import annotations

from typing import Protocol


class ReleasePolicy(Protocol):
    """Decides whether followers are released as soon as the leader's prompt is computed."""

    name: str

    def after_prefill(self, num_followers: int) -> bool:
        """Return True to publish the leader's prompt and release now, False to wait for the leader's end."""
        ...


class ReleaseOnCompletion:
    """Followers wait for the leader's whole request. Predictable; they wait through its decode, too."""

    name = "on-completion"

    def after_prefill(self, num_followers: int) -> bool:
        """Never."""
        return False


class ReleaseAfterPrefill:
    """Followers wait for the leader's prompt only; then all decode together."""

    name = "after-prefill"

    def after_prefill(self, num_followers: int) -> bool:
        """Always."""
        return True


RELEASE_POLICIES: dict[str, ReleasePolicy] = {
    policy.name: policy for policy in (ReleaseOnCompletion(), ReleaseAfterPrefill())
}
