"""The hash chain: a block's name says all tokens from the start of the prompt to its own end.

    block 0              block 1              block 2
    [10 11 12 13]        [14 15 16 17]        [18 .. ..]   not full: no hash
    H(root, tokens, extra keys)
          └────────────► H(parent, tokens, extra keys)

The K/V of a token depends on every token before it. So two blocks with the same tokens but another past are
different blocks, and the parent's hash in the input says so. Extra keys are what else the K/V (or the right to
share them) depends on: an adapter, a cache salt.

SHA-256 over a canonical encoding: the same value in every process and on every machine. Token ids go in whole
(an engine that kept 8 bits of each served wrong K/V without a sound). Knows tokens and bytes; must not know
blocks or requests. The scheme is that of vLLM's automatic prefix caching.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

BlockHash = bytes
"""A SHA-256 digest, 32 bytes."""

ExtraKeys = tuple[tuple[str, str], ...]
"""Pairs (kind, value) in a fixed order of kinds."""

ROOT_HASH: BlockHash = hashlib.sha256(b"prefix cache root").digest()
"""The parent of every first block."""

ADAPTER = "adapter"
CACHE_SALT = "cache_salt"


def make_extra_keys(*, adapter: str | None = None, cache_salt: str | None = None) -> ExtraKeys:
    """Return the tagged extra keys, always in the same order. An empty salt is no salt.

    The tag keeps an adapter named ``foo`` apart from a salt ``foo``.
    """
    keys = []
    if adapter:
        keys.append((ADAPTER, adapter))
    if cache_salt:
        keys.append((CACHE_SALT, cache_salt))
    return tuple(keys)


def block_extra_keys(extra_keys: ExtraKeys, block_index: int) -> ExtraKeys:
    """Return the extra keys that enter the hash of one block.

    The salt enters block 0 only and reaches the rest through the chain; an adapter enters every block.
    """
    if block_index == 0:
        return extra_keys
    return tuple(key for key in extra_keys if key[0] != CACHE_SALT)


def hash_block(parent: BlockHash, token_ids: Sequence[int], extra_keys: ExtraKeys = ()) -> BlockHash:
    """Return H(parent, token ids, extra keys) of one full block.

    Every part is preceded by its length, so that no two inputs have the same encoding. Raises struct.error for
    a token id outside 0 to 2**64 - 1.
    """
    parts = [parent, struct.pack(f"<I{len(token_ids)}Q", len(token_ids), *token_ids)]
    parts.append(struct.pack("<I", len(extra_keys)))
    for kind, value in extra_keys:
        for text in (kind, value):
            data = text.encode("utf-8", "surrogatepass")
            parts.append(struct.pack("<I", len(data)))
            parts.append(data)
    return hashlib.sha256(b"".join(parts)).digest()


class HashChain:
    """The hashes of one request's full blocks, grown as its tokens come."""

    def __init__(self, block_size: int, extra_keys: ExtraKeys = ()) -> None:
        self.block_size = block_size
        self.extra_keys = extra_keys
        self.hashes: list[BlockHash] = []

    def extend_to(self, token_ids: Sequence[int]) -> None:
        """Hash the full blocks of ``token_ids`` (all tokens of the request) that have no hash yet."""
        for index in range(len(self.hashes), len(token_ids) // self.block_size):
            block = token_ids[index * self.block_size : (index + 1) * self.block_size]
            self.hashes.append(hash_block(self.parent_of(index), block, block_extra_keys(self.extra_keys, index)))

    def parent_of(self, index: int) -> BlockHash:
        """Return the hash of the block before block ``index``."""
        return self.hashes[index - 1] if index else ROOT_HASH
