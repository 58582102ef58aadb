"""When a full block becomes visible: the policies alone, then each in an engine."""

from __future__ import annotations

from typing import Any

import pytest

from minivllm.cache.publication import (
    AT_ALLOCATION,
    INCREMENTAL,
    ON_COMPLETION,
    PUBLICATION_POLICIES,
    Moment,
    PublicationPolicy,
    is_safe,
)
from minivllm.log import events as ev
from minivllm.request import RequestState
from tests.unit.small import FULL_PROMPT, check, events_of, recovered, run, small_core, step

SAFE = sorted(name for name, policy in PUBLICATION_POLICIES.items() if is_safe(policy))


def test_the_policies_that_are_safe_are_these() -> None:
    assert SAFE == ["incremental", "on-completion"]
    assert not is_safe(AT_ALLOCATION)
    assert is_safe(object()), "one that says nothing is held to the rule by the manager"  # type: ignore[arg-type]


def test_on_completion_shows_nothing_before_the_end_and_everything_then() -> None:
    assert ON_COMPLETION.visible_tokens(20, Moment.STEP_DONE) == 0
    assert ON_COMPLETION.visible_tokens(20, Moment.FINISHED) == 20


def test_incremental_shows_everything_that_is_computed_at_any_moment() -> None:
    assert INCREMENTAL.visible_tokens(20, Moment.STEP_DONE) == 20
    assert INCREMENTAL.visible_tokens(20, Moment.FINISHED) == 20


@pytest.mark.parametrize("policy", PUBLICATION_POLICIES.values(), ids=PUBLICATION_POLICIES)
@pytest.mark.parametrize("moment", Moment)
def test_no_policy_shows_more_than_is_computed(policy: PublicationPolicy, moment: Moment) -> None:
    assert all(0 <= policy.visible_tokens(count, moment) <= count for count in range(40))


def test_four_identical_cold_requests_recover_nothing_when_publication_waits_for_the_end() -> None:
    """The cold-cache race."""
    core = small_core(num_blocks=32, publication="on-completion")
    requests = [core.submit(FULL_PROMPT, max_tokens=4) for _ in range(4)]
    run(core)
    assert recovered(requests) == [0, 0, 0, 0]


def test_a_request_that_comes_while_the_first_generates_shares_incrementally_published_blocks_only() -> None:
    for publication, expected in (("on-completion", 0), ("incremental", 8)):
        core = small_core(publication=publication)
        core.submit(FULL_PROMPT, max_tokens=6, request_id="a")
        late = core.submit(FULL_PROMPT, max_tokens=2, after=("a", 1))
        run(core)
        assert late.num_recovered_tokens == expected


def test_requests_of_one_step_cannot_share_even_incrementally() -> None:
    """Blocks are published after the forward pass: requests of the same step have looked up before it."""
    core = small_core(num_blocks=32, publication="incremental")
    requests = [core.submit(FULL_PROMPT, max_tokens=2) for _ in range(3)]
    run(core)
    assert recovered(requests) == [0, 0, 0]
    assert [len(event.block_ids) for event in events_of(core, ev.BlocksDuplicated)] == [2, 2]


def test_identical_prompts_in_lock_step_compute_everything_twice_under_either_safe_publication() -> None:
    """Running requests do not look up again; only single flight removes this."""
    for publication in SAFE:
        core = small_core(num_blocks=32, publication=publication, long_prefill_token_threshold=8)
        requests = [core.submit(list(range(24)), max_tokens=2) for _ in range(2)]
        run(core)
        assert recovered(requests) == [0, 0]
        assert sum(event.num_tokens for event in events_of(core, ev.ChunkComputed)) == 2 * 25


def test_published_at_allocation_the_first_chunk_is_shared_and_the_second_half_is_computed_twice_all_the_same() -> None:
    """As if two prompts of 800 tokens came with 400 a step each: running requests do not look up again."""
    core = small_core(num_blocks=32, publication="at-allocation", long_prefill_token_threshold=8)
    requests = [core.submit(list(range(16)), max_tokens=1) for _ in range(2)]
    run(core)
    assert recovered(requests) == [0, 8]
    chunks = [
        (event.step, event.request_id, event.start, event.num_tokens) for event in events_of(core, ev.ChunkComputed)
    ]
    assert chunks == [(1, "r0", 0, 8), (1, "r1", 8, 8), (2, "r0", 8, 8)]


def test_at_allocation_is_asked_before_each_step_for_what_it_will_compute_and_the_safe_ones_are_not() -> None:
    asked: list[tuple[int, Moment]] = []

    class Unsafe:
        name = "unsafe"
        is_safe = False

        def visible_tokens(self, num_computed_tokens: int, moment: Moment) -> int:
            asked.append((num_computed_tokens, moment))
            return 0

    class Safe(Unsafe):
        is_safe = True

    after = [(9, Moment.STEP_DONE), (10, Moment.STEP_DONE), (10, Moment.FINISHED)]
    before = [(9, Moment.ALLOCATED), (10, Moment.ALLOCATED)]
    for policy, expected in ((Safe(), after), (Unsafe(), [before[0], after[0], before[1], *after[1:]])):
        asked.clear()
        core = small_core(publication=policy)
        core.submit(FULL_PROMPT, max_tokens=2)
        run(core)
        assert asked == expected


def test_at_allocation_shows_only_what_the_coming_step_completes() -> None:
    core = small_core(publication="at-allocation", long_prefill_token_threshold=6)
    core.submit(list(range(16)), max_tokens=1)
    run(core)
    published = [(event.step, event.indices) for event in events_of(core, ev.BlocksPublished)]
    assert published == [(1, (0,)), (2, (1, 2)), (3, (3,))]
    computed = [event.seq for event in events_of(core, ev.ChunkComputed)]
    assert all(event.seq < seq for event, seq in zip(events_of(core, ev.BlocksPublished), computed, strict=True))


def test_each_chunk_is_published_after_the_step_that_filled_its_blocks() -> None:
    core = small_core(publication="incremental", long_prefill_token_threshold=6)
    core.submit(list(range(16)), max_tokens=1)
    run(core)
    published = [(event.step, event.indices) for event in events_of(core, ev.BlocksPublished)]
    assert published == [(1, (0,)), (2, (1, 2)), (3, (3,))]


@pytest.mark.parametrize("publication", sorted(PUBLICATION_POLICIES))
def test_after_the_end_event_a_new_request_recovers(publication: str) -> None:
    """The fault it guards against: storing lags behind the end, and the next request finds nothing."""
    found: list[Any] = []

    def listen(output: Any) -> None:
        if output.end is RequestState.FINISHED and output.request_id == "a":
            probe = core.requests["probe"]
            found.append(core.manager.get_computed_blocks(probe).num_tokens)

    core = small_core(publication=publication, listener=listen, max_num_seqs=1)
    core.submit(FULL_PROMPT, max_tokens=4, request_id="a")
    probe = core.submit(FULL_PROMPT, max_tokens=1, request_id="probe")
    run(core)
    assert found == [8]
    assert probe.num_recovered_tokens == 8


@pytest.mark.parametrize("publication", sorted(PUBLICATION_POLICIES))
def test_the_token_that_came_out_last_is_never_part_of_a_published_block(publication: str) -> None:
    """It has no K/V: seven prompt tokens and one output token fill two blocks, but only one is whole."""
    core = small_core(publication=publication)
    first = core.submit(list(range(7)), max_tokens=1)
    run(core)
    follow_up = core.submit([*first.token_ids, 5, 6, 7], max_tokens=1)
    run(core)
    assert follow_up.num_recovered_tokens == 4


@pytest.mark.parametrize("publication", sorted(PUBLICATION_POLICIES))
def test_a_chat_turn_recovers_prompt_and_generated_tokens_of_the_turn_before(publication: str) -> None:
    core = small_core(num_blocks=16, publication=publication)
    first = core.submit(FULL_PROMPT, max_tokens=8)
    run(core)
    second = core.submit([*first.token_ids, 20, 21, 22], max_tokens=1)
    run(core)
    # 9 + 8 tokens, of which the last has no K/V: 16 computed, four full blocks.
    assert second.num_recovered_tokens == 16


@pytest.mark.parametrize(("publication", "expected"), [("on-completion", 0), ("incremental", 8), ("at-allocation", 8)])
def test_an_aborted_request_leaves_exactly_what_was_published_before(publication: str, expected: int) -> None:
    core = small_core(publication=publication)
    core.submit(FULL_PROMPT, max_tokens=20, request_id="a")
    step(core, 2)
    core.abort("a")
    check(core)
    again = core.submit(FULL_PROMPT, max_tokens=1)
    run(core)
    assert again.num_recovered_tokens == expected


def test_aborting_in_mid_prefill_leaves_no_key_that_says_more_than_was_computed() -> None:
    """The fault it guards against: a cancelled entry whose key said more tokens than its K/V held."""
    core = small_core(publication="incremental", max_num_batched_tokens=6)
    core.submit(list(range(16)), max_tokens=4, request_id="a")
    step(core)
    core.abort("a")
    assert len(core.manager.index) == 1
    again = core.submit(list(range(16)), max_tokens=1)
    run(core)
    assert again.num_recovered_tokens == 4


def test_a_policy_of_ones_own_is_asked_in_its_turn_and_cannot_show_more_than_is_computed() -> None:
    class Greedy:
        """Would show a whole block more than there is."""

        name = "greedy"

        def __init__(self) -> None:
            self.moments: list[Moment] = []

        def visible_tokens(self, num_computed_tokens: int, moment: Moment) -> int:
            self.moments.append(moment)
            return num_computed_tokens + 100

    policy = Greedy()
    core = small_core(publication=policy)
    first = core.submit(FULL_PROMPT, max_tokens=2)
    run(core)
    assert policy.moments == [Moment.STEP_DONE, Moment.STEP_DONE, Moment.FINISHED]
    assert first.num_computed_tokens == 10
    assert len(core.manager.index) == 2


def test_a_policy_of_ones_own_may_show_the_first_block_alone() -> None:
    class FirstBlock:
        name = "first-block"

        def visible_tokens(self, num_computed_tokens: int, moment: Moment) -> int:
            return min(num_computed_tokens, 4)

    core = small_core(publication=FirstBlock())
    core.submit(FULL_PROMPT, max_tokens=4, request_id="a")
    late = core.submit(FULL_PROMPT, max_tokens=1, after=("a", 1))
    run(core)
    assert late.num_recovered_tokens == 4
