"""Every lab keeps the rules of ``notebook_rules``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.labs.notebook_rules import RULES, Rule

LABS = Path(__file__).resolve().parents[2] / "labs"
NOTEBOOKS = sorted(path for path in LABS.rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts)


def test_there_are_labs_to_check() -> None:
    assert NOTEBOOKS, f"no notebook in {LABS}: every other check of this file would pass by checking nothing"


def test_the_map_of_the_labs_names_every_lab() -> None:
    the_map = (LABS / "README.md").read_text()
    unnamed = [path.name for path in NOTEBOOKS if path.name not in the_map]
    assert not unnamed, f"labs/README.md does not name {unnamed}"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_lab_keeps_the_rule(path: Path, rule: Rule) -> None:
    faults = rule(json.loads(path.read_text(encoding="utf-8")))
    assert not faults, f"{path.name}:\n- " + "\n- ".join(faults)
