"""The coordinators by name: who computes, who waits, until when."""

from __future__ import annotations

from collections.abc import Callable

from minivllm.coordination.coordinator import Coordinator, IndependentCoordinator
from minivllm.coordination.release import ReleasePolicy
from minivllm.coordination.shared_prefix import SharedPrefixCoordinator
from minivllm.coordination.single_flight import PrefixCacheFlightCoordinator
from minivllm.coordination.wait_or_recompute import WaitOrRecompute
from minivllm.log import events as ev

COORDINATORS: dict[str, Callable[[ReleasePolicy, Callable[[ev.Event], None]], Coordinator]] = {
    coordinator.name: coordinator
    for coordinator in (IndependentCoordinator, PrefixCacheFlightCoordinator, SharedPrefixCoordinator, WaitOrRecompute)
}
