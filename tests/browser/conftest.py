"""A real JupyterLab server, a real Chromium, and the moves a student makes with them.

Knows: JupyterLab's page. Must not know: what any lab is about. The labs are copied first, so that a test which
saves or runs one leaves the folder as it was. Pages wait for a state of the page, never for a time.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.browser.chromium import NoChromiumError, find_chromium

ROOT = Path(__file__).resolve().parents[2]
GUARD_S = 60.0
"""Against hanging only: a page or a server that has not come to a state by then never will."""

RUN_GUARD_S = 300.0
"""The same for a notebook that runs from top to bottom with a real model on a slow machine."""

CHROMIUM_FLAGS = [
    "--no-sandbox",  # Chromium's own sandbox needs rights that containers do not give
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

_pages = pytest.StashKey[Sequence[Page]]()


# ------------------------------------------------------------------------------------------- the server


@dataclass(frozen=True, slots=True)
class LabServer:
    """A running JupyterLab: its address, its token, and the folder it serves, with a copy of ``labs/``."""

    url: str
    token: str
    root: Path

    def page_of(self, notebook: str, workspace: str) -> str:
        """Return the address of a notebook, named from the root (``labs/00_start_here.ipynb``), or of "".

        JupyterLab keeps the open tabs of a workspace; a page with a workspace of its own sees no other's.
        """
        path = f"/tree/{urllib.parse.quote(notebook)}" if notebook else ""
        return f"{self.url}/lab/workspaces/{workspace}{path}?token={self.token}"

    def ask(self, path: str) -> Any:
        """Return the JSON answer of the server's API, e.g. of ``api/kernels``."""
        return json.loads(self._call("GET", path))

    def delete(self, path: str) -> None:
        """Delete what the API names, e.g. ``api/sessions/…``."""
        self._call("DELETE", path)

    def _call(self, method: str, path: str) -> bytes:
        request = urllib.request.Request(
            f"{self.url}/{path}", method=method, headers={"Authorization": f"token {self.token}"}
        )
        with urllib.request.urlopen(request, timeout=GUARD_S) as answer:
            return bytes(answer.read())


def free_port() -> int:
    """Return a port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def switch_off_the_news(config: Path) -> None:
    """Keep JupyterLab from asking, over the page, whether it may fetch news; binder/start-lab does so too."""
    page_config = config / "labconfig" / "page_config.json"
    page_config.parent.mkdir(parents=True, exist_ok=True)
    page_config.write_text('{"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": true}}')


@pytest.fixture(scope="package")
def lab_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LabServer]:
    """A JupyterLab with this environment's kernel, nobody's settings and a copy of the labs; stopped at the end."""
    root = tmp_path_factory.mktemp("served")
    if (ROOT / "labs").is_dir():
        shutil.copytree(ROOT / "labs", root / "labs", ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
    log_path = tmp_path_factory.mktemp("server") / "jupyter.log"
    switch_off_the_news(Path(os.environ["JUPYTER_CONFIG_DIR"]))
    port, token = free_port(), "only-for-this-test"
    command = [
        *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"),
        *(f"--ServerApp.port={port}", "--ServerApp.port_retries=0", "--ServerApp.ip=127.0.0.1"),
        *(f"--ServerApp.root_dir={root}", f"--IdentityProvider.token={token}"),
        *("--LabApp.expose_app_in_browser=True", "--ServerApp.terminals_enabled=False"),
    ]
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = LabServer(f"http://127.0.0.1:{port}", token, root)
    try:
        _wait_until_it_answers(server, process, log_path)
        yield server
    finally:
        process.send_signal(signal.SIGTERM)  # the server ends its kernels, then itself
        try:
            process.wait(GUARD_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_until_it_answers(server: LabServer, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + GUARD_S
    while process.poll() is None and time.monotonic() < end:
        try:
            server.ask("api/status")
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.1)
        else:
            return
    pytest.fail(f"JupyterLab did not come up; its log:\n{log.read_text()}")


# ------------------------------------------------------------------------------------------ the browser


@pytest.fixture(scope="package")
def chromium() -> Iterator[Browser]:
    """A headless Chromium. A machine without one fails, with a sentence that says what to install.

    It leaves with the last test of this folder: while its driver is there, an event loop runs in this thread, which
    the notebooks' runner, and whatever calls ``asyncio.run``, should not meet.
    """
    try:
        program = find_chromium()
    except NoChromiumError as error:
        pytest.fail(str(error), pytrace=False)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=CHROMIUM_FLAGS, headless=True)
        yield browser
        browser.close()


@dataclass
class LabPage:
    """One page of JupyterLab and the moves a student makes on it.

    ``messages`` holds what the page's console said, as ``"error: …"``; a test may assert on it.
    """

    page: Page
    server: LabServer
    workspace: str
    messages: list[str] = field(default_factory=list)

    def open(self, notebook: str = "") -> LabPage:
        """Go to a notebook (or to JupyterLab itself), wait until it stands there and its kernel is idle."""
        self.page.goto(self.server.page_of(notebook, self.workspace), wait_until="domcontentloaded")
        expect(self.page.locator("#jp-top-panel")).to_be_visible()
        expect(self.page.locator("#jupyterlab-splash")).to_have_count(0)
        self.page.wait_for_function("() => window.jupyterapp !== undefined")
        self.page.evaluate("() => window.jupyterapp.restored")
        if notebook:
            expect(self.page.locator(".jp-Notebook .jp-Cell").first).to_be_visible()
            self.wait_until_idle()
        return self

    def write_notebook(self, name: str, *sources: str) -> None:
        """Put a notebook with these code cells beside the labs."""
        cells = [
            {"cell_type": "code", "id": f"c{at}", "source": source, "metadata": {}, "outputs": []}
            | {"execution_count": None}
            for at, source in enumerate(sources)
        ]
        kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
        notebook = {"nbformat": 4, "nbformat_minor": 5, "metadata": {"kernelspec": kernelspec}, "cells": cells}
        (self.server.root / name).write_text(json.dumps(notebook))

    def wait_until_idle(self) -> None:
        """Wait until the notebook in front is connected to its kernel, and the kernel has nothing to do."""
        self.page.wait_for_function(
            """() => {
                const context = window.jupyterapp.shell.currentWidget?.sessionContext;
                const kernel = context?.session?.kernel;
                return context?.isReady && kernel?.connectionStatus === 'connected'
                    && kernel.status === 'idle';
            }"""
        )

    def menu(self, *names: str) -> None:
        """Choose from the menus by the words they show, e.g. ``menu("Run", "Run All Cells")``."""
        self.page.get_by_role("menuitem", name=names[0], exact=True).first.click()
        for name in names[1:]:
            item = self.page.locator(".lm-Menu .lm-Menu-item").filter(
                has=self.page.get_by_text(re.compile(rf"^{re.escape(name)}…?$"))
            )
            item.last.click()

    def run_all(self) -> None:
        """Run every cell through the Run menu and wait until the last one is through, or one has failed."""
        self.page.evaluate(
            """() => {
                window.runAllEnded = false;
                const { commands } = window.jupyterapp;
                const onExecuted = (_, { id, result }) => {
                    if (id !== 'notebook:run-all-cells') return;
                    commands.commandExecuted.disconnect(onExecuted);
                    result.finally(() => { window.runAllEnded = true; });
                };
                commands.commandExecuted.connect(onExecuted);
            }"""
        )
        self.menu("Run", "Run All Cells")
        self.page.wait_for_function("() => window.runAllEnded", timeout=RUN_GUARD_S * 1000)
        self.wait_until_idle()

    def errors(self) -> list[str]:
        """Return ``"ValueError: …"`` for each error among the notebook's outputs, in the order of the cells."""
        errors: list[str] = self.page.evaluate(
            """() => (window.jupyterapp.shell.currentWidget?.content?.widgets ?? [])
                .flatMap(cell => cell.model.outputs?.toJSON() ?? [])
                .filter(output => output.output_type === 'error')
                .map(output => `${output.ename}: ${output.evalue}`)"""
        )
        return errors

    def outputs(self) -> list[str]:
        """Return the text of each code cell's outputs as the kernel sent it, in the order of the cells."""
        outputs: list[str] = self.page.evaluate(
            """() => (window.jupyterapp.shell.currentWidget?.content?.widgets ?? [])
                .filter(cell => cell.model.type === 'code')
                .map(cell => cell.model.outputs.toJSON()
                    .map(output => output.text ?? output.data?.['text/plain'] ?? output.evalue ?? '')
                    .flat()
                    .join(''))"""
        )
        return outputs

    def theme(self, which: Literal["light", "dark"]) -> None:
        """Change JupyterLab's theme and wait until the page wears it."""
        name = {"light": "JupyterLab Light", "dark": "JupyterLab Dark"}[which]
        self.page.evaluate("name => window.jupyterapp.commands.execute('apputils:change-theme', { theme: name })", name)
        self.page.wait_for_function(
            "([name, light]) => document.body.dataset.jpThemeName === name"
            " && document.body.dataset.jpThemeLight === light",
            arg=[name, "true" if which == "light" else "false"],
        )

    def screenshot(self, name: str, *, selector: str | None = None) -> Path:
        """Save a picture of the page, or of one element, in the folder of screenshots, and return where."""
        path = screenshot_folder() / f"{_file_name(name)}.png"
        if selector is None:
            self.page.screenshot(path=path)
        else:
            self.page.locator(selector).first.screenshot(path=path)
        return path


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name)


def screenshot_folder() -> Path:
    """Return where pictures go: ``MINIVLLM_SCREENSHOTS`` if it is set, else a folder for temporary files."""
    wish = os.environ.get("MINIVLLM_SCREENSHOTS")
    folder = Path(wish) if wish else Path(tempfile.gettempdir()) / "minivllm-screenshots"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture
def lab(chromium: Browser, lab_server: LabServer, request: pytest.FixtureRequest) -> Iterator[LabPage]:
    """A fresh page with no history; ``lab.open("labs/00_start_here.ipynb")`` goes to a notebook.

    Kernels that a test started are ended after it. A test that fails leaves a picture; its report says where.
    """
    context = chromium.new_context(viewport={"width": 1400, "height": 1000}, reduced_motion="no-preference")
    context.set_default_timeout(GUARD_S * 1000)
    expect.set_options(timeout=GUARD_S * 1000)
    page = context.new_page()
    lab_page = LabPage(page, lab_server, workspace=f"test-{uuid.uuid4().hex}")
    page.on("console", lambda message: lab_page.messages.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: lab_page.messages.append(f"error: {error}"))
    request.node.stash[_pages] = [page]
    yield lab_page
    context.close()
    for session in lab_server.ask("api/sessions"):
        lab_server.delete(f"api/sessions/{session['id']}")  # ends its kernel too


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Take a picture of every page of a test that failed, while the page is still there."""
    report = yield
    if report.when == "call" and report.failed:
        pages: Sequence[Page] = item.stash.get(_pages, ())
        for number, page in enumerate(pages):
            path = screenshot_folder() / f"failed-{_file_name(item.name)}-{number}.png"
            try:
                page.screenshot(path=path, timeout=10_000)
            except Exception as error:  # the page may have crashed: that is the test's news, not this one's
                report.sections.append(("screenshot", f"none: {error}"))
            else:
                report.sections.append(("screenshot", str(path)))
    return report
