"""The eviction policies that an engine can be set up with, by name."""

from __future__ import annotations

from minivllm.cache.eviction.lru import LRU
from minivllm.cache.eviction.mru import MRU
from minivllm.cache.eviction.policy import EvictionPolicy

EVICTION_POLICIES: dict[str, EvictionPolicy] = {policy.name: policy for policy in (LRU(), MRU())}
