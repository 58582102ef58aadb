"""The hash chain: a block's name says all tokens from the start of the prompt to its own end.

    block 0              block 1              block 2
    [10 11 12 13]        [14 15 16 17]        [18 .. ..]   not full: no hash
    H(root, tokens, extra keys)
          └────────────► H(parent, tokens, extra keys)

The K/V of a token depends on every token before it. So two blocks with the same tokens but another past are
different blocks, and the parent's hash in the input says so. Extra keys are what else the K/V (or the right to
share them) depends on: an adapter, an image that stands behind some tokens, a cache salt.

What is hashed is one canonical encoding, so that a hash is the same in every process and on every machine:

    parent        as many bytes as every hash of this hasher has
    token ids     their number (4 bytes), then 8 bytes each
    extra keys    their number (4 bytes), then kind and value of each: its length (4 bytes), then UTF-8

Numbers are little-endian. Each part's length is fixed or stands before it, so no two inputs have the same encoding.
Token ids go in whole (an engine that kept 8 bits of each served wrong K/V without a sound).

Knows tokens and bytes; must not know blocks or requests. The scheme is that of vLLM's automatic prefix caching.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Protocol

import xxhash

from minivllm.errors import ConfigError, InvariantError
from minivllm.request import CACHE_SALT, ExtraKeys

BlockHash = bytes
"""A digest: 32 bytes of SHA-256, 16 of XXH3, one to three of a weak hash."""

BlockKeys = tuple[tuple[str, str], ...]
"""The extra keys that enter one block's hash, as pairs (kind, value)."""

_BYTES_PER_TOKEN = 8
_ROOT_NAME = b"prefix cache root"


# -- Extra keys --------------------------------------------------------------------------------------------


def block_extra_keys(extra_keys: ExtraKeys, block_index: int, block_size: int) -> BlockKeys:
    """Return the extra keys that enter the hash of one block.

    An adapter enters every block. A multimodal item enters every block that it overlaps, with its place: the same
    image one token later is another input, though the placeholder tokens around it may be the same. The salt enters
    block 0 only and reaches the rest through the chain.
    """
    first, end = block_index * block_size, (block_index + 1) * block_size
    keys = []
    for key in extra_keys:
        if len(key) == 4:
            kind, content_hash, offset, num_tokens = key
            if offset < end and offset + num_tokens > first:
                keys.append((kind, f"{content_hash}@{offset}+{num_tokens}"))
        elif block_index == 0 or key[0] != CACHE_SALT:
            keys.append(key)
    return tuple(keys)


# -- Encoding ----------------------------------------------------------------------------------------------


def encode_token_ids(token_ids: Sequence[int]) -> bytes:
    """Return 8 bytes for each token id. Raises struct.error for an id outside 0 to 2**64 - 1."""
    return struct.pack(f"<{len(token_ids)}Q", *token_ids)


def encode_extra_keys(extra_keys: BlockKeys) -> bytes:
    """Return the number of pairs, then every text behind its length."""
    parts = [struct.pack("<I", len(extra_keys))]
    for pair in extra_keys:
        for text in pair:
            data = text.encode("utf-8", "surrogatepass")
            parts += struct.pack("<I", len(data)), data
    return b"".join(parts)


# -- Hashers -----------------------------------------------------------------------------------------------


class BlockHasher(Protocol):
    """Turns an encoded block into its hash.

    Another one is a subclass with a ``name``, a ``root`` (the parent of every first block) and a ``digest``. Every
    digest and the root must have the same number of bytes.
    """

    name: str
    root: BlockHash

    def digest(self, data: bytes) -> BlockHash:
        """Return the hash of these bytes: the same in every process and on every machine."""
        ...

    def hash_block(self, parent: BlockHash, token_ids: Sequence[int], extra_keys: BlockKeys = ()) -> BlockHash:
        """Return H(parent, token ids, extra keys) of one full block.

        Raises struct.error for a token id outside 0 to 2**64 - 1, and InvariantError for a parent that this hasher
        did not make: its length shows where the parent ends.
        """
        if len(parent) != len(self.root):
            raise InvariantError(
                f"a parent hash has {len(parent)} bytes and every hash of {self.name} has {len(self.root)}; "
                "one chain has one hasher"
            )
        tokens = struct.pack("<I", len(token_ids)) + encode_token_ids(token_ids)
        return self.digest(parent + tokens + encode_extra_keys(extra_keys))


class Sha256(BlockHasher):
    """The default: nobody can find two inputs with the same hash, so tenants cannot be made to share by a trick."""

    name = "sha256"

    def __init__(self) -> None:
        self.root = self.digest(_ROOT_NAME)

    def digest(self, data: bytes) -> BlockHash:
        """Return 32 bytes."""
        return hashlib.sha256(data).digest()


class Xxh3(BlockHasher):
    """The 128-bit variant of XXH3: faster, and enough where nobody tries to make two inputs collide."""

    name = "xxh3-128"

    def __init__(self) -> None:
        self.root = self.digest(_ROOT_NAME)

    def digest(self, data: bytes) -> BlockHash:
        """Return 16 bytes, in xxHash's canonical (big-endian) order."""
        return xxhash.xxh3_128_digest(data)


class WeakHash(BlockHasher):
    """The first few bits of SHA-256: for teaching, never for use.

    With so few values, different tokens soon have the same hash, and a look-up finds K/V that other tokens left
    there. That is what a good hash, or a comparison of token ids, prevents. The root is a value that no block can have.
    Raises ConfigError for bits outside 1 to 16.
    """

    def __init__(self, bits: int = 4) -> None:
        if not isinstance(bits, int) or isinstance(bits, bool) or not 1 <= bits <= 16:
            raise ConfigError(f"bits is {bits!r}; a weak hash has from 1 to 16 bits (4 soon collide)")
        self.bits = bits
        self.name = f"weak-{bits}"
        self._num_bytes = bits // 8 + 1  # one bit more than a block needs: the root's
        self.root = (1 << bits).to_bytes(self._num_bytes, "big")

    def digest(self, data: bytes) -> BlockHash:
        """Return a number below 2**bits, big-endian."""
        number = int.from_bytes(hashlib.sha256(data).digest()[:2], "big") >> (16 - self.bits)
        return number.to_bytes(self._num_bytes, "big")


SHA256 = Sha256()

BLOCK_HASHERS: dict[str, BlockHasher] = {hasher.name: hasher for hasher in (SHA256, Xxh3(), WeakHash(4))}

ROOT_HASH: BlockHash = SHA256.root
"""The parent of every first block under SHA-256."""


def hash_block(parent: BlockHash, token_ids: Sequence[int], extra_keys: BlockKeys = ()) -> BlockHash:
    """Return H(parent, token ids, extra keys) of one full block, with SHA-256: see `BlockHasher.hash_block`."""
    return SHA256.hash_block(parent, token_ids, extra_keys)


# -- The chain ---------------------------------------------------------------------------------------------


class HashChain:
    """The hashes of one request's full blocks, grown as its tokens come."""

    def __init__(self, block_size: int, extra_keys: ExtraKeys = (), hasher: BlockHasher = SHA256) -> None:
        self.block_size = block_size
        self.extra_keys = extra_keys
        self.hasher = hasher
        self.hashes: list[BlockHash] = []
        # Most blocks have the adapter's key or none: encoded once. The others are block 0 and those of items.
        pairs = tuple(key for key in extra_keys if len(key) == 2)
        self._usual_keys = encode_extra_keys(block_extra_keys(pairs, 1, block_size))
        self._items = [(key[2], key[2] + key[3] - 1) for key in extra_keys if len(key) == 4]  # first and last token

    def extend_to(self, token_ids: Sequence[int]) -> None:
        """Hash the full blocks of ``token_ids`` (all tokens of the request) that have no hash yet.

        The same hashes as `BlockHasher.hash_block` gives block by block; all new tokens are encoded at once.
        """
        size, first, end = self.block_size, len(self.hashes), len(token_ids) // self.block_size
        if end <= first:
            return
        tokens = encode_token_ids(token_ids[first * size : end * size])
        width, count = size * _BYTES_PER_TOKEN, struct.pack("<I", size)
        special = self._special_blocks(first, end)
        digest, parent = self.hasher.digest, self.parent_of(first)
        for index in range(first, end):
            keys = self._keys(index) if index in special else self._usual_keys
            start = (index - first) * width
            parent = digest(parent + count + tokens[start : start + width] + keys)
            self.hashes.append(parent)

    def _special_blocks(self, first: int, end: int) -> set[int]:
        """Return which of these blocks have extra keys of their own: block 0, and those that an item overlaps."""
        special = {0}
        for first_token, last_token in self._items:
            special.update(
                range(max(first, first_token // self.block_size), min(end, last_token // self.block_size + 1))
            )
        return special

    def _keys(self, index: int) -> bytes:
        return encode_extra_keys(block_extra_keys(self.extra_keys, index, self.block_size))

    def parent_of(self, index: int) -> BlockHash:
        """Return the hash of the block before block ``index``."""
        return self.hashes[index - 1] if index else self.hasher.root

    def fork(self) -> HashChain:
        """Return a chain of its own with the same hashes so far, for another sample of the same prompt."""
        twin = HashChain(self.block_size, self.extra_keys, self.hasher)
        twin.hashes = list(self.hashes)
        return twin
