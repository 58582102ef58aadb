"""``binder/`` is what Binder needs: repo2docker reads it as it would there, only without building an image."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BINDER = ROOT / "binder"


@pytest.fixture(scope="module")
def dockerfile(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The Dockerfile that repo2docker would build from this folder, one command a line."""
    command = [sys.executable, "-m", "repo2docker", "--no-build", "--debug", "."]
    outcome = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    text = outcome.stdout + outcome.stderr
    assert outcome.returncode == 0, text
    assert "FROM " in text, text
    return re.sub(r"\\\s*\n\s*", "", text)


@pytest.mark.parametrize(
    "pattern",
    [
        pytest.param(r"apt-get install .*libopenblas0-pthread", id="the fast BLAS"),
        pytest.param(r'pip install .*-r "binder/requirements\.txt"', id="the requirements"),
        pytest.param(r"RUN \./binder/postBuild", id="postBuild"),
        pytest.param(r'ENV R2D_ENTRYPOINT="\$\{REPO_DIR\}/binder/start"', id="start"),
    ],
)
def test_the_image_gets_what_binder_names(dockerfile: str, pattern: str) -> None:
    assert re.search(pattern, dockerfile), dockerfile


def test_the_image_has_a_python_that_mlx_supports(dockerfile: str) -> None:
    """Left to itself, repo2docker takes a Python that is too old."""
    encoded = re.search(r"environment-2epy-2d3-2e(\d+)-2d", dockerfile)
    assert encoded, dockerfile
    assert 11 <= int(encoded[1]) <= 14


def test_the_requirements_are_read_after_the_whole_repository_was_copied(dockerfile: str) -> None:
    """They refer to files outside of ``binder/``, which are not there earlier."""
    assert dockerfile.index("COPY --chown=0:0 src/ ") < dockerfile.index('-r "binder/requirements.txt"')


def test_binder_installs_the_same_requirements() -> None:
    assert "-r ../requirements.txt" in (BINDER / "requirements.txt").read_text().splitlines()


def test_post_build_stops_at_the_first_failure() -> None:
    commands = [line for line in (BINDER / "postBuild").read_text().splitlines() if line and not line.startswith("#")]
    assert commands[0] == "set -e"
    for what in ("pip install", "model get smollm2", "jupyter trust labs/"):
        assert any(what in command for command in commands), what


def test_start_hands_over_to_the_command_it_is_given() -> None:
    outcome = subprocess.run(
        [BINDER / "start", "sh", "-c", 'echo "$1"; exit 7', "sh", "two words"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (outcome.returncode, outcome.stdout) == (7, "two words\n")
