"""What is published is found from the start of its chain to the first miss, and what is forgotten is not."""

from __future__ import annotations

import pytest

from minivllm.cache.block_hash import HashChain
from minivllm.cache.prefix_index.index import PrefixIndex
from minivllm.cache.prefix_index.names import PREFIX_INDEXES
from minivllm.errors import InvariantError


@pytest.fixture(params=sorted(PREFIX_INDEXES))
def index(request: pytest.FixtureRequest) -> PrefixIndex:
    return PREFIX_INDEXES[request.param]()


def chain_of(*tokens: int) -> list[bytes]:
    chain = HashChain(1)
    chain.extend_to(tokens)
    return chain.hashes


def test_an_empty_index_finds_nothing(index: PrefixIndex) -> None:
    assert index.longest_prefix(chain_of(1, 2)) == []
    assert index.longest_prefix([]) == []
    assert len(index) == 0


def test_a_chain_is_found_up_to_its_first_miss(index: PrefixIndex) -> None:
    hashes = chain_of(1, 2, 3, 4)
    for place in (0, 1, 3):
        index.insert(hashes[place], 10 + place)
    assert index.longest_prefix(hashes) == [10, 11]


def test_a_chain_without_its_first_block_is_not_found(index: PrefixIndex) -> None:
    hashes = chain_of(1, 2, 3)
    index.insert(hashes[1], 5)
    index.insert(hashes[2], 6)
    assert index.longest_prefix(hashes) == []


def test_chains_that_part_share_their_beginning(index: PrefixIndex) -> None:
    left, right = chain_of(1, 2, 3), chain_of(1, 2, 9)
    for place, block_hash in enumerate(left):
        index.insert(block_hash, 1 + place)
    assert index.longest_prefix(right) == [1, 2]


def test_a_lookup_changes_nothing(index: PrefixIndex) -> None:
    hashes = chain_of(1, 2, 3)
    index.insert(hashes[0], 1)
    before = list(index.items())
    for _ in range(3):
        assert index.longest_prefix(hashes) == [1]
        assert index.get(hashes[0]) == 1
        assert index.get(hashes[1]) is None
    assert list(index.items()) == before


def test_a_forgotten_hash_misses(index: PrefixIndex) -> None:
    hashes = chain_of(1, 2)
    for place, block_hash in enumerate(hashes):
        index.insert(block_hash, 1 + place)
    index.remove(hashes[0])
    assert index.get(hashes[0]) is None
    assert index.longest_prefix(hashes) == []
    assert len(index) == 1


def test_a_hash_is_published_once(index: PrefixIndex) -> None:
    block_hash = chain_of(1)[0]
    index.insert(block_hash, 1)
    with pytest.raises(InvariantError, match="published already"):
        index.insert(block_hash, 2)
    assert index.get(block_hash) == 1


def test_a_hash_that_is_not_there_cannot_be_forgotten(index: PrefixIndex) -> None:
    with pytest.raises(InvariantError, match="is not published"):
        index.remove(chain_of(1)[0])
    index.insert(chain_of(1)[0], 0)
    index.remove(chain_of(1)[0])  # block id 0 is an id like any other to the index
    assert len(index) == 0


def test_all_that_is_published_can_be_listed(index: PrefixIndex) -> None:
    hashes = chain_of(1, 2, 3)
    for place, block_hash in enumerate(hashes):
        index.insert(block_hash, 1 + place)
    assert dict(index.items()) == dict(zip(hashes, (1, 2, 3), strict=True))
