"""The page's fold is the engine's: the same events give the same state in JavaScript as in Python, at every moment."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from minivllm import EngineCore, replay
from minivllm.cache.eviction.policy import EvictionPolicy
from minivllm.log.event import EVENT_KINDS
from minivllm.log.events import BlocksEvicted, BlocksFreed, BlocksHit, BlocksPublished, HashCollision
from minivllm.step import ScheduledStep
from tests.browser.engine_logs import CORES, Backwards, engine, placed_by, race, ran
from widgets.fold import Place, lanes_of, moment_of
from widgets.live import PANELS, make_checkpoint

pytestmark = pytest.mark.browser
WIDGETS = Path(__file__).resolve().parents[2] / "widgets"
STATIC = WIDGETS / "static"


@pytest.fixture(scope="module")
def blank(chromium: Browser) -> Iterator[Page]:
    """A page with nothing but the module in it, as ``lab``."""
    page = chromium.new_page(viewport={"width": 1200, "height": 900})
    page.set_content("<main></main>")
    page.add_style_tag(path=STATIC / "lab.css")
    page.evaluate(
        """async source => {
            window.lab = await import(URL.createObjectURL(new Blob([source], { type: 'text/javascript' })));
        }""",
        (STATIC / "lab.js").read_text(encoding="utf-8"),
    )
    yield page
    page.close()


@pytest.fixture(scope="module")
def unbundled(chromium: Browser) -> Iterator[Page]:
    """The same page with the modules as they are written, each loaded for itself."""
    page = chromium.new_page(viewport={"width": 1200, "height": 900})
    scripts = {"content_type": "text/javascript"}
    page.route("http://widgets.test/**", lambda route: route.fulfill(body="<main></main>", content_type="text/html"))
    page.route(
        "http://widgets.test/**/*.js",
        lambda route: route.fulfill(path=WIDGETS / route.request.url.removeprefix("http://widgets.test/"), **scripts),
    )
    page.goto("http://widgets.test/")
    page.evaluate("async () => { window.lab = await import('/lab.js'); }")
    yield page
    page.close()


def as_json(core: EngineCore) -> list[dict[str, Any]]:
    return json.loads(json.dumps([event.as_dict() for event in core.log]))


def test_the_logs_hold_every_kind_of_event() -> None:
    assert {event.kind for make in CORES.values() for event in make().log} == set(EVENT_KINDS)


@pytest.mark.parametrize("eviction", ["mru", Backwards()])
def test_the_logs_of_other_evictions_put_published_blocks_at_the_front(eviction: str | EvictionPolicy) -> None:
    log = placed_by(eviction).log
    published: set[int] = set()
    at_front = 0
    for event in log:
        if isinstance(event, BlocksPublished):
            published.update(event.block_ids)
        elif isinstance(event, BlocksEvicted):
            published.difference_update(event.block_ids)
        elif isinstance(event, BlocksFreed):
            at_front += len(published.intersection(event.to_front))
    assert at_front > 0
    assert any(isinstance(event, BlocksEvicted) for event in log)
    assert any(isinstance(event, BlocksHit) for event in log)


@pytest.mark.parametrize("name", CORES)
def test_the_fold_in_the_page_equals_replay_after_every_event(blank: Page, name: str) -> None:
    core = CORES[name]()
    states = blank.evaluate(
        """events => {
            const state = lab.initialState();
            return events.map(event => JSON.stringify(lab.asDict(lab.fold(state, event))));
        }""",
        as_json(core),
    )
    assert len(states) == len(core.log)
    for seq, state in enumerate(states):
        assert json.loads(state) == replay(core.log, until_seq=seq + 1).as_dict(), core.log[seq]
    assert json.loads(states[-1]) == core.state().as_dict()


def test_a_state_survives_the_way_through_its_dictionary(blank: Page) -> None:
    events = as_json(CORES["preemption"]())[:150]
    assert blank.evaluate(
        """events => {
            const state = lab.replay(events);
            return JSON.stringify(lab.asDict(lab.fromDict(lab.asDict(state)))) === JSON.stringify(lab.asDict(state));
        }""",
        events,
    )


def test_a_recording_can_be_entered_anywhere_and_takes_batches_that_overlap_but_no_gap(blank: Page) -> None:
    core = ran(race(8, prompt=60, max_tokens=90, num_blocks=400, coordination="single-flight"))
    assert len(core.log) > 1200  # so that there is a snapshot on the way
    events = as_json(core)
    result = blank.evaluate(
        """events => {
            const recording = new lab.Recording();
            const gap = recording.append(5, events.slice(5, 9));
            recording.append(0, events.slice(0, 40));
            recording.append(20, events.slice(20, 600));
            recording.append(600, events.slice(600));
            const places = [0, 1, 37, 999, 1000, 1001, events.length];
            const player = new lab.Player(recording, false);
            const walked = [];
            player.seek(0);
            while (player.position < recording.end) { player.forward(); walked.push(player.position); }
            const back = [];
            while (player.position > 0) { back.push(player.position); player.back(); }
            return {
                gap, end: recording.end, snapshots: recording.snapshots.length,
                states: places.map(seq => [seq, lab.asDict(recording.modelAt(seq).state)]),
                walked, back: back.reverse(),
            };
        }""",
        events,
    )
    assert result["gap"] is False
    assert result["end"] == len(core.log)
    assert result["snapshots"] >= 2
    for seq, state in result["states"]:
        assert state == replay(core.log, until_seq=seq).as_dict()
    assert result["walked"] == result["back"]
    # Every step is two beats: what was scheduled, and what came of it.
    assert len(result["walked"]) >= 2 * core.log.step


def test_a_page_that_begins_at_a_checkpoint_knows_the_blocks_that_were_never_computed(blank: Page) -> None:
    def withdraw(_step: ScheduledStep) -> None:
        core.abort("r0")

    core = engine(withdraw, publication="at-allocation")
    core.submit(list(range(18)), max_tokens=3)
    core.step()
    checkpoint = make_checkpoint(core.log, len(core.log))
    assert checkpoint["uncomputed"] == {str(block): {"by": "r0", "end": 4 * block} for block in (1, 2, 3, 4)}
    ids = blank.evaluate(
        """checkpoint => {
            const recording = new lab.Recording();
            recording.load(checkpoint);
            return [...recording.head.scene.uncomputed.keys()];
        }""",
        checkpoint,
    )
    assert ids == [1, 2, 3, 4]


def test_a_page_that_begins_at_a_checkpoint_ends_where_the_others_do(blank: Page) -> None:
    core = ran(race(2, publication="incremental"))
    place = len(core.log)
    core.submit(list(range(70)), max_tokens=3)
    core.run()
    state = blank.evaluate(
        """([checkpoint, events]) => {
            const recording = new lab.Recording(true);
            recording.load(checkpoint);
            recording.append(checkpoint.seq, events);
            const { scene, state } = recording.head;
            const lanes = scene.lanes.map(lane => [lane.id, lane.recovered]);
            return { state: lab.asDict(state), hashes: [...scene.hashes.keys()], lanes };
        }""",
        [make_checkpoint(core.log, place), as_json(core)[place:]],
    )
    expected = replay(core.log).as_dict()
    ended = {name: expected["requests"].pop(name) for name in ("r0", "r1")}
    assert all(request["state"] == "finished" for request in ended.values())
    assert state["state"] == expected
    assert set(state["hashes"]) == set(expected["prefix_index"])
    assert state["lanes"] == [["r2", 68]]


@pytest.mark.parametrize("name", CORES)
def test_every_log_can_be_drawn_and_walked_through(blank: Page, name: str) -> None:
    errors: list[str] = []
    blank.on("pageerror", lambda error: errors.append(str(error)))
    events = as_json(CORES[name]())
    blank.evaluate(
        """([events, show]) => {
            const root = document.querySelector('main');
            root.replaceChildren();
            const recording = new lab.Recording();
            recording.append(0, events);
            window.page = new lab.LabPage(root, recording, { show, title: 'A recording' });
        }""",
        [events, list(PANELS)],
    )
    expect(blank.locator(".mvl-lane")).to_have_count(
        len({e["request_id"] for e in events if e["kind"] == "request_arrived"})
    )
    blank.evaluate(
        """async () => {
            const frame = () => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
            page.player.seek(0);
            while (page.player.position < page.recording.end) {
                page.player.forward();
                page.invalidate();
                await frame();
            }
        }"""
    )
    words = blank.locator("main").inner_text()
    assert "undefined" not in words and "NaN" not in words and "[object" not in words
    assert blank.locator(".mvl-story-list li").count() > 3
    blank.evaluate("() => page.destroy()")
    expect(blank.locator(".mvl")).to_have_count(0)
    assert errors == []


def test_the_modules_export_the_same_unbundled(blank: Page, unbundled: Page) -> None:
    names = "() => Object.entries(lab).map(([name, value]) => [name, typeof value])"
    assert unbundled.evaluate(names) == blank.evaluate(names)
    assert len(unbundled.evaluate(names)) > 10


@pytest.mark.parametrize("name", CORES)
def test_the_modules_draw_the_same_unbundled(blank: Page, unbundled: Page, name: str) -> None:
    errors: list[str] = []
    unbundled.on("pageerror", lambda error: errors.append(str(error)))
    drawn = [
        page.evaluate(
            """async ([events, show]) => {
                const root = document.querySelector('main');
                root.replaceChildren();
                const recording = new lab.Recording();
                recording.append(0, events);
                const page = new lab.LabPage(root, recording, { show, title: 'A recording' });
                await new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
                const tips = [...root.querySelectorAll('[data-block],[data-request]')].map(node => {
                    node.dispatchEvent(new MouseEvent('mouseover', { bubbles: true }));
                    return root.querySelector('.mvl-tooltip').textContent;
                });
                const words = [...root.querySelectorAll('section section')].map(panel => panel.textContent);
                page.destroy();
                return [words, tips];
            }""",
            [as_json(CORES[name]()), list(PANELS)],
        )
        for page in (blank, unbundled)
    ]
    assert errors == []
    words, tips = drawn[0]
    assert len(words) == len(PANELS) and len(tips) > 10
    assert drawn[1] == drawn[0]


def test_leaving_frees_the_recording(blank: Page) -> None:
    left = blank.evaluate(
        """events => {
            const root = document.querySelector('main');
            const recording = new lab.Recording();
            recording.append(0, events);
            const pages = [1, 2].map(() => new lab.LabPage(root, recording, { show: ['timeline', 'pool'] }));
            const during = recording.listeners.size;
            for (const page of pages) page.destroy();
            return [during, recording.listeners.size, root.childElementCount];
        }""",
        as_json(CORES["cold race"]()),
    )
    assert left == [2, 0, 0]


@pytest.mark.parametrize("name", CORES)
def test_the_page_and_the_pictures_tell_the_same_of_every_request(blank: Page, name: str) -> None:
    core = CORES[name]()
    lanes, arrows = blank.evaluate(
        """events => {
            const scene = lab.initialScene();
            for (const event of events) lab.foldScene(scene, event);
            const at = place => [Math.round(place.ms * 1e6), place.step];
            return [
                scene.lanes.map(lane => [
                    lane.id, lane.role, lane.state, lane.recovered, lane.adopted, lane.forked, lane.output, lane.salt,
                    lane.spans.map(span => [
                        span.phase, at(span.from), span.to && at(span.to), span.tokens, span.behind || '',
                        span.blocks || null, span.failed || false]),
                    lane.marks.filter(mark => mark.kind !== 'released').map(mark => [mark.kind, at(mark.at)]),
                ]),
                scene.arrows.map(arrow => [arrow.kind, at(arrow.at), arrow.from, arrow.to]),
            ];
        }""",
        as_json(core),
    )
    drawn = lanes_of(core.log)

    def at(place: Place | None) -> list[int] | None:
        return None if place is None else [round(place.ms * 1e6), place.step]

    assert lanes == [
        [
            *(lane.request_id, lane.role, lane.state, lane.recovered, lane.adopted, lane.is_forked),
            *(lane.num_output_tokens, lane.salt),
            [
                [s.phase.value, at(s.start), at(s.end), s.tokens, s.behind, s.blocks and list(s.blocks), s.failed]
                for s in lane.spans
            ],
            [[mark.kind, at(mark.at)] for mark in lane.marks],
        ]
        for lane in drawn.lanes
    ]
    assert arrows == [[arrow.kind, at(arrow.at), arrow.from_id, list(arrow.to_ids)] for arrow in drawn.arrows]


@pytest.mark.parametrize("name", CORES)
def test_the_page_knows_at_every_moment_which_published_blocks_were_never_computed(blank: Page, name: str) -> None:
    core = CORES[name]()
    seen = blank.evaluate(
        """events => {
            const scene = lab.initialScene();
            return events.map(event => [...lab.foldScene(scene, event).uncomputed.keys()].sort((a, b) => a - b));
        }""",
        as_json(core),
    )
    ends = {event.step: event.seq for event in core.log}
    assert {step: seen[seq] for step, seq in ends.items()} == {
        step: sorted(moment_of(core.log, step).uncomputed) for step in ends
    }
    if name == "published but never computed":
        assert seen[ends[1]] == [1, 2, 3, 4]
    else:
        assert not any(seen)


def drawn_at(blank: Page, core: EngineCore, seq: int) -> None:
    """Show the moment after the first ``seq`` events, in every panel."""
    blank.evaluate(
        """([events, show, seq]) => {
            const root = document.querySelector('main');
            root.replaceChildren();
            const recording = new lab.Recording();
            recording.append(0, events);
            window.page = new lab.LabPage(root, recording, { show, title: 'A recording' });
            page.player.seek(seq);
            page.invalidate();
        }""",
        [as_json(core), list(PANELS), seq],
    )


def after(core: EngineCore, kind: str, number: int = -1) -> int:
    """Return how many events there are up to the last one of a kind, or another one of them."""
    return [event.seq for event in core.log if event.kind == kind][number] + 1


def test_samples_are_shown_held_then_on_shared_blocks_then_with_copies(blank: Page) -> None:
    core = CORES["samples copied on write"]()
    drawn_at(blank, core, after(core, "step_scheduled", 0))
    expect(blank.locator(".mvl-flight")).to_have_text(re.compile("samples.*r0 computes the prompt.*held: r0.1, r0.2"))
    expect(blank.locator('.mvl-lane[data-request="r0.1"]')).to_have_attribute("data-state", "held")
    expect(blank.locator(".mvl-row", has_text="r0.1")).to_contain_text("held behind r0: no block yet")
    drawn_at(blank, core, after(core, "block_copied"))
    expect(blank.locator('.mvl-pool [data-block="4"]')).to_have_text("3")
    expect(blank.locator('.mvl-pool [data-block="4"]')).to_have_attribute("data-look", "owned")
    expect(blank.locator('.mvl-tables [data-block="7"]')).to_have_attribute("data-came", "copied")
    expect(blank.locator(".mvl-row").nth(1)).to_contain_text("7 is a copy of 5")
    expect(blank.locator('.mvl-arrow[data-kind="fork"] .mvl-arrowhead')).to_have_count(2)
    expect(blank.locator('.mvl-lane [data-mark="copied"]')).to_have_count(2)
    expect(blank.locator('.mvl-keys [data-mark="copied"]')).to_be_visible()
    expect(blank.locator('.mvl-keys [data-mark="adopted"]')).to_be_hidden()
    blank.locator('.mvl-pool [data-block="4"]').focus()
    expect(blank.locator(".mvl-tooltip")).to_contain_text("owned, shared by samples of one prompt")
    blank.locator('.mvl-pool [data-block="7"]').focus()
    expect(blank.locator(".mvl-tooltip")).to_contain_text("copied on write from block 5")
    expect(blank.locator(".mvl-story-list")).to_contain_text(
        "r0.1 is about to write into block 5, which other samples read: "
        "it takes a copy, block 7 (2 tokens of K/V copied)."
    )


def test_who_is_held_for_a_shared_prefix_is_shown_with_leader_and_block_until_it_is_released(blank: Page) -> None:
    core = CORES["shared prefix"]()
    drawn_at(blank, core, after(core, "step_scheduled", 1))
    expect(blank.locator(".mvl-flight")).to_have_text(
        re.compile(r"prefix.*r0 computes blocks.*held: r1 \(block 4\), r2 \(block 4\), r3 \(block 4\)")
    )
    expect(blank.locator(".mvl-row", has_text="r1")).to_contain_text("held behind r0 for blocks 0 to 4: no block yet")
    expect(blank.locator('.mvl-lane[data-request="r0"]')).to_have_attribute("data-role", "leader")
    expect(blank.locator(".mvl-story-list")).to_contain_text(
        "r0 is computing block 0 of r1, r2 and r3, so they are held behind it."
    )
    drawn_at(blank, core, len(core.log))
    expect(blank.locator(".mvl-flights")).to_contain_text("Nobody waits for a shared prefix.")
    expect(blank.locator(".mvl-story-list")).to_contain_text(
        "r0 has published the awaited block, so r1, r2 and r3 are released."
    )
    expect(blank.locator(".mvl-lane-role").nth(1)).to_have_text("was held · done")


def test_a_choice_to_compute_is_shown_with_its_two_times(blank: Page) -> None:
    core = CORES["waited or recomputed"]()
    drawn_at(blank, core, after(core, "step_scheduled", 0))
    expect(blank.locator(".mvl-story-list")).to_contain_text(
        "r0 is computing block 0 of r1 as well, but it does not wait: first token in 39 ms, or in 60 ms behind r0."
    )
    expect(blank.locator(".mvl-story-list")).to_contain_text("first token in 176 ms, or in 244 ms if it computed too.")
    expect(blank.locator('.mvl-arrow[data-kind="beside"] .mvl-ring')).to_have_count(1)


def test_adopted_blocks_and_tokens_are_shown(blank: Page) -> None:
    core = CORES["adopted in mid-prefill"]()
    drawn_at(blank, core, after(core, "blocks_adopted"))
    expect(blank.locator('.mvl-tables [data-came="adopted"]')).to_have_count(9)
    expect(blank.locator(".mvl-row").nth(1)).to_contain_text("9 blocks adopted in mid-prefill")
    expect(blank.locator('[data-counter="recovered"]')).to_contain_text("36 adopted")
    expect(blank.locator('[data-result-request="r1"]')).to_have_text(
        "r1 recovered 0 of 60 prompt tokens and adopted 36"
    )


def test_blocks_that_were_never_computed_are_shown_and_who_reads_them(blank: Page) -> None:
    core = CORES["published but never computed"]()
    drawn_at(blank, core, after(core, "blocks_hit"))
    expect(blank.locator('.mvl-pool button[data-look="uncomputed"]')).to_have_text(["?", "?", "?", "?"])
    expect(blank.locator(".mvl-pool .mvl-legend")).to_contain_text("4 published, not computed")
    expect(blank.locator(".mvl-story-list")).to_contain_text(
        "r2 takes 4 blocks that r0 has published and never computed: what is read there is whatever was there before."
    )


def test_a_collision_is_told_with_what_would_have_been_served(blank: Page) -> None:
    core = CORES["hash collision"]()
    first = next(event for event in core.log if isinstance(event, HashCollision))
    drawn_at(blank, core, first.seq + 1)
    held, asked = (" ".join(map(str, tokens)) for tokens in (first.held_token_ids, first.token_ids))
    expect(blank.locator(".mvl-story-list")).to_contain_text(
        f"Two contents, one hash: block {first.block_id} has the hash ({first.block_hash[:8]}) that {first.request_id} "
        f"asks for, but it holds token ids {held} in place of {asked}."
    )
