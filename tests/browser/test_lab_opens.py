"""JupyterLab opens in a real browser, with the labs in its file browser and a live kernel behind them."""

from __future__ import annotations

import sys
from typing import Literal

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import LabPage

pytestmark = pytest.mark.browser
THEMES: tuple[Literal["light", "dark"], ...] = ("dark", "light")


def test_the_file_browser_shows_the_labs(lab: LabPage) -> None:
    lab.open()
    listing = lab.page.locator(".jp-DirListing-content")
    expect(listing.get_by_text("labs", exact=True)).to_be_visible()
    listing.get_by_text("labs", exact=True).dblclick()
    expect(listing.get_by_text("00_start_here.ipynb", exact=True)).to_be_visible()


def test_the_first_lab_opens_with_a_kernel(lab: LabPage) -> None:
    lab.open("labs/00_start_here.ipynb")
    expect(lab.page.locator(".jp-Notebook h1").first).to_be_visible()
    kernels = lab.server.ask("api/kernels")
    assert [kernel["name"] for kernel in kernels] == ["python3"]


def test_the_run_menu_runs_every_cell_in_this_environment(lab: LabPage) -> None:
    lab.write_notebook("sound.ipynb", "import minivllm, sys", "print(sys.prefix)", "6 * 7")
    lab.open("sound.ipynb").run_all()
    assert lab.outputs() == ["", f"{sys.prefix}\n", "42"]
    assert lab.errors() == []


def test_a_cell_that_fails_is_seen(lab: LabPage) -> None:
    lab.write_notebook("broken.ipynb", "1 / 0", "print('never reached')")
    lab.open("broken.ipynb").run_all()
    assert lab.errors() == ["ZeroDivisionError: division by zero"]
    assert lab.outputs()[1] == ""


def test_the_page_wears_both_themes(lab: LabPage) -> None:
    lab.write_notebook("themes.ipynb", "6 * 7")
    lab.open("themes.ipynb")
    grounds = []
    for which in THEMES:
        lab.theme(which)
        grounds.append(lab.page.evaluate("() => getComputedStyle(document.body).backgroundColor"))
        assert lab.screenshot(f"themes-{which}").stat().st_size > 0
    assert len(set(grounds)) == len(THEMES)
