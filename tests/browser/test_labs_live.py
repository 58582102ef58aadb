"""The labs as a student meets them: run all cells on JupyterLab's own page, look, press Fire.

Real page, real kernel, the labs themselves; lab 01 races on the default model. What is asserted is true on every
machine: who leads, who is held, what is recovered. The times on the page are not.
"""

from __future__ import annotations

import contextlib
import re
from typing import Literal

import pytest
from playwright.sync_api import Locator, TimeoutError, expect

from tests.browser.conftest import LabPage, screenshot_folder

pytestmark = [pytest.mark.browser, pytest.mark.model]

GUARD_S = 300.0
"""Against hanging only: Fire may have to load the model first, on a slow machine."""

THEMES: tuple[Literal["light", "dark"], ...] = ("dark", "light")
FOLLOWERS = ("r1", "r2", "r3")

RECORD = """node => {
    // Notes every state of the lanes that the page ever shows: a quick machine may show one for a moment only.
    window.seenStates = [];
    const look = () => {
        const lanes = [...node.querySelectorAll('.mvl-lane')].map(
            lane => [lane.dataset.request, `${lane.dataset.role} ${lane.dataset.state}`]);
        window.seenStates.push(Object.fromEntries(lanes));
    };
    new MutationObserver(look).observe(node, { subtree: true, childList: true, attributes: true,
        attributeFilter: ['data-state', 'data-role'] });
}"""

CUT_OFF = """root => {
    const names = node => `${node.tagName.toLowerCase()}.${node.className.baseVal ?? node.className}: `
        + `${node.textContent.slice(0, 60)}`;
    const shown = [...root.querySelectorAll('*')].filter(node => node.checkVisibility());
    const hidden = shown.filter(node => getComputedStyle(node).overflowX === 'hidden'
        && node.scrollWidth > node.clientWidth && node.clientWidth > 0);
    const scrolls = node => node.closest('.mvl-scroll, .mvl-tables-body, .mvl-story-scroll');
    const edge = root.getBoundingClientRect().right;
    const outside = shown.filter(node => !scrolls(node) && !node.closest('.mvl-tooltip')
        && node.getBoundingClientRect().right > edge + 1);
    return [...hidden, ...outside].map(names);
}"""


def page_errors(lab: LabPage) -> list[str]:
    """What went wrong in the page itself."""
    return [message for message in lab.messages if message.startswith("error")]


def output_of(lab: LabPage, cell: str) -> Locator:
    """Go to a cell by its id, as a student scrolls there, and return its output."""
    lab.page.evaluate(
        """async id => {
            const notebook = window.jupyterapp.shell.currentWidget.content;
            const cell = notebook.widgets.find(cell => cell.model.id === id);
            cell.node.dataset.cell = id;
            await notebook.scrollToCell(cell, 'start');
        }""",
        cell,
    )
    return lab.page.locator(f'.jp-Cell[data-cell="{cell}"] .jp-Cell-outputArea')


def view_in(lab: LabPage, cell: str) -> Locator:
    """Go to a cell and return the live view in its output."""
    view = output_of(lab, cell).locator(".mvl")
    expect(view).to_be_visible()
    return view


def lane_of(view: Locator, request: str) -> Locator:
    return view.locator(f'.mvl-lane[data-request="{request}"]')


def was_seen(lab: LabPage, states: dict[str, str]) -> None:
    """Wait until the page has shown these lanes in these states ("leader running") at one moment, now or before."""
    lab.page.wait_for_function(
        "states => window.seenStates.some(seen => Object.entries(states).every(([id, was]) => seen[id] === was))",
        arg=states,
        timeout=GUARD_S * 1000,
    )


def take_pictures(lab: LabPage, view: Locator, name: str) -> None:
    """Both themes, the whole view on one picture."""
    size = lab.page.viewport_size
    assert size is not None
    lab.page.mouse.move(0, 0)  # nothing is pointed at
    lab.page.set_viewport_size({"width": size["width"], "height": 2600})
    for theme in THEMES:
        lab.theme(theme)
        expect(lab.page.locator("#jupyterlab-splash")).to_have_count(0)
        view.screenshot(path=screenshot_folder() / f"{name}-{theme}.png")
    lab.page.set_viewport_size(size)


def nothing_is_cut_off(lab: LabPage, view: Locator, name: str) -> None:
    """Narrow the window, the side bar open: JupyterLab leaves the view about half of it."""
    size = lab.page.viewport_size
    assert size is not None
    for width in (size["width"], 1000, 800):
        lab.page.set_viewport_size({"width": width, "height": size["height"]})
        with contextlib.suppress(TimeoutError):  # the drawings follow the new width in their own time
            lab.page.wait_for_function(f"node => ({CUT_OFF})(node).length === 0", arg=view.element_handle())
        assert view.evaluate(CUT_OFF) == []
        take_pictures(lab, view, f"{name}-{width}")
    lab.page.set_viewport_size(size)


def test_lab_01_is_run_and_its_race_fired(lab: LabPage) -> None:
    lab.open("labs/01_the_cold_cache_race.ipynb")
    picture = output_of(lab, "cold-live").locator("img")
    expect(picture).to_be_visible()  # in the file: there is no kernel behind its views yet
    lab.run_all()
    assert lab.errors() == []
    cold = view_in(lab, "cold-live")
    expect(cold.locator('.mvl-lane[data-state="finished"]')).to_have_count(4)
    expect(picture).to_have_count(0)  # the view, not the picture beside it
    console = view_in(lab, "console")
    status = console.locator(".mvl-status")
    # The last cell has closed the engine, as the lab says; a console that heard of it or not fires all the same.
    expect(status).to_contain_text(re.compile("smollm2 is ready|Fire makes a new one"))
    expect(console.get_by_label("Coordination", exact=True)).to_have_value("single-flight")
    expect(console.get_by_label("Release followers", exact=True)).to_have_value("after-prefill")
    console.get_by_label("Output tokens", exact=True).fill("8")
    console.evaluate(RECORD)
    console.get_by_role("button", name="Fire", exact=True).click()

    was_seen(lab, {"r0": "leader running"} | dict.fromkeys(FOLLOWERS, "follower held"))
    lab.screenshot("lab01-while-it-races")
    was_seen(lab, dict.fromkeys(FOLLOWERS, "follower running"))
    was_seen(lab, {"r0": "leader finished"} | dict.fromkeys(FOLLOWERS, "follower finished"))
    for follower in FOLLOWERS:
        expect(lane_of(console, follower).locator('rect[data-phase="held"]')).to_have_count(1)
    expect(console.locator('[data-result-total][data-over="true"]')).to_contain_text(
        "In all: 1,584 of 2,128 prompt tokens recovered"
    )
    results = console.locator("[data-result-request]")
    expect(results).to_have_text(
        ["r0 (leader) recovered 0 of 532 prompt tokens"]
        + [f"{follower} (follower) recovered 528 of 532 prompt tokens" for follower in FOLLOWERS]
    )
    expect(console.locator(".mvl-error")).to_be_hidden()
    expect(status).to_have_text("Race 1 is over.")
    nothing_is_cut_off(lab, console, "lab01-race")
    assert lab.errors() == []
    assert page_errors(lab) == []


def test_lab_00_is_run_and_its_view_shows_both_requests(lab: LabPage) -> None:
    lab.open("labs/00_start_here.ipynb").run_all()
    assert lab.errors() == []
    view = view_in(lab, "live")
    for panel in ("counters", "timeline", "pool", "tables", "chain", "story", "flights"):
        expect(view.locator(f"section.mvl-{panel}")).to_be_visible()
    expect(view.locator(".mvl-lane")).to_have_count(2)
    for request in ("A", "B"):
        expect(lane_of(view, request)).to_have_attribute("data-state", "finished")
    expect(view.locator('.mvl-pool [data-block="1"]')).to_have_attribute("data-look", "kept")
    expect(view).not_to_contain_text(re.compile("error|undefined|is not", re.IGNORECASE))
    nothing_is_cut_off(lab, view, "lab00-view")
    assert page_errors(lab) == []
