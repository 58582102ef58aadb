"""The page's fold is the engine's: the same events give the same state in JavaScript as in Python, at every moment."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from minivllm import EngineConfig, EngineCore, Submission, VirtualRunner, replay
from minivllm.block_pool import Block
from minivllm.events import BlocksEvicted, BlocksFreed, BlocksHit, BlocksPublished
from minivllm.eviction import EvictionPolicy, Placement
from minivllm.request import Sampling
from widgets.lab import PANELS
from widgets.publisher import make_checkpoint

pytestmark = pytest.mark.browser
STATIC = Path(__file__).resolve().parents[2] / "widgets" / "static"


def race(num_requests: int = 4, prompt: int = 70, max_tokens: int = 6, same: bool = True, **config: Any) -> EngineCore:
    core = EngineCore(EngineConfig(**({"block_size": 4, "num_blocks": 96} | config)), VirtualRunner())
    core.submit_batch(
        [
            Submission(list(range(0 if same else 1000 * i, (0 if same else 1000 * i) + prompt)), Sampling(max_tokens))
            for i in range(num_requests)
        ]
    )
    return core


def ran(core: EngineCore) -> EngineCore:
    core.run()
    return core


def aborted(steps: int, who: str) -> EngineCore:
    core = race(coordination="single-flight", max_num_batched_tokens=32)
    core.run(max_steps=steps)
    core.abort(who)
    core.run()
    return core


def deferred() -> EngineCore:
    core = EngineCore(EngineConfig(coordination="single-flight"), VirtualRunner())
    tokens = list(range(40))
    core.submit_batch(
        [
            Submission(tokens, Sampling(8), "a"),
            Submission(tokens, Sampling(8), "b", "team-a", ("a", 3)),
            Submission(tokens, Sampling(8), "c", None, ("b", 1)),
        ]
    )
    core.run()
    return core


def evicted_and_reset() -> EngineCore:
    core = ran(race(3, same=False, num_blocks=40))
    core.submit([7] * 90, max_tokens=3)
    core.run()
    core.reset_cache()
    core.set_policies(coordination="single-flight", publication="incremental")
    core.submit([7] * 90, max_tokens=3)
    core.submit([7] * 90, max_tokens=3)
    core.run(max_steps=3)
    return core


def placed_by(eviction: str | EvictionPolicy) -> EngineCore:
    """A small pool in which prefixes are shared, kept, forgotten and found again."""
    core = EngineCore(EngineConfig(block_size=4, num_blocks=24, eviction=eviction), VirtualRunner())
    for starts in ((0, 500), (0, 0), (500, 900), (0, 900), (500, 500)):
        for tail, start in enumerate(starts):
            core.submit([*range(start, start + 21), 5000 + tail], max_tokens=6)
        core.run()
    return core


class Backwards:
    """Puts published blocks at the front and those without a hash at the back."""

    name = "backwards"

    def place(self, freed: Sequence[Block]) -> Placement:
        return Placement(
            to_front=[block for block in freed if block.block_hash is not None],
            to_back=[block for block in freed if block.block_hash is None],
        )


def failed() -> EngineCore:
    def fail(step: Any) -> None:
        if step.number == 3:
            raise RuntimeError("the device went away")

    core = EngineCore(EngineConfig(coordination="single-flight"), VirtualRunner(on_step=fail))
    core.submit_batch([Submission(list(range(40)), Sampling(8)) for _ in range(3)])
    with pytest.raises(RuntimeError):
        core.run()
    return core


CORES: dict[str, Callable[[], EngineCore]] = {
    "cold race": lambda: ran(race()),
    "incremental": lambda: ran(race(publication="incremental", max_num_batched_tokens=50)),
    "flight after prefill": lambda: ran(race(coordination="single-flight")),
    "flight on completion": lambda: ran(race(coordination="single-flight", release="on-completion")),
    "leader aborted before its first step": lambda: aborted(0, "r0"),
    "leader aborted in prefill": lambda: aborted(1, "r0"),
    "leader aborted in decode": lambda: aborted(4, "r0"),
    "follower aborted": lambda: aborted(1, "r2"),
    "preemption": lambda: ran(race(6, prompt=40, max_tokens=30, same=False, num_blocks=60)),
    "deferred with a salt": deferred,
    "eviction, reset, other policies": evicted_and_reset,
    "most recently used evicted first": lambda: placed_by("mru"),
    "published blocks evicted first": lambda: placed_by(Backwards()),
    "failed step": failed,
}


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


def as_json(core: EngineCore) -> list[dict[str, Any]]:
    return json.loads(json.dumps([event.as_dict() for event in core.log]))


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
