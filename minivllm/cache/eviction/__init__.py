"""Which free block is forgotten first, when a new one is needed.

Owns the order in which freed blocks enter the free queue: it is popped at its head, so that order is the order of
eviction. Must not know requests, the index or who uses a block: no policy can make the manager evict a block in use.

Read `policy` (the interface), then `lru`, the default. `names` lists what an engine can be set up with: a new policy is
a file here and an entry there, and tests/property runs with all of them.
"""

from minivllm.cache.eviction.lru import LRU
from minivllm.cache.eviction.mru import MRU
from minivllm.cache.eviction.names import EVICTION_POLICIES
from minivllm.cache.eviction.policy import EvictionPolicy, Placement

__all__ = ["EVICTION_POLICIES", "LRU", "MRU", "EvictionPolicy", "Placement"]
