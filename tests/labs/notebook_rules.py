"""The rules that a committed lab keeps: it shows on a plain web view of its file, and nbval compares it.

nbval passes a notebook whose outputs were stripped, and compares no widget; a browser shows no widget of a
kernel that is gone; a path or an address is true on one machine only. So each of these is a rule here.

Knows: the notebook format. Must not know: what any lab is about. Each rule takes a parsed notebook and
returns one sentence per fault, so that a lab's author sees all of them at once.
"""

from __future__ import annotations

import ast
import base64
import binascii
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from typing import Any

import nbformat

Notebook = dict[str, Any]
Cell = dict[str, Any]
Rule = Callable[[Notebook], list[str]]

MOST_IGNORED = 5
"""At most one in this many code cells may have outputs that are not compared."""

IGNORES = {"nbval-ignore-output", "pytest-validate-ignore-output"}
SKIPS = {"nbval-skip"}
"""Tags of nbval's; the same words in capitals with underscores, alone in a comment, mean the same."""

_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")  # tracebacks are coloured, in the middle of paths too
_DATA_URI = re.compile(r"data:([\w.+/-]*)(?:;[\w=-]+)*;base64,([A-Za-z0-9+/=\s]+)")
_MACHINE = {
    "a path of somebody's machine": re.compile(
        r"(?<![\w/.:~-])/(?:Users|home|root|work|tmp|private|var/folders|opt/homebrew)/"
        r"|\b[A-Za-z]:\\{1,2}(?:Users|Documents|Program|Temp|Windows)"
    ),
    "a memory address": re.compile(r"\b0x[0-9a-fA-F]{6,}\b"),
}
_MARKDOWN_IMAGE = re.compile(r"!\[([^\]]*)\]\(")


@dataclass(frozen=True, slots=True)
class Piece:
    """A text of the notebook and where it stands: ``source`` or the MIME type or stream of an output."""

    cell: int
    kind: str
    text: str


def joined(text: str | list[str] | None) -> str:
    """Return a text that the format stores as one string or as a list of lines."""
    return "".join(text) if isinstance(text, list) else text or ""


def code_cells(notebook: Notebook) -> list[tuple[int, Cell]]:
    """Return the code cells that hold anything, each with its number in the notebook, counted from 1."""
    return [
        (number, cell)
        for number, cell in enumerate(notebook["cells"], 1)
        if cell["cell_type"] == "code" and joined(cell["source"]).strip()
    ]


def tags_of(cell: Cell) -> set[str]:
    """Return the tags of a cell, those written as a comment included, in the spelling of a tag."""
    tags = {str(tag).lower() for tag in cell.get("metadata", {}).get("tags", [])}
    for line in joined(cell["source"]).splitlines():
        if line.strip().startswith("#"):
            word = line.strip().lstrip("#").strip()
            if re.fullmatch(r"[A-Z_]+", word):
                tags.add(word.lower().replace("_", "-"))
    return tags


def pieces(notebook: Notebook) -> Iterator[Piece]:
    """Yield every text of sources and outputs; data URIs decoded if they are text (SVG), else left out."""
    for number, cell in enumerate(notebook["cells"], 1):
        yield from _without_data_uris(Piece(number, "source", joined(cell["source"])))
        for output in cell.get("outputs", []):
            match output["output_type"]:
                case "stream":
                    yield Piece(number, output["name"], _plain(joined(output["text"])))
                case "error":
                    text = "\n".join([output["ename"], output["evalue"], *output["traceback"]])
                    yield Piece(number, "error", _plain(text))
                case _:
                    for mime, value in output["data"].items():
                        if isinstance(value, str | list) and (mime.startswith("text/") or mime.endswith("xml")):
                            yield from _without_data_uris(Piece(number, mime, _plain(joined(value))))


def _plain(text: str) -> str:
    return _ESCAPES.sub("", text)


def _without_data_uris(piece: Piece) -> Iterator[Piece]:
    """Yield the text with its data URIs cut out, then the contents of those that are text (SVG)."""
    yield Piece(piece.cell, piece.kind, _DATA_URI.sub("data:", piece.text))
    for mime, content in _DATA_URI.findall(piece.text):
        if mime.startswith("text/") or mime.endswith("xml"):
            try:
                text = base64.b64decode(content).decode()
            except (binascii.Error, UnicodeDecodeError):
                text = "data:;base64,"  # broken: the rule of pictures reports it
            yield Piece(piece.cell, mime, text)


# -------------------------------------------------------------------------------------------- the rules


def is_valid_and_has_ids(notebook: Notebook) -> list[str]:
    """The format's own schema, and an id of its own for every cell (version 4.5 has them)."""
    faults = []
    if (notebook.get("nbformat"), notebook.get("nbformat_minor", 0)) < (4, 5):
        faults.append("the notebook's format is older than 4.5, which gave cells their ids; save it with JupyterLab 4")
    seen: set[str] = set()
    for number, cell in enumerate(notebook["cells"], 1):
        identity = cell.get("id")
        if not identity:
            faults.append(f"cell {number} has no id; save the notebook with JupyterLab 4")
        elif identity in seen:
            faults.append(f"cell {number} has the id {identity!r} of another cell; give it one of its own")
        else:
            seen.add(identity)
    if not faults:
        try:
            nbformat.validate(nbformat.from_dict(notebook))
        except nbformat.ValidationError as error:
            faults.append(f"the notebook does not keep to its format: {str(error).splitlines()[0]}")
    return faults


def was_run_from_top_to_bottom(notebook: Notebook) -> list[str]:
    """Execution counts 1, 2, 3, …: each cell was run once, in order, in a fresh kernel; none was stripped."""
    cells = code_cells(notebook)
    if not cells:
        return ["the notebook has no code cell"]
    faults = []
    for expected, (number, cell) in enumerate(cells, 1):
        count = cell.get("execution_count")
        if count is None:
            faults.append(f"cell {number} was not run, or its outputs were stripped; run all cells and save")
        elif count != expected:
            faults.append(
                f"cell {number} was run as number {count} and stands as number {expected}; "
                "restart the kernel, run all cells and save"
            )
    return faults


def keeps_its_outputs(notebook: Notebook) -> list[str]:
    """A cell that surely prints holds what it printed, and so does a cell that ends in a value."""
    cells = code_cells(notebook)
    faults = [
        f"cell {number} prints and holds no output; run all cells and save"
        for number, cell in cells
        if not cell.get("outputs") and _surely_prints(joined(cell["source"]))
    ]
    if cells and not any(cell.get("outputs") for _, cell in cells):
        faults.append("no cell holds an output; run all cells and save")
    return faults


def _surely_prints(source: str) -> bool:
    """Whether a ``print`` with arguments stands at the cell's outermost level."""
    try:
        statements = ast.parse(source).body
    except SyntaxError:  # a magic or a shell line
        return False
    return any(
        isinstance(statement, ast.Expr)
        and isinstance(call := statement.value, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id == "print"
        and not any(keyword.arg in {"file", "end", None} for keyword in call.keywords)
        for statement in statements
    )


def holds_no_widget(notebook: Notebook) -> list[str]:
    """A saved widget shows "model not found" once its kernel is gone: commit pictures, not views."""
    faults = []
    if "widgets" in notebook.get("metadata", {}):
        faults.append("the notebook's metadata hold widget state; clear it and save without widget state")
    for number, cell in code_cells(notebook):
        for output in cell.get("outputs", []):
            if any(mime.startswith("application/vnd.jupyter.widget") for mime in output.get("data", {})):
                faults.append(f"cell {number} holds a widget view; commit the view's picture instead")
    return faults


def names_no_machine(notebook: Notebook) -> list[str]:
    """No path of a user's machine and no memory address, in a source or in an output."""
    return [
        f"cell {piece.cell} holds {what} in its {piece.kind}: {found.group()}"
        for piece in pieces(notebook)
        for what, pattern in _MACHINE.items()
        if (found := pattern.search(piece.text))
    ]


def fails_only_on_purpose(notebook: Notebook) -> list[str]:
    """An error stands only in a cell that is tagged for it, and such a cell holds one."""
    faults = []
    for number, cell in code_cells(notebook):
        failed = any(output["output_type"] == "error" for output in cell.get("outputs", []))
        meant = bool(tags_of(cell) & {"raises-exception", "nbval-raises-exception"})
        if failed and not meant:
            faults.append(f"cell {number} ended in an error; put it right, or tag it raises-exception")
        if meant and not failed:
            faults.append(f"cell {number} is tagged raises-exception and holds no error; take the tag off, or run it")
    return faults


def is_really_compared(notebook: Notebook) -> list[str]:
    """No cell is skipped, and at most a fifth of the code cells have outputs that are not compared."""
    cells = code_cells(notebook)
    faults = [
        f"cell {number} is skipped by the checks; let it run, tagged nbval-ignore-output if its output varies"
        for number, cell in cells
        if tags_of(cell) & SKIPS
    ]
    ignored = [number for number, cell in cells if tags_of(cell) & IGNORES]
    if len(ignored) * MOST_IGNORED > len(cells):
        faults.append(
            f"{len(ignored)} of {len(cells)} code cells are not compared (cells {ignored}) and at most "
            f"one in {MOST_IGNORED} may be; use the virtual clock where a figure varies"
        )
    return faults


def describes_its_pictures(notebook: Notebook) -> list[str]:
    """Every picture says in words what it shows, for a reader who does not see it."""
    faults = []
    for number, cell in enumerate(notebook["cells"], 1):
        texts = [joined(cell["source"])] if cell["cell_type"] == "markdown" else []
        if cell["cell_type"] == "markdown":
            faults += [
                f"cell {number} has a picture without a description; write it between the brackets of ![]"
                for description in _MARKDOWN_IMAGE.findall(texts[0])
                if not description.strip()
            ]
        texts += [
            joined(output["data"][mime])
            for output in cell.get("outputs", [])
            for mime in ("text/html", "text/markdown")
            if mime in output.get("data", {})
        ]
        for text in texts:
            finder = _Images()
            finder.feed(text)
            faults += [
                f"cell {number} has an <img> without a description; give it a non-empty alt"
                for description in finder.descriptions
                if not description.strip()
            ]
    return faults


class _Images(HTMLParser):
    """Collects the descriptions of all ``<img>``; "" where there is none."""

    def __init__(self) -> None:
        super().__init__()
        self.descriptions: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "img":
            self.descriptions.append(dict(attrs).get("alt") or "")


def runs_on_any_python_kernel(notebook: Notebook) -> list[str]:
    """The kernel is named as every installation names it."""
    name = notebook.get("metadata", {}).get("kernelspec", {}).get("name")
    return [] if name == "python3" else [f"the notebook asks for the kernel {name!r}; choose python3 and save"]


RULES: tuple[Rule, ...] = (
    is_valid_and_has_ids,
    was_run_from_top_to_bottom,
    keeps_its_outputs,
    holds_no_widget,
    names_no_machine,
    fails_only_on_purpose,
    is_really_compared,
    describes_its_pictures,
    runs_on_any_python_kernel,
)
