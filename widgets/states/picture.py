"""Diagrams of the two state machines: of a request and of a block.

Knows the tables of transitions that the engine and the pool go by. Must not know logs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from minivllm.log import BLOCK_TRANSITIONS, BlockState
from minivllm.request import TRANSITIONS, RequestState
from widgets.drawing import GREY, GROUND, MUTED, TEXT, WIDTH, Picture, dot_svg, number, picture, text
from widgets.words import listed

_STATE_FILLS: dict[RequestState | BlockState, str] = {
    RequestState.HELD: "#f8edf4",
    RequestState.RUNNING: "#c4e3f6",
    RequestState.PREEMPTED: "#fbeee4",
    RequestState.FINISHED: "#d9f0e6",
    BlockState.OWNED: "#fbe9c0",
    BlockState.PUBLISHED: "#c4e3f6",
}


def picture_states() -> Picture:
    """Draw the states of a request and which may follow which: the table that the engine goes by."""
    pairs = [(a, b) for a in RequestState for b in RequestState if b in TRANSITIONS[a]]
    ways = "; ".join(f"{state.value} to {_listed(TRANSITIONS[state])}" for state in RequestState if TRANSITIONS[state])
    ends = _listed(state for state in RequestState if state.is_ended)
    alt = f"States of a request, and which may follow which: {ways}. Nothing follows {ends}."
    edges = []
    for a, b in pairs:
        # A request may be aborted or fail at any time: those lines are there, and stand back.
        at_any_time = b in (RequestState.ABORTED, RequestState.FAILED)
        edges.append(f'"{a.value}" -> "{b.value}" [color="{GREY if at_any_time else TEXT}"];')
    return _picture_graph(RequestState, edges, "States of a request", alt)


def picture_block_states() -> Picture:
    """Draw the states of a block and what leads from one to another: the table that the pool goes by."""
    actions: dict[tuple[BlockState, BlockState], list[str]] = {}
    for (a, action), b in BLOCK_TRANSITIONS.items():
        actions.setdefault((a, b), []).append(action.value)
    moves = [f"{a.value} to {b.value} by {listed(names)}" for (a, b), names in actions.items() if a is not b]
    stays = [f"{a.value} stays so by {listed(names)}" for (a, b), names in actions.items() if a is b]
    alt = f"States of a block, and what leads from one to another: {'; '.join([*moves, *stays])}."
    edges = [
        f'"{a.value}" -> "{b.value}" [color="{TEXT}", label=" {", ".join(names)} "];'
        for (a, b), names in actions.items()
    ]
    return _picture_graph(BlockState, edges, "States of a block", alt)


def _picture_graph(states: type[RequestState] | type[BlockState], edges: list[str], title: str, alt: str) -> Picture:
    """Draw one node for each state, and ``edges`` as Graphviz writes them."""
    lines = [
        "digraph states {",
        'rankdir=LR; nodesep=0.35; ranksep=0.7; bgcolor="transparent";',
        'node [shape=box, style="rounded,filled", height=0.4, margin="0.2,0.06"];',
        'node [fontname="Helvetica,Arial,sans-serif", fontsize=13];',
        f'edge [arrowsize=0.7, penwidth=1.3, fontname="Helvetica,Arial,sans-serif", fontsize=12, fontcolor="{MUTED}"];',
    ]
    for state in states:
        fill = _STATE_FILLS.get(state, GROUND)
        lines.append(f'"{state.value}" [fillcolor="{fill}", color="{MUTED}", fontcolor="{TEXT}"];')
    svg = dot_svg("\n".join([*lines, *edges, "}"]))
    size = re.search(r'<svg width="([\d.]+)(?:pt)?" height="([\d.]+)(?:pt)?"', svg)
    assert size is not None, "the program that draws graphs begins its SVG with a size"
    width, height = float(size[1]), float(size[2])
    left = max(18.0, (WIDTH - width) / 2)
    inside = f'<svg x="{number(left)}" y="46" width="{number(width)}" height="{number(height)}"' + svg[size.end() :]
    body = [text(18, 28, title, 14, bold=True), inside]
    return picture(body, max(WIDTH, width + 36), height + 64, alt, title[0].lower() + title[1:])


def _listed(states: Iterable[RequestState]) -> str:
    """Return states in words, in the order of their table."""
    chosen = set(states)
    return listed(state.value for state in RequestState if state in chosen)
