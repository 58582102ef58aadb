"""The manager's benchmark: that what it times happens, and what it makes of the times. Never how long it takes."""

from __future__ import annotations

import json
import random

import pytest

from minivllm.bench import manager as bench_manager
from minivllm.bench.manager import measure_growth, run_bench_manager
from minivllm.bench.manager_report import ManagerBench, Operation, OperationCost, Spread
from minivllm.bench.reference_manager import ObviousManager
from minivllm.errors import ConfigError, InvariantError
from minivllm.log import events as ev
from minivllm.log.event_log import EventLog

GROWTH_BLOCKS = 501 * 21


def small_bench(runs: int = 2) -> ManagerBench:
    return run_bench_manager(runs, num_blocks=6, block_size=4, growth_requests=40, growth_blocks=GROWTH_BLOCKS)


# -- What is timed really happens --------------------------------------------------------------------------


def logged_run(num_blocks: int = 6, block_size: int = 4) -> tuple[dict[Operation, float], list[ev.Event]]:
    events: list[ev.Event] = []
    tokens = list(range(num_blocks * block_size + 1))
    return bench_manager._run_real(tokens, num_blocks, block_size, events.append), events


def test_a_run_is_cold_then_beside_the_first_then_after_it() -> None:
    _, events = logged_run()
    told = [type(event).__name__ for event in events]
    cold = ["BlocksAllocated", "BlocksPublished"]
    hits = ["BlocksHit", "BlocksAllocated"]
    assert told == [*cold, *hits, "BlocksFreed", "BlocksFreed", *hits, "BlocksFreed"]


def test_the_cold_prompt_publishes_all_its_full_blocks_and_the_others_hit_all_of_them() -> None:
    _, events = logged_run()
    full = tuple(range(1, 7))
    published, *_ = [e for e in events if isinstance(e, ev.BlocksPublished)]
    assert published.block_ids == full
    assert [e.block_ids for e in events if isinstance(e, ev.BlocksHit)] == [full, full]
    assert [len(e.block_ids) for e in events if isinstance(e, ev.BlocksAllocated)] == [7, 1, 1]


def test_the_first_free_leaves_the_blocks_to_others_and_the_second_to_nobody() -> None:
    _, events = logged_run()
    shared, last, _ = [e for e in events if isinstance(e, ev.BlocksFreed)]
    assert (len(shared.to_front), shared.to_back, shared.still_held) == (1, (), (6, 5, 4, 3, 2, 1))
    assert (len(last.to_front), last.to_back, last.still_held) == (1, (6, 5, 4, 3, 2, 1), ())


def test_a_look_up_that_finds_too_little_stops_the_benchmark() -> None:
    with pytest.raises(InvariantError, match="prompt 1 should have found 7 blocks, and found 6"):
        bench_manager._one_run(ObviousManager(40, 4), list(range(25)), num_blocks=7)


def test_the_events_that_are_made_again_are_those_of_the_run() -> None:
    log, again = (EventLog(lambda: 0.0) for _ in range(2))
    bench_manager._run_real(list(range(25)), 6, 4, log.append)
    times = bench_manager._time_events(log, again)
    with_events = {operation: events for operation, events in bench_manager._events_of_run(log).items() if events}
    assert set(times) == set(with_events)
    for event in again:
        event.seq = -1
    expected = [event for events in with_events.values() for event in events]
    for event in expected:
        event.seq = -1
    assert list(again) == expected
    assert len(again) == 8  # all but the last prompt's free, which is not timed


# -- The obvious manager -----------------------------------------------------------------------------------


def test_the_obvious_manager_and_the_real_one_hold_the_same_blocks_in_the_same_order() -> None:
    """Both go through random prompts; a cold one, hits in use, hits in the free queue, and evictions are all met."""
    draw = random.Random(5)
    real, obvious = bench_manager._RealManager(12, 4, lambda event: None), ObviousManager(12, 4)
    live: list[int] = []
    hits = evictions = 0
    for number in range(200):
        while len(live) > 1:
            ended = live.pop(draw.randrange(len(live)))
            real.free(ended)
            obvious.free(ended)
        tokens = [draw.randrange(2) for _ in range(4)] * draw.randrange(1, 3) + [7]
        real.prepare(number, tokens)
        real.hash(number, tokens)
        obvious.hash(number, tokens)
        published = len(real.manager.index)
        found = real.look_up(number)
        assert obvious.look_up(number) == found
        if found == len(tokens) // 4:
            real.take_hits(number)
            obvious.take_hits(number)
            hits += 1
        elif not found:
            real.allocate_and_publish(number)
            obvious.allocate_and_publish(number)
            evictions += len(real.manager.index) < published + len(tokens) // 4
        else:
            continue
        live.append(number)
        assert list(real.manager.block_ids(f"r{number}")) == obvious.tables[number]
        assert [block.block_id for block in real.manager.pool.free_queue] == obvious.free_blocks
        assert [block.ref_count for block in real.manager.pool.blocks] == list(obvious.ref_counts.values())
        real.manager.check_invariants()
    assert hits > 20
    assert evictions > 20


# -- Growth ------------------------------------------------------------------------------------------------


def test_each_request_shares_half_of_its_blocks_and_evicts_what_it_takes() -> None:
    growth = measure_growth(40, GROWTH_BLOCKS, block_size=4, blocks_per_request=20)
    assert growth.recovered_blocks == 39 * 10  # the first request has none before it
    # The first takes 20 blocks and one for its last token; that one has no hash when it is freed, so the next takes it
    # without evicting. The others take 10 new full ones.
    assert growth.evicted_blocks == 21 + 39 * 10
    assert (growth.num_requests, growth.num_blocks, growth.blocks_per_request) == (40, GROWTH_BLOCKS, 20)


def test_prompts_share_exactly_their_first_half_with_an_earlier_one() -> None:
    prompts = bench_manager._growth_prompts(30, 4, 2)
    assert {len(tokens) for tokens in prompts} == {9}
    for number, tokens in enumerate(prompts[1:], start=1):
        assert any(tokens[:4] == earlier[:4] and tokens[4:] != earlier[4:] for earlier in prompts[:number])
    assert prompts == bench_manager._growth_prompts(30, 4, 2)


def test_too_few_requests_or_blocks_for_growth_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_requests is 19; the first and the last tenth need 20 or more"):
        measure_growth(19, GROWTH_BLOCKS, 4)
    with pytest.raises(
        ConfigError, match=r"num_blocks is 10,520; what requests share stays in a pool of 10,521 or more"
    ):
        measure_growth(40, GROWTH_BLOCKS - 1, 4)


# -- The table ---------------------------------------------------------------------------------------------


def test_every_operation_has_a_line_in_the_order_of_the_table() -> None:
    bench = small_bench()
    assert [cost.operation for cost in bench.costs] == list(Operation)
    assert (bench.num_runs, bench.num_tokens, bench.stopped_by) == (2, 25, None)
    for cost in bench.costs:
        for spread in (cost.manager, cost.unlogged, cost.events, cost.obvious):
            assert spread is None or 0 < spread.least <= spread.median <= spread.most
    without_events = {cost.operation for cost in bench.costs if cost.events is None}
    assert without_events == {Operation.HASH, Operation.HASH_XXH3, Operation.LOOK_UP}
    assert {cost.operation for cost in bench.costs if cost.obvious is None} == {Operation.HASH_XXH3}


def test_a_hash_is_given_for_one_block_and_all_else_for_the_whole_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter(range(0, 10**9, 6_000))  # the clock goes on by 6 µs from one reading to the next
    monkeypatch.setattr("minivllm.bench.manager.time.perf_counter_ns", lambda: next(readings))
    times, _ = logged_run(num_blocks=6)
    assert times.pop(Operation.HASH) == 1.0
    assert set(times.values()) == {6.0}


def test_the_targets_and_the_other_engine_s_figures_stand_beside_what_they_are_for() -> None:
    figures = [(cost.target_us, cost.other_engine_us) for cost in small_bench(1).costs]
    assert figures == [(1, 1.5), (None, None), (600, 850), (250, 500), (75, 75), (75, 75), (66, 66), (66, 66)]


def test_the_result_is_plain_json_with_the_ratio_of_the_medians() -> None:
    spread = Spread.of([1.0, 4.0, 2.0])
    assert spread == Spread(2.0, 1.0, 4.0)
    cost = OperationCost(Operation.LOOK_UP, spread, spread, None, Spread(50.0, 40.0, 60.0))
    assert cost.ratio == 25.0
    assert cost.as_dict() == {
        "operation": "look_up",
        "manager": {"median_us": 2.0, "min_us": 1.0, "max_us": 4.0},
        "unlogged": {"median_us": 2.0, "min_us": 1.0, "max_us": 4.0},
        "events": None,
        "obvious": {"median_us": 50.0, "min_us": 40.0, "max_us": 60.0},
        "ratio": 25.0,
        "target_us": 250.0,
        "other_engine_us": 500.0,
    }
    data = small_bench(1).as_dict()
    assert json.loads(json.dumps(data)) == data
    assert data["complete"] is True
    assert data["growth"]["recovered_blocks"] == 390


def test_the_printed_table_says_what_was_measured_against_what() -> None:
    spread = Spread(1234.5, 1000.0, 2000.0)
    cost = OperationCost(
        Operation.COLD, spread, Spread(1200.0, 1.0, 2.0), Spread(123.45, 1.0, 2.0), Spread(12345, 1, 2)
    )
    bench = ManagerBench(1024, 16, 3, [cost])
    assert repr(bench).splitlines()[:3] == [
        "A prompt of 16,385 tokens (1,024 blocks of 16), medians of 3 runs in µs",
        "                            median      (min – max)  target  of it events  obvious way  ratio  other engine",
        "allocate and publish, cold   1,234  (1,000 – 2,000)     600           123       12,345   10 x           850",
    ]
    assert "1,234 µs in all, events are about 123 µs (10%); with a log that drops them it is 1,200 µs" in repr(bench)


# -- Progress and Ctrl-C -----------------------------------------------------------------------------------


def test_progress_is_told_after_every_run_and_through_the_growth() -> None:
    told: list[tuple[str, int, int]] = []
    run_bench_manager(
        2,
        lambda *report: told.append(report),
        num_blocks=2,
        block_size=2,
        growth_requests=20,
        growth_blocks=GROWTH_BLOCKS,
    )
    assert told == [("runs", 1, 2), ("runs", 2, 2), *(("growth", done, 20) for done in range(1, 21))]


def test_ctrl_c_gives_the_runs_that_are_done_and_says_so() -> None:
    def stop_after_two(what: str, done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    bench = run_bench_manager(5, stop_after_two, num_blocks=2, block_size=2)
    assert isinstance(bench.stopped_by, KeyboardInterrupt)
    assert bench.num_runs == 2
    assert len(bench.costs) == len(Operation)
    assert bench.growth is None
    assert bench.as_dict()["complete"] is False
    assert repr(bench).endswith("Stopped early: this is what was done by then.")


def test_ctrl_c_in_the_first_run_gives_an_empty_table(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_manager, "_time_events", stop)
    bench = run_bench_manager(2, num_blocks=2, block_size=2)
    assert (bench.num_runs, bench.costs, bench.growth) == (0, [], None)
    assert repr(bench) == "Stopped early: this is what was done by then."


@pytest.mark.parametrize(("runs", "num_blocks", "block_size"), [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_nothing_to_measure_is_refused(runs: int, num_blocks: int, block_size: int) -> None:
    with pytest.raises(ConfigError, match="each must be 1 or more"):
        run_bench_manager(runs, num_blocks=num_blocks, block_size=block_size)
