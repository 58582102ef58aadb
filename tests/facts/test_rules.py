"""The rules of a correct prefix cache, each by itself, on engines with a virtual clock."""

from __future__ import annotations

import hashlib
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from minivllm.cache.block_hash import BLOCK_HASHERS, ROOT_HASH, HashChain, block_extra_keys, hash_block
from minivllm.cache.prefix_index.index import PrefixIndex
from minivllm.cache.prefix_index.names import PREFIX_INDEXES
from minivllm.errors import OutOfBlocksError
from minivllm.log import events as ev
from minivllm.log.metrics import HitRate, Metrics
from minivllm.log.replay import replay
from minivllm.request import MultimodalItem, Request, RequestState, make_extra_keys
from tests.facts.engines import (
    MOST_STEPS,
    alone,
    check,
    computed_tokens,
    counts,
    during_steps,
    events_of,
    everything,
    figures,
    finish,
    found,
    free_ids,
    hashed,
    incremental,
    numbers,
    read_back,
    serve,
    small_core,
    step,
    steps_until,
    table,
    writes_private_blocks_only,
)
from tests.unit.small import rows_of_steps

ROOT = Path(__file__).resolve().parents[2]

fact = pytest.mark.fact

# -- Hash --------------------------------------------------------------------------------------------------


@fact("hash-full-blocks")
def test_a_block_is_hashed_when_it_is_full_and_not_a_token_earlier() -> None:
    core = incremental()
    request = core.submit(numbers(10, 6), max_tokens=9)
    for num_computed in range(6, 14):
        step(core)
        assert request.num_computed_tokens == num_computed
        own = [core.manager.pool.blocks[block_id - 1] for block_id in table(core, request)]
        assert [block.block_hash is not None for block in own] == [
            (place + 1) * 4 <= num_computed for place in range(len(own))
        ]
    chain = HashChain(4)
    lengths = []
    for count in range(9):
        chain.extend_to(numbers(10, count))
        lengths.append(len(chain.hashes))
    assert lengths == [0, 0, 0, 0, 1, 1, 1, 1, 2]


@fact("hash-chain")
def test_the_same_tokens_after_another_beginning_are_another_block() -> None:
    one, other = HashChain(4), HashChain(4)
    one.extend_to([1, *numbers(10, 11)])
    other.extend_to([2, *numbers(10, 11)])
    assert not set(one.hashes) & set(other.hashes)
    assert one.hashes[2] == hash_block(one.hashes[1], numbers(17, 4))
    core = incremental()
    serve(core, [1, *numbers(10, 12)])
    assert found(core, [1, *numbers(10, 12)]) == 12
    assert found(core, [2, *numbers(10, 12)]) == 0


@fact("hash-root")
@pytest.mark.parametrize("name", sorted(BLOCK_HASHERS))
def test_every_chain_begins_at_its_hashers_one_root(name: str) -> None:
    hasher = BLOCK_HASHERS[name]
    chains = [HashChain(4, hasher=hasher) for _ in range(2)]
    for chain, tokens in zip(chains, (numbers(0, 4), numbers(50, 8)), strict=True):
        chain.extend_to(tokens)
        assert chain.parent_of(0) == hasher.root
        assert chain.hashes[0] == hasher.hash_block(hasher.root, tokens[:4])
    assert hashlib.sha256(b"prefix cache root").digest() == ROOT_HASH == BLOCK_HASHERS["sha256"].root


LITERAL = {
    "sha256": "980466d223c51b8f84220265d350045836fbda2d65a32d3b3dadc73d0a871b13",
    "xxh3-128": "0b4fa3d794937ba0dcc32c58b2bb8381",
}
"""The hash of the second block of [0, 1, 2, 3, 300, 2**40, 6, 7], adapter ``a``, an item, salt ``s``."""

CHAIN = (
    "from minivllm.cache.block_hash import BLOCK_HASHERS, HashChain\n"
    "from minivllm.request import MultimodalItem, make_extra_keys\n"
    "keys = make_extra_keys(adapter='a', multimodal=[MultimodalItem('cat', 3, 2)], cache_salt='s')\n"
    "for name in ('sha256', 'xxh3-128'):\n"
    "    chain = HashChain(4, keys, BLOCK_HASHERS[name])\n"
    "    chain.extend_to([0, 1, 2, 3, 300, 2**40, 6, 7])\n"
    "    print(name, chain.hashes[1].hex())\n"
)


@fact("hash-everywhere")
def test_another_process_with_another_seed_makes_the_hashes_that_are_written_here() -> None:
    outcome = subprocess.run(
        [sys.executable, "-c", CHAIN],
        cwd=ROOT,
        env={"PYTHONHASHSEED": "12345", "PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert outcome.stdout.split() == [word for pair in LITERAL.items() for word in pair], outcome.stderr


@fact("hash-everywhere")
def test_a_hash_is_of_the_encoding_that_is_written_down() -> None:
    def text(value: str) -> bytes:
        return struct.pack("<I", len(value.encode())) + value.encode()

    keys = (("adapter", "é"), ("cache_salt", "s"))
    encoded = ROOT_HASH + struct.pack("<I", 2) + struct.pack("<QQ", 7, 2**33) + struct.pack("<I", 2)
    encoded += b"".join(text(kind) + text(value) for kind, value in keys)
    assert hash_block(ROOT_HASH, [7, 2**33], keys) == hashlib.sha256(encoded).digest()


@fact("hash-extra-keys")
def test_extra_keys_say_their_kind_and_stand_in_one_order_however_they_were_given() -> None:
    items = [MultimodalItem("dog", 9, 2), MultimodalItem("cat", 1, 4)]
    keys = make_extra_keys(cache_salt="s", multimodal=items, adapter="a")
    assert keys == (("adapter", "a"), ("multimodal", "cat", 1, 4), ("multimodal", "dog", 9, 2), ("cache_salt", "s"))
    assert [key[0] for key in block_extra_keys(keys, 0, 16)] == ["adapter", "multimodal", "multimodal", "cache_salt"]


@fact("hash-salt-once")
def test_the_salt_enters_the_first_block_and_the_chain_carries_it_on() -> None:
    keys = make_extra_keys(adapter="a", cache_salt="s")
    assert block_extra_keys(keys, 0, 4) == (("adapter", "a"), ("cache_salt", "s"))
    assert block_extra_keys(keys, 1, 4) == block_extra_keys(keys, 7, 4) == (("adapter", "a"),)
    salted, plain = HashChain(4, make_extra_keys(cache_salt="s")), HashChain(4)
    for chain in (salted, plain):
        chain.extend_to(numbers(10, 12))
    assert not set(salted.hashes) & set(plain.hashes)
    assert salted.hashes[1] == hash_block(salted.hashes[0], numbers(14, 4))
    # In pieces as in one go: the first block may be hashed long before the second.
    slowly = HashChain(4, make_extra_keys(cache_salt="s"))
    for count in range(13):
        slowly.extend_to(numbers(10, count))
    assert slowly.hashes == salted.hashes


@fact("hash-no-salt")
def test_a_salt_without_a_character_is_none() -> None:
    assert make_extra_keys(cache_salt="") == make_extra_keys(cache_salt=None) == ()
    core = incremental()
    serve(core, numbers(10, 9), cache_salt="")
    assert serve(core, numbers(10, 9)).num_recovered_tokens == 8


@fact("hash-whole-ids")
@pytest.mark.parametrize("bits", [8, 16, 31, 32, 48, 63])
def test_token_ids_that_differ_in_their_high_bits_alone_have_different_hashes(bits: int) -> None:
    small, large = HashChain(4), HashChain(4)
    small.extend_to([1, 2, 3, 4])
    large.extend_to([1, 2, 3 + (1 << bits), 4])
    assert small.hashes != large.hashes


# -- Look-up -----------------------------------------------------------------------------------------------


@fact("lookup-pure")
def test_looking_up_changes_no_count_no_order_no_figure_and_writes_no_event() -> None:
    core = incremental(num_blocks=12, max_num_batched_tokens=8, adoption=True)
    serve(core, numbers(10, 13))
    running, other = core.submit(numbers(50, 17), max_tokens=4), core.submit(numbers(10, 13), max_tokens=4)
    step(core)
    before, before_figures = everything(core), Metrics.of(core.log).as_dict()
    for prompt in (numbers(10, 13), numbers(10, 9), numbers(50, 17), numbers(90, 13)):
        for _ in range(3):
            assert found(core, prompt) == found(core, prompt)
    core.manager.get_computed_blocks(other)
    core.manager.get_adoptable_blocks(running)
    core.manager.has_room(other, 5)
    assert everything(core) == before
    assert Metrics.of(core.log).as_dict() == before_figures


@fact("lookup-first-miss")
@pytest.mark.parametrize("name", sorted(PREFIX_INDEXES))
@pytest.mark.parametrize("gap", [0, 1, 2])
def test_what_lies_behind_a_gap_is_not_found(name: str, gap: int) -> None:
    chain = HashChain(4)
    chain.extend_to(numbers(10, 12))
    index: PrefixIndex = PREFIX_INDEXES[name]()
    for block_id, block_hash in enumerate(chain.hashes, start=1):
        index.insert(block_hash, block_id)
    assert index.longest_prefix(chain.hashes) == [1, 2, 3]
    index.remove(chain.hashes[gap])
    assert index.longest_prefix(chain.hashes) == [1, 2, 3][:gap]


@fact("lookup-first-miss")
def test_a_request_takes_the_blocks_before_the_gap_and_computes_the_rest_again() -> None:
    core = incremental()
    first = serve(core, numbers(10, 17))
    # What was freed first is popped first: five blocks are plain or never used, then goes block 4, the chain's end.
    serve(core, numbers(50, 4 * 6 - 1))
    again = serve(core, numbers(10, 17))
    assert (first.num_recovered_tokens, again.num_recovered_tokens) == (0, 8)
    assert computed_tokens(core, again) == 9


@fact("lookup-last-token")
@pytest.mark.parametrize("num_tokens", range(1, 14))
def test_at_most_all_tokens_but_the_last_are_found(num_tokens: int) -> None:
    core = incremental()
    serve(core, numbers(10, 16))
    assert found(core, numbers(10, num_tokens)) == (num_tokens - 1) // 4 * 4
    again = serve(core, numbers(10, num_tokens))
    assert again.num_recovered_tokens == (num_tokens - 1) // 4 * 4
    assert again.output_token_ids == alone(numbers(10, num_tokens), max_tokens=1)


@fact("lookup-whole-blocks")
def test_a_prompt_of_whole_blocks_computes_its_last_block_in_a_block_of_its_own() -> None:
    core = incremental()
    holder = core.submit(numbers(10, 12), max_tokens=9)
    step(core)
    again = core.submit(numbers(10, 12), max_tokens=9)
    step(core)
    assert table(core, again)[:2] == table(core, holder)[:2]
    assert table(core, again)[2] != table(core, holder)[2]
    chunks = [(e.start, e.num_tokens) for e in events_of(core, ev.ChunkComputed) if e.request_id == again.request_id]
    assert chunks == [(8, 4)]
    finish(core)


@fact("lookup-not-again")
def test_a_request_that_runs_computes_what_others_publish_meanwhile() -> None:
    core = incremental(num_blocks=16, max_num_batched_tokens=8, long_prefill_token_threshold=4)
    first, second = (core.submit(numbers(10, 17), max_tokens=1) for _ in range(2))
    finish(core)
    assert [e.request_id for e in events_of(core, ev.PrefixLookedUp)] == ["r0", "r1"]
    assert [computed_tokens(core, request) for request in (first, second)] == [17, 17]
    assert events_of(core, ev.BlocksAdopted) == []


def side_by_side(**settings: Any) -> tuple[Any, Request, Request]:
    """Return an engine in which two equal prompts of 33 tokens were served, the second with half as much a step."""
    core = incremental(
        num_blocks=32, max_num_batched_tokens=12, long_prefill_token_threshold=8, **{"adoption": True, **settings}
    )
    first, second = (core.submit(numbers(10, 33), max_tokens=1) for _ in range(2))
    finish(core)
    return core, first, second


@fact("adoption-boundary")
def test_before_each_chunk_a_running_prefill_takes_what_was_published_since_the_last_one() -> None:
    core, first, second = side_by_side()
    assert computed_tokens(core, first) == 33
    adopted = events_of(core, ev.BlocksAdopted)
    assert [e.request_id for e in adopted] == [second.request_id] * 4
    for event in adopted:
        before = replay(core.log, event.seq)
        view = before.requests[second.request_id]
        # No block was begun, and none was taken for this chunk: the table ends where the computed tokens do.
        assert view.num_computed_tokens == 4 * len(view.block_ids)
        assert set(event.block_ids) <= set(before.prefix_index.values())
        # All that was there for it, and not a block more.
        chain = core.manager.chain_hashes(second)
        places = [before.prefix_index.get(h.hex()) for h in chain[len(view.block_ids) : 8]]
        there = places.index(None) if None in places else len(places)
        assert list(event.block_ids) == places[:there]


@fact("adoption-boundary")
def test_with_adoption_a_chunk_ends_where_a_block_ends() -> None:
    core = incremental(num_blocks=32, max_num_batched_tokens=11, long_prefill_token_threshold=6, adoption=True)
    for place in range(2):
        core.submit(numbers(10 + 100 * place, 18), max_tokens=1)
    finish(core)
    assert all(e.start % 4 == 0 for e in events_of(core, ev.ChunkComputed))


@fact("adoption-boundary")
def test_a_request_inside_a_block_of_its_own_adopts_nothing_there() -> None:
    core = incremental(num_blocks=32, max_num_batched_tokens=2)
    inside = core.submit(numbers(10, 17), max_tokens=1)
    step(core)
    other = incremental(num_blocks=32)
    serve(other, numbers(10, 17))
    for block_id, block_hash in enumerate(core.manager.chain_hashes(inside), start=20):
        core.manager.index.insert(block_hash, block_id)
    assert inside.num_computed_tokens == 2
    assert core.manager.get_adoptable_blocks(inside).block_ids == ()


@fact("adoption-apart")
def test_adopted_tokens_are_in_no_figure_of_recovered_ones() -> None:
    core, first, second = side_by_side()
    assert (first.num_recovered_tokens, first.num_adopted_tokens) == (0, 0)
    assert (second.num_recovered_tokens, second.num_adopted_tokens) == (0, 16)
    total, own = Metrics.of(core.log), figures(core, second)
    assert (total.recovered_tokens, total.adopted_tokens, total.hit_rate.rate) == (0, 16, 0)
    assert (own.recovered_tokens, own.adopted_tokens, own.computed_tokens) == (0, 16, 17)


# -- Allocation --------------------------------------------------------------------------------------------


def cached(num_blocks: int = 8, *lengths: int) -> Any:
    """Return an engine in which prompts of these lengths, from 10, 110, ... on, were served one after the other."""
    core = incremental(num_blocks=num_blocks)
    for place, length in enumerate(lengths):
        serve(core, numbers(10 + 100 * place, length))
    return core


@fact("allocation-room-first", "allocation-no-trace")
def test_an_allocation_with_hits_that_finds_too_little_room_changes_nothing_at_all() -> None:
    core = cached(8, 13)
    holder = core.submit(numbers(500, 15), max_tokens=4)
    step(core)
    asking = Request("asking", tuple(numbers(10, 25)))
    computed = core.manager.get_computed_blocks(asking)
    assert computed.num_tokens == 12
    before = everything(core)
    # Three free hits and four new blocks: seven, and four are free.
    with pytest.raises(OutOfBlocksError):
        core.manager.allocate_slots(asking, 13, computed)
    assert not core.manager.has_room(asking, 13, computed)
    assert everything(core) == before
    assert core.manager.block_ids("asking") == ()
    core.manager.free(asking)
    assert counts(core, table(core, holder)) == [1] * 4
    finish(core)


@fact("allocation-hits-first")
def test_a_hit_at_the_head_of_the_queue_is_not_popped_for_its_own_request() -> None:
    core = cached(6, 9, 9)
    core.submit(numbers(300, 7), max_tokens=2)
    step(core)
    assert free_ids(core) == [2, 1, 4, 3]
    again = core.submit(numbers(10, 9), max_tokens=1)
    step(core)
    (hit,) = events_of(core, ev.BlocksHit)
    assert (again.num_recovered_tokens, hit.block_ids) == (8, (1, 2))
    assert events_of(core, ev.BlocksAllocated)[-1].block_ids == (4,)
    finish(core)


@fact("allocation-from-head")
def test_new_blocks_are_the_head_of_the_free_queue_in_its_order_and_lose_what_they_held() -> None:
    core = cached(6, 9, 9)
    order = free_ids(core)
    request = core.submit(numbers(300, 18), max_tokens=1)
    held = {block_id: core.manager.pool.blocks[block_id - 1].block_hash for block_id in order[:5]}
    step(core)
    (allocated,) = [e for e in events_of(core, ev.BlocksAllocated) if e.request_id == request.request_id]
    assert list(allocated.block_ids) == order[:5]
    (evicted,) = events_of(core, ev.BlocksEvicted)
    assert dict(zip(evicted.block_ids, evicted.block_hashes, strict=True)) == {
        block_id: block_hash.hex() for block_id, block_hash in held.items() if block_hash is not None
    }
    for block_hash in held.values():
        assert block_hash is None or core.manager.index.get(block_hash) is None


@fact("allocation-free-hits")
def test_free_hits_use_up_room_and_hits_in_use_do_not() -> None:
    core = cached(5, 13)
    asking = Request("asking", tuple(numbers(10, 21)))
    computed = core.manager.get_computed_blocks(asking)
    assert computed.num_tokens == 12
    # Three free hits and two new blocks are all five; three new ones are one too many.
    assert core.manager.has_room(asking, 8, computed)
    assert not core.manager.has_room(asking, 9, computed)
    core.manager.free(asking)
    core.submit(numbers(10, 13), max_tokens=4, request_id="holder")
    step(core)
    # The same hits, in use now, cost nothing: of five blocks four are in use, and one is free.
    computed = core.manager.get_computed_blocks(asking)
    assert core.manager.has_room(asking, 4, computed)
    assert not core.manager.has_room(asking, 5, computed)
    core.manager.free(asking)


@fact("allocation-no-trace")
def test_a_request_that_is_refused_step_after_step_leaves_no_trace() -> None:
    core = cached(8, 13)
    core.submit(numbers(300, 17), max_tokens=5)
    step(core)
    before = free_ids(core)
    refused = core.submit([*numbers(10, 12), *numbers(400, 9)], max_tokens=1)
    for _ in range(3):
        seq = len(core.log)
        step(core)
        assert refused.state is RequestState.WAITING
        assert (free_ids(core), counts(core, before)) == (before, [0, 0, 0])
        assert {type(e) for e in core.log.since(seq)} <= {
            ev.StepScheduled,
            ev.ChunkComputed,
            ev.TokenOut,
            ev.BlocksPublished,
        }
        assert found(core, numbers(10, 13)) == 12
    finish(core)


# -- Sharing -----------------------------------------------------------------------------------------------


@fact("sharing-count")
def test_a_blocks_count_is_the_number_of_tables_that_it_is_in() -> None:
    core = incremental(num_blocks=16)
    requests = [core.submit(numbers(10, 9), max_tokens=9)]
    step(core)
    shared = table(core, requests[0])[:2]
    for expected in (2, 3, 4):
        requests.append(core.submit(numbers(10, 9), max_tokens=9))
        step(core)
        assert counts(core, shared) == [expected] * 2
        assert sum(shared[0] in table(core, request) for request in requests) == expected
    for left in (3, 2, 1, 0):
        core.abort(requests.pop().request_id)
        check(core)
        assert counts(core, shared) == [left] * 2


@fact("sharing-two-copies")
def test_of_two_copies_the_first_published_is_found_and_the_other_stays_private_until_it_is_freed() -> None:
    core = incremental(num_blocks=16)
    first, second = (core.submit(numbers(10, 9), max_tokens=4) for _ in range(2))
    step(core)
    mine, twins = table(core, first), table(core, second)
    assert not set(mine) & set(twins)
    assert sorted(core.manager.index.items(), key=lambda item: item[1]) == list(
        zip(core.manager.chain_hashes(first)[:2], mine[:2], strict=True)
    )
    assert hashed(core) == mine[:2]
    third = core.submit(numbers(10, 9), max_tokens=4)
    step(core)
    assert table(core, third)[:2] == mine[:2]
    core.abort(second.request_id)
    check(core)
    assert set(free_ids(core)[:3]) == set(twins)
    finish(core)


@fact("sharing-append-only")
def test_a_table_only_grows_at_its_end_until_all_of_it_is_freed() -> None:
    core = incremental(num_blocks=16, max_num_batched_tokens=8)
    requests = [core.submit(numbers(10, length), max_tokens=9) for length in (9, 9, 14)]
    before: dict[str, list[int]] = {}
    for _ in range(MOST_STEPS):
        if not core.step():
            break
        check(core)
        for request in requests:
            now = table(core, request)
            earlier = before.get(request.request_id, [])
            assert now[: len(earlier)] == earlier or not now
            before[request.request_id] = now
    assert all(table(core, request) == [] for request in requests)
    read_back(core)


@fact("sharing-samples")
def test_samples_of_one_prompt_use_its_blocks_and_compute_it_once() -> None:
    core = incremental(num_blocks=16)
    first = core.submit(numbers(10, 10), n=3, max_tokens=6, temperature=1.0, seed=5)
    samples = [core.requests[name] for name in core.samples_of(first.request_id)]
    step(core)
    assert len(samples) == 3
    assert [table(core, sample) for sample in samples] == [[1, 2, 3]] * 3
    assert counts(core, [1, 2, 3]) == [3, 3, 3]
    finish(core)
    assert sum(e.num_tokens for e in events_of(core, ev.ChunkComputed) if e.phase == "prefill") == 10
    for number, sample in enumerate(samples):
        assert sample.output_token_ids == alone(numbers(10, 10), max_tokens=6, temperature=1.0, seed=5 + number)


@fact("sharing-copy-on-write")
def test_the_partly_filled_block_is_copied_when_a_sample_writes_and_the_last_one_writes_in_place() -> None:
    core = during_steps(writes_private_blocks_only, num_blocks=16)
    first = core.submit(numbers(10, 10), n=3, max_tokens=6)
    samples = [core.requests[name] for name in core.samples_of(first.request_id)]
    step(core)
    assert events_of(core, ev.BlockCopied) == []
    step(core)
    copied = events_of(core, ev.BlockCopied)
    assert [(e.source_block_id, e.num_tokens) for e in copied] == [(3, 2), (3, 2)]
    tables = [table(core, sample) for sample in samples]
    assert [row[:2] for row in tables] == [[1, 2]] * 3
    assert len({row[2] for row in tables}) == 3
    assert 3 in {row[2] for row in tables}
    assert counts(core, [1, 2, *[row[2] for row in tables]]) == [3, 3, 1, 1, 1]
    finish(core)


@fact("sharing-copy-on-write")
def test_samples_of_whole_blocks_share_them_all_and_copy_none() -> None:
    core = during_steps(writes_private_blocks_only, num_blocks=16)
    first = core.submit(numbers(10, 8), n=2, max_tokens=6)
    step(core)
    assert counts(core, table(core, first)) == [2, 2]
    finish(core)
    assert events_of(core, ev.BlockCopied) == []


# -- Freeing -----------------------------------------------------------------------------------------------


@fact("freeing-tail-first")
def test_a_request_is_freed_from_its_tail_to_its_head() -> None:
    core = incremental()
    serve(core, numbers(10, 16))
    assert free_ids(core) == [5, 6, 7, 8, 4, 3, 2, 1]
    core = small_core()
    core.submit(numbers(10, 16), max_tokens=4)
    step(core)
    core.abort("r0")
    assert free_ids(core) == [4, 3, 2, 1, 5, 6, 7, 8]


@fact("freeing-plain-front")
def test_what_was_never_published_is_reused_next() -> None:
    core = incremental()
    serve(core, numbers(10, 11))
    assert free_ids(core) == [3, 4, 5, 6, 7, 8, 2, 1]
    assert core.manager.pool.blocks[2].block_hash is None


@fact("freeing-published-back")
def test_what_is_published_is_reused_after_all_that_was_free_before() -> None:
    core = incremental()
    serve(core, numbers(10, 9))
    serve(core, numbers(50, 9))
    # Block 3 held the ninth token of both; block 5 was popped for the second one, whose 9 tokens took 3, 4, 5.
    assert free_ids(core) == [5, 6, 7, 8, 2, 1, 4, 3]
    assert hashed(core) == [1, 2, 3, 4]


@fact("freeing-still-found")
def test_a_freed_published_block_is_found_until_it_is_popped() -> None:
    core = incremental()
    first = serve(core, numbers(10, 9))
    assert table(core, first) == []
    assert found(core, numbers(10, 9)) == 8
    again = core.submit(numbers(10, 9), max_tokens=1)
    step(core)
    assert again.num_recovered_tokens == 8
    assert [e.block_ids for e in events_of(core, ev.BlocksHit)] == [(1, 2)]
    serve(core, numbers(100, 31))
    assert found(core, numbers(10, 9)) == 0


# -- Eviction ----------------------------------------------------------------------------------------------


@fact("eviction-unused-only")
def test_however_tight_it_is_no_block_in_use_is_evicted() -> None:
    core = during_steps(writes_private_blocks_only, num_blocks=6)
    holder = core.submit(numbers(10, 9), max_tokens=4)
    step(core)
    own = table(core, holder)
    for place in range(3):
        core.submit(numbers(100 + 20 * place, 11), max_tokens=1)
    for _ in range(3):
        assert table(core, holder)[: len(own)] == own
        step(core)
    finish(core)
    for event in events_of(core, ev.BlocksEvicted):
        before = replay(core.log, event.seq)
        assert all(before.blocks[block_id].ref_count == 0 for block_id in event.block_ids)


@fact("eviction-hash-first")
def test_the_index_has_forgotten_a_block_before_it_is_written() -> None:
    core = during_steps(writes_private_blocks_only, num_blocks=6)
    for place in range(5):
        serve(core, numbers(10 + 50 * place, 9), max_tokens=9)
    assert len(events_of(core, ev.BlocksEvicted)) >= 4
    for event in events_of(core, ev.BlocksAllocated):
        before = replay(core.log, event.seq)
        assert not set(event.block_ids) & set(before.prefix_index.values())
        assert all(before.blocks[block_id].block_hash == "" for block_id in event.block_ids)


@fact("eviction-old-hash")
def test_the_old_hash_of_an_evicted_block_misses() -> None:
    core = incremental(num_blocks=3)
    serve(core, numbers(10, 9))
    old = [block_hash for block_hash, _ in core.manager.index.items()]
    serve(core, numbers(100, 12))
    assert all(core.manager.index.get(block_hash) is None for block_hash in old)
    assert serve(core, numbers(10, 9)).num_recovered_tokens == 0


# -- Reset -------------------------------------------------------------------------------------------------


@fact("reset-refused")
def test_a_reset_is_refused_without_a_trace_while_a_block_is_in_use() -> None:
    core = incremental()
    serve(core, numbers(10, 9))
    core.submit(numbers(10, 9), max_tokens=3)
    step(core)
    before = everything(core)
    assert core.reset_cache() is False
    assert everything(core) == before
    finish(core)


@fact("reset-all")
def test_a_reset_forgets_every_hash() -> None:
    core = incremental()
    serve(core, numbers(10, 9))
    serve(core, numbers(50, 9))
    assert core.reset_cache() is True
    check(core)
    assert (hashed(core), list(core.manager.index.items())) == ([], [])
    assert serve(core, numbers(10, 9)).num_recovered_tokens == 0


@fact("reset-all", "reset-refused")
def test_a_reset_that_aborts_the_running_ones_lets_the_waiting_ones_go_on_cold() -> None:
    core = incremental(max_num_seqs=1)
    serve(core, numbers(10, 9))
    running, waiting = core.submit(numbers(10, 9), max_tokens=4), core.submit(numbers(10, 9), max_tokens=1)
    step(core)
    assert core.reset_cache(abort_running=True) is True
    check(core)
    assert running.state is RequestState.ABORTED
    finish(core)
    assert (waiting.state, waiting.num_recovered_tokens) == (RequestState.FINISHED, 0)


# -- Preemption --------------------------------------------------------------------------------------------


def preempting(**settings: Any) -> tuple[Any, list[Request]]:
    """Return an engine in which three requests of two full blocks run, a fourth waits, and the next step preempts."""
    core = incremental(**{"num_blocks": 9, **settings})
    requests = [core.submit(numbers(10 + 100 * place, 9), max_tokens=12) for place in range(3)]
    step(core, 4)
    assert [len(table(core, request)) for request in requests] == [3, 3, 3]
    return core, requests


@fact("preemption-newest")
def test_the_request_admitted_last_gives_up_all_of_its_blocks() -> None:
    core, requests = preempting()
    step(core)
    assert [request.state for request in requests] == [
        RequestState.RUNNING,
        RequestState.RUNNING,
        RequestState.PREEMPTED,
    ]
    assert table(core, requests[2]) == []
    assert [e.request_id for e in events_of(core, ev.RequestPreempted)] == ["r2"]


@fact("preemption-newest")
def test_a_row_of_the_step_that_is_taken_back_leaves_its_tokens_to_the_rows_that_stay() -> None:
    core = incremental(num_blocks=6, max_num_batched_tokens=7, long_prefill_token_threshold=3)
    for place in range(2):
        core.submit(numbers(10 + 100 * place, 24), max_tokens=1)
    core.submit([7], n=2, max_tokens=9)
    step(core, 3)
    # Both samples decode, and the first prefill takes the newer one's block: the second prefill gets its token, too.
    assert rows_of_steps(core)[1:] == [
        [("r2", 1), ("r2.1", 1), ("r0", 3), ("r1", 2)],
        [("r2", 1), ("r0", 3), ("r1", 3)],
    ]
    finish(core)


@fact("preemption-front")
def test_a_preempted_request_stands_before_those_that_wait_with_nothing_computed() -> None:
    core, requests = preempting(max_num_seqs=3)
    core.submit(numbers(400, 2), max_tokens=1, request_id="later")
    step(core)
    assert [request.request_id for request in core.scheduler.waiting] == ["r2", "later"]
    assert (requests[2].num_computed_tokens, requests[2].num_preemptions) == (0, 1)
    assert core.state().requests["r2"].num_computed_tokens == 0


@fact("preemption-finds-own")
def test_a_request_that_resumes_takes_its_own_published_blocks_again() -> None:
    core, requests = preempting()
    finish(core)
    resumed = [e for e in events_of(core, ev.PrefixLookedUp) if e.resumed]
    assert resumed and resumed[0].num_recovered_tokens >= 8
    for place, request in enumerate(requests):
        assert request.output_token_ids == alone(numbers(10 + 100 * place, 9), max_tokens=12)


@fact("preemption-admits-nobody")
def test_a_step_that_preempts_admits_nobody_though_there_is_room() -> None:
    core = small_core(num_blocks=9, long_prefill_token_threshold=4)
    for place in range(3):
        core.submit(numbers(10 + 100 * place, 9), max_tokens=12)
    steps_until(core, lambda: bool(events_of(core, ev.RequestPreempted)))
    # The victim's three blocks went to the two that grow. One is left, enough for its first chunk: it stands first.
    assert [request.request_id for request in core.scheduler.waiting] == ["r2"]
    assert core.manager.has_room(core.requests["r2"], 4)
    finish(core)
    preempted = {e.step for e in events_of(core, ev.RequestPreempted)}
    assert preempted.isdisjoint(e.step for e in events_of(core, ev.RequestAdmitted))


# -- Figures -----------------------------------------------------------------------------------------------


@fact("figures-once")
def test_queried_and_recovered_are_counted_in_tokens_when_a_request_is_admitted() -> None:
    core = incremental()
    serve(core, numbers(10, 9))
    again = core.submit(numbers(10, 11), max_tokens=3)
    assert Metrics.of(core.log).queried_tokens == 9
    step(core)
    assert (figures(core, again).queried_tokens, figures(core, again).recovered_tokens) == (11, 8)
    finish(core)
    total = Metrics.of(core.log)
    assert (total.queried_tokens, total.recovered_tokens) == (20, 8)


@fact("figures-own-apart")
def test_what_a_preempted_request_finds_of_its_own_is_counted_apart() -> None:
    core, requests = preempting()
    finish(core)
    resumed = [e for e in events_of(core, ev.PrefixLookedUp) if e.resumed]
    assert sum(e.num_recovered_tokens for e in resumed) >= 8
    for request in requests:
        own = figures(core, request)
        again = sum(e.num_recovered_tokens for e in resumed if e.request_id == request.request_id)
        assert (own.queried_tokens, own.recovered_tokens, own.resumed_recovered_tokens) == (9, 0, again)
        assert request.num_recovered_tokens == 0
    total = Metrics.of(core.log)
    assert (total.queried_tokens, total.recovered_tokens) == (27, 0)


@fact("figures-own-chunks")
def test_a_requests_own_earlier_chunks_are_no_hits() -> None:
    core = incremental(max_num_batched_tokens=4)
    request = core.submit(numbers(10, 17), max_tokens=1)
    finish(core)
    assert len(events_of(core, ev.ChunkComputed)) == 5
    assert (figures(core, request).queried_tokens, figures(core, request).recovered_tokens) == (17, 0)
    assert events_of(core, ev.BlocksHit) == []


@fact("figures-ratio")
def test_the_hit_rate_is_a_ratio_of_sums() -> None:
    rate = HitRate(window=10)
    rate.observe(1, 1000, 0)
    rate.observe(1, 10, 10)
    assert rate.rate == 10 / 1010
    core = incremental(num_blocks=16)
    serve(core, numbers(10, 33))
    serve(core, numbers(10, 9))
    assert Metrics.of(core.log).hit_rate.rate == 8 / 42


@fact("figures-no-query")
def test_without_a_query_there_is_no_rate() -> None:
    core = incremental()
    assert HitRate().rate is None
    assert Metrics.of(core.log).hit_rate.rate is None
    core.submit(numbers(10, 9), max_tokens=1)
    assert Metrics.of(core.log).hit_rate.rate is None  # it has not been admitted
    finish(core)
    assert Metrics.of(core.log).hit_rate.rate == 0


# -- The moment of publication -----------------------------------------------------------------------------


@fact("publication-at-allocation")
def test_published_at_allocation_the_second_and_third_hit_in_the_same_step() -> None:
    core = small_core(publication="at-allocation", num_blocks=16)
    requests = [core.submit(numbers(10, 9), max_tokens=1) for _ in range(3)]
    step(core)
    assert [request.num_recovered_tokens for request in requests] == [0, 8, 8]
    assert [computed_tokens(core, request) for request in requests] == [9, 1, 1]


@fact("publication-after-pass")
@pytest.mark.parametrize("publication", ["incremental", "on-completion"])
def test_published_after_the_forward_pass_all_three_compute(publication: str) -> None:
    core = small_core(publication=publication, num_blocks=16)
    requests = [core.submit(numbers(10, 9), max_tokens=1) for _ in range(3)]
    finish(core)
    assert [request.num_recovered_tokens for request in requests] == [0, 0, 0]
    assert [computed_tokens(core, request) for request in requests] == [9, 9, 9]
    assert serve(core, numbers(10, 9)).num_recovered_tokens == 8


def in_lock_step(publication: str, **settings: Any) -> Any:
    """Serve two equal prompts of 800 tokens, 400 tokens a step each, and return the engine."""
    core = small_core(
        block_size=16,
        num_blocks=120,
        publication=publication,
        max_num_batched_tokens=800,
        long_prefill_token_threshold=400,
        **settings,
    )
    for _ in range(2):
        core.submit(numbers(0, 800), max_tokens=1)
    core.run(MOST_STEPS)
    check(core)
    return core


@fact("publication-lock-step")
@pytest.mark.parametrize(
    ("publication", "adoption", "computed"),
    [("incremental", False, [800, 800]), ("incremental", True, [800, 800]), ("at-allocation", False, [800, 400])],
)
def test_two_equal_prompts_in_lock_step_compute_the_second_half_twice(
    publication: str, adoption: bool, computed: list[int]
) -> None:
    core = in_lock_step(publication, adoption=adoption)
    assert [computed_tokens(core, core.requests[name]) for name in ("r0", "r1")] == computed
    assert core.requests["r1"].num_adopted_tokens == 0


@fact("publication-single-flight")
@pytest.mark.parametrize("coordination", ["single-flight", "shared-prefix"])
@pytest.mark.parametrize("publication", ["incremental", "on-completion"])
def test_behind_a_leader_the_second_prompt_computes_only_its_last_block(coordination: str, publication: str) -> None:
    core = in_lock_step(publication, coordination=coordination)
    read_back(core)
    assert [computed_tokens(core, core.requests[name]) for name in ("r0", "r1")] == [800, 16]
    assert core.requests["r1"].num_recovered_tokens == 784
