"""A block's hash names all tokens from the start to its end, and what else its K/V depends on."""

from __future__ import annotations

import hashlib
import itertools
import os
import struct
import subprocess
import sys
from collections.abc import Sequence

import pytest

from minivllm.cache.block_hash import (
    BLOCK_HASHERS,
    ROOT_HASH,
    SHA256,
    BlockHasher,
    HashChain,
    WeakHash,
    Xxh3,
    block_extra_keys,
    hash_block,
)
from minivllm.errors import ConfigError, InvalidRequestError, InvariantError
from minivllm.request import ExtraKeys, MultimodalItem, make_extra_keys

BLOCK = [10, 11, 12, 13]
NEXT = [14, 15, 16, 17]
CAT = MultimodalItem("cat", offset=2, num_tokens=5)

HASHERS: dict[str, BlockHasher] = {**BLOCK_HASHERS, "weak-12": WeakHash(12)}

DIGESTS = {
    "sha256": (
        "9e0f0ae44ecdfa12a6573cecd267c6c922151f44e8f8a73bc93d60b77533d8b0",
        "709822dfafe2c3c7e2744eeac2ab34b56f4d1dc621719685b5d096072b3a52c9",
        "60b5d1e24ef01897103ce72e57fda90155fbe6092604167ab76d6f0cb3ad6a7b",
        "abf6d39f10d87383f256a5b154fc913a8139a1bb138131e676aa828f5d644f21",
        "5ea9d649bf77172132cf9d270eb2d6c8c558f20aae8bf11b9670aea6575ae27f",
        "4e0a8c502b47b4b2075163cb24f070dffb736f4d559140d80187007dfd23e9b1",
    ),
    "xxh3-128": (
        "447add8365fe4bed7284896c3bdb3df3",
        "8f5b56b74a67094dbc210d75da9bc063",
        "82ebb8a697a3219857d37ebdae713a76",
        "3587ca15e543c5609d905d65bccdf8ac",
        "f20c514260a1b52cde321d2253c508bb",
        "e4e539c9dcb4f3c27bbb7e34f2206649",
    ),
    "weak-4": ("10", "0e", "0e", "0d", "01", "0e"),
    "weak-12": ("1000", "0bda", "0888", "059c", "05d4", "0ec1"),
}
"""The root, a block, the one behind it, the first with an adapter, the first with all keys, and one of large ids."""


def digests(hasher: BlockHasher) -> tuple[str, ...]:
    """Return what `DIGESTS` lists, computed now."""
    all_keys = block_extra_keys(make_extra_keys(adapter="größe", multimodal=[CAT], cache_salt="塩"), 0, 4)
    first = hasher.hash_block(hasher.root, BLOCK)
    hashes = (
        hasher.root,
        first,
        hasher.hash_block(first, NEXT),
        hasher.hash_block(hasher.root, BLOCK, (("adapter", "team-a"),)),
        hasher.hash_block(hasher.root, BLOCK, all_keys),
        hasher.hash_block(hasher.root, [2**32 + 10, 2**40, 2**63, 2**64 - 1]),
    )
    return tuple(block_hash.hex() for block_hash in hashes)


def chain_of(tokens: Sequence[int], keys: ExtraKeys = (), hasher: BlockHasher = SHA256) -> list[bytes]:
    chain = HashChain(4, keys, hasher)
    chain.extend_to(tokens)
    return chain.hashes


def first_hash(*, adapter: str | None = None, cache_salt: str | None = None) -> bytes:
    keys = make_extra_keys(adapter=adapter, cache_salt=cache_salt)
    return hash_block(ROOT_HASH, BLOCK, block_extra_keys(keys, 0, 4))


# -- The same everywhere -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DIGESTS)
def test_the_digests_are_these_on_every_machine(name: str) -> None:
    """Fixed values: a change of the encoding is a change of the format, and must be meant."""
    assert digests(HASHERS[name]) == DIGESTS[name]


def test_every_hasher_has_fixed_digests_here() -> None:
    assert set(BLOCK_HASHERS) <= set(DIGESTS)
    assert all(hasher.name == name for name, hasher in HASHERS.items())


def test_the_default_is_sha_256() -> None:
    assert SHA256 is BLOCK_HASHERS["sha256"]
    assert SHA256.root == ROOT_HASH
    assert HashChain(4).hasher is SHA256
    assert hash_block(ROOT_HASH, BLOCK, (("k", "v"),)) == SHA256.hash_block(ROOT_HASH, BLOCK, (("k", "v"),))


def test_a_salted_block_has_this_digest() -> None:
    assert first_hash(cache_salt="team-a").hex() == "47ca22c34dccaada24f6cda902ea74524dff68465159847621a88fa3e2809208"


def test_another_process_with_another_hash_seed_gives_the_same_digests() -> None:
    code = (
        "from tests.unit.test_block_hash import *\n"
        "print({name: digests(hasher) for name, hasher in HASHERS.items()} == DIGESTS, hash('a'))"
    )
    seen = set()
    for seed in ("0", "4711"):
        child = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        )
        answer, python_hash = child.stdout.split()
        assert answer == "True"
        seen.add(python_hash)
    assert len(seen) == 2  # Python's own hash did differ


# -- The encoding ------------------------------------------------------------------------------------------


def test_the_encoding_is_the_documented_one_byte_for_byte() -> None:
    written = (
        ROOT_HASH
        + b"\x02\0\0\0" + b"\x0a\0\0\0\0\0\0\0" + b"\0\0\0\0\x01\0\0\0"
        + b"\x01\0\0\0" + b"\x0a\0\0\0cache_salt" + b"\x02\0\0\0\xc3\xb6"
    )  # fmt: skip
    assert hash_block(ROOT_HASH, [10, 2**32], (("cache_salt", "ö"),)) == hashlib.sha256(written).digest()


@pytest.mark.parametrize("hasher", HASHERS.values(), ids=HASHERS)
def test_all_hashes_of_one_hasher_have_one_length(hasher: BlockHasher) -> None:
    """The parent stands first in the encoding without a length: it needs none as long as this holds."""
    hashes = [hasher.hash_block(hasher.root, [number, 1, 2, 3]) for number in range(300)]
    assert {len(block_hash) for block_hash in hashes} == {len(hasher.root)}


def test_a_parent_of_another_hasher_is_refused() -> None:
    with pytest.raises(InvariantError, match="a parent hash has 16 bytes and every hash of sha256 has 32; one chain"):
        hash_block(Xxh3().root, BLOCK)


def test_the_same_tokens_after_another_past_are_another_block() -> None:
    assert hash_block(hash_block(ROOT_HASH, BLOCK), NEXT) != hash_block(hash_block(ROOT_HASH, NEXT), NEXT)
    assert hash_block(ROOT_HASH, NEXT) != hash_block(hash_block(ROOT_HASH, BLOCK), NEXT)


def test_the_order_of_tokens_counts() -> None:
    assert hash_block(ROOT_HASH, [1, 2, 3, 4]) != hash_block(ROOT_HASH, [1, 2, 4, 3])


@pytest.mark.parametrize("bits", [8, 16, 32])
def test_token_ids_are_hashed_whole(bits: int) -> None:
    """An engine that kept 8 bits of each token id took 300 for 44."""
    assert hash_block(ROOT_HASH, [44, 1, 2, 3]) != hash_block(ROOT_HASH, [44 + 2**bits, 1, 2, 3])


def test_bytes_of_neighbouring_tokens_do_not_run_together() -> None:
    assert hash_block(ROOT_HASH, [1, 0]) != hash_block(ROOT_HASH, [0, 1])
    assert hash_block(ROOT_HASH, [0]) != hash_block(ROOT_HASH, [0, 0])


def test_a_negative_token_id_is_refused() -> None:
    with pytest.raises(struct.error):
        hash_block(ROOT_HASH, [-1, 2, 3, 4])


def test_an_adapter_named_like_a_salt_has_other_hashes() -> None:
    """Example 9: the tag of the kind keeps them apart."""
    assert first_hash(adapter="foo") != first_hash(cache_salt="foo")
    assert first_hash(adapter="foo", cache_salt="bar") != first_hash(adapter="bar", cache_salt="foo")


def test_two_salts_differ_and_the_same_salt_agrees() -> None:
    assert first_hash(cache_salt="a") != first_hash(cache_salt="b")
    assert first_hash(cache_salt="a") != first_hash()
    assert first_hash(cache_salt="a") == first_hash(cache_salt="a")


def test_an_empty_salt_is_no_salt() -> None:
    assert make_extra_keys(cache_salt="") == make_extra_keys(cache_salt=None) == ()
    assert first_hash(cache_salt="") == first_hash()


def test_text_cannot_move_from_one_extra_key_to_the_next() -> None:
    """Lengths stand before every part, so that ("ab", "c") and ("a", "bc") are two encodings."""
    assert hash_block(ROOT_HASH, BLOCK, (("ab", "c"),)) != hash_block(ROOT_HASH, BLOCK, (("a", "bc"),))
    assert hash_block(ROOT_HASH, BLOCK, (("a", ""), ("b", ""))) != hash_block(ROOT_HASH, BLOCK, (("a", "b"),))
    assert hash_block(ROOT_HASH, BLOCK, (("k", "\0"),)) != hash_block(ROOT_HASH, BLOCK, (("k", ""),))


def test_a_salt_that_is_no_valid_unicode_still_has_a_hash_of_its_own() -> None:
    assert first_hash(cache_salt="\udc80") != first_hash(cache_salt="\udc81")


def test_extra_keys_come_in_one_order_adapter_before_salt() -> None:
    assert make_extra_keys(cache_salt="s", adapter="a") == (("adapter", "a"), ("cache_salt", "s"))


def test_the_salt_enters_block_0_only_and_the_adapter_every_block() -> None:
    keys = make_extra_keys(adapter="a", cache_salt="s")
    assert block_extra_keys(keys, 0, 4) == keys
    assert block_extra_keys(keys, 1, 4) == block_extra_keys(keys, 9, 4) == (("adapter", "a"),)


def test_the_salt_reaches_later_blocks_through_the_chain() -> None:
    salted, plain = HashChain(4, make_extra_keys(cache_salt="s")), HashChain(4)
    for chain in (salted, plain):
        chain.extend_to([*BLOCK, *NEXT])
    assert salted.hashes[1] == hash_block(salted.hashes[0], NEXT)
    assert salted.hashes[1] != plain.hashes[1]


def test_a_partial_block_has_no_hash() -> None:
    chain = HashChain(4)
    chain.extend_to(BLOCK[:3])
    assert chain.hashes == []
    chain.extend_to([*BLOCK, *NEXT, 18])
    assert len(chain.hashes) == 2


def test_the_first_block_hangs_on_the_root_and_the_next_on_the_first() -> None:
    chain = HashChain(4)
    chain.extend_to([*BLOCK, *NEXT])
    assert chain.parent_of(0) == ROOT_HASH
    assert chain.parent_of(1) == chain.hashes[0]
    assert chain.hashes == [hash_block(ROOT_HASH, BLOCK), hash_block(hash_block(ROOT_HASH, BLOCK), NEXT)]


def test_a_fork_has_the_hashes_so_far_and_grows_on_its_own() -> None:
    keys = make_extra_keys(adapter="a", multimodal=[MultimodalItem("cat", 6, 4)], cache_salt="s")
    chain = HashChain(4, keys, Xxh3())
    chain.extend_to([*BLOCK, *NEXT])
    twin = chain.fork()
    assert twin.hashes == chain.hashes
    twin.extend_to([*BLOCK, *NEXT, *BLOCK])
    chain.extend_to([*BLOCK, *NEXT, *NEXT])
    assert twin.hashes == chain_of([*BLOCK, *NEXT, *BLOCK], keys, Xxh3())
    assert chain.hashes == chain_of([*BLOCK, *NEXT, *NEXT], keys, Xxh3())


# -- Multimodal items --------------------------------------------------------------------------------------


def keys_by_block(item: MultimodalItem, num_blocks: int) -> list[int]:
    """Return the blocks of 4 tokens whose hash the item enters."""
    keys = make_extra_keys(multimodal=[item])
    return [index for index in range(num_blocks) if block_extra_keys(keys, index, 4)]


@pytest.mark.parametrize(
    ("offset", "num_tokens", "blocks"),
    [
        (0, 1, [0]),
        (0, 4, [0]),
        (0, 5, [0, 1]),
        (3, 1, [0]),
        (3, 2, [0, 1]),
        (4, 4, [1]),
        (4, 9, [1, 2, 3]),
        (6, 7, [1, 2, 3]),
    ],
)
def test_a_multimodal_item_enters_every_block_that_it_overlaps_and_no_other(
    offset: int, num_tokens: int, blocks: list[int]
) -> None:
    assert keys_by_block(MultimodalItem("cat", offset, num_tokens), 5) == blocks


def test_two_images_behind_the_same_tokens_part_at_the_first_block_that_they_overlap() -> None:
    tokens = [7] * 16
    cat, dog = (chain_of(tokens, make_extra_keys(multimodal=[MultimodalItem(name, 6, 4)])) for name in ("cat", "dog"))
    assert cat[0] == dog[0] == chain_of(tokens)[0]
    assert not set(cat[1:]) & set(dog[1:])
    assert cat == chain_of(tokens, make_extra_keys(multimodal=[MultimodalItem("cat", 6, 4)]))


def test_the_same_image_at_another_place_or_of_another_length_is_another_input() -> None:
    tokens = [7] * 8
    blocks = [
        chain_of(tokens, make_extra_keys(multimodal=[MultimodalItem("cat", offset, num_tokens)]))[0]
        for offset, num_tokens in ((0, 2), (1, 2), (0, 3), (1, 6), (2, 6))
    ]
    assert len(set(blocks)) == 5


def test_a_later_block_knows_an_image_that_ended_before_it_through_the_chain() -> None:
    seen, plain = chain_of([7] * 12, make_extra_keys(multimodal=[MultimodalItem("cat", 0, 4)])), chain_of([7] * 12)
    assert seen[2] == hash_block(seen[1], [7] * 4)
    assert seen[2] != plain[2]


def test_items_come_by_their_place_between_the_adapter_and_the_salt() -> None:
    items = [MultimodalItem("dog", 9, 1), MultimodalItem("cat", 2, 3)]
    keys = make_extra_keys(cache_salt="s", multimodal=items, adapter="a")
    assert keys == (("adapter", "a"), ("multimodal", "cat", 2, 3), ("multimodal", "dog", 9, 1), ("cache_salt", "s"))
    assert keys == make_extra_keys(adapter="a", multimodal=items[::-1], cache_salt="s")
    assert block_extra_keys(keys, 0, 4) == (("adapter", "a"), ("multimodal", "cat@2+3"), ("cache_salt", "s"))
    assert block_extra_keys(keys, 2, 4) == (("adapter", "a"), ("multimodal", "dog@9+1"))


def test_a_content_hash_cannot_pass_for_a_place() -> None:
    """The place is the last part of the value and holds digits only."""
    one, other = MultimodalItem("cat@1+2", 1, 2), MultimodalItem("cat", 1, 2)
    assert block_extra_keys(make_extra_keys(multimodal=[one]), 0, 4) == (("multimodal", "cat@1+2@1+2"),)
    assert chain_of(BLOCK, make_extra_keys(multimodal=[one])) != chain_of(BLOCK, make_extra_keys(multimodal=[other]))


def test_an_item_named_like_an_adapter_or_a_salt_has_other_hashes() -> None:
    item = make_extra_keys(multimodal=[MultimodalItem("foo", 0, 4)])
    names = [item, make_extra_keys(adapter="foo@0+4"), make_extra_keys(cache_salt="foo@0+4")]
    assert len({chain_of(BLOCK, keys)[0] for keys in names}) == 3


@pytest.mark.parametrize("wrong", [("", 0, 1), (7, 0, 1), ("a", -1, 1), ("a", 0.0, 1), ("a", 0, 0), ("a", 0, True)])
def test_an_item_that_stands_for_nothing_is_refused(wrong: tuple[str, int, int]) -> None:
    with pytest.raises(
        InvalidRequestError, match=r"it must be a (string of one character|whole number of [01]) or more"
    ):
        MultimodalItem(*wrong)


# -- The weak hash -----------------------------------------------------------------------------------------


def test_a_weak_hash_collides_after_a_few_blocks_and_a_good_one_does_not() -> None:
    blocks = [[number, 11, 12, 13] for number in range(17)]  # one more than a weak hash has values
    assert len({WeakHash(4).hash_block(WeakHash(4).root, block) for block in blocks}) < 17
    assert len({hash_block(ROOT_HASH, block) for block in blocks}) == 17


@pytest.mark.parametrize("bits", [1, 4, 8, 12, 16])
def test_a_weak_hash_uses_all_of_its_bits_and_no_block_has_the_root_s_value(bits: int) -> None:
    hasher = WeakHash(bits)
    values = {int.from_bytes(hasher.digest(bytes([a, b])), "big") for a, b in itertools.product(range(256), repeat=2)}
    assert max(values) < 2**bits == int.from_bytes(hasher.root, "big")
    assert max(values) >= 2 ** (bits - 1)
    assert len(values) > 0.6 * 2**bits
    assert hasher.name == f"weak-{bits}"


@pytest.mark.parametrize("bits", [0, 17, -1, 4.0, "4", True])
def test_a_weak_hash_of_no_bits_or_of_many_is_refused(bits: int) -> None:
    with pytest.raises(ConfigError, match="a weak hash has from 1 to 16 bits"):
        WeakHash(bits)
