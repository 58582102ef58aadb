"""Thirteen examples with their numbers: blocks of 16 tokens and a pool of ten, ids 1 to 10, unless said."""

from __future__ import annotations

from typing import Any

import pytest

from minivllm.cache.block_hash import HashChain
from minivllm.errors import OutOfBlocksError
from minivllm.log import events as ev
from minivllm.log.metrics import HitRate, Metrics
from minivllm.request import Request, RequestState, make_extra_keys
from tests.facts.engines import (
    SHARED,
    check,
    computed_tokens,
    counts,
    events_of,
    figures,
    finish,
    free_ids,
    hashed,
    incremental,
    numbers,
    serve,
    small_core,
    step,
    table,
    ten_blocks,
)
from tests.unit.small import rows_of_steps

fact = pytest.mark.fact


def two_prompts() -> tuple[Any, Request, Request]:
    """A cold prompt of 55 tokens and, a step later, one with the same 48 tokens and 5 others."""
    core = ten_blocks()
    first = core.submit([*SHARED, *range(7)], max_tokens=9)
    step(core)
    second = core.submit([*SHARED, *numbers(50, 5)], max_tokens=9)
    step(core)
    return core, first, second


@fact("example-1")
def test_a_cold_prompt_of_55_tokens_takes_blocks_1_to_4_and_the_three_full_ones_are_hashed() -> None:
    core = ten_blocks()
    request = core.submit([*SHARED, *range(7)], max_tokens=9)
    step(core)
    assert request.num_recovered_tokens == 0
    assert table(core, request) == [1, 2, 3, 4]
    assert hashed(core) == [1, 2, 3]


@fact("example-2")
def test_meanwhile_the_second_prompt_recovers_48_tokens_and_takes_block_5() -> None:
    core, first, second = two_prompts()
    assert second.num_recovered_tokens == 48
    assert (table(core, first), table(core, second)) == ([1, 2, 3, 4], [1, 2, 3, 5])
    assert counts(core, [1, 2, 3, 4, 5]) == [2, 2, 2, 1, 1]
    assert core.manager.pool.num_free == 5


@fact("example-3")
def test_when_both_have_ended_tails_come_before_heads_and_published_blocks_last() -> None:
    core, first, second = two_prompts()
    for request in (first, second):
        core.abort(request.request_id)
        check(core)
    assert free_ids(core) == [5, 4, 6, 7, 8, 9, 10, 3, 2, 1]


@fact("example-4")
@pytest.mark.parametrize(("num_tokens", "recovered"), [(16, 0), (32, 16), (47, 32), (48, 32), (49, 48)])
def test_the_same_prompt_again_recovers_whole_blocks_and_never_its_last_token(num_tokens: int, recovered: int) -> None:
    core = ten_blocks()
    serve(core, numbers(0, num_tokens))
    again = serve(core, numbers(0, num_tokens))
    assert again.num_recovered_tokens == recovered
    assert computed_tokens(core, again) == num_tokens - recovered


@fact("example-5")
def test_in_a_pool_of_one_block_the_next_prompt_takes_it_and_its_hash_is_gone() -> None:
    core = ten_blocks(num_blocks=1)
    serve(core, numbers(0, 16))
    (old,) = (block_hash for block_hash, _ in core.manager.index.items())
    other = core.submit(numbers(50, 15), max_tokens=2)
    step(core)
    assert table(core, other) == [1]
    assert (hashed(core), core.manager.index.get(old)) == ([], None)
    finish(core)


@fact("example-6")
def test_without_caching_blocks_are_room_and_nothing_more() -> None:
    core = ten_blocks(block_size=4, num_blocks=4, enable_prefix_caching=False)
    first = core.submit(numbers(0, 10), max_tokens=3)
    step(core)
    assert len(table(core, first)) == 3
    core.abort(first.request_id)
    second = core.submit([*numbers(0, 10), *numbers(50, 6)], max_tokens=1)
    third = core.submit(numbers(80, 4), max_tokens=1)
    core.scheduler.schedule(1)
    assert (second.num_recovered_tokens, len(table(core, second))) == (0, 4)
    assert (third.state, core.manager.pool.num_free) == (RequestState.WAITING, 0)
    with pytest.raises(OutOfBlocksError):
        core.manager.allocate_slots(third, 4)


@fact("example-7")
def test_output_fills_the_last_block_before_it_takes_another_and_then_the_full_one_is_hashed() -> None:
    core = ten_blocks()
    request = core.submit(numbers(0, 55), max_tokens=40)
    step(core, 5)
    assert request.num_computed_tokens == 55 + 4
    assert (table(core, request), hashed(core)) == ([1, 2, 3, 4], [1, 2, 3])
    step(core, 19)
    assert request.num_computed_tokens == 55 + 4 + 19
    assert (table(core, request), hashed(core)) == ([1, 2, 3, 4, 5], [1, 2, 3, 4])


@fact("example-8")
@pytest.mark.parametrize(("salt", "recovered"), [("a", 48), ("b", 0), (None, 0), ("", 0)])
def test_what_one_salt_cached_is_found_by_that_salt_alone(salt: str | None, recovered: int) -> None:
    core = ten_blocks()
    serve(core, [*SHARED, 1], cache_salt="a")
    assert serve(core, [*SHARED, 2], cache_salt=salt).num_recovered_tokens == recovered


@fact("example-9")
def test_an_adapter_and_a_salt_of_one_name_give_different_first_hashes() -> None:
    chains = [HashChain(16, make_extra_keys(adapter="foo")), HashChain(16, make_extra_keys(cache_salt="foo"))]
    for chain in chains:
        chain.extend_to(SHARED)
    assert chains[0].hashes[0] != chains[1].hashes[0]
    core = ten_blocks()
    serve(core, [*SHARED, 1], adapter="foo")
    assert serve(core, [*SHARED, 1], cache_salt="foo").num_recovered_tokens == 0


@fact("example-10")
def test_a_window_of_five_requests_forgets_the_oldest_sums_as_whole_sums() -> None:
    rate = HitRate(window=5)
    rates = []
    for num_requests, queried, recovered in ((1, 20, 9), (4, 80, 16), (1, 10, 2)):
        rate.observe(num_requests, queried, recovered)
        rates.append(rate.rate)
    assert rates == [0.45, 0.25, 0.2]


@fact("example-11")
def test_three_prompts_of_800_share_a_budget_of_1024_at_most_400_each() -> None:
    core = small_core(
        block_size=16,
        num_blocks=200,
        max_num_batched_tokens=1024,
        long_prefill_token_threshold=400,
    )
    for place in range(3):
        core.submit(numbers(1000 * place, 800), max_tokens=2)
    step(core, 3)
    assert [[count for _, count in rows] for rows in rows_of_steps(core)] == [
        [400, 400, 224],
        [400, 400, 224],
        [1, 1, 352],
    ]


@fact("example-12")
def test_a_request_that_was_refused_and_then_admitted_is_one_query() -> None:
    core = incremental(num_blocks=5)
    serve(core, numbers(0, 8))
    core.submit(numbers(100, 13), max_tokens=3)
    refused = core.submit(numbers(0, 9), max_tokens=1)
    step(core, 2)
    assert refused.state is RequestState.WAITING
    assert Metrics.of(core.log).queried_tokens == 8 + 13
    finish(core)
    assert [e.num_queried_tokens for e in events_of(core, ev.PrefixLookedUp)] == [8, 13, 9]
    assert figures(core, refused).queried_tokens == 9
    assert Metrics.of(core.log).queried_tokens == 8 + 13 + 9


@fact("example-13")
def test_asking_for_more_blocks_than_are_free_says_both_numbers() -> None:
    core = ten_blocks()
    core.submit(numbers(0, 70), max_tokens=2)
    step(core)
    with pytest.raises(OutOfBlocksError, match=r"asks for 6 blocks and 5 of 10 are free"):
        core.manager.allocate_slots(Request("big", tuple(numbers(100, 90))), 90)
    with pytest.raises(OutOfBlocksError, match=r"6 blocks were asked for and 5 of 10 are free"):
        core.manager.pool.get_new_blocks(6)
    with pytest.raises(OutOfBlocksError, match=r"6 blocks were asked for and 5 are free"):
        core.manager.pool.free_queue.popleft_n(6)
    assert core.manager.pool.num_free == 5
