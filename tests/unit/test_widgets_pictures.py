"""Pictures and texts say what the log says, and are the same bytes each time."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from minivllm import ConfigError, EngineConfig, EngineCore, Submission, VirtualRunner
from minivllm.cache.block_pool import Block
from minivllm.cache.eviction.policy import Placement
from minivllm.log.states import BLOCK_TRANSITIONS, BlockState
from minivllm.request import TRANSITIONS, RequestState, Sampling
from tests.browser.engine_logs import CORES
from widgets import (
    Picture,
    compare_timelines,
    picture_block_states,
    picture_chain,
    picture_pool,
    picture_states,
    picture_tables,
    picture_timeline,
    tables_text,
    timeline_text,
)

SVG = "{http://www.w3.org/2000/svg}"


def race(num_requests: int = 3, prompt: int = 18, max_tokens: int = 3, **config: Any) -> EngineCore:
    """A race of identical prompts; blocks of 4 tokens, so that 18 tokens fill 4 blocks and a half."""
    settings = {"block_size": 4, "num_blocks": 40} | config
    core = EngineCore(EngineConfig(**settings), VirtualRunner())
    core.submit_batch([Submission(list(range(prompt)), Sampling(max_tokens=max_tokens)) for _ in range(num_requests)])
    return core


def flight() -> EngineCore:
    core = race(coordination="single-flight")
    core.run()
    return core


def cold() -> EngineCore:
    core = race()
    core.run()
    return core


def handed_over() -> EngineCore:
    core = race(prompt=40, coordination="single-flight", max_num_batched_tokens=16)
    core.step()
    core.abort("r0")
    core.run()
    return core


def preempted() -> EngineCore:
    core = EngineCore(EngineConfig(block_size=4, num_blocks=12), VirtualRunner())
    core.submit_batch([Submission(list(range(100 * i, 100 * i + 16)), Sampling(max_tokens=14)) for i in range(2)])
    core.run()
    return core


def failed() -> EngineCore:
    def fail(step: Any) -> None:
        if step.number == 2:
            raise RuntimeError("out of memory <here> & now")

    core = EngineCore(EngineConfig(block_size=4, num_blocks=40), VirtualRunner(on_step=fail))
    core.submit(list(range(18)), max_tokens=3)
    core.step()
    with pytest.raises(RuntimeError):
        core.step()
    return core


LOGS: dict[str, Callable[[], EngineCore]] = {
    "flight": flight,
    "cold": cold,
    "handed_over": handed_over,
    "preempted": preempted,
    "failed": failed,
    "fresh": lambda: EngineCore(EngineConfig(block_size=4, num_blocks=8), VirtualRunner()),
    **CORES,
}
PICTURES: dict[str, Callable[[EngineCore], Picture]] = {
    "pool": lambda core: picture_pool(core.log),
    "pool at 1": lambda core: picture_pool(core.log, at=1),
    "tables at 1": lambda core: picture_tables(core.log, at=1),
    "tables": lambda core: picture_tables(core.log),
    "chain": lambda core: picture_chain(core.log),
    "timeline": lambda core: picture_timeline(core.log, "A race"),
    "steps": lambda core: picture_timeline(core.log, axis="step"),
    "compared": lambda core: compare_timelines({"one <&>": core.log, "two": core.log}),
}


def words(picture: Picture) -> list[str]:
    return ["".join(node.itertext()) for node in ElementTree.fromstring(picture.svg).iter(f"{SVG}text")]


@pytest.mark.parametrize("log", LOGS)
@pytest.mark.parametrize("kind", PICTURES)
def test_every_picture_is_well_formed_and_the_same_bytes_each_time(kind: str, log: str) -> None:
    first, second = PICTURES[kind](LOGS[log]()), PICTURES[kind](LOGS[log]())
    assert first.svg == second.svg
    assert first._repr_html_() == second._repr_html_()
    root = ElementTree.fromstring(first.svg)
    assert root.tag == f"{SVG}svg"
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    assert root.attrib["viewBox"] == f"0 0 {root.attrib['width']} {root.attrib['height']}"
    for node in root.iter(f"{SVG}rect"):  # nothing hangs over the edge (patterns have a plane of their own)
        assert float(node.attrib["x"]) + float(node.attrib["width"]) <= width
        assert float(node.attrib["y"]) + float(node.attrib["height"]) <= height
        assert float(node.attrib["width"]) > 0


@pytest.mark.parametrize("kind", PICTURES)
def test_a_picture_has_its_own_ground(kind: str) -> None:
    root = ElementTree.fromstring(PICTURES[kind](flight()).svg)
    ground = next(node for node in root if node.tag == f"{SVG}rect")
    assert ground.attrib["fill"] == "#ffffff"
    assert float(ground.attrib["width"]) >= float(root.attrib["width"]) - 1


def test_in_a_notebook_it_is_an_image_with_its_facts_in_words() -> None:
    picture = picture_timeline(flight().log)
    match = re.fullmatch(
        r'<img alt="([^"]+)" src="data:image/svg\+xml;base64,([A-Za-z0-9+/=]+)">', picture._repr_html_()
    )
    assert match is not None
    assert base64.b64decode(match[2]).decode() == picture.svg
    assert html.unescape(match[1]) == picture.alt
    assert "r1  follower  held behind r0" in picture.alt
    assert "32 of 54 prompt tokens recovered" in picture.alt


def test_a_text_of_a_log_cannot_break_out_of_the_picture() -> None:
    picture = compare_timelines({'"><script>': failed().log})
    assert "<script>" not in picture.svg
    assert "<script>" not in picture._repr_html_()


def test_saved_and_shown() -> None:
    assert repr(picture_pool(flight().log, at=1)) == "Picture(block pool, after step 1)"


def test_a_picture_is_saved_as_a_file(tmp_path: Path) -> None:
    picture = picture_pool(flight().log)
    assert picture.save(tmp_path / "pool.svg").read_text(encoding="utf-8") == picture.svg


def test_the_pool_counts_what_each_block_is() -> None:
    core = flight()
    after = picture_pool(core.log, at=2).alt
    assert after == (
        "Block pool after step 2: 40 blocks; 33 free, 3 owned, 0 private copy, 4 published, in use, "
        "0 published, ref_count 0."
    )
    assert words(picture_pool(core.log, at=2)).count("3") == 4  # four blocks in three tables
    assert "0 published, in use, 5 published, ref_count 0" in picture_pool(core.log).alt  # 20 tokens have K/V


def test_private_copies_are_told_from_owned_blocks() -> None:
    core = race(publication="incremental")
    core.step()
    assert "3 owned, 8 private copy, 4 published, in use" in picture_pool(core.log).alt


def test_a_large_pool_says_how_much_of_it_is_drawn() -> None:
    core = EngineCore(EngineConfig(num_blocks=3000), VirtualRunner())
    assert "The first 1,024 of 3,000 blocks." in words(picture_pool(core.log))


def test_tables_in_words() -> None:
    assert tables_text(flight().log, at=2) == "\n".join(
        [
            "Block tables after step 2:",
            "  r0  running    1 to 4 (published, ref_count 3); 5 (owned, ref_count 1)",
            "  r1  running    1 to 4 (published, ref_count 3); 6 (owned, ref_count 1)",
            "  r2  running    1 to 4 (published, ref_count 3); 7 (owned, ref_count 1)",
            "  33 of 40 blocks free",
        ]
    )
    assert tables_text(flight().log, at=0).splitlines()[:2] == [
        "Block tables before the first step:",
        "  r0  waiting    no block",
    ]
    assert picture_tables(flight().log, at=2).alt == tables_text(flight().log, at=2)


def test_the_timeline_in_words_by_steps() -> None:
    assert timeline_text(handed_over().log, axis="step") == "\n".join(
        [
            "r0  leader    prefill 16 (step 1) → aborted; recovered 0 of 40",
            "r1  leader    held behind r0 (step 1) → prefill 16 (step 2) → prefill 16 (step 3) → prefill 8 (step 4) → "
            "decode 2 (steps 5 to 6) → done; recovered 0 of 40",
            "r2  follower  held behind r0 (step 1) → held behind r1 (steps 2 to 4) → prefill 4 (step 5) → "
            "decode 2 (steps 6 to 7) → done; recovered 36 of 40",
            "r0 hands over to r1 (step 1)",
            "r1 releases r2 (step 4): its prompt is published",
            "in all 36 of 120 prompt tokens recovered",
        ]
    )


def test_the_timeline_in_words_by_the_clock() -> None:
    lines = timeline_text(flight().log).splitlines()
    assert re.fullmatch(
        r"r1  follower  held behind r0 \(0 to \d+ ms\) → prefill 2 \(\d+ to \d+ ms\) → decode 2 \(\d+ to \d+ ms\)"
        r" → done; recovered 16 of 18, TTFT \d+ ms",
        lines[1],
    )
    assert "preempted (steps" in timeline_text(preempted().log, axis="step")
    assert "→ failed;" in timeline_text(failed().log)
    assert timeline_text(LOGS["fresh"]().log) == "no request"


def test_idle_time_is_cut_out() -> None:
    runner = VirtualRunner()
    core = EngineCore(EngineConfig(), runner)
    core.submit([1, 2, 3], max_tokens=2)
    core.run()
    busy_ms = runner.clock.now_ms()
    runner.clock.advance(60_000)
    core.submit([1, 2, 3], max_tokens=2)
    core.run()
    last = int(re.findall(r"to (\d+) ms", timeline_text(core.log))[-1])
    assert last <= 2 * busy_ms + 1


def test_the_timeline_draws_leader_followers_and_hand_over() -> None:
    drawn = words(picture_timeline(handed_over().log))
    assert "leader · aborted" in drawn
    assert "follower · done" in drawn
    assert "held behind r1" in drawn
    assert "36 of 40 recovered" in drawn
    assert drawn.count("✓") == 2 and drawn.count("✕") == 1


def test_compared_timelines_share_one_axis() -> None:
    def ends(picture: Picture) -> list[float]:
        return [float(x) for x in re.findall(r'<text x="([\d.]+)"[^>]*>✓<', picture.svg)]

    short, long = flight(), race(max_tokens=60)
    long.run()
    both = compare_timelines({"short": short.log, "long": long.log})
    assert {"short", "long"} <= set(words(both))
    assert both.alt.startswith("short:\nr0  leader")
    assert ends(both)[3:] == ends(picture_timeline(long.log))  # the longer one fills the axis, as alone
    assert max(ends(both)[:3]) < min(ends(picture_timeline(short.log)))  # the shorter one does not


def test_the_chain_shows_where_prompts_part_and_the_salt() -> None:
    core = EngineCore(EngineConfig(block_size=4, num_blocks=40, publication="incremental"), VirtualRunner())
    core.submit([1, 2, 3, 4, 5, 6, 7, 8, 9], max_tokens=1)
    core.run()
    core.submit([1, 2, 3, 4, 50, 60, 70, 80, 90], max_tokens=1)
    core.submit([1, 2, 3, 4, 5], max_tokens=1, cache_salt="team-a")
    core.run()
    picture = picture_chain(core.log)
    assert picture.alt == "Hash chain after step 2: 4 published blocks, 2 first blocks, 3 ends."
    assert "cache salt team-a" in words(picture)
    hashes = [block.block_hash for block in core.state().blocks.values() if block.block_hash]
    assert {h[:6] for h in hashes} <= set(words(picture))


def test_a_long_run_of_the_chain_is_folded() -> None:
    core = race(num_requests=1, prompt=100)
    core.run()
    assert "20 more" in words(picture_chain(core.log))


def test_what_was_evicted_is_gone_from_the_chain() -> None:
    core = EngineCore(EngineConfig(block_size=4, num_blocks=6), VirtualRunner())
    core.submit(list(range(16)), max_tokens=1)
    core.run()
    before = len(core.state().prefix_index)
    core.submit(list(range(100, 112)), max_tokens=1)
    core.run()
    left = [h[:6] for h in core.state().prefix_index]
    assert sum(event.kind == "blocks_evicted" for event in core.log) == 1
    assert set(left) <= set(words(picture_chain(core.log)))
    assert f"{len(left)} published blocks" in picture_chain(core.log).alt
    assert len(left) < before + 3


@pytest.mark.parametrize("at", [-1, 1.5, "2", True])
def test_a_step_that_makes_no_sense_is_refused(at: Any) -> None:
    with pytest.raises(ConfigError, match="give an engine step of 0 or more"):
        picture_pool(flight().log, at=at)


def test_bad_input_is_a_sentence() -> None:
    with pytest.raises(ConfigError, match="the log is empty"):
        picture_pool([])
    with pytest.raises(ConfigError, match="must be 'ms' or 'step'"):
        timeline_text(flight().log, axis="seconds")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no log to compare"):
        compare_timelines({})


class AllToTheBack:
    """Puts every freed block at the back, with a hash or without."""

    name = "all-to-the-back"

    def place(self, freed: Sequence[Block]) -> Placement:
        return Placement(to_front=[], to_back=list(freed))


def test_a_private_copy_that_was_freed_to_the_back_is_none_when_it_is_used_again() -> None:
    core = race(2, num_blocks=12, eviction=AllToTheBack())
    core.run()
    assert any(event.kind == "blocks_duplicated" for event in core.log)
    core.submit(list(range(100, 140)), max_tokens=3)  # takes blocks that were copies
    core.run(max_steps=1)
    assert ", 0 private copy," in picture_pool(core.log).alt


def test_the_states_of_a_request_are_drawn_from_the_table_of_transitions() -> None:
    drawn = picture_states()
    assert drawn.svg == picture_states().svg
    told = dict(re.findall(r"(\w+) to ([\w, ]+)", drawn.alt))
    words = {source: set(re.split(r", | or ", targets)) for source, targets in told.items()}
    assert words == {a.value: {b.value for b in after} for a, after in TRANSITIONS.items() if after}
    titles = {node.text for node in ElementTree.fromstring(drawn.svg).iter("{http://www.w3.org/2000/svg}title")}
    assert {state.value for state in RequestState} <= titles
    assert {f"{a.value}->{b.value}" for a, after in TRANSITIONS.items() for b in after} <= titles
    assert "Nothing follows finished, aborted or failed." in drawn.alt


def test_the_states_of_a_block_are_drawn_from_the_table_of_transitions() -> None:
    drawn = picture_block_states()
    assert drawn.svg == picture_block_states().svg
    told: dict[tuple[str, str], set[str]] = {}
    for source, target, actions in re.findall(r"(\w+) (?:to (\w+)|stays so) by ([\w, ]+)", drawn.alt):
        told[source, target or source] = set(re.split(r", | or ", actions))
    table: dict[tuple[str, str], set[str]] = {}
    for (source, action), target in BLOCK_TRANSITIONS.items():
        table.setdefault((source.value, target.value), set()).add(action.value)
    assert told == table
    titles = {node.text for node in ElementTree.fromstring(drawn.svg).iter(f"{SVG}title")}
    assert {state.value for state in BlockState} <= titles
    assert {f"{source}->{target}" for source, target in table} <= titles
    labels = [set(label.strip().split(", ")) for label in words(drawn)]
    assert all(actions in labels for actions in table.values())


# --- Samples, shared prefixes, adoption, blocks published too early -----------------------------------------


def test_tables_name_what_samples_share_and_what_they_copied() -> None:
    core = CORES["samples copied on write"]()
    assert tables_text(core.log, at=2).splitlines()[1:4] == [
        "  r0    running    1 to 4 (owned, shared by samples, ref_count 3); 6 (copy of 5, owned, ref_count 1)",
        "  r0.1  running    1 to 4 (owned, shared by samples, ref_count 3); 7 (copy of 5, owned, ref_count 1)",
        "  r0.2  running    1 to 4 (owned, shared by samples, ref_count 3); 5 (owned, ref_count 1)",
    ]
    assert "copied on write" in words(picture_tables(core.log, at=2))
    assert "copied on write" not in words(picture_tables(core.log, at=1))
    assert ", held behind r0" in tables_text(core.log, at=0).splitlines()[2]


def test_the_timeline_of_samples_in_words() -> None:
    core = CORES["samples copied on write"]()
    assert timeline_text(core.log, axis="step") == "\n".join(
        [
            "r0    independent  prefill 18 (step 1) → decode 4 (steps 2 to 5) → done; recovered 0 of 18, "
            "1 block copied on write",
            "r0.1  sample       held behind r0 (step 1) → decode 4 (steps 2 to 5) → done; the prompt of r0, "
            "1 block copied on write",
            "r0.2  sample       held behind r0 (step 1) → decode 4 (steps 2 to 5) → done; the prompt of r0",
            "r0.1, r0.2 begin on the blocks of r0 (step 1): the prompt of these samples is computed",
            "in all 0 of 18 prompt tokens recovered",
        ]
    )
    drawn = words(picture_timeline(core.log))
    assert {"sample · done", "the prompt of r0", "block copied on write", "samples begin on the same blocks"} <= set(
        drawn
    )


def test_the_timeline_of_a_first_sample_that_ends_too_early() -> None:
    told = timeline_text(CORES["samples whose first is aborted"]().log, axis="step").splitlines()
    assert told[1].startswith("r0.1  independent  held behind r0 (step 1) → prefill 8 (step 2)")
    assert told[3] == "r0 hands over to r0.1 (step 1)"


def test_the_timeline_of_a_shared_prefix_in_words() -> None:
    told = timeline_text(CORES["shared prefix, leader aborted"]().log, axis="step").splitlines()
    assert told[0].startswith("r0  leader  prefill 16 (step 1) → aborted;")
    assert told[2] == (
        "r2  held    held behind r0 for blocks 0 to 4 (step 1) → held behind r1 for blocks 4 to 8 (steps 2 to 3) → "
        "prefill 6 (step 4) → decode 3 (steps 5 to 7) → done; recovered 40 of 46"
    )
    assert told[4:6] == [
        "r0 releases r1, r2, r3 (step 1): it has ended",
        "r1 releases r2, r3 (step 3): the awaited block is published",
    ]
    log = CORES["shared prefix, leader preempted"]().log
    assert "r1 releases r2 (step 3): it was preempted" in timeline_text(log, axis="step")
    assert "was held · done" in words(picture_timeline(log))
    assert "no block, held behind r1" in tables_text(log, at=3)
    assert "no block, held behind r1" in words(picture_tables(log, at=3))


def test_a_choice_to_compute_is_told_with_its_two_times() -> None:
    log = CORES["waited or recomputed"]().log
    assert (
        "r1 computes block 0 beside r0 (step 1): first token in 39 ms, or in 60 ms if it waited"
        in timeline_text(log, axis="step").splitlines()
    )
    assert "computes beside another" in words(picture_timeline(log))


def test_adopted_tokens_are_told_apart_from_recovered_ones() -> None:
    log = CORES["adopted in mid-prefill"]().log
    told = timeline_text(log, axis="step").splitlines()
    assert told[1].endswith("recovered 0 of 60, adopted 36")
    assert told[-1] == "in all 0 of 120 prompt tokens recovered, 36 adopted"
    assert "5 (private copy, ref_count 1); 2 to 4 (adopted, published, ref_count 2)" in tables_text(log, at=2)
    assert {"36 of 60 adopted", "adopted in mid-prefill"} <= set(words(picture_timeline(log)))
    assert "adopted in mid-prefill" in words(picture_tables(log, at=2))
    assert "adopted in mid-prefill" not in words(picture_tables(log))  # given back


def test_blocks_that_were_published_and_never_computed_are_report() -> None:
    log = CORES["published but never computed"]().log
    assert "0 published, ref_count 0, 4 published, not computed." in picture_pool(log, at=1).alt
    assert words(picture_pool(log, at=1)).count("?") == 4
    assert "  r2  running    1 to 4 (published, not computed, ref_count 1); 5" in tables_text(log, at=2)
    assert "published, not computed" in words(picture_tables(log, at=2))
    assert "not computed" not in picture_pool(CORES["incremental"]().log, at=1).alt


def test_the_chain_names_each_extra_key_where_it_begins() -> None:
    drawn = words(picture_chain(CORES["adapter, multimodal and salt"]().log))
    assert {"adapter tuned", "cache salt team-a", "multimodal dog at token 20"} <= set(drawn)
    assert {"multimodal cat at tokens 6 to 14", "multimodal cat at tokens 7 to 15"} <= set(drawn)
    # Where one label would cover the next, that one stands behind it.
    assert {"adapter tuned, cache salt team-a", "· multimodal cat at tokens 6 to 14"} <= set(drawn)
