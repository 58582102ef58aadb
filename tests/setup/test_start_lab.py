"""``binder/start-lab`` for real: its flags, its server, and what is left when it is stopped (nothing)."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
START_LAB = ROOT / "binder" / "start-lab"
GUARD_S = 120.0
"""Against hanging only."""

NO_NETWORK = {
    **dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9"),
    "no_proxy": "localhost,127.0.0.1",
    "PIP_NO_INDEX": "1",
    "PIP_FIND_LINKS": "",
}
"""Whatever goes out over HTTP fails at once."""


def environment() -> dict[str, str]:
    """Return the environment of a student: no Jupyter settings, no activated environment, and no network."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("JUPYTER_", "IPYTHON"))}
    path = os.pathsep.join(folder for folder in inherited["PATH"].split(os.pathsep) if not folder.startswith(str(ROOT)))
    return inherited | NO_NETWORK | {"PATH": path}


def run(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [START_LAB, *arguments],
        cwd=cwd,
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=GUARD_S,
    )


def test_help_names_every_flag() -> None:
    outcome = run("--help")
    assert outcome.returncode == 0
    for flag in ("--no-browser", "--port", "--prepare-only", "--help"):
        assert flag in outcome.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--no-browsr"], "unknown flag '--no-browsr'; the flags are --no-browser, --port N, --prepare-only"),
        (["lab"], "unknown flag 'lab'; the flags are"),
        (["--port"], "--port needs a number from 1 to 65535 after it"),
        (["--port", "many"], "--port takes a number from 1 to 65535, and 'many' is none"),
        (["--port="], "--port takes a number from 1 to 65535, and '' is none"),
        (["--port", "-1"], "--port takes a number from 1 to 65535, and '-1' is none"),
        (["--port", "0"], "--port takes a number from 1 to 65535, and 0 is outside"),
        (["--port=65536"], "--port takes a number from 1 to 65535, and 65536 is outside"),
        (["--port", "99999999999999999999"], "and 99999999999999999999 is outside"),
    ],
)
def test_wrong_use_is_one_sentence_and_status_2(arguments: list[str], sentence: str) -> None:
    outcome = run(*arguments)
    assert outcome.returncode == 2
    assert outcome.stdout == ""
    assert outcome.stderr.startswith("start-lab: ")
    assert sentence in outcome.stderr
    assert len(outcome.stderr.splitlines()) == 1


def test_a_port_in_use_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        outcome = run("--no-browser", "--port", str(port))
    assert outcome.returncode == 1
    assert outcome.stderr.splitlines() == [
        f"start-lab: port {port} is in use; take another with --port, or none to get the next free one."
    ]


def test_preparing_again_does_nothing_and_needs_no_network(tmp_path: Path) -> None:
    stamp = ROOT / ".venv" / ".stamp"
    before = stamp.stat().st_mtime_ns
    outcome = run("--prepare-only", cwd=tmp_path)
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stderr.splitlines()[-1] == "Everything is ready: binder/start-lab opens the labs."
    assert "Installing" not in outcome.stderr
    assert stamp.stat().st_mtime_ns == before


@dataclass
class Lab:
    """A lab that ``start-lab`` started."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    def ask(self, method: str, path: str, body: object = None) -> Any:
        """Return the JSON answer of the server's API."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"token {self.token()}"},
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=GUARD_S) as answer:
            return json.load(answer)

    def token(self) -> str:
        found = re.search(r"token=(\w+)", self.log.read_text())
        return found[1] if found else ""

    def wait_until_up(self) -> None:
        end = time.monotonic() + GUARD_S
        while time.monotonic() < end:
            assert self.process.poll() is None, self.log.read_text()
            try:
                self.ask("GET", "api/status")
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.1)
            else:
                return
        pytest.fail(f"the server did not come up:\n{self.log.read_text()}")

    def processes(self) -> list[str]:
        """Return ``"<id> <command>"`` of the server and of every kernel: all that names this lab's port or files."""
        listing = subprocess.run(["ps", "-A", "-ww", "-o", "pid=,command="], capture_output=True, text=True, check=True)
        of_this_lab = (
            f"--ServerApp.port={self.port}",
            f"--port {self.port}",
            f"{self.log.parent}/runtime/kernel",
        )
        return [line for line in listing.stdout.splitlines() if any(mark in line for mark in of_this_lab)]


def ignore_interrupts() -> None:
    """What a script does to its background jobs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@pytest.fixture
def lab(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Lab]:
    """A lab started from another folder, on a free port; stopped at the end whatever the test did.

    The parameter, if any, is run in the new process first.
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [START_LAB, "--no-browser", "--port", str(port)],
            cwd=tmp_path,
            env=environment() | {"JUPYTER_RUNTIME_DIR": str(tmp_path / "runtime")},  # kernels are known by it
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=getattr(request, "param", None),
        )
    yield Lab(process, port, log)
    if process.poll() is None:
        process.terminate()
        process.wait(GUARD_S)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_the_lab_answers_and_stopping_it_leaves_no_process(lab: Lab, sent: signal.Signals) -> None:
    lab.wait_until_up()
    address = f"http://localhost:{lab.port}/lab/tree/labs/00_start_here.ipynb?token={lab.token()}"
    assert address in lab.log.read_text()
    notebook = lab.ask("GET", "api/contents/labs/00_start_here.ipynb")
    code = [cell for cell in notebook["content"]["cells"] if cell["cell_type"] == "code"]
    assert code
    assert all(cell["metadata"]["trusted"] for cell in code)

    lab.ask("POST", "api/kernels", {"name": "python3"})
    assert any("ipykernel" in line for line in lab.processes())

    os.killpg(lab.process.pid, sent)  # as a terminal does with Ctrl-C
    assert lab.process.wait(GUARD_S) == 0, lab.log.read_text()
    assert lab.processes() == []


@pytest.mark.parametrize("lab", [ignore_interrupts], indirect=True)
def test_a_lab_in_the_background_of_a_script_never_leaves_its_server_behind(lab: Lab) -> None:
    lab.wait_until_up()
    os.killpg(lab.process.pid, signal.SIGINT)  # which that shell may ignore, or die of, but cannot trap
    os.killpg(lab.process.pid, signal.SIGTERM)
    lab.process.wait(GUARD_S)
    assert lab.processes() == []
