"""The drawn timeline says what the log says: who waited, who was held, and until when."""

from __future__ import annotations

import pytest

from minivllm.config import EngineConfig
from minivllm.engine import EngineCore
from minivllm.race import run_race
from minivllm.runners.virtual import CostModel, VirtualRunner
from minivllm.text_timeline import Lanes, Phase, can_write, draw_timeline
from minivllm.workloads import Race

EVEN = CostModel(step_ms=10.0, prefill_ms=9.0, decode_one_ms=0.0, decode_base_ms=0.0, decode_row_ms=0.0)
"""A step takes 10 ms and 9 for each prefilled token."""


def small_core(**settings: object) -> EngineCore:
    fields = {"block_size": 4, "num_blocks": 64, **settings}
    return EngineCore(EngineConfig(**fields), VirtualRunner(EVEN))  # type: ignore[arg-type]


def single_flight() -> EngineCore:
    core = small_core(coordination="single-flight")
    for _ in range(2):
        core.submit([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], max_tokens=11)
    return core


def test_a_leader_and_its_follower() -> None:
    core = single_flight()
    core.run()
    assert draw_timeline(core.log, 37, ascii_only=True) == (
        "r0 leader    ##########------------O\n"
        "r1 follower  ::::::::::###----------O\n"
        "             +-------------------+--\n"
        "             0                 200 ms\n"
        ": held behind its leader  # prefill  - decode  O done"
    )


def test_spans_are_the_moments_of_the_log() -> None:
    core = single_flight()
    core.run()
    lanes = Lanes.of(core.log).lanes
    leader = [(s.phase, s.start_ms, s.end_ms) for s in lanes["r0"].spans if s.start_ms != s.end_ms]
    assert leader == [(Phase.PREFILL, 0.0, 100.0), (Phase.DECODE, 100.0, 218.0)]
    follower = [(s.phase, s.start_ms, s.end_ms) for s in lanes["r1"].spans if s.start_ms != s.end_ms]
    assert follower == [
        (Phase.HELD, 0.0, 100.0),
        (Phase.PREFILL, 100.0, 128.0),
        (Phase.DECODE, 128.0, 228.0),
    ]
    assert [lane.role for lane in lanes.values()] == ["leader", "follower"]
    assert [lane.end for lane in lanes.values()] == ["length", "length"]


def test_while_it_runs_a_lane_knows_its_phase_and_whom_it_waits_for() -> None:
    core = single_flight()
    lanes = Lanes.of(core.log).lanes
    assert (lanes["r0"].phase, lanes["r1"].phase, lanes["r1"].behind) == (Phase.WAITING, Phase.HELD, "r0")
    core.step()
    lanes = Lanes.of(core.log).lanes
    assert (lanes["r0"].phase, lanes["r1"].phase) == (Phase.DECODE, Phase.WAITING)
    assert Lanes.of([]).lanes == {}


def test_a_handed_over_flight_names_the_new_leader() -> None:
    core = small_core(coordination="single-flight")
    for _ in range(3):
        core.submit([1, 2, 3, 4, 5], max_tokens=2)
    core.abort("r0")
    lanes = Lanes.of(core.log).lanes
    assert (lanes["r1"].role, lanes["r1"].behind, lanes["r1"].phase) == ("leader", None, Phase.WAITING)
    assert (lanes["r2"].role, lanes["r2"].behind) == ("follower", "r1")
    assert lanes["r0"].end == "abort"
    core.run()
    assert "× aborted or failed" in draw_timeline(core.log)


def test_a_preempted_request_is_seen_to_wait() -> None:
    core = small_core(num_blocks=6)
    core.submit(list(range(8)), max_tokens=12)
    core.submit(list(range(20, 28)), max_tokens=12)
    core.run()
    drawing = draw_timeline(core.log, 80)
    assert "▒ preempted" in drawing
    assert "▒" in drawing.splitlines()[1]
    assert "▒" not in drawing.splitlines()[0]


def test_folding_step_by_step_gives_the_same_lanes() -> None:
    core = single_flight()
    folded, seen = Lanes(), 0
    while core.step():
        folded.update(core.log.since(seen))
        seen = len(core.log)
    assert folded.lanes == Lanes.of(core.log).lanes


def test_an_empty_log_says_so() -> None:
    assert draw_timeline([]) == "no request has arrived"


def test_a_log_in_which_no_time_has_passed_is_drawn_without_a_scale() -> None:
    core = single_flight()
    lines = draw_timeline(core.log, 60).splitlines()
    assert lines[0] == "r0 leader"
    assert lines[1] == "r1 follower"


@pytest.mark.parametrize("width", [40, 60, 80, 120])
@pytest.mark.parametrize("coordination", ["independent", "single-flight"])
def test_nothing_is_wider_than_asked(width: int, coordination: str) -> None:
    result = run_race(Race(num_requests=4), EngineConfig(coordination=coordination), "virtual")
    lines = result.timeline(width).splitlines()
    assert max(map(len, lines[:-1])) <= width
    assert len(lines) == 7


def test_short_phases_stay_visible() -> None:
    result = run_race(Race(num_requests=4), EngineConfig(coordination="single-flight"), "virtual")
    follower = result.timeline(80).splitlines()[1]
    assert "░█━" in follower  # a prefill of 25 ms in a race of five seconds


def test_the_ascii_drawing_is_ascii_and_as_wide() -> None:
    result = run_race(Race(num_requests=3), EngineConfig(coordination="single-flight"), "virtual")
    plain, drawn = result.timeline(70, ascii_only=True), result.timeline(70)
    plain.encode("ascii")
    assert [len(line) for line in plain.splitlines()] == [len(line) for line in drawn.splitlines()]


@pytest.mark.parametrize(
    ("encoding", "can"), [("utf-8", True), ("UTF8", True), ("ascii", False), ("latin-1", False), (None, False)]
)
def test_the_marks_are_used_where_they_can_be_written(encoding: str | None, can: bool) -> None:
    assert can_write(encoding) is can
    assert can_write("no-such-encoding") is False
