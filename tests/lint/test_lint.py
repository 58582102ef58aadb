"""Lint and types, as tests: a finding fails the run like anything else, and its text is the message."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "tool",
    [
        pytest.param(["ruff", "check", "--no-fix", "."], id="ruff"),
        pytest.param(["mypy"], id="mypy"),
    ],
)
def test_the_tool_finds_nothing(tool: list[str]) -> None:
    outcome = subprocess.run([sys.executable, "-m", *tool], cwd=ROOT, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, f"{' '.join(tool)}:\n{outcome.stdout}{outcome.stderr}"
