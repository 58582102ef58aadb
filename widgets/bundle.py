"""Write the page's modules as one, as anywidget wants it: ``python -m widgets.bundle``.

Reads ``lab.js`` and what it imports, and writes ``static/lab.js``: the modules in the order of their imports, without
``import`` and ``export``. A style sheet beside a module, with its name, goes into ``static/lab.css`` in the same order.

Understands what the modules here use, and refuses the rest in a sentence: ``import { a, b } from "./c.js";`` and
``export`` before a declaration at the beginning of a line. Only the entry may export a list or a default. All names at
the top of a module must differ from those of every other module. Knows text. Must not know what the modules do.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ENTRY = HERE / "lab.js"
BUNDLE = HERE / "static" / "lab.js"
COMMAND = "python -m widgets.bundle"

_IMPORT = re.compile(r'^import \{\s*([\w$]+(?:\s*,\s*[\w$]+)*)\s*,?\s*\} from "(\.{1,2}/[^"]+\.js)";\n', re.MULTILINE)
_DECLARED = re.compile(r"^(export )?(?:async )?(?:function\*?|class|const|let|var) (?:([\w$]+)|(.))", re.MULTILINE)
_ENTRY_EXPORT = re.compile(r"^export (?:default |\{[\w$,\s]+\};)", re.MULTILINE)
_LEFT_OVER = re.compile(r"^(?:import\b|export\b).*", re.MULTILINE)


class BundleError(Exception):
    """The modules cannot become one; the message is a sentence that says why."""


@dataclass(frozen=True, slots=True)
class Module:
    """One module, without its imports and exports, and what it exports."""

    body: str
    exports: frozenset[str]


def bundle(entry: Path = ENTRY) -> tuple[str, str]:
    """Return the script and the style sheet of an entry and all that it imports. Raises BundleError."""
    done: dict[Path, Module] = {}
    owners: dict[str, str] = {}
    _add(entry.resolve(), entry.resolve(), (), done, owners)
    root = entry.resolve().parent
    head = f"Written by {COMMAND} from the modules beside this folder: change those, not this file."
    script = [f"// {head}\n"]
    style = [f"/* {head} */\n"]
    for path, module in done.items():
        name = path.relative_to(root).as_posix()
        script.append(f"// ---- {name} ".ljust(110, "-") + "\n\n" + module.body.strip("\n") + "\n")
        if path.with_suffix(".css").exists():
            style.append(path.with_suffix(".css").read_text(encoding="utf-8").strip("\n") + "\n")
    return "\n".join(script), "\n".join(style)


def _add(path: Path, entry: Path, above: tuple[Path, ...], done: dict[Path, Module], owners: dict[str, str]) -> None:
    """Add a module to ``done`` after those that it imports. ``above`` are the modules that led here."""
    if path in done:
        return
    name = _name(path, entry)
    if path in above:
        circle = " imports ".join(_name(each, entry) for each in (*above[above.index(path) :], path))
        raise BundleError(f"the imports go round in a circle: {circle}")
    if not path.is_file():
        raise BundleError(f"{_name(above[-1], entry)} imports {name}, which does not exist")
    source = path.read_text(encoding="utf-8")
    for match in _IMPORT.finditer(source):
        target = (path.parent / match[2]).resolve()
        _add(target, entry, (*above, path), done, owners)
        for word in re.split(r"\s*,\s*", match[1]):
            if word not in done[target].exports:
                raise BundleError(f"{name} imports {word!r}, which {_name(target, entry)} does not export")
    done[path] = _module(name, _IMPORT.sub("", source), path == entry, owners)


def _module(name: str, source: str, is_entry: bool, owners: dict[str, str]) -> Module:
    exports = set()
    for match in _DECLARED.finditer(source):
        if match[2] is None:
            raise BundleError(f"{name} declares several names at once ({match[0]!r} …); declare one name a statement")
        if match[2] in owners:
            raise BundleError(f"{name} and {owners[match[2]]} both declare {match[2]!r}; rename one of them")
        owners[match[2]] = name
        if match[1]:
            exports.add(match[2])
    body = _DECLARED.sub(lambda match: match[0].removeprefix("export "), source)
    left = _ENTRY_EXPORT.sub("", body) if is_entry else body
    if line := _LEFT_OVER.search(left):
        raise BundleError(
            f'{name} has a line that cannot be bundled: {line[0]!r}; write import {{ name }} from "./file.js"; '
            "or export before a function, class or const"
        )
    return Module(body, frozenset(exports))


def _name(path: Path, entry: Path) -> str:
    return path.relative_to(entry.parent).as_posix() if path.is_relative_to(entry.parent) else str(path)


def main() -> None:
    """Write the bundle, or leave with a sentence."""
    try:
        script, style = bundle()
    except BundleError as error:
        sys.exit(f"{COMMAND}: {error}.")
    BUNDLE.write_text(script, encoding="utf-8")
    BUNDLE.with_suffix(".css").write_text(style, encoding="utf-8")


if __name__ == "__main__":
    main()
