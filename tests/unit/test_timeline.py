"""The drawn timeline says what the log says: who waited, who was held, and until when."""

from __future__ import annotations

import io

import pytest

from minivllm.bench.race import run_race
from minivllm.bench.workloads import Race
from minivllm.cli.race_progress import LiveTable, StoryLines
from minivllm.cli.terminal import Channel
from minivllm.config import EngineConfig
from minivllm.cost import CostModel
from minivllm.engine.core import EngineCore
from minivllm.log import events as ev
from minivllm.log.lanes import Lanes, Phase
from minivllm.log.timeline import can_write, draw_timeline
from minivllm.runners.virtual import VirtualRunner

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


def samples(**settings: object) -> EngineCore:
    core = small_core(**settings)
    core.submit([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], n=3, max_tokens=11)
    return core


def test_samples_are_held_then_fork_and_those_that_copy_a_block_say_so() -> None:
    core = samples()
    lanes = Lanes.of(core.log).lanes
    assert (lanes["r0.1"].phase, lanes["r0.1"].held_words) == (Phase.HELD, "behind r0")
    core.run()
    assert draw_timeline(core.log, 37, ascii_only=True) == (
        "r0 independent  ##########YC--------O\n"
        "r0.1 sample     ::::::::::LC--------O\n"
        "r0.2 sample     ::::::::::L---------O\n"
        "                +---------+--------+\n"
        "                0         100  200 ms\n"
        ": held behind another  # prefill  - decode  Y forked  L begins as a sample  C copied a block  O done"
    )


def test_a_sample_takes_the_place_of_the_first_one() -> None:
    core = samples(max_num_batched_tokens=4)
    core.step()
    core.abort("r0")
    lanes = Lanes.of(core.log).lanes
    assert [(lane.role, lane.phase, lane.behind) for lane in lanes.values()] == [
        ("independent", None, None),
        ("independent", Phase.WAITING, None),
        ("sample", Phase.HELD, "r0.1"),
    ]


def shared_prefix(**settings: object) -> EngineCore:
    """Prompts that share two blocks; a request computes a block a step."""
    core = small_core(coordination="shared-prefix", long_prefill_token_threshold=4, **settings)
    for own in range(3):
        core.submit([1, 2, 3, 4, 5, 6, 7, 8, 100 + own], max_tokens=4)
    return core


def test_who_is_held_for_a_shared_prefix_names_the_leader_and_the_block() -> None:
    core = shared_prefix()
    core.step()
    lanes = Lanes.of(core.log).lanes
    assert (lanes["r0"].role, lanes["r1"].role) == ("leader", "held")
    assert (lanes["r1"].phase, lanes["r1"].held_words) == (Phase.HELD, "behind r0 for block 1")
    core.run()
    drawing = draw_timeline(core.log, 60)
    assert drawing.splitlines()[1].startswith("r1 held    ░░░░")
    assert "░ held behind its leader" in drawing
    assert [span.phase for span in Lanes.of(core.log).lanes["r1"].spans].count(Phase.HELD) == 1


def adopting() -> EngineCore:
    limits = {"max_num_batched_tokens": 12, "long_prefill_token_threshold": 8}
    core = small_core(adoption=True, publication="incremental", **limits)
    for _ in range(2):
        core.submit(list(range(20)), max_tokens=4)
    core.run()
    return core


def test_adoption_is_marked_where_it_happens() -> None:
    drawing = draw_timeline(adopting().log, 60)
    assert "◆" not in drawing.splitlines()[0]
    assert "◆" in drawing.splitlines()[1]
    assert "◆ adopted blocks" in drawing


def story(events: list[ev.Event]) -> list[str]:
    """What the lines say, without the times."""
    lines: list[str] = []
    StoryLines(lines.append)(events)
    return [line.split("ms  ", 1)[1].rstrip() for line in lines]


def test_the_story_of_samples() -> None:
    core = samples()
    core.run()
    told = story(list(core.log))
    assert "r0.1, r0.2: held behind r0, a sample of the same prompt" in told
    assert "r0.1, r0.2: forked: run on the 3 blocks of r0, whose prompt is computed" in told
    copied = [line for line in told if "copied block" in line]
    assert copied == [
        "r0: copied block 3 to block 4 (2 tokens) before its first write, as other samples read it",
        "r0.1: copied block 3 to block 5 (2 tokens) before its first write, as other samples read it",
    ]


def test_the_story_of_a_first_sample_that_ends_too_early() -> None:
    core = samples(max_num_batched_tokens=4)
    core.step()
    core.abort("r0")
    assert story(list(core.log))[-1] == "r0.1: computes the prompt now, as r0 has ended before it was computed"


def test_the_story_of_a_shared_prefix_tells_each_wait_once() -> None:
    core = shared_prefix()
    core.run()
    told = story(list(core.log))
    assert told.count("r1, r2: held behind r0, which computes its block 0") == 1
    assert not any("its block 1" in line for line in told)
    assert "r1, r2: released: r0 has published the awaited block" in told
    core = shared_prefix()
    core.step()
    core.abort("r0")
    core.step()
    told = story(list(core.log))
    assert "r1, r2: released: r0 has ended" in told
    assert "r2: held behind r1, which computes its block 1" in told


def test_the_story_of_a_choice_has_both_times() -> None:
    core = small_core(coordination="wait-or-recompute", long_prefill_token_threshold=16)
    core.submit(list(range(80)), max_tokens=1)
    core.submit([*range(8), 98, 99], max_tokens=1)
    core.submit([*range(78), 98, 99], max_tokens=1)
    core.run()
    told = story(list(core.log))
    chosen = next(e for e in core.log if isinstance(e, ev.RecomputeChosen))
    awaited = next(e for e in core.log if isinstance(e, ev.PrefixAwaited))
    assert (chosen.request_id, awaited.request_id) == ("r1", "r2")
    for words, event in (("r1: computes block 0 itself beside r0", chosen), ("r2: held behind r0, which", awaited)):
        line = next(line for line in told if line.startswith(words))
        assert f"({event.wait_ms:,.1f} ms to its first token if it waits, {event.recompute_ms:,.1f} ms if it" in line


def test_the_story_of_adoption_and_of_a_collision() -> None:
    assert "r1: adopted 4 tokens in 1 block published meanwhile" in story(list(adopting().log))
    collision = ev.HashCollision("r5", 7, "0a", (1, 2, 3, 4), (1, 2, 8, 9))
    assert story([collision]) == [
        "r5: hash collision: block 7 has the hash that it asks for, but holds token ids 8 9 in place of 3 4; "
        "it is not served"
    ]
    same = ev.HashCollision("r5", 7, "0a", (1, 2, 3, 4), (1, 2, 3, 4))
    assert "holds the same tokens after another beginning" in story([same])[0]


def test_the_live_table_says_whom_a_request_waits_for_and_what_it_adopted() -> None:
    table = LiveTable(Channel(io.StringIO(), "standard output"), "A race", 4)
    core = shared_prefix()
    core.step()
    table._lanes.update(core.log)
    table._metrics.update(core.log)
    rows = {name: table._row(request) for name, request in table._metrics.requests.items()}
    assert rows["r1"][:3] == ("r1", "held", "held behind r0 for block 1")
    table = LiveTable(Channel(io.StringIO(), "standard output"), "A race", 4)
    log = adopting().log
    table._lanes.update(log)
    table._metrics.update(log)
    adopted = table._metrics.adopted_tokens
    assert table._row(table._metrics.requests["r1"])[4] == f"0 + {adopted} adopted"
