"""A block's hash names all tokens from the start to its end, and what else its K/V depends on."""

from __future__ import annotations

import struct
import subprocess
import sys

import pytest

from minivllm.block_hash import (
    ROOT_HASH,
    HashChain,
    block_extra_keys,
    hash_block,
    make_extra_keys,
)

BLOCK = [10, 11, 12, 13]
NEXT = [14, 15, 16, 17]


def first_hash(*, adapter: str | None = None, cache_salt: str | None = None) -> bytes:
    return hash_block(ROOT_HASH, BLOCK, make_extra_keys(adapter=adapter, cache_salt=cache_salt))


def test_the_digests_are_these_on_every_machine() -> None:
    """Fixed values: a change of the encoding is a change of the format, and must be meant."""
    first = hash_block(ROOT_HASH, BLOCK)
    assert ROOT_HASH.hex() == "9e0f0ae44ecdfa12a6573cecd267c6c922151f44e8f8a73bc93d60b77533d8b0"
    assert first.hex() == "709822dfafe2c3c7e2744eeac2ab34b56f4d1dc621719685b5d096072b3a52c9"
    assert hash_block(first, NEXT).hex() == "60b5d1e24ef01897103ce72e57fda90155fbe6092604167ab76d6f0cb3ad6a7b"
    assert first_hash(cache_salt="team-a").hex() == "47ca22c34dccaada24f6cda902ea74524dff68465159847621a88fa3e2809208"
    assert first_hash(adapter="team-a").hex() == "abf6d39f10d87383f256a5b154fc913a8139a1bb138131e676aa828f5d644f21"
    assert (
        first_hash(adapter="größe", cache_salt="塩").hex()
        == "9f494fb8713d26bfcd52a574bdb0f5e4af5c9f8f57df14c87e568ba2b6001800"
    )


def test_another_process_with_another_hash_seed_gives_the_same_digest() -> None:
    code = (
        "from minivllm.block_hash import *;"
        "print(hash_block(ROOT_HASH, [10, 11, 12, 13], make_extra_keys(adapter='a', cache_salt='s')).hex())"
    )
    for seed in ("0", "4711"):
        child = subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert child.stdout.strip() == first_hash(adapter="a", cache_salt="s").hex()


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
    assert block_extra_keys(keys, 0) == keys
    assert block_extra_keys(keys, 1) == block_extra_keys(keys, 9) == (("adapter", "a"),)


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
