"""The parts of the package: which may know which, what each says of itself, and what others may use of it."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lint.parts import PARTS, ROOT, drawn, imports, without_shortcuts

PACKAGES = sorted(
    path.parent for top in ("minivllm", "widgets") for path in (ROOT / top).rglob("__init__.py") if path.parent.name
)
SHARED = {"clock", "config", "cost", "errors", "request", "step"}


def imported_names(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield (module, name) of every import; the name is "" for a whole module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, ""
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                yield node.module, alias.name


def test_imports_keep_the_contracts_of_pyproject() -> None:
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()"]
    outcome = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stdout[outcome.stdout.find("Contracts") :] + outcome.stderr


def test_the_contracts_catch_an_import_that_points_up(tmp_path: Path) -> None:
    """The check itself is checked: a module of the cache that knows the engine breaks the layers."""
    for top in ("minivllm", "widgets"):
        for source in (ROOT / top).rglob("*.py"):
            target = tmp_path / source.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
    (tmp_path / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
    with (tmp_path / "minivllm" / "cache" / "block_pool.py").open("a") as module:
        module.write("\nfrom minivllm.engine.core import EngineCore\n")
    command = [
        sys.executable,
        "-c",
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); "
        "from importlinter.cli import lint_imports_command; lint_imports_command()",
    ]
    outcome = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert outcome.returncode == 1
    assert "minivllm.cache.block_pool -> minivllm.engine.core" in outcome.stdout


def test_the_package_has_nothing_beside_its_parts_but_the_shared_modules() -> None:
    files = {path.stem for path in (ROOT / "minivllm").glob("*.py")}
    folders = {path.parent.name for path in (ROOT / "minivllm").glob("*/__init__.py")}
    assert files == SHARED | {"__init__", "__main__"}
    assert folders == PARTS.keys()


def test_the_picture_in_readme_shows_which_part_imports_which() -> None:
    assert drawn() == without_shortcuts(imports()), "draw it anew: python -m tests.lint.parts"
    assert "labs/images/parts.svg" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("folder", PACKAGES, ids=lambda folder: str(folder.relative_to(ROOT)))
def test_a_part_says_what_it_is_for_and_holds_no_code(folder: Path) -> None:
    tree = ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))
    text = ast.get_docstring(tree) or ""
    assert 5 <= len(text.splitlines()) <= 15, "5 to 15 lines: what it owns, what it must not know, what to read first"
    for node in tree.body[1:]:
        is_exports = isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"
        assert is_exports or isinstance(node, ast.ImportFrom), f"line {node.lineno} is more than an export"


@pytest.mark.parametrize("folder", [f for f in PACKAGES if f.parent != ROOT], ids=lambda f: str(f.relative_to(ROOT)))
def test_no_part_imports_a_private_name_of_another(folder: Path) -> None:
    for path in folder.glob("*.py"):
        for module, name in imported_names(ast.parse(path.read_text(encoding="utf-8"))):
            own = ".".join(folder.relative_to(ROOT).parts)
            if module.split(".")[0] in ("minivllm", "widgets") and not module.startswith(own):
                private = [part for part in (*module.split("."), name) if re.match(r"_[^_]", part)]
                assert not private, f"{path.relative_to(ROOT)} imports {module}.{name}"


def lab_sources() -> Iterator[tuple[str, str]]:
    """Yield the name and the code of each lab and module of labs."""
    for path in sorted((ROOT / "labs").glob("*.py")):
        yield path.name, path.read_text(encoding="utf-8")
    for path in sorted((ROOT / "labs").glob("*.ipynb")):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            if cell["cell_type"] == "code":
                code = "".join(cell["source"])
                yield path.name, re.sub(r"^\s*[%!].*$", "pass", code, flags=re.MULTILINE)


def test_labs_import_public_names_alone() -> None:
    public = {"minivllm", "widgets", *(f"minivllm.{name}" for name in (*PARTS, *SHARED))}
    for name, code in lab_sources():
        for module, imported in imported_names(ast.parse(code)):
            if module.split(".")[0] in ("minivllm", "widgets"):
                assert module in public, f"{name} imports {module}; use what its part exports"
                assert not imported.startswith("_"), f"{name} imports {module}.{imported}"


def test_every_file_that_readme_names_is_there() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    names = set(re.findall(r"\]\(([\w./-]+)\)", text)) | set(re.findall(r"`(minivllm/[\w./-]+|tests/[\w./-]+)`", text))
    missing = {name for name in names if not (ROOT / name).exists()}
    assert not missing
