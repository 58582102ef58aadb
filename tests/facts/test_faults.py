"""Faults that engines have shipped, each by its whole kind: every place where the same could happen here."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest

from minivllm import Submission
from minivllm.cache.block_hash import BLOCK_HASHERS, HashChain, WeakHash
from minivllm.cache.block_pool import BlockPool
from minivllm.cache.eviction.names import EVICTION_POLICIES
from minivllm.engine.core import EngineCore
from minivllm.engine.engine import Engine
from minivllm.engine.output import Output
from minivllm.errors import EngineDeadError, InvariantError, OutOfBlocksError, RowError
from minivllm.log import events as ev
from minivllm.log.kv_contents import kv_contents
from minivllm.log.metrics import Metrics
from minivllm.request import MultimodalItem, Request, RequestState, Sampling, make_extra_keys
from minivllm.runners.virtual import VirtualRunner
from minivllm.step import ScheduledStep
from tests.facts.engines import (
    MOST_STEPS,
    alone,
    check,
    computed_tokens,
    config,
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
    serve,
    small_core,
    step,
    steps_until,
    table,
    writes_private_blocks_only,
)

fact = pytest.mark.fact

SAFE = ["incremental", "on-completion"]
COORDINATIONS = ["independent", "single-flight", "shared-prefix", "wait-or-recompute"]

PROMPT = numbers(10, 13)
"""Three blocks of four tokens and one token more."""


# -- Zombie blocks: published, withdrawn, hit, never written ---------------------------------------------------


@fact("fault-zombie")
@pytest.mark.parametrize("coordination", COORDINATIONS)
@pytest.mark.parametrize("publication", SAFE)
def test_a_request_withdrawn_before_it_is_computed_leaves_nothing_that_is_found(
    publication: str, coordination: str
) -> None:
    def withdraw(core: EngineCore, scheduled: ScheduledStep) -> None:
        if scheduled.number == 1:
            core.abort("r0")

    core = during_steps(withdraw, publication=publication, coordination=coordination, num_blocks=16)
    for _ in range(3):
        core.submit(PROMPT, max_tokens=2)
    step(core)
    assert all(block_id not in hashed(core) for block_id in events_of(core, ev.BlocksAllocated)[0].block_ids)
    finish(core)
    assert [core.requests[name].output_token_ids for name in ("r1", "r2")] == [alone(PROMPT, max_tokens=2)] * 2


@fact("fault-zombie")
def test_published_at_allocation_a_withdrawn_request_leaves_blocks_that_were_never_written() -> None:
    """The fault itself, where it can be looked at: without it the tests beside this one would show nothing."""

    def withdraw(core: EngineCore, scheduled: ScheduledStep) -> None:
        if scheduled.number == 1:
            core.abort("r0")

    core = during_steps(withdraw, publication="at-allocation")
    core.submit(PROMPT, max_tokens=1)
    core.run(MOST_STEPS)
    victim = core.submit(PROMPT, max_tokens=1)
    core.run(MOST_STEPS)
    assert victim.num_recovered_tokens == 12
    assert [read.position for read in kv_contents(core.log).wrong_reads] == list(range(12))


@fact("fault-zombie")
@pytest.mark.parametrize("coordination", COORDINATIONS)
def test_of_a_step_that_raises_nothing_is_found(coordination: str) -> None:
    def fail(core: EngineCore, scheduled: ScheduledStep) -> None:
        if scheduled.number == 2:
            raise RuntimeError("the device is gone")

    core = during_steps(fail, coordination=coordination, num_blocks=16, max_num_batched_tokens=8)
    core.submit(PROMPT, max_tokens=2)
    core.submit(PROMPT, max_tokens=2)
    step(core)
    published = dict(core.manager.index.items())
    with pytest.raises(EngineDeadError):
        core.step()
    check(core)
    assert dict(core.manager.index.items()) == published
    assert kv_contents(core.log).published_unwritten == ()
    assert core.manager.pool.num_free == 16


class OneBadRow(VirtualRunner):
    """A runner whose rows of one request come out as no numbers."""

    bad = "bad"

    def execute(self, step: ScheduledStep) -> dict[str, int | RowError]:
        """Draw as ever, but for that request."""
        drawn = super().execute(step)
        for row in step.rows:
            if row.request_id == self.bad and not row.is_withdrawn:
                drawn |= {
                    name: RowError("no number") for name in (row.request_id, *(r.request_id for r in row.sampled))
                }
        return drawn


@fact("fault-zombie", "fault-nan")
@pytest.mark.parametrize("budget", [64, 8])
@pytest.mark.parametrize("num_samples", [1, 3])
def test_of_a_row_that_gave_no_numbers_nothing_is_found_and_the_others_go_on(num_samples: int, budget: int) -> None:
    core = EngineCore(config(num_blocks=32, max_num_batched_tokens=budget), OneBadRow())
    other = core.submit(numbers(50, 9), max_tokens=3)
    core.submit(PROMPT, max_tokens=3, n=num_samples, request_id="bad")
    later = core.submit(PROMPT, max_tokens=3)
    finish(core)
    assert {core.requests[name].state for name in core.samples_of("bad")} == {RequestState.FAILED}
    assert [request.state for request in (other, later)] == [RequestState.FINISHED] * 2
    assert later.num_recovered_tokens == 0
    assert all(e.request_id != "bad" for e in events_of(core, ev.BlocksPublished))


@fact("fault-zombie")
def test_a_row_taken_back_by_a_preemption_of_the_same_step_publishes_nothing_of_it() -> None:
    core = incremental(num_blocks=6, max_num_batched_tokens=8, long_prefill_token_threshold=4)
    long, short = core.submit(numbers(50, 20), max_tokens=3), core.submit(numbers(10, 4), max_tokens=9)
    step(core, 4)
    # The short one, in decode, is planned first and would fill its second block; then the long one takes its room.
    assert (short.num_computed_tokens, core.manager.pool.num_free) == (7, 0)
    step(core)
    assert short.state is RequestState.PREEMPTED
    assert [e.indices for e in events_of(core, ev.BlocksPublished) if e.request_id == short.request_id] == [(0,)]
    finish(core)
    assert long.output_token_ids == alone(numbers(50, 20), max_tokens=3)
    assert short.output_token_ids == alone(numbers(10, 4), max_tokens=9)


@fact("fault-zombie")
def test_the_manager_refuses_to_publish_a_token_that_is_not_computed() -> None:
    core = incremental(max_num_batched_tokens=7)
    request = core.submit(PROMPT, max_tokens=1)
    step(core)
    before = everything(core)
    with pytest.raises(InvariantError, match="would publish 8 tokens and has computed 7"):
        core.manager.publish(request, 8)
    assert everything(core) == before


class Boastful:
    """A publication policy that shows more than there is."""

    name = "boastful"

    def visible_tokens(self, num_computed_tokens: int, moment: object) -> int:
        """Return too much."""
        return num_computed_tokens + 4


@fact("fault-zombie")
def test_a_policy_that_shows_more_than_is_computed_shows_what_is() -> None:
    core = incremental(publication=Boastful(), max_num_batched_tokens=4)
    core.submit(PROMPT, max_tokens=3)
    step(core)
    assert hashed(core) == [1]
    finish(core)


# -- Stale hashes: every way in which a block is allocated ----------------------------------------------------


def old_hashes(core: EngineCore) -> list[bytes]:
    return [block_hash for block_hash, _ in core.manager.index.items()]


def handed_out_at_admission(core: EngineCore) -> None:
    core.submit(numbers(300, 30), max_tokens=1)
    step(core)


def handed_out_as_a_request_grows(core: EngineCore) -> None:
    core.submit(numbers(300, 3), max_tokens=29)
    step(core, 29)


def handed_out_after_hits(core: EngineCore) -> None:
    core.submit([*numbers(10, 4), *numbers(300, 26)], max_tokens=1)
    step(core)


def handed_out_for_a_copy(core: EngineCore) -> None:
    core.submit(numbers(300, 22), max_tokens=6, n=2)
    step(core, 5)


def handed_out_to_one_that_resumes(core: EngineCore) -> None:
    core.submit(numbers(300, 10), max_tokens=16)
    core.submit(numbers(400, 10), max_tokens=16)
    core.run(MOST_STEPS)


@fact("fault-stale-hash")
@pytest.mark.parametrize(
    "hand_out",
    [
        handed_out_at_admission,
        handed_out_as_a_request_grows,
        handed_out_after_hits,
        handed_out_for_a_copy,
        handed_out_to_one_that_resumes,
    ],
)
def test_a_block_handed_out_anew_is_not_found_by_its_old_hash(hand_out: Callable[[EngineCore], None]) -> None:
    core = during_steps(writes_private_blocks_only)
    serve(core, numbers(10, 13))
    serve(core, numbers(50, 17))
    held = dict(core.manager.index.items())
    assert len(held) == 7
    hand_out(core)
    gone = {h for e in events_of(core, ev.BlocksEvicted) for h in e.block_hashes} & {h.hex() for h in held}
    assert len(gone) >= 4
    assert gone.isdisjoint(block_hash.hex() for block_hash in old_hashes(core))
    finish(core)
    core.reset_cache()
    assert old_hashes(core) == []
    assert (found(core, numbers(10, 13)), found(core, numbers(50, 17))) == (0, 0)


@fact("fault-stale-hash")
def test_a_block_whose_hash_was_forgotten_in_a_reset_can_be_published_again() -> None:
    core = incremental()
    serve(core, PROMPT)
    assert core.reset_cache()
    assert serve(core, PROMPT).num_recovered_tokens == 0
    assert serve(core, PROMPT).num_recovered_tokens == 12


@fact("fault-stale-hash")
def test_two_eviction_policies_forget_in_different_order_and_both_forget() -> None:
    for name in sorted(EVICTION_POLICIES):
        core = during_steps(writes_private_blocks_only, eviction=name)
        for place in range(6):
            serve(core, numbers(10 + 50 * place, 14), max_tokens=3)
        assert len(events_of(core, ev.BlocksEvicted)) >= 3


# -- Leaked counts: every allocation that can fail, and every end ----------------------------------------------


@fact("fault-leaked-counts")
@pytest.mark.parametrize(
    ("settings", "num_tokens"),
    [({}, 21), ({"admission": "whole-prompt", "long_prefill_token_threshold": 4}, 21), ({"watermark": 0.25}, 14)],
)
def test_an_admission_with_hits_that_is_refused_counts_nothing(settings: dict[str, Any], num_tokens: int) -> None:
    core = incremental(**settings)
    serve(core, PROMPT)
    holder = core.submit(numbers(300, 13), max_tokens=4)
    steps_until(core, lambda: bool(holder.output_token_ids))
    before = free_ids(core)
    assert len(before) == 4
    refused = core.submit([*PROMPT, *numbers(400, num_tokens - 13)], max_tokens=1)
    for _ in range(2):
        step(core)
        assert refused.state is RequestState.WAITING
        assert (free_ids(core), counts(core, before)) == (before, [0, 0, 0, 0])
    finish(core)
    assert refused.num_recovered_tokens == 12


@fact("fault-leaked-counts")
def test_a_running_row_that_finds_no_room_and_gives_up_leaves_the_counts_of_the_others() -> None:
    core = incremental(num_blocks=7)
    requests = [core.submit(PROMPT, max_tokens=9)]
    step(core)
    requests.append(core.submit(PROMPT, max_tokens=9))
    requests.append(core.submit(numbers(300, 7), max_tokens=9))
    shared = table(core, requests[0])[:3]
    seen = set()
    for _ in range(MOST_STEPS):
        if not core.step():
            break
        check(core)
        num_users = sum(table(core, request)[:3] == shared for request in requests[:2])
        assert num_users == 0 or counts(core, shared) == [num_users] * 3
        seen.add(num_users)
    assert seen == {0, 1, 2}
    assert {e.request_id for e in events_of(core, ev.RequestPreempted)} >= {"r1"}


def full_pool_with_samples() -> tuple[EngineCore, list[Request]]:
    """Two samples that share a partly filled block, and no block that is free for a copy."""
    core = incremental(num_blocks=6)
    first = core.submit(numbers(10, 10), n=2, max_tokens=6)
    core.submit(numbers(300, 11), max_tokens=2)
    step(core)
    assert core.manager.pool.num_free == 0
    return core, [core.requests[name] for name in core.samples_of(first.request_id)]


@fact("fault-leaked-counts")
def test_a_copy_on_write_that_finds_no_block_changes_nothing() -> None:
    core, samples = full_pool_with_samples()
    before = everything(core)
    assert not core.manager.has_room(samples[0], 1)
    with pytest.raises(OutOfBlocksError):
        core.manager.allocate_slots(samples[0], 1)
    assert everything(core) == before
    finish(core)
    for sample in samples:
        assert sample.output_token_ids == alone(numbers(10, 10), max_tokens=6)


@fact("fault-leaked-counts")
def test_an_adoption_that_finds_no_room_for_its_chunk_changes_nothing() -> None:
    core = incremental(num_blocks=8, max_num_batched_tokens=4, adoption=True)
    slow = core.submit(numbers(10, 25), max_tokens=1)
    step(core)
    other = Request("other", tuple(numbers(10, 13)))
    computed = core.manager.get_computed_blocks(other)
    core.manager.allocate_slots(other, 9, computed)
    other.num_computed_tokens = 13
    core.manager.publish(other, 13)
    core.manager.free(other)
    adoptable = core.manager.get_adoptable_blocks(slow)
    assert adoptable.num_tokens == 8
    filler = Request("filler", tuple(numbers(300, 15)))
    core.manager.allocate_slots(filler, 15)
    before = everything(core)
    # Two free hits and two new blocks: four, and three are free.
    assert core.manager.has_room(slow, 4, adoptable)
    assert not core.manager.has_room(slow, 8, adoptable)
    with pytest.raises(OutOfBlocksError):
        core.manager.allocate_slots(slow, 8, adoptable)
    assert everything(core) == before


@fact("fault-leaked-counts")
def test_a_count_below_0_is_an_error_at_once_and_changes_nothing() -> None:
    pool = BlockPool(4)
    blocks = pool.get_new_blocks(3)
    assert pool.free_blocks([blocks[1]]).freed == [blocks[1]]
    with pytest.raises(InvariantError, match="freed once too often"):
        pool.free_blocks([blocks[1]])
    pool.free_queue.append_n([blocks[1]])
    with pytest.raises(InvariantError, match="freed once too often"):
        pool.free_blocks(blocks)
    assert [block.ref_count for block in blocks] == [1, 0, 1]


def abort(core: EngineCore, name: str) -> None:
    core.abort(name)


def fail(core: EngineCore, name: str) -> None:
    core.fail(name, RuntimeError("told to"))


@fact("fault-leaked-counts")
@pytest.mark.parametrize("coordination", COORDINATIONS)
@pytest.mark.parametrize("end", [abort, fail])
def test_however_requests_end_every_block_comes_back(end: Callable[[EngineCore, str], None], coordination: str) -> None:
    for num_steps in range(6):
        core = incremental(num_blocks=12, coordination=coordination, max_num_batched_tokens=8)
        core.submit(numbers(10, 10), n=2, max_tokens=6)
        for _ in range(2):
            core.submit(PROMPT, max_tokens=6)
        for _ in range(num_steps):
            step(core)
        for name in list(core.requests):
            if not core.requests[name].state.is_ended:
                end(core, name)
                check(core)
        assert core.manager.pool.num_free == 12
        assert sum(block.ref_count for block in core.manager.pool.blocks) == 0
        finish(core)


# -- A full hit with nothing to compute ------------------------------------------------------------------------


@fact("fault-full-hit")
@pytest.mark.parametrize("coordination", COORDINATIONS)
@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 8, 12])
def test_a_prompt_that_is_all_cached_still_computes_and_answers(num_tokens: int, coordination: str) -> None:
    core = incremental(coordination=coordination)
    serve(core, numbers(10, 16))
    again = serve(core, numbers(10, num_tokens), max_tokens=3)
    assert computed_tokens(core, again) >= 1
    assert again.output_token_ids == alone(numbers(10, num_tokens), max_tokens=3)


@fact("fault-full-hit")
@pytest.mark.parametrize("coordination", ["single-flight", "shared-prefix"])
def test_a_follower_of_whole_blocks_computes_its_last_one(coordination: str) -> None:
    core = incremental(coordination=coordination, num_blocks=16, max_num_batched_tokens=64)
    requests = [core.submit(numbers(10, 12), max_tokens=2) for _ in range(3)]
    finish(core)
    assert [request.output_token_ids for request in requests] == [alone(numbers(10, 12), max_tokens=2)] * 3
    chunks = {(e.request_id, e.start) for e in events_of(core, ev.ChunkComputed)}
    assert {("r1", 8), ("r2", 8)} <= chunks


@fact("fault-full-hit")
def test_one_that_resumes_with_all_of_its_blocks_found_computes_its_last_token() -> None:
    core = incremental(num_blocks=7)
    old = core.submit(numbers(50, 12), max_tokens=9)
    new = core.submit(numbers(10, 8), max_tokens=9)
    steps_until(core, lambda: new.num_preemptions > 0)
    # 12 tokens: with the ones that it has generated, all of its blocks are full and, for now, still cached.
    core.abort(old.request_id)
    step(core)
    assert new.state is RequestState.RUNNING
    finish(core)
    assert new.output_token_ids == alone(numbers(10, 8), max_tokens=9)
    for event in events_of(core, ev.PrefixLookedUp):
        assert event.num_recovered_tokens < event.num_queried_tokens


@fact("fault-full-hit")
def test_an_adoption_never_takes_the_block_of_the_last_token() -> None:
    core = incremental(num_blocks=16, max_num_batched_tokens=12, long_prefill_token_threshold=8, adoption=True)
    requests = [core.submit(numbers(10, 24), max_tokens=2) for _ in range(2)]
    finish(core)
    assert requests[1].num_adopted_tokens > 0
    assert [request.output_token_ids for request in requests] == [alone(numbers(10, 24), max_tokens=2)] * 2
    assert max(e.start for e in events_of(core, ev.ChunkComputed) if e.phase == "prefill") == 20


# -- Double counting -------------------------------------------------------------------------------------------


@fact("fault-double-counting")
@pytest.mark.parametrize("coordination", COORDINATIONS)
def test_chunks_waiting_and_release_add_nothing_to_the_figures(coordination: str) -> None:
    core = incremental(num_blocks=32, coordination=coordination, max_num_batched_tokens=6)
    requests = [core.submit(PROMPT, max_tokens=3) for _ in range(4)]
    finish(core)
    total = Metrics.of(core.log)
    assert total.queried_tokens == 13 * 4
    assert total.recovered_tokens == sum(request.num_recovered_tokens for request in requests)
    assert len(events_of(core, ev.PrefixLookedUp)) == 4


@fact("fault-double-counting")
def test_samples_ask_once_for_their_prompt() -> None:
    core = incremental(num_blocks=32)
    serve(core, PROMPT)
    first = core.submit(PROMPT, n=3, max_tokens=4)
    finish(core)
    total = Metrics.of(core.log)
    assert (total.queried_tokens, total.recovered_tokens) == (26, 12)
    assert [figures(core, core.requests[name]).queried_tokens for name in core.samples_of(first.request_id)] == [
        13,
        0,
        0,
    ]


@fact("fault-double-counting")
def test_recomputing_after_a_preemption_asks_for_nothing_anew() -> None:
    core = incremental(num_blocks=9)
    requests = [core.submit(numbers(10, 9), max_tokens=14) for _ in range(3)]
    finish(core)
    assert sum(request.num_preemptions for request in requests) >= 1
    total = Metrics.of(core.log)
    assert (total.queried_tokens, total.recovered_tokens) == (27, 0)
    assert len([e for e in events_of(core, ev.PrefixLookedUp) if not e.resumed]) == 3


# -- Keys lost on the way, for a salt, an adapter and an item --------------------------------------------------

CAT, DOG = MultimodalItem("cat", 2, 4), MultimodalItem("dog", 2, 4)

DIFFERENT: list[Any] = [
    pytest.param({"cache_salt": "a"}, {"cache_salt": "b"}, id="salt"),
    pytest.param({"adapter": "a"}, {"adapter": "b"}, id="adapter"),
    pytest.param({"multimodal": [CAT]}, {"multimodal": [DOG]}, id="item"),
    pytest.param({"cache_salt": "a"}, {}, id="no salt"),
    pytest.param({"adapter": "a"}, {}, id="no adapter"),
    pytest.param({"multimodal": [CAT]}, {}, id="no item"),
]


def one_by_one(core: EngineCore, keys: list[dict[str, Any]]) -> list[Request]:
    return [serve(core, PROMPT, **own) for own in keys]


def in_batches(core: EngineCore, keys: list[dict[str, Any]]) -> list[Request]:
    requests = []
    for own in keys:
        requests += core.submit_batch([Submission(PROMPT, Sampling(max_tokens=1), **own)])
        finish(core)
    return requests


def deferred(core: EngineCore, keys: list[dict[str, Any]]) -> list[Request]:
    for place, own in enumerate(keys):
        after = (f"k{place - 1}", 2) if place else None
        core.submit(PROMPT, request_id=f"k{place}", after=after, max_tokens=2, **own)
    finish(core)
    return [core.requests[f"k{place}"] for place in range(len(keys))]


def as_samples(core: EngineCore, keys: list[dict[str, Any]]) -> list[Request]:
    return [serve(core, PROMPT, n=2, **own) for own in keys]


@fact("fault-salt-lost")
@pytest.mark.parametrize("way_in", [one_by_one, in_batches, deferred, as_samples])
@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_two_keys_share_nothing_and_the_same_key_still_does_on_every_way_in(
    one: dict[str, Any], other: dict[str, Any], way_in: Callable[[EngineCore, list[dict[str, Any]]], list[Request]]
) -> None:
    core = incremental(num_blocks=64)
    requests = way_in(core, [one, other, one, other])
    assert [request.num_recovered_tokens for request in requests] == [0, 0, 12, 12]


@fact("fault-salt-lost")
@pytest.mark.parametrize("coordination", ["single-flight", "shared-prefix", "wait-or-recompute"])
@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_nobody_waits_behind_another_key_and_those_of_one_key_do(
    one: dict[str, Any], other: dict[str, Any], coordination: str
) -> None:
    core = incremental(num_blocks=64, coordination=coordination)
    requests = [core.submit(PROMPT, max_tokens=2, **keys) for keys in (one, other, one, other)]
    finish(core)
    assert [request.num_recovered_tokens for request in requests] == [0, 0, 12, 12]
    leaders = [figures(core, request).role for request in requests]
    assert leaders[:2] == ["leader", "leader"]


@fact("fault-salt-lost")
@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_a_running_prefill_adopts_nothing_of_another_key(one: dict[str, Any], other: dict[str, Any]) -> None:
    settings = {"num_blocks": 64, "max_num_batched_tokens": 12, "long_prefill_token_threshold": 8, "adoption": True}
    for second, adopts in ((other, False), (one, True)):
        core = incremental(**settings)
        core.submit(numbers(10, 33), max_tokens=1, **one)
        behind = core.submit(numbers(10, 33), max_tokens=1, **second)
        finish(core)
        assert (behind.num_adopted_tokens > 0) is adopts


@fact("fault-salt-lost")
@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_through_the_engines_thread_two_keys_share_nothing_and_the_same_does(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    with Engine("virtual", block_size=4, num_blocks=64, publication="incremental") as engine:
        names = []
        for keys in (one, other, one):
            handle = engine.submit(PROMPT, max_tokens=1, **keys)
            handle.result(30)
            names.append(handle.request_id)
        recovered = [engine.metrics().requests[name].recovered_tokens for name in names]
    assert recovered == [0, 0, 12]


# -- Key collisions --------------------------------------------------------------------------------------------


@fact("fault-key-collisions")
@pytest.mark.parametrize("name", ["sha256", "xxh3-128"])
def test_requests_that_look_alike_have_different_hashes(name: str) -> None:
    def item(content: str, offset: int = 0, length: int = 4) -> dict[str, Any]:
        return {"multimodal": [MultimodalItem(content, offset, length)]}

    keys: list[dict[str, Any]] = [
        {},
        {"cache_salt": "foo"},
        {"adapter": "foo"},
        item("foo"),
        item("foo", 1),
        item("foo", 0, 3),
        item("foo@0+4"),
        {"adapter": "foo", "cache_salt": "bar"},
        {"adapter": "bar", "cache_salt": "foo"},
        {"adapter": "foob", "cache_salt": "ar"},
        {"adapter": "foo\0", "cache_salt": "bar"},
        {"cache_salt": "adapterfoo"},
        {"multimodal": [MultimodalItem("a", 0, 2), MultimodalItem("b", 2, 2)]},
        {"multimodal": [MultimodalItem("b", 0, 2), MultimodalItem("a", 2, 2)]},
    ]
    prompts = [[1, 2, 3, 4], [1, 2, 3, 260], [4, 3, 2, 1], [12, 3, 4, 0], [1, 2, 3, 4 + 2**32], [0x0201, 0x0403, 0, 0]]
    seen: dict[bytes, Any] = {}
    for own, prompt in itertools.product(keys, prompts):
        chain = HashChain(4, make_extra_keys(**own), BLOCK_HASHERS[name])
        chain.extend_to(prompt)
        assert chain.hashes[0] not in seen, f"{own} {prompt} is taken for {seen[chain.hashes[0]]}"
        seen[chain.hashes[0]] = own, prompt


@fact("fault-key-collisions")
def test_an_item_separates_every_block_that_it_reaches_and_none_before() -> None:
    plain, cat = HashChain(4), HashChain(4, make_extra_keys(multimodal=[MultimodalItem("cat", 6, 4)]))
    for chain in (plain, cat):
        chain.extend_to(numbers(10, 16))
    assert [one == other for one, other in zip(plain.hashes, cat.hashes, strict=True)] == [True, False, False, False]
    # An item that only reaches the second of its blocks differs there, too.
    early, late = (HashChain(4, make_extra_keys(multimodal=[MultimodalItem("cat", o, 5)])) for o in (3, 4))
    for chain in (early, late):
        chain.extend_to(numbers(10, 12))
    assert early.hashes[1] != late.hashes[1]


@fact("fault-key-collisions")
def test_tokens_with_the_same_text_are_different_prompts() -> None:
    core = incremental(num_blocks=16)
    tokenizer = core.runner.tokenizer
    ids = [core.runner.vocab_size - 5, *numbers(97, 8)]
    text = tokenizer.decode(ids)  # type: ignore[attr-defined]
    retold = tokenizer.encode(text)
    assert retold != ids
    assert tokenizer.decode(retold) == text  # type: ignore[attr-defined]
    serve(core, ids)
    retold_request = core.submit(text, max_tokens=1)
    finish(core)
    assert retold_request.num_recovered_tokens == 0
    assert serve(core, ids).num_recovered_tokens == 8


@fact("fault-key-collisions")
def test_a_weak_hash_collides_and_with_the_check_of_token_ids_nothing_wrong_is_served() -> None:
    def served(check_token_ids: bool) -> EngineCore:
        core = small_core(
            publication="incremental", num_blocks=64, block_hash=WeakHash(2), check_token_ids=check_token_ids
        )
        for place in range(20):
            core.submit(numbers(100 * place, 9), max_tokens=1)
            core.run(MOST_STEPS)
            core.check_invariants()
        return core

    wrong, right = served(False), served(True)
    assert kv_contents(wrong.log).wrong_reads
    assert events_of(wrong, ev.HashCollision) == []
    assert kv_contents(right.log).wrong_reads == ()
    collisions = events_of(right, ev.HashCollision)
    assert collisions
    assert all(e.token_ids != e.held_token_ids for e in collisions if e.token_ids[0] % 100 == 0)
    # What is really the same is still shared.
    assert serve(right, numbers(1900, 9)).num_recovered_tokens in (0, 4, 8)
    check(right)


@fact("fault-key-collisions")
def test_a_flight_is_of_one_exact_prompt_under_one_key() -> None:
    core = incremental(num_blocks=64, coordination="single-flight")
    prompts: list[tuple[list[int], dict[str, Any]]] = [
        (PROMPT, {}),
        (PROMPT, {"cache_salt": "foo"}),
        (PROMPT, {"adapter": "foo"}),
        ([*PROMPT[:-1], 269], {}),
        ([*PROMPT, 1], {}),
        (PROMPT[:-1], {}),
    ]
    for prompt, keys in prompts:
        core.submit(prompt, max_tokens=1, **keys)
    assert len(events_of(core, ev.FlightOpened)) == 6
    assert events_of(core, ev.FlightJoined) == []
    finish(core)


# -- The moment of publication, seen from a caller -------------------------------------------------------------


@fact("fault-publication-moment")
@pytest.mark.parametrize("publication", SAFE)
def test_a_prompt_that_comes_right_after_the_first_one_has_finished_finds_it(publication: str) -> None:
    with Engine("virtual", block_size=4, num_blocks=64, publication=publication) as engine:
        for turn in range(8):
            prompt = numbers(1000 * turn, 13)
            engine.submit(prompt, max_tokens=3).result(30)
            again = engine.submit(prompt, max_tokens=3)
            again.result(30)
            assert engine.metrics().requests[again.request_id].recovered_tokens == 12


@fact("fault-publication-moment")
@pytest.mark.parametrize("publication", SAFE)
def test_when_the_listener_hears_the_end_all_is_published(publication: str) -> None:
    heard: list[int] = []
    made: list[EngineCore] = []

    def listen(output: Output) -> None:
        if output.end is RequestState.FINISHED:
            heard.append(found(made[0], numbers(10, 20)))

    made.append(small_core(publication=publication, listener=listen))
    serve(made[0], PROMPT, max_tokens=1)
    assert heard == [12]


@fact("fault-publication-moment")
def test_what_waits_for_completion_is_not_found_a_step_earlier() -> None:
    core = small_core(publication="on-completion", num_blocks=16)
    first = core.submit(PROMPT, max_tokens=4)
    for _ in range(3):
        step(core)
        assert (found(core, PROMPT), first.state) == (0, RequestState.RUNNING)
    step(core)
    assert (found(core, PROMPT), first.state) == (12, RequestState.FINISHED)


@fact("fault-publication-moment")
@pytest.mark.parametrize("release", ["after-prefill", "on-completion"])
@pytest.mark.parametrize("publication", SAFE)
def test_a_follower_is_let_go_when_what_it_waits_for_is_there(publication: str, release: str) -> None:
    core = small_core(publication=publication, release=release, coordination="single-flight", num_blocks=32)
    core.submit(PROMPT, max_tokens=3)
    followers = [core.submit(PROMPT, max_tokens=3) for _ in range(2)]
    steps_until(core, lambda: any(request.state is not RequestState.HELD for request in followers))
    assert found(core, PROMPT) == 12
    finish(core)
    assert [request.num_recovered_tokens for request in followers] == [12, 12]


@fact("fault-publication-moment")
def test_with_a_cached_prompt_nobody_is_held_so_that_an_abort_keeps_nobody_waiting() -> None:
    core = small_core(coordination="single-flight", release="on-completion", num_blocks=32)
    serve(core, PROMPT)
    first = core.submit(PROMPT, max_tokens=5)
    others = [core.submit(PROMPT, max_tokens=2) for _ in range(3)]
    assert [request.state for request in others] == [RequestState.WAITING] * 3
    step(core)
    core.abort(first.request_id)
    assert [request.state for request in others] == [RequestState.RUNNING] * 3
    finish(core)
    assert [request.state for request in others] == [RequestState.FINISHED] * 3


@fact("fault-publication-moment")
def test_a_held_prefix_is_let_go_block_by_block_and_not_a_step_late() -> None:
    core = small_core(
        coordination="shared-prefix", num_blocks=32, max_num_batched_tokens=16, long_prefill_token_threshold=8
    )
    core.submit(numbers(10, 25), max_tokens=2)
    held = core.submit([*numbers(10, 12), *numbers(90, 5)], max_tokens=2)
    step(core)
    assert (held.state, found(core, numbers(10, 25))) == (RequestState.HELD, 8)
    step(core)
    assert held.state is RequestState.WAITING
    step(core)
    assert (held.state, held.num_recovered_tokens) == (RequestState.RUNNING, 12)
    finish(core)


# -- A cancelled request leaves no key that says more than was computed ----------------------------------------


@fact("fault-cancel-corrupts")
@pytest.mark.parametrize("publication", SAFE)
@pytest.mark.parametrize("end", [abort, fail])
def test_cancelled_at_any_moment_a_key_says_no_more_than_was_computed(
    end: Callable[[EngineCore, str], None], publication: str
) -> None:
    for num_steps in range(8):
        core = small_core(publication=publication, num_blocks=16, max_num_batched_tokens=6)
        cancelled = core.submit(PROMPT, max_tokens=8)
        for _ in range(num_steps):
            step(core)
        computed = cancelled.num_computed_tokens
        tokens = list(cancelled.token_ids)
        end(core, cancelled.request_id)
        expected = computed // 4 * 4 if publication == "incremental" else 0
        assert found(core, [*tokens, 1, 2, 3, 4, 5]) == expected
        again = serve(core, PROMPT, max_tokens=8)
        assert again.output_token_ids == alone(PROMPT, max_tokens=8)


@fact("fault-cancel-corrupts")
def test_regenerating_an_answer_finds_the_prompt_and_draws_its_own_tokens() -> None:
    core = incremental(num_blocks=16)
    first = core.submit(PROMPT, max_tokens=9, temperature=1.0, seed=1)
    step(core, 5)
    core.abort(first.request_id)
    again = serve(core, PROMPT, max_tokens=9, temperature=1.0, seed=2)
    assert again.num_recovered_tokens == 12
    assert again.output_token_ids == alone(PROMPT, max_tokens=9, temperature=1.0, seed=2)


@fact("fault-cancel-corrupts")
@pytest.mark.parametrize("coordination", ["single-flight", "shared-prefix", "wait-or-recompute"])
def test_a_leader_cancelled_at_any_moment_leaves_its_followers_right_answers(coordination: str) -> None:
    for num_steps in range(6):
        core = small_core(coordination=coordination, num_blocks=32, max_num_batched_tokens=6)
        leader = core.submit(PROMPT, max_tokens=8)
        followers = [core.submit(PROMPT, max_tokens=3) for _ in range(2)]
        for _ in range(num_steps):
            step(core)
        core.abort(leader.request_id)
        finish(core)
        assert [request.output_token_ids for request in followers] == [alone(PROMPT, max_tokens=3)] * 2


@fact("fault-cancel-corrupts")
def test_a_cancelled_sample_leaves_the_blocks_to_the_others() -> None:
    for num_steps, place in itertools.product(range(5), range(3)):
        core = during_steps(writes_private_blocks_only, num_blocks=32, max_num_batched_tokens=8)
        first = core.submit(numbers(10, 10), n=3, max_tokens=5, temperature=1.0, seed=3)
        names = core.samples_of(first.request_id)
        for _ in range(num_steps):
            step(core)
        core.abort(names[place])
        finish(core)
        for number, name in enumerate(names):
            if number != place:
                lone = alone(numbers(10, 10), max_tokens=5, temperature=1.0, seed=3 + number)
                assert core.requests[name].output_token_ids == lone


# -- A restored reply ------------------------------------------------------------------------------------------


@fact("fault-restored-reply")
def test_a_turn_of_the_generated_ids_is_found_and_a_turn_of_their_text_is_not() -> None:
    with Engine("virtual", block_size=4, num_blocks=64) as engine:
        asked = numbers(97, 8)
        result = engine.submit(asked, max_tokens=9).result(30)
        by_ids = engine.submit([*asked, *result.token_ids, 33, 33, 33], max_tokens=1)
        by_ids.result(30)
        retold = engine.tokenizer.encode(result.text)
        assert retold != list(result.token_ids)
        by_text = engine.submit([*asked, *retold, 33, 33, 33], max_tokens=1)
        by_text.result(30)
        recovered = {name: request.recovered_tokens for name, request in engine.metrics().requests.items()}
    # 8 + 9 tokens, of which the last one was never computed: four blocks. By text, the prompt's two alone.
    assert (recovered[by_ids.request_id], recovered[by_text.request_id]) == (16, 8)


@fact("fault-restored-reply")
@pytest.mark.parametrize("num_turns", [4])
def test_each_turn_of_a_chat_recovers_all_full_blocks_of_the_turns_before(num_turns: int) -> None:
    core = small_core(num_blocks=64)
    history = numbers(10, 6)
    known = 0
    for turn in range(num_turns):
        request = serve(core, history, max_tokens=7)
        assert request.num_recovered_tokens == known
        known = (len(history) + 7 - 1) // 4 * 4
        assert request.output_token_ids == alone(history, max_tokens=7)
        history = [*history, *request.output_token_ids, *numbers(1000 * turn, 3)]


# -- Rates that flatter ----------------------------------------------------------------------------------------


@fact("fault-flattering-rates")
def test_a_prompt_of_927_tokens_that_recovers_256_has_the_rate_of_its_tokens() -> None:
    core = small_core(block_size=16, num_blocks=128)
    serve(core, numbers(0, 258))
    before = Metrics.of(core.log)
    again = serve(core, [*numbers(0, 258), *numbers(2000, 927 - 258)])
    own, total = figures(core, again), Metrics.of(core.log)
    assert (own.recovered_tokens, own.queried_tokens) == (256, 927)
    assert total.hit_rate.rate == 256 / (258 + 927)
    assert before.hit_rate.rate == 0
    sums = total.as_dict()
    assert (sums["recovered_tokens"], sums["queried_tokens"]) == (256, 1185)
    assert f"{256} of {1185:d} prompt tokens recovered" in repr(total)


@fact("fault-flattering-rates")
def test_a_thousand_small_hits_do_not_hide_a_large_miss() -> None:
    core = small_core(num_blocks=128)
    serve(core, numbers(0, 5))
    for _ in range(10):
        assert serve(core, numbers(0, 5)).num_recovered_tokens == 4
    serve(core, numbers(1000, 245))
    rate = Metrics.of(core.log).hit_rate.rate
    assert rate == 40 / (11 * 5 + 245)


# -- Head before tail ------------------------------------------------------------------------------------------


def remaining(core: EngineCore, chain: list[bytes]) -> list[bool]:
    return [core.manager.index.get(block_hash) is not None for block_hash in chain]


@fact("fault-head-before-tail")
@pytest.mark.parametrize("eviction", sorted(EVICTION_POLICIES))
def test_under_pressure_a_chain_loses_its_end_before_its_beginning(eviction: str) -> None:
    core = incremental(num_blocks=10, eviction=eviction)
    request = core.submit(numbers(10, 28), max_tokens=1)
    chain = list(core.manager.chain_hashes(request))
    finish(core)
    lengths = []
    for size in range(4, 42, 4):
        serve(core, numbers(1000 * size, size - 1), cache_salt=str(size))
        left = remaining(core, chain)
        assert left == sorted(left, reverse=True), "a later block of the chain outlived an earlier one"
        assert found(core, numbers(10, 40)) == 4 * sum(left)
        lengths.append(sum(left))
    assert lengths[0] > 0
    assert lengths[-1] == 0


@fact("fault-head-before-tail")
def test_the_end_goes_first_however_the_request_ended() -> None:
    def aborted(core: EngineCore) -> list[bytes]:
        request = core.submit(numbers(10, 17), max_tokens=9)
        step(core)
        core.abort(request.request_id)
        return list(core.manager.chain_hashes(request))[:4]

    def sampled(core: EngineCore) -> list[bytes]:
        request = serve(core, numbers(10, 17), n=3, max_tokens=3)
        return list(core.manager.chain_hashes(request))[:4]

    def shared(core: EngineCore) -> list[bytes]:
        core.submit(numbers(10, 17), max_tokens=2)
        step(core)
        request = serve(core, numbers(10, 17), max_tokens=4)
        return list(core.manager.chain_hashes(request))[:4]

    for way in (aborted, sampled, shared):
        core = incremental(num_blocks=10)
        chain = way(core)
        assert remaining(core, chain) == [True] * 4
        core.manager.free(core.requests["r0"])  # asking for its hashes has left an empty table
        for size in range(3, 39, 4):
            serve(core, numbers(1000 * size, size), cache_salt=str(size))
            left = remaining(core, chain)
            assert left == sorted(left, reverse=True)
        assert remaining(core, chain) == [False] * 4


@fact("fault-head-before-tail")
def test_a_preempted_request_is_freed_from_its_tail_too() -> None:
    core = incremental(num_blocks=8)
    core.submit(numbers(50, 12), max_tokens=9)
    core.submit(numbers(10, 16), max_tokens=9)
    steps_until(core, lambda: bool(events_of(core, ev.RequestPreempted)))
    freed = events_of(core, ev.BlocksFreed)[-1]
    taken = [e.block_ids for e in events_of(core, ev.BlocksAllocated) if e.request_id == "r1"]
    assert freed.request_id == "r1"
    assert list(freed.to_back) == sorted(taken[0][:4], reverse=True)
    finish(core)


# -- Frequency for ever ----------------------------------------------------------------------------------------


@fact("fault-frequency")
def test_a_prefix_that_was_hit_often_is_forgotten_when_the_workload_has_moved_on() -> None:
    core = incremental(num_blocks=8)
    for _ in range(30):
        serve(core, numbers(10, 9))
    assert found(core, numbers(10, 9)) == 8
    for place in range(3):
        serve(core, numbers(1000 * (place + 1), 9))
    # Three prompts of two blocks each are younger. What comes next takes the old one, however often it was hit.
    serve(core, numbers(5000, 15))
    assert found(core, numbers(10, 9)) == 0
    assert found(core, numbers(3000, 9)) == 8


@fact("fault-frequency")
def test_a_hit_makes_a_prefix_young_again_once() -> None:
    core = incremental(num_blocks=8)
    serve(core, numbers(10, 9))
    serve(core, numbers(1000, 9))
    serve(core, numbers(10, 9))
    serve(core, numbers(5000, 23))
    assert (found(core, numbers(10, 9)), found(core, numbers(1000, 9))) == (8, 0)


# -- Shared blocks charged in full -----------------------------------------------------------------------------


@fact("fault-shared-in-full")
@pytest.mark.parametrize(
    "settings",
    [{}, {"admission": "whole-prompt"}, {"coordination": "shared-prefix"}, {"coordination": "single-flight"}],
)
def test_eight_sharers_are_admitted_on_room_for_what_is_new(settings: dict[str, Any]) -> None:
    # 6 shared blocks, and for each of eight one more: 14 of 15 blocks. Charged in full they would need 56.
    core = incremental(num_blocks=15, **settings)
    serve(core, numbers(10, 25))
    requests = [core.submit([*numbers(10, 24), 500 + place], max_tokens=3) for place in range(8)]
    step(core)
    assert [request.state for request in requests] == [RequestState.RUNNING] * 8
    assert core.manager.pool.num_free == 1
    finish(core)
    assert not events_of(core, ev.RequestPreempted)


@fact("fault-shared-in-full")
def test_samples_pay_for_their_prompt_once() -> None:
    core = incremental(num_blocks=12)
    first = core.submit(numbers(10, 32), n=4, max_tokens=4)
    step(core)
    assert core.manager.pool.num_free == 4
    finish(core)
    assert not events_of(core, ev.RequestPreempted)
    assert len(core.samples_of(first.request_id)) == 4


@fact("fault-shared-in-full")
def test_the_watermark_is_held_against_what_is_new() -> None:
    core = incremental(num_blocks=10, watermark=0.2)
    core.submit(numbers(10, 25), max_tokens=6)
    step(core)
    sharer = core.submit([*numbers(10, 24), 500], max_tokens=1)
    stranger = core.submit(numbers(300, 5), max_tokens=1)
    step(core)
    # Three blocks were free: the sharer's one leaves the two that must stay free, and the stranger's two do not.
    assert (sharer.num_recovered_tokens, sharer.state) == (24, RequestState.FINISHED)
    assert stranger.state is not RequestState.FINISHED
    finish(core)


# -- Shallow copies --------------------------------------------------------------------------------------------


@fact("fault-shallow-copies")
@pytest.mark.parametrize(
    "settings", [{}, {"coordination": "shared-prefix"}, {"adoption": True}, {"publication": "on-completion"}]
)
def test_no_step_writes_into_a_block_that_another_reads(settings: dict[str, Any]) -> None:
    core = during_steps(
        writes_private_blocks_only,
        **{"num_blocks": 24, "max_num_batched_tokens": 24, "long_prefill_token_threshold": 8, **settings},
    )
    for place in range(3):
        core.submit([*numbers(10, 9 + place), 900 + place], max_tokens=7)
        core.submit(numbers(10, 10), n=2, max_tokens=7)
    finish(core)
    assert all(request.state is RequestState.FINISHED for request in core.requests.values())


@fact("fault-shallow-copies")
def test_two_requests_that_part_after_a_shared_beginning_answer_as_if_alone() -> None:
    core = incremental(num_blocks=32)
    requests = [core.submit([*numbers(10, 8), place], max_tokens=6) for place in range(3)]
    step(core)
    requests += [core.submit([*numbers(10, 8), place], max_tokens=6) for place in range(3)]
    finish(core)
    assert [r.num_recovered_tokens for r in requests] == [0, 0, 0, 8, 8, 8]
    for place, request in enumerate(requests):
        assert request.output_token_ids == alone([*numbers(10, 8), place % 3], max_tokens=6)


@fact("fault-shallow-copies")
def test_what_a_caller_changes_afterwards_changes_no_request() -> None:
    core = incremental(num_blocks=32)
    prompt = list(PROMPT)
    items = [MultimodalItem("cat", 0, 2)]
    request = core.submit(prompt, max_tokens=3, multimodal=items)
    prompt[0] = 99
    items.clear()
    finish(core)
    assert request.prompt_token_ids == tuple(PROMPT)
    assert found(core, PROMPT, multimodal=[MultimodalItem("cat", 0, 2)]) == 12
    assert found(core, PROMPT) == 0


@fact("fault-shallow-copies")
def test_samples_have_chains_tables_and_tokens_of_their_own() -> None:
    core = incremental(num_blocks=32)
    first = core.submit(numbers(10, 11), n=2, max_tokens=9, temperature=1.0, seed=1)
    finish(core)
    one, other = (core.requests[name] for name in core.samples_of(first.request_id))
    assert one.output_token_ids != other.output_token_ids
    for request in (one, other):
        assert found(core, [*request.token_ids, 1, 1, 1, 1]) == (11 + 9 - 1) // 4 * 4


@fact("fault-shallow-copies")
def test_a_state_that_was_asked_for_does_not_change_afterwards() -> None:
    core = incremental(num_blocks=32)
    core.submit(PROMPT, max_tokens=5)
    step(core)
    state = core.state()
    before = state.as_dict()
    finish(core)
    assert state.as_dict() == before


# -- Memory pinned: what an engine keeps -----------------------------------------------------------------------


@fact("fault-memory-pinned")
def test_blocks_are_made_once_and_nothing_of_an_ended_request_keeps_one() -> None:
    core = incremental(num_blocks=12, coordination="shared-prefix", check_token_ids=True)
    blocks = [id(block) for block in core.manager.pool.blocks]
    for turn in range(12):
        for place in range(3):
            core.submit(numbers(100 * turn, 9 + place), max_tokens=3, n=1 + place % 2)
        finish(core)
    assert [id(block) for block in core.manager.pool.blocks] == blocks
    assert core.manager._tables == {}
    assert len(core.manager._check.block_ids if core.manager._check else ()) == len(hashed(core)) <= 12
    assert (core.coordinator.awaiting, core.scheduler.samples, core.scheduler.held) == ({}, {}, {})


@fact("fault-memory-pinned")
def test_an_engine_that_was_closed_keeps_no_thread() -> None:
    before = threading.active_count()
    with Engine("virtual", num_blocks=32) as engine:
        engine.submit(PROMPT, max_tokens=3).result(30)
        assert threading.active_count() > before
    for thread in threading.enumerate():
        if thread.name == "minivllm-engine":
            thread.join(30)
    assert threading.active_count() <= before
