"""What is imported is pinned, and what is pinned says why it is there."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PIN = re.compile(r"(?P<name>[A-Za-z0-9_.-]+)(\[[a-z0-9]+\])?==[\w.+]+ +# \S.*")
OURS = {"minivllm", "widgets", "tests", "labs"}


def lines_of(name: str) -> list[str]:
    return [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pinned() -> set[str]:
    return {normal(match["name"]) for line in lines_of("requirements.txt") if (match := PIN.fullmatch(line))}


def test_every_line_of_the_requirements_is_an_exact_version_with_a_reason() -> None:
    lines = [line for line in lines_of("requirements.txt") if not line.startswith("-c ")]
    assert [line for line in lines if not PIN.fullmatch(line)] == []
    assert len(pinned()) == len(lines)


def test_no_requirement_names_a_host() -> None:
    for name in ("requirements.txt", "binder/requirements.txt", "binder/constraints.txt", "pyproject.toml"):
        assert "://" not in (ROOT / name).read_text(), name


def test_the_constraints_repeat_no_requirement() -> None:
    names = [normal(line.split("==")[0]) for line in lines_of("binder/constraints.txt")]
    assert len(names) == len(set(names))
    assert set(names) & pinned() == set()


def test_the_environment_holds_the_pinned_versions() -> None:
    for line in lines_of("requirements.txt"):
        if match := PIN.fullmatch(line):
            version = line.split("==")[1].split()[0]
            assert importlib.metadata.version(match["name"]) == version


def test_whatever_is_imported_is_pinned() -> None:
    """A package that comes along with another one today may not come along tomorrow."""
    distributions = importlib.metadata.packages_distributions()
    unpinned = {
        f"{module} in {path.relative_to(ROOT)}"
        for path, module in imported_modules()
        if module not in OURS | set(sys.stdlib_module_names)
        and not {normal(name) for name in distributions.get(module, [])} & pinned()
    }
    assert not unpinned


def imported_modules() -> Iterator[tuple[Path, str]]:
    """Yield each top-level module that a file of ours imports, wherever in the file."""
    for path, source in sources():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                yield from ((path, alias.name.split(".")[0]) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield path, node.module.split(".")[0]


def sources() -> Iterator[tuple[Path, str]]:
    for folder in ("minivllm", "widgets", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            yield path, path.read_text()
    for path in (ROOT / "labs").rglob("*.ipynb"):
        for cell in json.loads(path.read_text())["cells"]:
            if cell["cell_type"] == "code":
                code = "".join(cell["source"])
                if not re.search(r"^\s*[%!]", code, re.MULTILINE):  # a magic is no Python
                    yield path, code
