"""The coordinators by name: who computes, who waits, until when."""

from __future__ import annotations

from collections.abc import Callable

from minivllm import events as ev
from minivllm.flights import Coordinator, IndependentCoordinator, PrefixCacheFlightCoordinator, ReleasePolicy
from minivllm.shared_prefix import SharedPrefixCoordinator
from minivllm.wait_or_recompute import WaitOrRecompute

COORDINATORS: dict[str, Callable[[ReleasePolicy, Callable[[ev.Event], None]], Coordinator]] = {
    coordinator.name: coordinator
    for coordinator in (IndependentCoordinator, PrefixCacheFlightCoordinator, SharedPrefixCoordinator, WaitOrRecompute)
}
