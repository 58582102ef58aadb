"""The project's commands, as files: they are scripts that old shells read, and the runner's wrong use is told."""

from __future__ import annotations

import os
import re
import subprocess
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
        "run: unknown part 'unti'; the parts are all, lint, unit, labs, browser, or the name of a folder in tests.\n"
    )


def test_a_part_without_a_matching_test_is_a_failure() -> None:
    outcome = run("tests/run", "lint", "-k", "no_test_has_this_name")
    assert outcome.returncode != 0
    assert "2 deselected" in outcome.stdout.splitlines()[-1]
