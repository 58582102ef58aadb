"""``binder/setup.sh`` makes an environment, once, and gets over whatever cut it off.

It works here on a small project with a package and a requirement of its own, so that real Pythons, real pips and real
processes do the work, with no network.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

BINDER = Path(__file__).resolve().parents[2] / "binder"
GUARD_S = 120.0
"""Against hanging only."""

BACKEND = '''
import os, time, zipfile
def build_editable(folder, settings=None, metadata=None):
    """Stop in mid-build while there is a file ``slow``."""
    open("building", "w").close()
    while os.path.exists("slow"):
        time.sleep(0.05)
    name = "small-1.0-py3-none-any.whl"
    with zipfile.ZipFile(os.path.join(folder, name), "w") as wheel:
        wheel.writestr("small.py", "")
        wheel.writestr("small-1.0.dist-info/METADATA", "Metadata-Version: 2.1\\nName: small\\nVersion: 1.0\\n")
        wheel.writestr("small-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr("small-1.0.dist-info/RECORD", "")
    return name
build_wheel = build_editable
'''
PYPROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "small"
version = "1.0"
"""
NO_NETWORK = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "https_proxy": "http://127.0.0.1:9"}


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a command ended, and what it said on both streams together."""

    status: int
    text: str


@dataclass(frozen=True, slots=True)
class Project:
    """A folder with the set-up in it; ``start`` begins a set-up, ``prepare`` waits for its end."""

    root: Path

    @property
    def python(self) -> Path:
        return self.root / ".venv" / "bin" / "python"

    @property
    def lock(self) -> Path:
        return self.root / ".venv.lock"

    def shell(self, commands: str, **environment: str) -> subprocess.Popen[str]:
        """Start bash with the set-up's functions at hand, in a process group of its own, from another folder."""
        return subprocess.Popen(
            ["bash", "-uc", f'. "$1/binder/setup.sh"; {commands}', "setup.sh", str(self.root)],
            cwd="/",
            env=os.environ | NO_NETWORK | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def ask(self, commands: str, **environment: str) -> Outcome:
        return self.wait_for(self.shell(commands, **environment))

    def start(self) -> subprocess.Popen[str]:
        return self.shell("prepare_venv")

    def wait_for(self, process: subprocess.Popen[str]) -> Outcome:
        text, _ = process.communicate(timeout=GUARD_S)
        return Outcome(process.returncode, text)

    def prepare(self) -> Outcome:
        return self.wait_for(self.start())

    def start_and_stop_in_mid_build(self) -> subprocess.Popen[str]:
        """Start a set-up that stays in the building of the package until the file ``slow`` is gone."""
        (self.root / "slow").touch()
        process = self.start()
        wait_until((self.root / "building").exists)
        return process

    def processes(self) -> list[str]:
        """Return the command lines of all processes of this project's environment."""
        listing = subprocess.run(["ps", "-A", "-ww", "-o", "command="], capture_output=True, text=True, check=True)
        return [line for line in listing.stdout.splitlines() if str(self.root / ".venv") in line]

    def has_its_packages(self) -> bool:
        imports = subprocess.run([self.python, "-c", "import small, thing"], capture_output=True, check=False)
        return imports.returncode == 0


def wait_until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + GUARD_S
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def write_wheel(path: Path, name: str, version: str) -> None:
    """Write a wheel with one empty module."""
    info = f"{name}-{version}.dist-info"
    path.parent.mkdir(exist_ok=True)
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}.py", "")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    """A small project in a folder with a space in its name."""
    root = (tmp_path / "a small project").resolve()
    (root / "binder").mkdir(parents=True)
    shutil.copy(BINDER / "setup.sh", root / "binder")
    (root / "binder" / "constraints.txt").touch()
    (root / "pyproject.toml").write_text(PYPROJECT)
    (root / "backend.py").write_text(BACKEND)
    (root / "requirements.txt").write_text("./wheels/thing-1.0-py3-none-any.whl\n")
    write_wheel(root / "wheels" / "thing-1.0-py3-none-any.whl", "thing", "1.0")
    project = Project(root)
    yield project
    (root / "slow").unlink(missing_ok=True)  # lets a builder go that a failed test left behind
    wait_until(lambda: not project.processes())


def test_the_first_run_installs_and_the_second_does_nothing(project: Project) -> None:
    first = project.prepare()
    assert first.status == 0, first.text
    assert project.has_its_packages()
    assert not project.lock.exists()

    shutil.rmtree(project.root / "wheels")  # without it an installation would fail
    (project.root / "building").unlink()
    assert project.prepare() == Outcome(0, "")
    assert not (project.root / "building").exists()


def test_changed_requirements_are_installed_into_the_same_environment(project: Project) -> None:
    assert project.prepare().status == 0
    kept = project.root / ".venv" / "kept"
    kept.touch()
    write_wheel(project.root / "wheels" / "other-2.0-py3-none-any.whl", "other", "2.0")
    with (project.root / "requirements.txt").open("a") as requirements:
        requirements.write("./wheels/other-2.0-py3-none-any.whl\n")

    assert project.prepare().status == 0
    subprocess.run([project.python, "-c", "import small, thing, other"], check=True)
    assert kept.exists()


def test_a_requirement_that_cannot_be_had_is_one_sentence_and_the_next_run_goes_on(project: Project) -> None:
    wheel = project.root / "wheels" / "thing-1.0-py3-none-any.whl"
    wheel.rename(wheel.with_suffix(".away"))
    failed = project.prepare()
    assert failed.status == 1
    assert failed.text.splitlines()[-1].startswith("setup.sh: pip could not install requirements.txt")
    kept = project.root / ".venv" / "kept"
    kept.touch()

    wheel.with_suffix(".away").rename(wheel)
    assert project.prepare().status == 0
    assert project.has_its_packages()
    assert kept.exists()


def test_a_folder_that_was_moved_gets_a_new_environment(project: Project, tmp_path: Path) -> None:
    assert project.prepare().status == 0
    moved = Project((tmp_path / "moved").resolve())
    project.root.rename(moved.root)
    assert moved.prepare().status == 0
    assert moved.has_its_packages()
    assert str(project.root) not in (moved.root / ".venv" / "bin" / "activate").read_text()


@pytest.mark.parametrize(("sent", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_leaves_no_process_and_the_next_one_ends_well(
    project: Project, sent: signal.Signals, status: int
) -> None:
    process = project.start_and_stop_in_mid_build()
    os.kill(process.pid, sent)  # to the shell alone: it must see to the rest
    assert project.wait_for(process).status == status
    assert project.processes() == []

    (project.root / "slow").unlink()
    again = project.prepare()
    assert again.status == 0, again.text
    assert "was cut off" in again.text
    assert project.has_its_packages()


def test_a_killed_run_cannot_go_on_writing_beside_the_next_one(project: Project) -> None:
    process = project.start_and_stop_in_mid_build()
    process.kill()
    process.wait()
    orphans = project.processes()
    assert orphans, "pip outlives the shell that started it: otherwise this test shows nothing"

    again = project.start()  # `slow` is still there: only the end of the orphans lets this one go further
    wait_until(lambda: not set(orphans) & set(project.processes()) or again.poll() is not None)
    (project.root / "slow").unlink()
    outcome = project.wait_for(again)
    assert outcome.status == 0, outcome.text
    assert "was cut off" in outcome.text
    assert project.has_its_packages()


def test_two_runs_at_once_take_turns(project: Project) -> None:
    first = project.start_and_stop_in_mid_build()
    (project.root / "building").unlink()
    second = project.start()
    assert second.stdout is not None
    assert "is running" in second.stdout.readline()
    (project.root / "slow").unlink()
    assert project.wait_for(first).status == 0
    assert project.wait_for(second) == Outcome(0, "")
    assert not (project.root / "building").exists(), "the second one installed again"
    assert project.has_its_packages()


# ------------------------------------------------------------------------------------- what is on the machine


@pytest.fixture
def shims(tmp_path: Path) -> Path:
    """A folder of Pythons that are names only, as a version manager leaves them."""
    folder = tmp_path / "shims"
    folder.mkdir()
    for name in ("python3.14", "python3.13", "python3.12", "python3.11", "python3", "python"):
        (folder / name).write_text("#!/bin/sh\necho 'no such version' >&2\nexit 127\n")
        (folder / name).chmod(0o755)
    return folder


def test_a_python_in_name_only_is_passed_over(project: Project, shims: Path) -> None:
    real = project.ask("find_python").text.strip()
    (shims / "python3").unlink()
    (shims / "python3").symlink_to(real)
    found = project.ask("find_python", PATH=f"{shims}:{os.environ['PATH']}")
    assert found == Outcome(0, f"{shims}/python3\n")


def test_no_python_is_one_sentence(project: Project, shims: Path) -> None:
    outcome = project.ask("find_python", PATH=f"{shims}:{os.environ['PATH']}")
    assert outcome.status == 1
    assert outcome.text.splitlines() == [
        "setup.sh: no Python 3.11 to 3.14 was found; install one, or name it with PYTHON=/path/to/python3, "
        "and start again."
    ]


def test_a_python_without_venv_is_told_apart_from_none(project: Project, shims: Path) -> None:
    (shims / "python3").write_text('#!/bin/sh\ncase "$2" in *ensurepip*) exit 1;; esac\nexit 0\n')
    outcome = project.ask("find_python", PATH=f"{shims}:{os.environ['PATH']}")
    assert outcome.status == 1
    assert outcome.text.startswith("setup.sh: python3 has no venv module; install it")


def test_a_python_that_is_named_is_taken(project: Project, shims: Path) -> None:
    real = project.ask("find_python", PYTHON="").text.strip()
    named = shims / "my own python"
    named.write_text(f'#!/bin/sh\nexec "{real}" "$@"\n')
    named.chmod(0o755)
    assert project.ask("find_python", PYTHON=str(named)) == Outcome(0, f"{named}\n")


@pytest.mark.parametrize("name", ["/no/such/python", "a shim"])
def test_a_named_python_that_does_not_fit_is_one_sentence_and_no_other_is_taken(
    project: Project, shims: Path, name: str
) -> None:
    named = str(shims / "python3") if name == "a shim" else name
    outcome = project.ask("find_python", PYTHON=named)
    assert outcome.status == 1
    assert outcome.text.splitlines() == [
        f"setup.sh: PYTHON={named} is not Python 3.11 to 3.14; name one that is, or leave PYTHON unset, "
        "and start again."
    ]


def test_no_python_leaves_nothing_behind(project: Project, shims: Path) -> None:
    outcome = project.ask("prepare_venv", PATH=f"{shims}:{os.environ['PATH']}")
    assert outcome.status == 1
    assert not project.lock.exists()
    assert not (project.root / ".venv").exists()


@pytest.mark.parametrize(
    ("version", "fits"), [("2.31", 1), ("2.34", 1), ("2.35", 0), ("2.36", 0), ("2.35.1", 0), ("3.0", 0)]
)
def test_glibc_of_2_35_or_later_fits(project: Project, version: str, fits: int) -> None:
    assert project.ask(f"glibc_fits {version}").status == fits


@pytest.mark.parametrize(
    ("machine", "glibc", "sentence"),
    [
        ("Linux-x86_64", "glibc 2.31", "MLX needs glibc 2.35 or later and this Linux has 2.31"),
        ("Linux-x86_64", "", "MLX needs glibc 2.35 or later and this Linux has another C library"),
        ("Darwin-x86_64", "", "MLX runs on Macs with Apple silicon only, and this one is x86_64"),
        ("FreeBSD-amd64", "", "MLX has no build for FreeBSD on amd64"),
    ],
)
def test_a_system_that_mlx_has_no_build_for_is_one_sentence(
    project: Project, tmp_path: Path, machine: str, glibc: str, sentence: str
) -> None:
    system, _, processor = machine.partition("-")
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "uname").write_text(f'#!/bin/sh\n[ "$1" = -s ] && echo {system} || echo {processor}\n')
    (tools / "getconf").write_text(f'#!/bin/sh\n[ -n "{glibc}" ] && echo "{glibc}"\n')
    for tool in tools.iterdir():
        tool.chmod(0o755)
    outcome = project.ask("check_system", PATH=f"{tools}:{os.environ['PATH']}")
    assert outcome.status == 1
    assert outcome.text.startswith(f"setup.sh: {sentence}")
    assert len(outcome.text.splitlines()) == 1
