"""The map from facts to tests: read from the tests, held against the catalogue, and printed.

``python -m tests.facts.map`` collects the tests of this folder (it runs none), prints each fact with the tests that
carry its id, and ends with status 1 if a fact has no test, a test names a fact that does not exist, or a test names
none. Knows pytest's items and the catalogue. Must not know what any test does.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.facts.catalogue import FACTS, Fact, Kind

FOLDER = Path(__file__).resolve().parent
ABOUT_THE_MAP = "test_map.py"
"""The one file whose tests are about this map and about no fact."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A test function and the facts that it says it tests."""

    test: str
    fact_ids: tuple[str, ...]


@dataclass(slots=True)
class FactMap:
    """Facts and tests, held against each other."""

    tests_of: dict[str, list[str]] = field(default_factory=dict)
    untested: list[str] = field(default_factory=list)
    unknown: list[tuple[str, str]] = field(default_factory=list)  # test, the id that does not exist
    silent: list[str] = field(default_factory=list)

    @property
    def tests(self) -> list[str]:
        """Every test that names a fact, once, in the order of the facts."""
        return list(dict.fromkeys(test for tests in self.tests_of.values() for test in tests))

    def complaints(self) -> list[str]:
        """Return a sentence for each thing that is wrong."""
        return [
            *[f"fact {fact_id} has no test" for fact_id in self.untested],
            *[f"{test} names fact {fact_id!r}, which the catalogue does not have" for test, fact_id in self.unknown],
            *[f"{test} names no fact" for test in self.silent],
        ]


def make_map(facts: Mapping[str, Fact], claims: Iterable[Claim]) -> FactMap:
    """Hold facts and tests against each other. Several claims of one test (its parameters) count once."""
    found = FactMap({fact_id: [] for fact_id in facts})
    for claim in claims:
        if not claim.fact_ids and claim.test not in found.silent:
            found.silent.append(claim.test)
        for fact_id in claim.fact_ids:
            tests = found.tests_of.get(fact_id)
            if tests is None:
                if (claim.test, fact_id) not in found.unknown:
                    found.unknown.append((claim.test, fact_id))
            elif claim.test not in tests:
                tests.append(claim.test)
    found.untested = [fact_id for fact_id, tests in found.tests_of.items() if not tests]
    return found


def claims_of(items: Iterable[pytest.Item]) -> list[Claim]:
    """Return what collected tests say, without the tests of the map itself."""
    return [
        Claim(item.nodeid.split("[")[0], tuple(arg for mark in item.iter_markers("fact") for arg in mark.args))
        for item in items
        if item.path.name != ABOUT_THE_MAP
    ]


class _Collector:
    """A pytest plugin that keeps what was collected."""

    def __init__(self) -> None:
        self.claims: list[Claim] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Take the tests in."""
        self.claims = claims_of(session.items)


def collect(folder: Path = FOLDER) -> list[Claim]:
    """Let pytest collect a folder, without running it. Raises RuntimeError, with what it said, if it cannot."""
    collector, said = _Collector(), io.StringIO()
    with contextlib.redirect_stdout(said):
        status = pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", str(folder)], plugins=[collector])
    if status != pytest.ExitCode.OK:
        raise RuntimeError(f"pytest cannot collect {folder}:\n{said.getvalue()}")
    return collector.claims


def describe(found: FactMap, facts: Mapping[str, Fact]) -> str:
    """Return the map as text: each fact's id and sentence, and under it its tests."""
    lines: list[str] = []
    for kind in Kind:
        own = [fact for fact in facts.values() if fact.kind is kind]
        lines += ["", f"{kind.value}: {len(own)}"] if own else []
        for fact in own:
            lines.append(f"  {fact.fact_id}: {fact.sentence}")
            lines += [f"      {test.rsplit('/', 1)[-1]}" for test in found.tests_of[fact.fact_id]]
    lines += ["", f"{len(facts)} facts, {len(found.tests)} tests"]
    return "\n".join(lines[1:])


def main() -> int:
    """Print the map and return the command's status."""
    found = make_map(FACTS, collect())
    print(describe(found, FACTS))
    for complaint in found.complaints():
        print(f"facts: {complaint}", file=sys.stderr)
    return 1 if found.complaints() else 0


if __name__ == "__main__":
    sys.exit(main())
