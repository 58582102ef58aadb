"""Figures are computed from the log: counted once, in tokens, on the engine's clock."""

from __future__ import annotations

import pytest

from minivllm.config import EngineConfig
from minivllm.cost import CostModel
from minivllm.engine.core import EngineCore
from minivllm.log import events as ev
from minivllm.log.metrics import HitRate, Metrics
from minivllm.runners.virtual import VirtualRunner

SIMPLE = CostModel(step_ms=10.0, prefill_ms=1.0, decode_one_ms=0.0, decode_base_ms=0.0, decode_row_ms=0.0)


def small_core(**settings: object) -> EngineCore:
    fields = {"block_size": 4, "num_blocks": 8, **settings}
    return EngineCore(EngineConfig(**fields), VirtualRunner(SIMPLE))  # type: ignore[arg-type]


def test_a_request_alone_has_the_times_that_its_steps_took() -> None:
    core = small_core()
    core.submit([1, 2, 3, 4, 5], max_tokens=3)
    core.run()
    figures = Metrics.of(core.log).requests["r0"]
    assert (figures.ttft_ms, figures.completion_ms, figures.tpot_ms) == (15.0, 35.0, 10.0)
    assert (figures.prompt_tokens, figures.output_tokens, figures.computed_tokens) == (5, 3, 7)
    assert (figures.role, figures.end) == ("independent", "length")


def test_times_that_have_not_come_are_none() -> None:
    core = small_core()
    core.submit([1, 2, 3, 4, 5], max_tokens=2)
    figures = Metrics.of(core.log).requests["r0"]
    assert (figures.ttft_ms, figures.completion_ms, figures.tpot_ms) == (None, None, None)
    assert Metrics.of(core.log).mean_ttft_ms is None
    core.step()
    figures = Metrics.of(core.log).requests["r0"]
    assert (figures.ttft_ms, figures.completion_ms, figures.tpot_ms) == (15.0, None, None)


def test_a_warm_request_recovers_full_blocks_and_computes_the_rest() -> None:
    core = small_core()
    core.submit([1, 2, 3, 4, 5, 6, 7, 8, 9], max_tokens=1)
    core.run()
    core.submit([1, 2, 3, 4, 5, 6, 7, 8, 9], max_tokens=1)
    core.run()
    metrics = Metrics.of(core.log)
    assert [r.recovered_tokens for r in metrics.requests.values()] == [0, 8]
    assert [r.computed_tokens for r in metrics.requests.values()] == [9, 1]
    assert (metrics.recovered_tokens, metrics.queried_tokens, metrics.computed_tokens) == (8, 18, 10)
    assert metrics.hit_rate.rate == 8 / 18


def test_what_a_preempted_request_finds_of_its_own_is_counted_apart() -> None:
    core = small_core(num_blocks=6, publication="incremental")
    core.submit(list(range(8)), max_tokens=10)
    core.submit(list(range(20, 28)), max_tokens=10)
    core.run()
    metrics = Metrics.of(core.log)
    preempted = metrics.requests["r1"]
    assert preempted.num_preemptions >= 1
    assert preempted.resumed_recovered_tokens > 0
    assert (preempted.recovered_tokens, preempted.queried_tokens) == (0, 8)
    assert metrics.recovered_tokens == 0
    assert metrics.queried_tokens == 16


def test_roles_come_from_the_flights_and_an_heir_is_a_leader() -> None:
    core = small_core(num_blocks=32, coordination="single-flight")
    for _ in range(3):
        core.submit([1, 2, 3, 4, 5], max_tokens=2)
    assert [r.role for r in Metrics.of(core.log).requests.values()] == ["leader", "follower", "follower"]
    core.abort("r0")
    core.run()
    metrics = Metrics.of(core.log)
    assert [(r.role, r.end) for r in metrics.requests.values()] == [
        ("leader", "abort"),
        ("leader", "length"),
        ("follower", "length"),
    ]
    assert metrics.requests["r2"].recovered_tokens == 4


def test_duplicated_blocks_are_the_ones_that_another_had_published_first() -> None:
    core = small_core(num_blocks=32)
    for _ in range(3):
        core.submit([1, 2, 3, 4, 5, 6, 7, 8, 9], max_tokens=1)
    core.run()
    assert [r.duplicated_blocks for r in Metrics.of(core.log).requests.values()] == [0, 2, 2]
    assert Metrics.of(core.log).duplicated_blocks == 4


def test_the_hit_rate_of_a_window_is_a_ratio_of_sums() -> None:
    rate = HitRate(window=5)
    rates = []
    for observed in [(1, 20, 9), (4, 80, 16), (1, 10, 2)]:
        rate.observe(*observed)
        rates.append(rate.rate)
    assert rates == [0.45, 0.25, 0.2]


def test_no_query_is_no_hit_rate_at_all() -> None:
    assert HitRate().rate is None
    assert Metrics().hit_rate.rate is None


def test_folding_the_log_in_parts_gives_the_same_as_in_one_go() -> None:
    core = small_core(num_blocks=32, publication="incremental")
    in_parts = Metrics()
    for number in range(4):
        core.submit([1, 2, 3, 4, 5, 6, 7, number], max_tokens=3)
        core.step()
        in_parts.update(core.log)
    core.run()
    in_parts.update(core.log).update(core.log)
    whole = Metrics.of(core.log)
    assert repr(in_parts) == repr(whole)
    assert in_parts.as_dict() == whole.as_dict()


def test_a_part_of_a_log_counts_its_own_steps() -> None:
    core = small_core()
    core.submit([1, 2, 3], max_tokens=4)
    core.run()
    start = len(core.log)
    core.submit([5, 6, 7], max_tokens=2)
    core.run()
    assert Metrics.of(core.log).num_steps == 6
    assert Metrics.of(core.log.since(start)).num_steps == 2


def test_failed_and_aborted_requests_say_so_in_the_table() -> None:
    core = small_core()
    core.submit([1, 2, 3], max_tokens=4)
    core.submit([4, 5, 6], max_tokens=4)
    core.abort("r0")
    core.fail("r1", ValueError("broken"))
    assert [row[-1] for row in Metrics.of(core.log).rows()] == ["abort", "error"]


def test_the_table_and_its_page_form_hold_the_same_cells() -> None:
    core = small_core()
    core.submit([1, 2, 3, 4, 5], max_tokens=2, request_id="<b>")
    core.run()
    metrics = Metrics.of(core.log)
    assert repr(metrics) == (
        "request  role         prompt  recovered  output  TTFT ms  completion ms  end\n"
        "<b>      independent       5          0       2     15.0           25.0  length\n"
        "0 of 5 prompt tokens recovered, 6 computed in 2 steps, 0 blocks duplicated"
    )
    page = metrics._repr_html_()
    assert "<td>&lt;b&gt;</td><td>independent</td><td>5</td>" in page
    assert "<td><b></td>" not in page
    assert page.count("<tr>") == 2


def test_sums_are_plain_json_values() -> None:
    core = small_core()
    core.submit([1, 2, 3, 4, 5], max_tokens=2)
    core.run()
    assert Metrics.of(core.log).as_dict() == {
        "num_steps": 2,
        "queried_tokens": 5,
        "recovered_tokens": 0,
        "adopted_tokens": 0,
        "computed_tokens": 6,
        "duplicated_blocks": 0,
        "evicted_blocks": 0,
        "hit_rate": 0.0,
        "mean_ttft_ms": 15.0,
        "slowest_completion_ms": 25.0,
    }


def test_evicted_blocks_are_counted() -> None:
    core = small_core(num_blocks=4)
    core.submit(list(range(12)), max_tokens=1)
    core.run()
    core.submit(list(range(50, 62)), max_tokens=1)
    core.run()
    evicted = sum(len(e.block_ids) for e in core.log if isinstance(e, ev.BlocksEvicted))
    assert Metrics.of(core.log).evicted_blocks == evicted
    assert evicted >= 2


@pytest.mark.parametrize("reason", ["length", "stop"])
def test_the_end_is_the_reason_of_the_engine(reason: str) -> None:
    core = small_core()
    request = core.submit([1, 2, 3], max_tokens=8)
    if reason == "stop":
        core.step()
        text = next(e.text for e in core.log if isinstance(e, ev.TokenOut))
        core.abort(request.request_id)
        request = core.submit([1, 2, 3], max_tokens=8, stop=(text,))
    core.run()
    assert Metrics.of(core.log).requests[request.request_id].end == reason


def test_a_sample_neither_asks_nor_computes_its_prompt_and_its_heir_is_the_first() -> None:
    core = small_core(num_blocks=32, max_num_batched_tokens=4)
    core.submit([1, 2, 3, 4, 5, 6], n=3, max_tokens=2)
    assert [r.role for r in Metrics.of(core.log).requests.values()] == ["independent", "sample", "sample"]
    core.step()
    core.abort("r0")
    core.run()
    figures = list(Metrics.of(core.log).requests.values())
    assert [(r.role, r.end) for r in figures] == [
        ("independent", "abort"),
        ("independent", "length"),
        ("sample", "length"),
    ]
    assert [r.queried_tokens for r in figures] == [6, 6, 0]
    assert [r.computed_tokens for r in figures] == [4, 7, 1]
    assert figures[1].ttft_ms == figures[2].ttft_ms == 14.0 + 14.0 + 12.0


def test_who_waits_for_a_shared_prefix_is_held_and_who_computes_it_leads() -> None:
    core = small_core(num_blocks=32, coordination="shared-prefix", long_prefill_token_threshold=4)
    for own in range(3):
        core.submit([1, 2, 3, 4, 5, 6, 7, 8, 100 + own], max_tokens=2)
    core.step()
    core.abort("r0")
    core.run()
    metrics = Metrics.of(core.log)
    assert [(r.role, r.recovered_tokens) for r in metrics.requests.values()] == [
        ("leader", 0),
        ("held", 4),
        ("held", 8),
    ]


def test_a_leader_of_a_flight_that_others_wait_for_keeps_its_role() -> None:
    metrics = Metrics()
    told = (
        ev.FlightOpened(0, "a"),
        ev.FlightJoined(0, "a", "b"),
        ev.PrefixAwaited("c", "b", 0, "ff", None, None),
        ev.PrefixAwaited("d", "a", 0, "ff", None, None),
        ev.PrefixAwaited("e", "f", 0, "ff", None, None),
    )
    for seq, event in enumerate(told):
        event.seq = seq
    roles = {name: request.role for name, request in metrics.update(told).requests.items()}
    assert roles == {"a": "leader", "b": "follower", "c": "held", "d": "held", "e": "held", "f": "leader"}


def test_adopted_tokens_are_counted_apart_and_have_a_column_only_where_there_are_some() -> None:
    # Of the twelve tokens of a step the second request gets what the first one leaves.
    limits = {"max_num_batched_tokens": 12, "long_prefill_token_threshold": 8}
    core = small_core(num_blocks=32, adoption=True, publication="incremental", **limits)
    core.submit(list(range(20)), max_tokens=1)
    core.submit(list(range(20)), max_tokens=1)
    core.run()
    metrics = Metrics.of(core.log)
    adopted = sum(e.num_tokens for e in core.log if isinstance(e, ev.BlocksAdopted))
    assert adopted > 0
    assert [r.adopted_tokens for r in metrics.requests.values()] == [0, adopted]
    assert (metrics.adopted_tokens, metrics.recovered_tokens) == (adopted, 0)
    assert metrics.as_dict()["adopted_tokens"] == adopted
    assert metrics.requests["r1"].computed_tokens + adopted == 20
    place = metrics.columns.index("adopted")
    assert [row[place] for row in metrics.rows()] == ["0", str(adopted)]
    assert f"recovered, {adopted} adopted, " in repr(metrics)
    assert "<th>adopted</th>" in metrics._repr_html_()
    core = small_core()
    core.submit([1, 2, 3], max_tokens=1)
    core.run()
    assert "adopted" not in repr(Metrics.of(core.log)) + Metrics.of(core.log)._repr_html_()
    assert all(len(row) == len(Metrics.of(core.log).columns) for row in Metrics.of(core.log).rows())


def test_without_prefix_caching_nothing_is_queried_and_there_is_no_rate() -> None:
    core = EngineCore(EngineConfig(enable_prefix_caching=False), VirtualRunner())
    core.submit(list(range(144)), max_tokens=1)
    core.run()
    metrics = Metrics.of(core.log)
    assert (metrics.queried_tokens, metrics.recovered_tokens, metrics.hit_rate.rate) == (0, 0, None)
