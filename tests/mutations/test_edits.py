"""Every edit fits the code as it is, so that a change of the code that loses one is seen at once."""

from __future__ import annotations

import ast
import collections
from pathlib import Path

import pytest

from tests.mutations.edits import AREA_OF, EDITS, UNIT_TESTS, Edit
from tests.mutations.workshop import Run

ROOT = Path(__file__).resolve().parents[2]

EIGHT = (
    "block pool",
    "cache manager",
    "prefix index",
    "single flight",
    "scheduler",
    "publication",
    "block hash",
    "replay",
)


def source(edit: Edit) -> str:
    return (ROOT / "minivllm" / f"{edit.module}.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: f"{edit.module}-{edit.name}")
def test_an_edits_text_is_there_once_and_what_it_makes_is_python(edit: Edit) -> None:
    assert source(edit).count(edit.old) == 1
    edited = source(edit).replace(edit.old, edit.new)
    assert ast.dump(ast.parse(edited)) != ast.dump(ast.parse(source(edit)))


def test_names_are_unique_in_their_modules_and_each_module_has_tests_of_its_own() -> None:
    assert len({(edit.module, edit.name) for edit in EDITS}) == len(EDITS)
    for paths in (UNIT_TESTS[edit.module] for edit in EDITS):
        assert all((ROOT / path).exists() for path in paths)


def test_there_are_at_least_60_edits_and_6_in_each_of_the_eight_areas() -> None:
    counts = collections.Counter(AREA_OF[edit.module] for edit in EDITS if not edit.equivalent_because)
    assert counts.total() >= 60
    assert all(counts[area] >= 6 for area in EIGHT)


def test_a_run_is_green_only_with_tests_that_all_passed_to_the_end() -> None:
    assert Run(1.0, started=["a"]).is_green
    for run in (
        Run(1.0),
        Run(1.0, started=["a"], failed=["a"]),
        Run(1.0, started=["a"], unread=["b"]),
        Run(1.0, started=["a"], was_killed=True),
    ):
        assert not run.is_green
