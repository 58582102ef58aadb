"""Coordination: who computes a prompt, who waits for it, and until when.

Owns the coordinators. The engine reports a request's life (arrived, admitted, published, ended); they say who may run.
Must not know block ids, the scheduler's lists or time, nor the engine that asks.

Read in this order: `coordinator` (what an engine asks; nobody waits), `release` (until when followers are held),
`flight` and `single_flight` (identical prompts), `shared_prefix` (equal beginnings), `wait_or_recompute` (which is
sooner).
`names` lists what an engine can be set up with: a new coordinator is a subclass of `Coordinator` and an entry there.
"""

from minivllm.coordination.coordinator import NOBODY, Coordinator, Outlook, Released
from minivllm.coordination.flight import Flight
from minivllm.coordination.names import COORDINATORS
from minivllm.coordination.release import RELEASE_POLICIES, ReleaseAfterPrefill, ReleaseOnCompletion, ReleasePolicy
from minivllm.coordination.shared_prefix import SharedPrefixCoordinator
from minivllm.coordination.single_flight import PrefixCacheFlightCoordinator
from minivllm.coordination.wait_or_recompute import WaitOrRecompute

__all__ = [
    "COORDINATORS",
    "NOBODY",
    "RELEASE_POLICIES",
    "Coordinator",
    "Flight",
    "Outlook",
    "PrefixCacheFlightCoordinator",
    "ReleaseAfterPrefill",
    "ReleaseOnCompletion",
    "ReleasePolicy",
    "Released",
    "SharedPrefixCoordinator",
    "WaitOrRecompute",
]
