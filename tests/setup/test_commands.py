"""The project's commands, as files: they are scripts that old shells read, and the runner's wrong use is told."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ["binder/setup.sh", "binder/start-lab", "binder/postBuild", "binder/start", "tests/run", ".ci/run"]
NEWER_THAN_BASH_3_2 = r"declare -A|local -A|mapfile|readarray|\$\{\w+[,^]|&>>|\|&|wait -n|\$\{\w+@"


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_script_can_be_read_by_the_bash_of_a_mac(script: str) -> None:
    subprocess.run(["bash", "-n", ROOT / script], check=True)
    commands = [line for line in (ROOT / script).read_text().splitlines() if not line.lstrip().startswith("#")]
    assert not [line for line in commands if re.search(NEWER_THAN_BASH_3_2, line)]
    assert os.access(ROOT / script, os.X_OK) == (script != "binder/setup.sh")


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / script, *arguments],
        cwd="/",
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("script", ["tests/run", ".ci/run"])
def test_both_commands_are_the_same_test_runner(script: str) -> None:
    outcome = run(script, "--help")
    assert outcome.returncode == 0
    assert outcome.stdout.startswith("usage: tests/run [PART]")


def test_an_unknown_part_is_one_sentence_and_status_2() -> None:
    outcome = run("tests/run", "unti")
    assert outcome.returncode == 2
    assert outcome.stderr == (
        "run: unknown part 'unti'; the parts are all, lint, unit, model, cli, setup, labs, browser, "
        "or the name of a folder in tests.\n"
    )


def test_a_part_without_a_matching_test_is_a_failure() -> None:
    outcome = run("tests/run", "lint", "-k", "no_test_has_this_name")
    assert outcome.returncode != 0
    assert "2 deselected" in outcome.stdout.splitlines()[-1]


PARTS = ("lint", "unit", "model", "cli", "setup", "labs", "browser")
"""Those that make up "all"."""


@pytest.fixture
def paths_of(tmp_path: Path) -> Callable[[str], list[str]]:
    """Return what a part hands to pytest, where there is one folder more and a Python that only tells."""
    for script in ("tests/run", "binder/setup.sh"):
        (tmp_path / script).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / script, tmp_path / script)
    for name in ("requirements.txt", "pyproject.toml", "binder/constraints.txt"):
        (tmp_path / name).touch()
    for test in [*(ROOT / "tests").glob("*/test_*.py"), ROOT / "tests" / "new" / "test_new.py"]:
        copy = tmp_path / test.relative_to(ROOT)
        copy.parent.mkdir(exist_ok=True)
        copy.touch()
    (tmp_path / "labs").mkdir()
    (tmp_path / "labs" / "one.ipynb").touch()
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\n[ "$2" != pytest ] || printf "%s\\n" "$@"\n')
    python.chmod(0o755)
    subprocess.run(["bash", "-c", '. "$1/binder/setup.sh"; fingerprint >"$STAMP"', "bash", tmp_path], check=True)

    def ask(part: str) -> list[str]:
        outcome = subprocess.run([tmp_path / "tests/run", part], capture_output=True, text=True, check=True, cwd="/")
        return sorted(line for line in outcome.stdout.splitlines() if line.startswith(("tests/", "labs/")))

    return ask


def test_the_parts_together_are_everything_and_no_test_is_in_two(paths_of: Callable[[str], list[str]]) -> None:
    everything = paths_of("all")
    assert sorted(path for part in PARTS for path in paths_of(part)) == everything
    folders = {f"tests/{path.parent.name}" for path in (ROOT / "tests").glob("*/test_*.py")}
    assert set(everything) == folders | {"tests/new", "labs/one.ipynb"}
    assert "tests/new" in paths_of("unit")
