"""A student at the race console: fires, watches, aborts the leader, resets, makes mistakes.

Real page, real kernel, real engine. The virtual runner makes the steps the same on every machine; the last test
races on the default model.
"""

from __future__ import annotations

from typing import Literal

import pytest
from playwright.sync_api import Locator, expect

from tests.browser.conftest import LabPage

pytestmark = pytest.mark.browser
THEMES: tuple[Literal["light", "dark"], ...] = ("dark", "light")

FLIGHT = (
    "from widgets import RaceConsole\nconsole = RaceConsole(model='virtual', coordination='single-flight', {})\nconsole"
)


# An engine that computes a step when the test says so, so that what is between two steps stays on the page.
GATED = """\
import threading, time
from minivllm import Engine, VirtualRunner
from widgets import RaceConsole
steps = threading.Semaphore(0)
engine = Engine('virtual', runner=lambda: VirtualRunner(on_step=lambda step: steps.acquire()))
RaceConsole(engine, coordination='single-flight', {})
"""
COMMAND_IS_THERE = "exec('while engine._worker.commands.empty(): time.sleep(0.01)')"


def run_in_kernel(lab: LabPage, code: str) -> None:
    """Run code in the notebook's kernel, beside its cells, and wait until it is through."""
    lab.page.evaluate(
        """async code => {
            const { kernel } = window.jupyterapp.shell.currentWidget.sessionContext.session;
            await kernel.requestExecute({ code }).done;
        }""",
        code,
    )


class Console:
    """The console on a page, by the words that a student reads there."""

    def __init__(self, lab: LabPage, name: str, *sources: str) -> None:
        lab.write_notebook(name, *sources)
        lab.open(name).run_all()
        self.lab = lab
        self.node = lab.page.locator(".mvl").first
        expect(self.node).to_be_visible()

    @property
    def status(self) -> Locator:
        return self.node.locator(".mvl-status")

    @property
    def error(self) -> Locator:
        return self.node.locator(".mvl-error")

    def press(self, name: str) -> None:
        self.node.get_by_role("button", name=name, exact=True).click()

    def choose(self, label: str, choice: str) -> None:
        self.node.get_by_label(label, exact=True).select_option(choice)

    def fill(self, label: str, value: str) -> None:
        self.node.get_by_label(label, exact=True).fill(value)

    def lane(self, request: str) -> Locator:
        return self.node.locator(f'.mvl-lane[data-request="{request}"]')

    def expect_result(self, request: str, recovered: int, prompt: int = 532, role: str = "") -> None:
        words = f"{request}{f' ({role})' if role else ''} recovered {recovered:,} of {prompt:,} prompt tokens"
        line = self.node.locator(f'[data-result-request="{request}"]')
        expect(line).to_contain_text(words)
        expect(line).to_have_attribute("data-recovered", str(recovered))

    def expect_over(self) -> None:
        expect(self.node.locator('[data-result-total][data-over="true"]')).to_be_visible()


def page_errors(lab: LabPage) -> list[str]:
    """What went wrong in the page itself."""
    return [message for message in lab.messages if message.startswith("error")]


def take_pictures(lab: LabPage, name: str) -> None:
    """Both themes, the whole console on one picture."""
    lab.page.set_viewport_size({"width": 1400, "height": 2000})
    for theme in THEMES:
        lab.theme(theme)
        expect(lab.page.locator("#jupyterlab-splash")).to_have_count(0)
        lab.screenshot(f"{name}-{theme}", selector=".mvl")


def test_a_cold_race_recovers_nothing_and_single_flight_nearly_all(lab: LabPage) -> None:
    console = Console(lab, "race.ipynb", FLIGHT.format("num_requests=4"))
    expect(console.status).to_contain_text("virtual is ready")
    console.choose("Coordination", "independent")
    console.choose("Slow motion", "0")
    console.press("Fire")
    console.expect_over()
    for request in ("r0", "r1", "r2", "r3"):
        console.expect_result(request, 0)
    expect(console.status).to_have_text("Race 1 is over.")

    console.choose("Coordination", "single-flight")
    console.press("Fire")
    console.expect_result("r2.0", 0, role="leader")
    for request in ("r2.1", "r2.2", "r2.3"):
        console.expect_result(request, 528, role="follower")
    console.expect_over()
    expect(console.node.locator("[data-result-total]")).to_contain_text("1,584 of 2,128 prompt tokens recovered")
    assert lab.errors() == []
    assert page_errors(lab) == []


def test_leader_and_followers_move_while_the_engine_works(lab: LabPage) -> None:
    console = Console(lab, "moving.ipynb", GATED.format("num_requests=4"))
    expect(console.status).to_contain_text("ready")
    console.press("Fire")
    expect(console.lane("r0")).to_have_attribute("data-role", "leader")
    for request in ("r1", "r2", "r3"):
        expect(console.lane(request)).to_have_attribute("data-state", "held")
    expect(console.node.locator(".mvl-flight")).to_contain_text("held: r1, r2, r3")
    expect(console.node.locator(".mvl-story-list")).to_contain_text(
        "r1, r2 and r3 ask exactly what r0 asks, so they are held behind it."
    )
    run_in_kernel(lab, "steps.release(6)")
    for request in ("r1", "r2", "r3"):
        expect(console.lane(request)).to_have_attribute("data-state", "running")
        expect(console.lane(request).locator('rect[data-phase="held"]')).to_have_count(1)
    expect(console.node.locator('.mvl-arrow[data-kind="release"] .mvl-arrowhead')).to_have_count(3)
    # Four tables, one block: its count is 4 wherever it is shown.
    expect(console.node.locator('.mvl-pool [data-block="1"]')).to_have_text("4")
    expect(console.node.locator('.mvl-tables [data-block="1"]')).to_have_count(4)
    take_pictures(lab, "race-console")
    console.press("Abort leader")
    run_in_kernel(lab, f"{COMMAND_IS_THERE}; steps.release(1000)")
    expect(console.status).to_contain_text("Race 1 is over.")
    expect(console.lane("r0")).to_have_attribute("data-state", "aborted")
    console.expect_over()
    assert page_errors(lab) == []


def test_an_aborted_leader_hands_over(lab: LabPage) -> None:
    console = Console(lab, "abort.ipynb", GATED.format("num_requests=3, prompt_tokens=5000, max_tokens=4"))
    expect(console.status).to_contain_text("ready")
    console.press("Fire")
    expect(console.lane("r1")).to_have_attribute("data-state", "held")
    console.press("Abort leader")
    run_in_kernel(lab, f"{COMMAND_IS_THERE}; steps.release()")
    expect(console.status).to_have_text("r0 led its flight and was aborted.")
    expect(console.lane("r0")).to_have_attribute("data-state", "aborted")
    expect(console.lane("r1")).to_have_attribute("data-role", "leader")
    expect(console.lane("r2").locator('rect[data-phase="held"]')).to_have_count(2)  # behind one, then the other
    expect(console.node.locator('.mvl-arrow[data-kind="handover"]')).to_have_count(1)
    console.press("Fire")
    expect(console.error).to_have_text("A race is running; wait until it is over, or abort its leader.")
    console.press("Reset cache")
    run_in_kernel(lab, f"{COMMAND_IS_THERE}; steps.release()")
    expect(console.error).to_contain_text("A block is in use, so the cache cannot be reset")
    run_in_kernel(lab, "steps.release(1000)")
    console.expect_over()
    console.expect_result("r2", 4992, 5000, role="follower")
    console.press("Reset cache")
    expect(console.status).to_have_text("The cache is reset: nothing is published any more.")
    expect(console.error).to_be_hidden()
    expect(console.node.locator(".mvl-chain .mvl-empty")).to_be_visible()
    assert page_errors(lab) == []


def test_a_mistake_is_a_sentence_and_the_console_lives_on(lab: LabPage) -> None:
    console = Console(lab, "mistakes.ipynb", FLIGHT.format("num_requests=2, speed='0'"))
    expect(console.status).to_contain_text("ready")
    console.press("Abort leader")
    expect(console.error).to_contain_text("No race is running")
    console.fill("Prompt tokens", "8190")
    console.press("Fire")
    expect(console.error).to_contain_text("the pool has 512")
    console.fill("Prompt tokens", "")
    console.press("Fire")
    expect(console.error).to_have_text("Prompt tokens is empty; give a whole number from 1 to 8,192.")
    console.fill("Prompt tokens", "100")
    console.press("Fire")
    console.expect_over()
    console.expect_result("r1", 96, 100, role="follower")
    expect(console.error).to_be_hidden()
    assert lab.errors() == []
    assert page_errors(lab) == []


def test_a_dead_engine_says_why_and_fire_makes_a_new_one(lab: LabPage) -> None:
    console = Console(
        lab,
        "dead.ipynb",
        "from minivllm import Engine, VirtualRunner\nfrom widgets import RaceConsole",
        "def fail(step):\n    if step.number == 3:\n        raise RuntimeError('the device went away')",
        "engine = Engine('virtual', runner=lambda: VirtualRunner(on_step=fail))\nRaceConsole(engine, num_requests=2)",
    )
    expect(console.status).to_contain_text("ready")
    console.press("Fire")
    expect(console.error).to_contain_text("RuntimeError: the device went away")
    expect(console.error).to_contain_text("Fire makes a new engine.")
    console.press("Fire")
    console.expect_over()
    console.expect_result("r0", 0)
    expect(console.node.locator('[data-result-request="r0"]')).to_have_attribute("data-state", "finished")
    assert lab.errors() == []
    assert page_errors(lab) == []


def test_it_works_while_a_cell_runs(lab: LabPage) -> None:
    console = Console(lab, "busy.ipynb", FLIGHT.format("num_requests=2, speed='0'"), "import time")
    expect(console.status).to_contain_text("ready")
    # The cell ends only after the race that is fired while it runs.
    lab.page.evaluate(
        """() => {
            const { kernel } = window.jupyterapp.shell.currentWidget.sessionContext.session;
            window.busyCell = kernel.requestExecute({ code: 'while not console.engine.metrics().requests or any('
                + 'r.end is None for r in console.engine.metrics().requests): time.sleep(0.02)' }).done;
            window.busyCell.then(() => { window.busyCellEnded = true; });
        }"""
    )
    console.press("Fire")
    console.expect_over()
    console.expect_result("r1", 528, role="follower")
    lab.page.wait_for_function("() => window.busyCellEnded")


def test_a_view_moves_while_the_cell_that_shows_it_runs(lab: LabPage) -> None:
    """The kernel is busy from the first moment: nothing may wait for the cell's end."""
    source = (
        "import time\nfrom minivllm import Engine, VirtualRunner\nfrom widgets import LabView\n"
        "engine = Engine('virtual', runner=lambda: VirtualRunner(on_step=lambda step: time.sleep(0.05)))\n"
        "display(LabView(engine, paced=False))\n"
        "engine.submit(list(range(100)), max_tokens=5000).result()"
    )
    lab.write_notebook("within.ipynb", source)
    lab.open("within.ipynb")
    lab.menu("Run", "Run All Cells")
    view = lab.page.locator(".mvl")
    expect(view.locator('.mvl-lane[data-request="r0"]')).to_have_attribute("data-state", "running")
    expect(view.locator('.mvl-tables [data-block="1"]')).to_have_count(1)
    expect(lab.page.locator(".jp-Notebook-ExecutionIndicator").first).to_have_attribute("data-status", "busy")


def test_the_page_can_be_stepped_scrubbed_and_explains_a_block_by_keyboard(lab: LabPage) -> None:
    console = Console(lab, "keys.ipynb", FLIGHT.format("num_requests=3, speed='0'"))
    expect(console.status).to_contain_text("ready")
    console.press("Fire")
    console.expect_over()
    console.press("Back to the start of the race")
    for request in ("r1", "r2"):
        expect(console.lane(request)).to_have_count(0)
    console.press("One beat on")
    expect(console.lane("r1")).to_have_attribute("data-state", "held")
    console.press("One beat on")
    console.press("One beat on")
    expect(console.node.locator('.mvl-pool [data-block="1"]')).to_have_attribute("data-look", "used")
    console.node.locator('.mvl-pool [data-block="1"]').focus()
    tip = console.node.locator(".mvl-tooltip")
    expect(tip).to_contain_text("Block 1: published, in use")
    expect(tip).to_contain_text("r0 (logical block 0)")
    lab.page.keyboard.press("ArrowRight")
    expect(tip).to_contain_text("Block 2: published, in use")
    expect(tip).to_contain_text("parent")
    console.node.get_by_role("slider").focus()
    lab.page.keyboard.press("Home")
    expect(console.lane("r0")).to_have_count(0)
    console.press("go live")
    console.expect_over()


def test_running_the_cell_again_closes_the_console_of_before(lab: LabPage) -> None:
    console = Console(
        lab, "again.ipynb", FLIGHT.format("num_requests=2, speed='0'"), "import threading\nfirst = console"
    )
    expect(console.status).to_contain_text("ready")
    lab.run_all()
    expect(lab.page.locator(".mvl")).to_have_count(1)
    expect(console.status).to_contain_text("ready")
    console.press("Fire")
    console.expect_over()


@pytest.mark.model
def test_a_race_on_the_default_model(lab: LabPage) -> None:
    console = Console(
        lab,
        "real.ipynb",
        "from widgets import RaceConsole",
        "RaceConsole(coordination='single-flight', num_requests=4, prompt_tokens=532, max_tokens=16)",
    )
    expect(console.status).to_contain_text("smollm2 is ready")
    console.press("Fire")
    console.expect_over()
    console.expect_result("r0", 0, role="leader")
    for request in ("r1", "r2", "r3"):
        console.expect_result(request, 528, role="follower")
        expect(console.lane(request).locator('rect[data-phase="held"]')).to_have_count(1)
    take_pictures(lab, "race-console-real")
    assert lab.errors() == []
    assert page_errors(lab) == []
