"""Who runs in a step, and how many tokens."""

from __future__ import annotations

import pytest

from minivllm.engine.core import EngineCore
from minivllm.errors import UnknownRequestError
from minivllm.log import events as ev
from minivllm.log.metrics import Metrics
from minivllm.request import RequestState
from minivllm.step import Phase, ScheduledStep
from tests.unit.small import check, events_of, recovered, rows_of_steps, run, small_core, step


def tokens(count: int, start: int = 0) -> list[int]:
    """Return a prompt that shares no block with one of another ``start``."""
    return list(range(1000 * start, 1000 * start + count))


def counts_of_steps(core: EngineCore) -> list[list[int]]:
    return [[count for _, count in rows] for rows in rows_of_steps(core)]


def small_alone(prompt: list[int], max_tokens: int) -> list[int]:
    """Return the output of a request that has an engine to itself."""
    core = small_core(num_blocks=64)
    request = core.submit(prompt, max_tokens=max_tokens)
    run(core)
    return request.output_token_ids


def admitted(core: EngineCore) -> list[tuple[int, str]]:
    return [(event.step, event.request_id) for event in events_of(core, ev.RequestAdmitted)]


# -- Budget, chunks, rows ----------------------------------------------------------------------------------


def test_three_prompts_of_800_tokens_take_400_400_224_then_the_same_then_1_1_352() -> None:
    """Example 11: 1,024 tokens a step, at most 400 of one request."""
    core = small_core(
        num_blocks=200, block_size=16, max_num_batched_tokens=1024, long_prefill_token_threshold=400, max_num_seqs=3
    )
    for number in range(3):
        core.submit(tokens(800, number), max_tokens=4)
    step(core, 3)
    assert counts_of_steps(core) == [[400, 400, 224], [400, 400, 224], [1, 1, 352]]


def test_rows_in_decode_come_first_and_prefill_takes_what_the_budget_leaves() -> None:
    core = small_core(num_blocks=32, max_num_batched_tokens=6)
    core.submit(tokens(4), max_tokens=8, request_id="a")
    step(core)
    core.submit(tokens(12, 1), max_tokens=2, request_id="b")
    step(core, 3)
    assert rows_of_steps(core) == [[("a", 4)], [("a", 1), ("b", 5)], [("a", 1), ("b", 5)], [("a", 1), ("b", 2)]]


def test_a_decode_that_began_later_still_comes_before_an_older_prefill() -> None:
    core = small_core(num_blocks=32, max_num_batched_tokens=8, long_prefill_token_threshold=4)
    core.submit(tokens(16), max_tokens=2, request_id="long")
    core.submit(tokens(3, 1), max_tokens=4, request_id="short")
    step(core, 2)
    phases = [[(row[0], row[3]) for row in event.rows] for event in events_of(core, ev.StepScheduled)]
    assert phases == [[("long", "prefill"), ("short", "prefill")], [("short", "decode"), ("long", "prefill")]]


def test_no_step_computes_more_tokens_than_the_budget() -> None:
    core = small_core(num_blocks=64, max_num_batched_tokens=7)
    for number in range(5):
        core.submit(tokens(9 + number, number), max_tokens=5)
    run(core)
    totals = [sum(counts) for counts in counts_of_steps(core)]
    assert max(totals) == 7
    assert sum(totals) == sum(9 + number + 4 for number in range(5))


def test_of_more_decodes_than_budget_the_later_ones_wait_a_step() -> None:
    core = small_core(num_blocks=32, max_num_batched_tokens=2)
    for number in range(3):
        core.submit(tokens(2, number), max_tokens=3, request_id=f"r{number}")
    run(core)
    assert all(sum(counts) <= 2 for counts in counts_of_steps(core))
    assert [event.request_id for event in events_of(core, ev.RequestFinished)] == ["r0", "r1", "r2"]


def test_no_more_rows_run_than_the_limit_and_the_next_comes_when_one_has_ended() -> None:
    core = small_core(num_blocks=64, max_num_seqs=2)
    for number, count in enumerate((2, 4, 2)):
        core.submit(tokens(3, number), max_tokens=count, request_id=f"r{number}")
    run(core)
    assert admitted(core) == [(1, "r0"), (1, "r1"), (3, "r2")]
    assert max(len(rows) for rows in rows_of_steps(core)) == 2


def test_a_prompt_longer_than_the_budget_is_computed_in_chunks_and_samples_once_at_its_end() -> None:
    steps: list[ScheduledStep] = []
    core = small_core(max_num_batched_tokens=5, on_step=steps.append)
    core.submit(tokens(12), max_tokens=1)
    run(core)
    rows = [row for scheduled in steps for row in scheduled.rows]
    assert [(row.start, row.num_tokens, row.samples) for row in rows] == [(0, 5, False), (5, 5, False), (10, 2, True)]
    assert [row.token_ids for row in rows] == [tokens(12)[:5], tokens(12)[5:10], tokens(12)[10:]]


def test_earlier_chunks_of_a_request_are_not_hits_of_its_own() -> None:
    core = small_core(publication="incremental", max_num_batched_tokens=4)
    request = core.submit(tokens(16), max_tokens=2)
    run(core)
    assert request.num_recovered_tokens == 0
    assert len(events_of(core, ev.PrefixLookedUp)) == 1
    assert events_of(core, ev.BlocksHit) == []


def test_a_chunk_starts_where_the_recovered_tokens_end() -> None:
    steps: list[ScheduledStep] = []
    core = small_core(on_step=steps.append)
    core.submit(tokens(9), max_tokens=1)
    run(core)
    core.submit([*tokens(8), 77, 78, 79], max_tokens=1)
    run(core)
    row = steps[-1].rows[0]
    assert (row.start, row.num_tokens, row.token_ids) == (8, 3, [77, 78, 79])
    assert row.block_ids[:2] == (1, 2)


# -- Admission ---------------------------------------------------------------------------------------------


def test_nobody_overtakes_the_head_of_the_waiting_list() -> None:
    core = small_core(num_blocks=8)
    core.submit(tokens(16), max_tokens=3, request_id="first")
    core.submit(tokens(20, 1), max_tokens=2, request_id="large")
    core.submit(tokens(2, 2), max_tokens=2, request_id="small")
    step(core)
    assert [request.request_id for request in core.scheduler.waiting] == ["large", "small"]
    run(core)
    assert [name for _, name in admitted(core)] == ["first", "large", "small"]


def test_a_request_that_was_refused_for_lack_of_room_is_counted_once() -> None:
    """Example 12."""
    core = small_core(num_blocks=8)
    core.submit(tokens(16), max_tokens=4, request_id="first")
    core.submit(tokens(20, 1), max_tokens=1, request_id="second")
    step(core, 2)
    assert core.requests["second"].state is RequestState.WAITING
    run(core)
    lookups = events_of(core, ev.PrefixLookedUp)
    assert [(event.request_id, event.num_queried_tokens) for event in lookups] == [("first", 16), ("second", 20)]
    assert Metrics.of(core.log).queried_tokens == 36


def test_shared_blocks_are_not_charged_again_to_each_who_shares_them() -> None:
    """The fault it guards against: five of eight admitted, because shared pages were counted for each."""
    core = small_core(num_blocks=6 + 8, block_size=4, publication="incremental")
    core.submit(tokens(25), max_tokens=20, request_id="first")  # 7 blocks, 6 of them shared
    step(core)
    sharers = [core.submit([*tokens(24), 500 + number], max_tokens=2) for number in range(6)]
    step(core)
    assert [request.state for request in sharers] == [RequestState.RUNNING] * 6
    assert recovered(sharers) == [24] * 6
    assert core.manager.pool.blocks[0].ref_count == 7


def test_admission_stops_at_the_first_request_without_room_though_hits_make_others_small() -> None:
    core = small_core(num_blocks=8, publication="incremental")
    core.submit(tokens(12), max_tokens=8, request_id="first")
    step(core)
    core.submit(tokens(24, 1), max_tokens=1, request_id="large")
    core.submit([*tokens(12), 5], max_tokens=1, request_id="sharer")
    step(core)
    assert [request.request_id for request in core.scheduler.waiting] == ["large", "sharer"]
    run(core)


# -- Preemption --------------------------------------------------------------------------------------------


def test_when_blocks_run_out_the_newest_gives_up_its_blocks_and_stands_at_the_head() -> None:
    core = small_core(num_blocks=5, block_size=4, max_num_seqs=2)
    for number in range(3):
        core.submit(tokens(7, number), max_tokens=8, request_id=f"r{number}")
    while not events_of(core, ev.RequestPreempted):
        step(core)
    assert [request.request_id for request in core.scheduler.running] == ["r0"]
    assert [request.request_id for request in core.scheduler.waiting] == ["r1", "r2"]
    victim = core.requests["r1"]
    assert victim.state is RequestState.PREEMPTED
    assert victim.num_computed_tokens == 0
    assert core.manager.block_ids("r1") == ()
    run(core)
    assert [event.request_id for event in events_of(core, ev.RequestFinished)] == ["r0", "r1", "r2"]


def test_a_row_that_is_planned_already_is_taken_back_when_it_is_the_newest() -> None:
    """Decode comes first, so the newest may have its row before an older prefill finds no room."""
    core = small_core(num_blocks=6, block_size=4, long_prefill_token_threshold=7)
    older = core.submit(tokens(23), max_tokens=2, request_id="older")
    newer = core.submit([900], max_tokens=9, request_id="newer")
    step(core, 2)
    assert newer.is_decoding and not older.is_decoding
    drawn_before = len(newer.output_token_ids)
    step(core)
    assert [event.request_id for event in events_of(core, ev.RequestPreempted)] == ["newer"]
    assert rows_of_steps(core)[-1] == [("older", 7)]
    assert len(newer.output_token_ids) == drawn_before
    run(core)
    assert newer.output_token_ids == small_alone([900], 9)


def test_a_step_that_preempts_admits_nobody() -> None:
    core = small_core(num_blocks=7, block_size=4, max_num_seqs=3)
    for number in range(2):
        core.submit(tokens(7, number), max_tokens=16, request_id=f"r{number}")
    step(core)
    core.submit([900], max_tokens=2, request_id="tiny", after=("r0", 6))
    run(core)
    preempting = {event.step for event in events_of(core, ev.RequestPreempted)}
    assert preempting
    assert preempting.isdisjoint(number for number, _ in admitted(core))


def test_a_step_that_preempts_admits_nobody_even_if_there_is_room_for_the_head() -> None:
    core = small_core(num_blocks=8, block_size=4, long_prefill_token_threshold=8)
    core.submit(tokens(15), max_tokens=8, request_id="old")
    core.submit(tokens(15, 1), max_tokens=4, request_id="new")
    step(core, 3)
    # Both filled four blocks with their first output token; the next one finds none, and "new" gives up four.
    core.submit([900], max_tokens=1, request_id="tiny")
    step(core)
    assert [event.step for event in events_of(core, ev.RequestPreempted)] == [4]
    assert core.manager.pool.num_free == 3  # the head's next chunk needs two
    assert core.requests["new"].state is RequestState.PREEMPTED
    assert core.requests["tiny"].state is RequestState.WAITING
    step(core)
    assert (5, "new") in admitted(core)
    run(core)


def test_several_victims_stand_in_the_order_of_their_arrival() -> None:
    core = small_core(num_blocks=12, block_size=4, max_num_batched_tokens=24, long_prefill_token_threshold=20)
    core.submit(tokens(45), max_tokens=2, request_id="old")
    for number in (1, 2):
        core.submit([1000 * number], max_tokens=12, request_id=f"new{number}")
    while len(events_of(core, ev.RequestPreempted)) < 2:
        step(core)
    first, second = events_of(core, ev.RequestPreempted)
    assert (first.request_id, second.request_id) == ("new2", "new1")
    assert first.step == second.step
    assert [request.request_id for request in core.scheduler.waiting] == ["new1", "new2"]
    run(core)


def test_a_preempted_request_finds_its_own_published_blocks_again_and_that_is_counted_apart() -> None:
    core = small_core(num_blocks=5, publication="incremental", max_num_seqs=2)
    for number in range(2):
        core.submit(tokens(7, number), max_tokens=8, request_id=f"r{number}")
    run(core)
    resumed = [event for event in events_of(core, ev.PrefixLookedUp) if event.resumed]
    assert [event.request_id for event in resumed] == ["r1"]
    assert resumed[0].num_recovered_tokens > 0
    figures = Metrics.of(core.log)
    assert figures.requests["r1"].recovered_tokens == 0
    assert figures.requests["r1"].resumed_recovered_tokens == resumed[0].num_recovered_tokens
    assert figures.queried_tokens == 14
    assert core.requests["r1"].num_recovered_tokens == 0


def test_tokens_are_the_same_with_and_without_preemption() -> None:
    outputs = []
    for num_blocks in (5, 64):
        core = small_core(num_blocks=num_blocks, max_num_seqs=3)
        requests = [core.submit(tokens(7, number), max_tokens=8) for number in range(3)]
        run(core)
        outputs.append([request.output_token_ids for request in requests])
        assert bool(events_of(core, ev.RequestPreempted)) == (num_blocks == 5)
    assert outputs[0] == outputs[1]


def test_output_that_is_computed_again_after_a_preemption_is_prefill_and_draws_no_token_twice() -> None:
    steps: list[ScheduledStep] = []
    core = small_core(num_blocks=5, max_num_seqs=2, on_step=steps.append)
    for number in range(2):
        core.submit(tokens(7, number), max_tokens=8, request_id=f"r{number}")
    run(core)
    resumed_at = next(event.step for event in events_of(core, ev.RequestAdmitted) if event.resumed)
    row = next(row for row in steps[resumed_at - 1].rows if row.request_id == "r1")
    assert row.phase is Phase.PREFILL
    assert row.start == 0
    assert row.num_tokens > 7
    assert [event.request_id for event in events_of(core, ev.PrefillFinished)] == ["r0", "r1"]
    indices = [event.index for event in events_of(core, ev.TokenOut) if event.request_id == "r1"]
    assert indices == list(range(8))


def test_a_request_that_resumes_in_decode_stands_before_the_prefills_too() -> None:
    """All but its last token is recovered: it is in decode at once, though it was admitted last."""
    core = small_core(num_blocks=5, publication="incremental", long_prefill_token_threshold=4)
    core.submit(tokens(4, 1), max_tokens=2, request_id="ending")
    core.submit(tokens(12, 2), max_tokens=2, request_id="long")
    core.submit(tokens(4, 3), max_tokens=6, request_id="short")
    step(core, 3)
    resumed = [event for event in events_of(core, ev.PrefixLookedUp) if event.resumed]
    assert [(event.request_id, event.step, event.num_recovered_tokens) for event in resumed] == [("short", 3, 4)]
    rows = events_of(core, ev.StepScheduled)[-1].rows
    assert rows == (("short", 4, 1, "decode"), ("long", 8, 4, "prefill"))
    run(core)


# -- Lists -------------------------------------------------------------------------------------------------


def test_released_followers_wait_by_arrival_before_later_ones() -> None:
    core = small_core(num_blocks=32, coordination="single-flight", max_num_seqs=1)
    core.submit(tokens(9), max_tokens=2, request_id="a")
    core.submit(tokens(9), max_tokens=2, request_id="b")
    core.submit(tokens(5, 1), max_tokens=2, request_id="c")
    core.submit(tokens(9), max_tokens=2, request_id="d")
    step(core)
    assert [request.request_id for request in core.scheduler.waiting] == ["b", "c", "d"]
    run(core)
    assert [name for _, name in admitted(core)] == ["a", "b", "c", "d"]


def test_released_followers_stand_behind_preempted_requests() -> None:
    """The follower came before the preempted one, and still waits behind it."""
    core = small_core(num_blocks=10, coordination="single-flight", release="on-completion")
    core.submit(tokens(9), max_tokens=11, request_id="leader")
    core.submit(tokens(9), max_tokens=1, request_id="follower")
    core.submit(tokens(15, 1), max_tokens=20, request_id="other")
    core.submit(tokens(8, 2), max_tokens=20, request_id="victim")
    while core.requests["victim"].state is not RequestState.PREEMPTED:
        step(core)
    assert core.requests["follower"].state is RequestState.HELD
    core.abort("leader")
    check(core)
    assert [request.request_id for request in core.scheduler.waiting] == ["victim", "follower"]
    run(core)


def test_releasing_a_request_that_is_not_held_raises() -> None:
    core = small_core()
    core.submit([1], request_id="a", max_tokens=1)
    for name in ("a", "ghost"):
        with pytest.raises(UnknownRequestError, match=f"'{name}' was released but is not held"):
            core.scheduler.release([name])
    check(core)


def test_an_engine_without_requests_has_no_work() -> None:
    core = small_core()
    assert not core.has_work
    assert core.step() is False
    assert core.run() == 0
    assert events_of(core, ev.StepScheduled) == []


def test_the_event_of_a_step_says_who_waits_and_who_is_held() -> None:
    core = small_core(num_blocks=32, coordination="single-flight", max_num_seqs=1)
    for prompt in (tokens(9), tokens(9), tokens(5, 1)):
        core.submit(prompt, max_tokens=1)
    step(core)
    event = events_of(core, ev.StepScheduled)[0]
    assert (event.rows, event.num_waiting, event.num_held) == ((("r0", 0, 9, "prefill"),), 1, 1)


def test_the_tokens_of_a_row_that_is_taken_back_are_there_for_the_rows_behind_it() -> None:
    core = small_core(num_blocks=4, scheduling="priority", max_num_batched_tokens=8, long_prefill_token_threshold=4)
    core.submit(list(range(6)), request_id="low", priority=5, max_tokens=6)
    step(core, 2)
    for name, first in (("p", 100), ("q", 200)):
        core.submit(list(range(first, first + 12)), request_id=name, max_tokens=1)
    step(core, 2)
    # "low" was planned first, with one token; then "p" needed its blocks. Its token goes to "q".
    assert rows_of_steps(core)[2:] == [[("low", 1), ("p", 4), ("q", 3)], [("p", 4), ("q", 4)]]
    run(core)
