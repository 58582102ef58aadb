"""The KV cache: which block holds which tokens, who uses it, and how it is found again.

    request's tokens ─► block_hash ─► prefix_index ─► block pool ─► block table

Owns every block's life: the hash chain, the pool with its free block queue, the index of what is published, block
tables, and the rules of eviction and publication. Must not know the scheduler, who waits for whom, or how K/V is
computed: it hands out ids of blocks and emits events.

Read in this order: `block_hash`, `block_pool`, `prefix_index/`, `eviction/`, `publication`, `block_table`, then
`kv_cache_manager`, which is all the others see. `content`, `token_check` and `invariants` can wait.
"""

from minivllm.cache.block_hash import (
    BLOCK_HASHERS,
    ROOT_HASH,
    BlockHash,
    BlockHasher,
    HashChain,
    Sha256,
    WeakHash,
    Xxh3,
    block_extra_keys,
    hash_block,
)
from minivllm.cache.block_pool import SCRATCH_BLOCK_ID, Block, BlockPool, FreeBlockQueue
from minivllm.cache.block_table import ComputedBlocks
from minivllm.cache.eviction import EVICTION_POLICIES, LRU, MRU, EvictionPolicy, Placement
from minivllm.cache.kv_cache_manager import KVCacheManager
from minivllm.cache.prefix_index import PREFIX_INDEXES, HashMapIndex, PrefixIndex
from minivllm.cache.publication import (
    AT_ALLOCATION,
    INCREMENTAL,
    ON_COMPLETION,
    PUBLICATION_POLICIES,
    Moment,
    PublicationPolicy,
)

__all__ = [
    "AT_ALLOCATION",
    "BLOCK_HASHERS",
    "EVICTION_POLICIES",
    "INCREMENTAL",
    "LRU",
    "MRU",
    "ON_COMPLETION",
    "PREFIX_INDEXES",
    "PUBLICATION_POLICIES",
    "ROOT_HASH",
    "SCRATCH_BLOCK_ID",
    "Block",
    "BlockHash",
    "BlockHasher",
    "BlockPool",
    "ComputedBlocks",
    "EvictionPolicy",
    "FreeBlockQueue",
    "HashChain",
    "HashMapIndex",
    "KVCacheManager",
    "Moment",
    "Placement",
    "PrefixIndex",
    "PublicationPolicy",
    "Sha256",
    "WeakHash",
    "Xxh3",
    "block_extra_keys",
    "hash_block",
]
