"""The parts of the package and which imports which, read from the code; and their picture, for README.md.

    python -m tests.lint.parts

draws the picture anew when an arrow has changed. Knows imports. Must not know what any part does, but for one line.
"""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "labs" / "images" / "parts.svg"

PARTS = {
    "cli": "commands, terminal",
    "bench": "workloads, the race, costs",
    "engine": "steps, threads, handles",
    "runners": "MLX, virtual clock",
    "models": "weights, downloads, BLAS",
    "coordination": "who computes, who waits",
    "scheduling": "who runs in a step",
    "cache": "blocks, hashes, eviction",
    "log": "events, replay, metrics",
}
"""Each folder of the package, and what it is about."""


def imports() -> set[tuple[str, str]]:
    """Return which part imports which, from the code of all their modules."""
    graph = grimp.build_graph("minivllm")
    found = set()
    for importer in graph.modules:
        for imported in graph.find_modules_directly_imported_by(importer):
            pair = _part(importer), _part(imported)
            if pair[0] != pair[1] and None not in pair:
                found.add((str(pair[0]), str(pair[1])))
    return found


def _part(module: str) -> str | None:
    name = module.split(".")[1] if "." in module else ""
    return name if name in PARTS else None


def without_shortcuts(arrows: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Return the arrows that no longer way says already: the picture shows these. Raises ValueError for a cycle."""
    below: dict[str, set[str]] = {}

    def reach(part: str, seen: tuple[str, ...] = ()) -> set[str]:
        if part in seen:
            raise ValueError(f"the parts import each other in a circle: {' -> '.join((*seen, part))}")
        if part not in below:
            direct = {imported for importer, imported in arrows if importer == part}
            below[part] = direct.union(*(reach(other, (*seen, part)) for other in direct))
        return below[part]

    return {
        (importer, imported)
        for importer, imported in arrows
        if not any(imported in reach(other) for first, other in arrows if first == importer and other != imported)
        and imported in reach(importer)
    }


def drawn() -> set[tuple[str, str]]:
    """Return the arrows that the picture in README shows."""
    titles = re.findall(r"<title>([^<]*)</title>", PICTURE.read_text(encoding="utf-8"))
    return {(a, b) for a, arrow, b in (unescape(title).partition("->") for title in titles) if arrow}


def as_dot() -> str:
    """Return the picture in the dot language."""
    lines = [
        "digraph parts {",
        '  graph [bgcolor="white", margin=0.1, nodesep=0.35, ranksep=0.4];',
        '  node [shape=box, style="rounded,filled", fillcolor="#eef3f8", color="#56789a"];',
        '  node [fontname="Helvetica", margin="0.3,0.1"];',
        '  edge [color="#56789a", arrowsize=0.8];',
    ]
    lines += [f'  {name} [label="{name}\\n{about}"];' for name, about in PARTS.items()]
    lines += [f"  {importer} -> {imported};" for importer, imported in sorted(without_shortcuts(imports()))]
    return "\n".join([*lines, "}"])


if __name__ == "__main__":
    from widgets.drawing import dot_svg

    PICTURE.write_text(dot_svg(as_dot()), encoding="utf-8")
