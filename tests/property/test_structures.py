"""The clever structures against the obvious ones."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.cache.block_hash import BLOCK_HASHERS, ROOT_HASH, BlockHasher, HashChain, block_extra_keys, hash_block
from minivllm.cache.block_pool import Block, FreeBlockQueue
from minivllm.engine.output import TextStream
from minivllm.request import ExtraKeys, MultimodalItem, make_extra_keys
from tests.property.steady import STEADY

# -- FreeBlockQueue against a list -------------------------------------------------------------------------


def some_of(data: st.DataObject, blocks: list[Block]) -> list[Block]:
    """Draw some of the blocks, in any order."""
    return data.draw(st.lists(st.sampled_from(blocks), unique=True)) if blocks else []


@settings(STEADY, max_examples=150)
@given(st.integers(0, 8), st.data())
def test_the_free_queue_behaves_like_a_list(size: int, data: st.DataObject) -> None:
    blocks = [Block(number) for number in range(size)]
    queue, model, outside = FreeBlockQueue(blocks), list(blocks), list[Block]()
    for _ in range(data.draw(st.integers(0, 25), "moves")):
        moves = ["pop", "remove"] * bool(model) + ["append"] * bool(outside)
        moves += ["prepend_n", "append_n", "popleft_n", "remove_all"]
        move = data.draw(st.sampled_from(moves))
        if move == "pop":
            block = queue.popleft_n(1)[0]
            assert block is model.pop(0)
            outside.append(block)
        elif move == "popleft_n":
            count = data.draw(st.integers(0, len(model)))
            assert queue.popleft_n(count) == model[:count]
            outside, model = [*outside, *model[:count]], model[count:]
        elif move == "remove":
            block = data.draw(st.sampled_from(model))
            queue.remove_n([block])
            model.remove(block)
            outside.append(block)
        elif move == "remove_all":
            chosen = some_of(data, model)
            queue.remove_n(chosen)
            outside, model = [*outside, *chosen], [block for block in model if block not in chosen]
        elif move == "append":
            block = data.draw(st.sampled_from(outside))
            queue.append_n([block])
            outside.remove(block)
            model.append(block)
        else:
            chosen = some_of(data, outside)
            getattr(queue, move)(chosen)
            outside = [block for block in outside if block not in chosen]
            model = [*chosen, *model] if move == "prepend_n" else [*model, *chosen]
        assert list(queue) == model
        assert len(queue) == queue.num_free == len(model)
        assert all((block in queue) == (block in model) for block in blocks)
        assert all(block.prev_free is block.next_free is None for block in outside)


# -- HashChain against hashing from scratch ----------------------------------------------------------------

few_tokens = st.lists(st.integers(0, 2), max_size=14)
names = st.one_of(st.none(), st.text("ab", max_size=2))
images = st.lists(st.builds(MultimodalItem, st.sampled_from("ab"), st.integers(0, 13), st.integers(1, 6)), max_size=2)
extra_keys = st.builds(
    lambda adapter, items, salt: make_extra_keys(adapter=adapter, multimodal=items, cache_salt=salt),
    names,
    images,
    names,
)
hashers = st.sampled_from(list(BLOCK_HASHERS.values()))


def from_scratch(block_size: int, tokens: list[int], keys: ExtraKeys, hasher: BlockHasher) -> list[bytes]:
    """Hash every block anew from the root, the obvious way."""
    out = []
    for end in range(block_size, len(tokens) + 1, block_size):
        parent = hasher.root
        for index in range(end // block_size):
            block = tokens[index * block_size : (index + 1) * block_size]
            parent = hasher.hash_block(parent, block, block_extra_keys(keys, index, block_size))
        out.append(parent)
    return out


@settings(STEADY, max_examples=150)
@given(st.integers(1, 5), few_tokens, extra_keys, st.lists(st.integers(0, 14), max_size=6), hashers)
def test_a_chain_that_grows_bit_by_bit_is_the_one_hashed_from_scratch(
    block_size: int, tokens: list[int], keys: ExtraKeys, stops: list[int], hasher: BlockHasher
) -> None:
    chain = HashChain(block_size, keys, hasher)
    for stop in sorted(min(stop, len(tokens)) for stop in stops):
        chain.extend_to(tokens[:stop])
        assert chain.hashes == from_scratch(block_size, tokens[:stop], keys, hasher)
    chain.extend_to(tokens)
    assert chain.hashes == from_scratch(block_size, tokens, keys, hasher)
    count = len(chain.hashes)
    assert [chain.parent_of(index) for index in range(count)] == [hasher.root, *chain.hashes][:count]


def named(keys: ExtraKeys, end: int) -> list[object]:
    """Return what the extra keys say about the first ``end`` tokens: items that begin behind them say nothing."""
    return [key for key in keys if len(key) == 2 or key[2] < end]


@settings(STEADY, max_examples=300)
@given(st.integers(1, 4), few_tokens, few_tokens, extra_keys, extra_keys)
def test_two_chains_agree_exactly_as_far_as_their_tokens_and_extra_keys_do(
    block_size: int, left: list[int], right: list[int], left_keys: ExtraKeys, right_keys: ExtraKeys
) -> None:
    chains = [HashChain(block_size, left_keys), HashChain(block_size, right_keys)]
    for chain, tokens in zip(chains, (left, right), strict=True):
        chain.extend_to(tokens)
    for index, (one, other) in enumerate(zip(chains[0].hashes, chains[1].hashes, strict=False)):
        end = (index + 1) * block_size
        alike = left[:end] == right[:end] and named(left_keys, end) == named(right_keys, end)
        assert (one == other) == alike


near_tokens = st.lists(st.sampled_from([0, 1, 255, 256, 65_535, 65_536, 2**32, 2**64 - 1]), max_size=4)
near_keys = st.lists(st.tuples(st.text("a\0", max_size=3), st.text("a\0", max_size=3)), max_size=2).map(tuple)
parents = st.sampled_from([ROOT_HASH, bytes(32), b"\1" * 32])
inputs = st.tuples(parents, near_tokens, near_keys)


@settings(STEADY, max_examples=300)
@given(inputs, inputs)
def test_two_inputs_have_one_hash_only_if_they_are_equal(left: Any, right: Any) -> None:
    """The encoding is canonical: no parent, token list or extra key can pass for another."""
    assert (hash_block(*left) == hash_block(*right)) == (left == right)


# -- TextStream against the whole text cut at the first stop -----------------------------------------------


class Characters:
    """A detokenizer that writes token i as piece i; ``held`` comes with the end."""

    def __init__(self, pieces: list[str], held: str) -> None:
        self.pieces, self.held, self.text = pieces, held, ""

    def add_token(self, token: int) -> None:
        self.text += self.pieces[token]

    def finalize(self) -> None:
        self.text, self.held = self.text + self.held, ""

    @property
    def last_segment(self) -> str:
        text, self.text = self.text, ""
        return text


def cut(text: str, stops: list[str]) -> str | None:
    """Return the text before the first stop string, None if there is none."""
    places = [text.find(stop) for stop in stops if stop in text]
    return text[: min(places)] if places else None


def longest_beginning(text: str, stops: list[str]) -> int:
    """Return how much of the end of ``text`` is the beginning of a stop string: the obvious way."""
    return max(
        (n for stop in stops for n in range(len(stop)) if n <= len(text) and text[len(text) - n :] == stop[:n]),
        default=0,
    )


@settings(STEADY, max_examples=400)
@given(
    st.lists(st.text("ab", max_size=4), max_size=10),
    st.text("ab", max_size=3),
    st.lists(st.text("abc", min_size=1, max_size=5), max_size=3),
)
def test_what_comes_out_is_the_whole_text_cut_at_the_first_stop(pieces: list[str], held: str, stops: list[str]) -> None:
    stream = TextStream(Characters(pieces, held), stops)
    text = out = ""
    for token, piece in enumerate(pieces):
        text += piece
        out += stream.add(token)
        whole = cut(text, stops)
        assert stream.stopped == (whole is not None)
        if whole is not None:
            assert out == whole
            assert stream.finish() == ""
            return
        # All that is certain is out, and nothing that may still turn into a stop string.
        assert out == text[: len(text) - longest_beginning(text, stops)]
    out += stream.finish()
    whole = cut(text + held, stops)
    assert out == (text + held if whole is None else whole)
    assert stream.stopped == (whole is not None)
