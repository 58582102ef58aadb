"""The map from facts to tests is complete, and finds every way in which it could be incomplete."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.facts.catalogue import FACTS, Fact, Kind
from tests.facts.map import Claim, collect, describe, make_map

ROOT = Path(__file__).resolve().parents[2]

TWO = {name: Fact(name, f"This is {name}.", Kind.RULE) for name in ("one", "two")}


def test_the_command_prints_every_fact_and_finds_nothing_missing() -> None:
    outcome = subprocess.run(
        [sys.executable, "-m", "tests.facts.map"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (outcome.returncode, outcome.stderr) == (0, "")
    for fact in FACTS.values():
        assert f"{fact.fact_id}: {fact.sentence}" in outcome.stdout


def test_there_are_13_examples_and_17_faults_and_each_rule_is_one_sentence() -> None:
    kinds = [fact.kind for fact in FACTS.values()]
    assert (kinds.count(Kind.EXAMPLE), kinds.count(Kind.FAULT)) == (13, 17)
    assert kinds.count(Kind.RULE) >= 35
    assert all(fact.sentence.endswith(".") and fact.sentence.count(". ") == 0 for fact in FACTS.values())
    assert len({fact.sentence for fact in FACTS.values()}) == len(FACTS)


def test_a_map_without_gaps_has_no_complaint_and_counts_a_test_once_whatever_its_parameters() -> None:
    found = make_map(TWO, [Claim("a", ("one",)), Claim("a", ("one",)), Claim("b", ("two", "one"))])
    assert found.complaints() == []
    assert found.tests_of == {"one": ["a", "b"], "two": ["b"]}
    assert found.tests == ["a", "b"]
    assert describe(found, TWO).splitlines()[-1] == "2 facts, 2 tests"


@pytest.mark.parametrize(
    ("claims", "complaint"),
    [
        ([Claim("a", ("one",))], "fact two has no test"),
        (
            [Claim("a", ("one", "two")), Claim("b", ("three",))],
            "b names fact 'three', which the catalogue does not have",
        ),
        ([Claim("a", ("one", "two")), Claim("b", ())], "b names no fact"),
    ],
)
def test_each_gap_is_named(claims: list[Claim], complaint: str) -> None:
    assert make_map(TWO, claims).complaints() == [complaint]


def test_what_is_read_from_tests_is_their_marks(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "@pytest.mark.fact('one')\n"
        "@pytest.mark.parametrize('x', [1, pytest.param(2, marks=pytest.mark.fact('two'))])\n"
        "def test_a(x): ...\n"
        "def test_b(): ...\n"
    )
    code = (
        "from pathlib import Path\n"
        "from tests.facts.map import collect\n"
        f"print([(c.test.split('::')[-1], sorted(c.fact_ids)) for c in collect(Path({str(tmp_path)!r}))])\n"
    )
    outcome = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert outcome.stdout.strip() == "[('test_a', ['one']), ('test_a', ['one', 'two']), ('test_b', [])]", outcome.stderr


def test_tests_that_cannot_be_collected_are_no_empty_map(tmp_path: Path) -> None:
    (tmp_path / "test_broken.py").write_text("this is no Python\n")
    with pytest.raises(RuntimeError, match="cannot collect"):
        collect(tmp_path)
