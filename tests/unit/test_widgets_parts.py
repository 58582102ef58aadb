"""The parts of `widgets` import each other in one direction, by public names, in Python and in the page."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

WIDGETS = Path(__file__).resolve().parents[2] / "widgets"
LAYERS = (
    {"words", "drawing"},
    {"fold"},
    {"looks"},
    {"pool", "tables", "chain", "timeline", "flights", "counters", "story", "result", "states"},
    {"live"},
    {"console"},
)
"""A part may import parts of the layers before its own, and none of its own layer."""

PARTS = sorted(set().union(*LAYERS))
LAYER = {part: i for i, layer in enumerate(LAYERS) for part in layer}


def imports(part: str) -> Iterator[tuple[str, str, str]]:
    """The names that a part imports from others: file, other part, name."""
    for path in (WIDGETS / part).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("widgets."):
                other = str(node.module).split(".")[1]
                yield from ((path.name, other, alias.name) for alias in node.names if other != part)
    for path in (WIDGETS / part).glob("*.js"):
        for names, source in re.findall(r'^import \{([^}]*)\} from "([^"]+)"', path.read_text(encoding="utf-8"), re.M):
            other = (path.parent / source).resolve().relative_to(WIDGETS).parts[0]
            yield from ((path.name, other, name.strip()) for name in names.split(",") if other != part)


def test_every_folder_is_a_part() -> None:
    assert {path.parent.name for path in WIDGETS.glob("*/__init__.py")} == set(PARTS)


@pytest.mark.parametrize("part", PARTS)
def test_imports_point_one_way_and_are_public(part: str) -> None:
    for file, other, name in imports(part):
        assert LAYER[other] < LAYER[part], f"{part}/{file} imports {other}: the arrow must point the other way"
        assert not name.startswith("_"), f"{part}/{file} imports {name} of {other}"


@pytest.mark.parametrize("part", PARTS)
def test_python_imports_other_parts_from_their_package(part: str) -> None:
    for path in (WIDGETS / part).glob("*.py"):
        for other in re.findall(r"^from widgets\.(\w+)\.\w+ import", path.read_text(encoding="utf-8"), re.M):
            assert other == part, f"{part}/{path.name} reaches into {other}; import from widgets.{other}"


@pytest.mark.parametrize("part", PARTS)
def test_a_part_says_what_it_owns_what_it_must_not_know_and_how_to_read_it(part: str) -> None:
    tree = ast.parse((WIDGETS / part / "__init__.py").read_text(encoding="utf-8"))
    words = ast.get_docstring(tree) or ""
    assert "Owns" in words and "ust not know" in words and "Read " in words
    for path in (WIDGETS / part).glob("*.[pj]*"):
        assert path.name == "__init__.py" or f"``{path.name}``" in words, (
            f"{part} does not say when to read {path.name}"
        )
