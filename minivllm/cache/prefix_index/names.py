"""The prefix indexes that an engine can be set up with, by name."""

from __future__ import annotations

from minivllm.cache.prefix_index.hash_map import HashMapIndex
from minivllm.cache.prefix_index.index import PrefixIndex

PREFIX_INDEXES: dict[str, type[PrefixIndex]] = {"hash-map": HashMapIndex}
