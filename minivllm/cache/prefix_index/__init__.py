"""What is published, and how the longest published prefix of a request is found.

Owns the map from a block's hash to the block that holds it. Must not know counts, the free queue or requests: the
manager says what becomes findable and what is forgotten.

Read `index` (the interface), then `hash_map`, the default. `names` lists what an engine can be set up with: a new index
is a file here and an entry there, and must pass tests/unit/test_prefix_index.py.
"""

from minivllm.cache.prefix_index.hash_map import HashMapIndex
from minivllm.cache.prefix_index.index import PrefixIndex
from minivllm.cache.prefix_index.names import PREFIX_INDEXES

__all__ = ["PREFIX_INDEXES", "HashMapIndex", "PrefixIndex"]
