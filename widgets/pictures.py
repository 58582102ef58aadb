"""Still pictures of the cache: block pool, block tables, hash chain; tables as text; the states of requests and blocks.

The pictures of time are in `timelines`. Knows moments of the log. Must not know engines or widgets.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from minivllm.log import events as ev
from minivllm.log.states import BLOCK_TRANSITIONS, BlockState
from minivllm.request import TRANSITIONS, RequestState
from widgets.graph import dot_svg
from widgets.moment import (
    COPY,
    LOOKS,
    OWNED,
    UNCOMPUTED,
    USED,
    Moment,
    Published,
    after_words,
    cell,
    entry_words,
    look_of,
    moment_of,
)
from widgets.svg import (
    GREY,
    GROUND,
    MUTED,
    SKY,
    TEXT,
    WIDTH,
    Picture,
    diamond,
    el,
    number,
    picture,
    plural,
    rect,
    text,
    two_sheets,
)
from widgets.timelines import compare_timelines, picture_timeline, timeline_text
from widgets.words import listed

__all__ = [
    "Picture",
    "compare_timelines",
    "picture_block_states",
    "picture_chain",
    "picture_pool",
    "picture_states",
    "picture_tables",
    "picture_timeline",
    "tables_text",
    "timeline_text",
]

# --- Block pool -------------------------------------------------------------------------------------------

_MAX_CELLS = 1024


def picture_pool(log: Iterable[ev.Event], at: int | None = None) -> Picture:
    """Draw every block of the pool: what it holds, and in how many block tables it is."""
    moment = moment_of(log, at)
    blocks = moment.state.blocks
    counts = dict.fromkeys((look.name for look in LOOKS), 0)
    for block_id in blocks:
        counts[look_of(moment, block_id).name] += 1
    looks = [look for look in LOOKS if look is not UNCOMPUTED or counts[look.name]]
    told = ", ".join(f"{counts[look.name]:,} {look.words}" for look in looks)
    alt = f"Block pool {after_words(moment)}: {plural(len(blocks), 'block')}; {told}."

    body = [
        text(18, 28, f"Block pool, {after_words(moment)}", 14, bold=True),
        text(WIDTH - 18, 28, "number in a cell = ref_count", 11.5, MUTED, anchor="end"),
    ]
    size, gap = 24, 4
    columns = 32
    drawn = list(blocks)[:_MAX_CELLS]
    for place, block_id in enumerate(drawn):
        row, column = divmod(place, columns)
        look = look_of(moment, block_id)
        words = {"free": "", "kept": "·", "uncomputed": "?"}.get(look.name, str(blocks[block_id].ref_count))
        body.append(cell(30 + column * (size + gap), 46 + row * (size + gap), size, size, look, words, 11.5))
    y = 46 + math.ceil(len(drawn) / columns) * (size + gap) + 18
    if len(blocks) > len(drawn):
        body.append(text(30, y, f"The first {len(drawn):,} of {len(blocks):,} blocks.", 11.5, MUTED))
        y += 20
    x = 30.0
    for look in looks:
        words = f"{counts[look.name]:,} {look.words}"
        body.append(cell(x, y - 10, 13, 13, look, "", 9) + text(x + 19, y + 1, words, 12))
        x += 19 + len(words) * 6.4 + 22
    return picture(body, WIDTH, y + 20, alt, f"block pool, {after_words(moment)}")


# --- Block tables -----------------------------------------------------------------------------------------

_STATE_WORDS = {
    RequestState.DEFERRED: "has not arrived",
    RequestState.WAITING: "waiting",
    RequestState.HELD: "held",
    RequestState.RUNNING: "running",
    RequestState.PREEMPTED: "preempted",
    RequestState.FINISHED: "done",
    RequestState.ABORTED: "aborted",
    RequestState.FAILED: "failed",
}


def tables_text(log: Iterable[ev.Event], at: int | None = None) -> str:
    """Return every request's block table in words, one line a request; neighbours that are alike are a range."""
    moment = moment_of(log, at)
    requests = moment.state.requests
    lines = [f"Block tables {after_words(moment)}:"]
    width = max((len(name) for name in requests), default=0)
    for name, view in requests.items():
        table = _table_words(moment, name, view.block_ids) or "no block"
        behind = _behind(moment, name)
        if behind:
            table += f", held behind {behind}"
        lines.append(f"  {name:<{width}}  {_STATE_WORDS[view.state]:<9}  {table}")
    if not requests:
        lines.append("  no request")
    free = len(moment.state.free_queue)
    lines.append(f"  {free:,} of {plural(len(moment.state.blocks), 'block')} free")
    return "\n".join(lines)


def _behind(moment: Moment, name: str) -> str:
    """Return behind whom a request is held outside of a flight, "" for others."""
    if name in moment.state.awaiting:
        return moment.state.awaiting[name]
    return next((first for first, held in moment.state.samples.items() if name in held), "")


def _table_words(moment: Moment, name: str, block_ids: list[int]) -> str:
    runs: list[tuple[int, int, str]] = []
    for block_id in block_ids:
        words = entry_words(moment, name, block_id)
        if runs and runs[-1][1] + 1 == block_id and runs[-1][2] == words:
            runs[-1] = (runs[-1][0], block_id, words)
        else:
            runs.append((block_id, block_id, words))
    return "; ".join(f"{a if a == b else f'{a} to {b}'} ({words})" for a, b, words in runs)


def picture_tables(log: Iterable[ev.Event], at: int | None = None) -> Picture:
    """Draw the block table of every request: logical blocks from left to right, each with its physical id."""
    events = list(log)
    moment = moment_of(events, at)
    size = moment.config.block_size
    width, height, gap, left, per_line = 27.0, 22.0, 3.0, 138.0, 26
    body = [
        text(18, 28, f"Block tables, {after_words(moment)}", 14, bold=True),
        text(WIDTH - 18, 28, "logical block 0, 1, 2 … → block id", 11.5, MUTED, anchor="end"),
    ]
    y = 46.0
    for name, view in moment.state.requests.items():
        body.append(text(18, y + 15, name, 12.5, bold=True))
        body.append(text(56, y + 15, _STATE_WORDS[view.state], 11, MUTED))
        for index, block_id in enumerate(view.block_ids):
            row, column = divmod(index, per_line)
            x, top = left + column * (width + gap), y + row * (height + gap)
            filled = (view.num_computed_tokens - index * size) / size
            body.append(_entry(moment, block_id, x, top, width, height, filled))
            if block_id in moment.adopted.get(name, ()):
                body.append(diamond(x + width - 2, top + 2, GROUND))
            if block_id in moment.copies:
                body.append(two_sheets(x + width - 3, top + 3))
        if not view.block_ids:
            behind = _behind(moment, name)
            body.append(text(left, y + 15, f"no block, held behind {behind}" if behind else "no block", 11, MUTED))
        y += max(1, math.ceil(len(view.block_ids) / per_line)) * (height + gap) + 7
    if not moment.state.requests:
        body.append(text(18, y + 15, "no request", 12, MUTED))
        y += 30
    x = 18.0
    looks = [OWNED, COPY, USED, *([UNCOMPUTED] if moment.uncomputed else [])]
    legend = [(look.words.removesuffix(", in use"), look) for look in looks]
    for words, look in legend:
        body.append(cell(x, y + 4, 13, 13, look, "", 9) + text(x + 19, y + 15, words, 11.5, MUTED))
        x += 19 + len(words) * 6.2 + 22
    body.append(rect(x, y + 13, 13, 3, SKY) + text(x + 19, y + 15, "in more than one table", 11.5, MUTED))
    x += 19 + 22 * 6.2 + 22
    if moment.copies:
        body.append(two_sheets(x + 6, y + 11) + text(x + 19, y + 15, "copied on write", 11.5, MUTED))
        x += 19 + 15 * 6.2 + 22
    if any(moment.adopted.values()):
        body.append(diamond(x + 6, y + 11, GROUND) + text(x + 19, y + 15, "adopted in mid-prefill", 11.5, MUTED))
    return picture(body, WIDTH, y + 32, tables_text(events, at), f"block tables, {after_words(moment)}")


def _entry(moment: Moment, block_id: int, x: float, y: float, width: float, height: float, filled: float) -> str:
    """One entry of a block table; ``filled`` is the share of the block's tokens that have K/V."""
    look = look_of(moment, block_id)
    out = cell(x, y, width, height, look, str(block_id), 11)
    if filled < 1 and look is OWNED:
        empty = (width - 2) * (1 - max(0.0, filled))
        out += rect(x + width - 1 - empty, y + 1, empty, height - 2, GROUND, opacity=0.78)
        out += text(x + width / 2, y + 15, str(block_id), 11, anchor="middle", bold=True)
    if moment.state.blocks[block_id].ref_count > 1:
        out += rect(x + 1, y + height - 4, width - 2, 3, SKY)
    return out


# --- Hash chain -------------------------------------------------------------------------------------------

_BOX_W, _BOX_H, _BOX_GAP, _ROW, _CHAIN_LEFT = 52.0, 38.0, 16.0, 54.0, 66.0
_RUN_SHOWN = 9


def picture_chain(log: Iterable[ev.Event], at: int | None = None) -> Picture:
    """Draw the published blocks from parent to child; long runs without a branch are folded."""
    moment = moment_of(log, at)
    children: dict[str, list[Published]] = {}
    for item in moment.published.values():
        parent = item.parent if item.parent in moment.published else ""
        children.setdefault(parent, []).append(item)
    chain = _ChainDrawing(moment, children)
    chain.draw()
    ends = sum(1 for item in moment.published.values() if item.block_hash not in children)
    alt = (
        f"Hash chain {after_words(moment)}: {plural(len(moment.published), 'published block')}, "
        f"{plural(len(children.get('', [])), 'first block')}, {plural(ends, 'end')}."
    )
    if not moment.published:
        chain.body.append(text(18, 64, "Nothing is published.", 12, MUTED))
    body = [
        text(18, 28, f"Hash chain, {after_words(moment)}", 14, bold=True),
        text(WIDTH - 18, 28, "hash over block id; parent → child", 11.5, MUTED, anchor="end"),
        *chain.body,
    ]
    width = max(float(WIDTH), chain.right + 20)
    return picture(body, width, 52 + (chain.row + 1) * _ROW, alt, f"hash chain, {after_words(moment)}")


class _ChainDrawing:
    """Boxes in rows: an only child stands right of its parent, each further child begins a row of its own."""

    def __init__(self, moment: Moment, children: dict[str, list[Published]]) -> None:
        self.moment = moment
        self.children = children
        self.body: list[str] = []
        self.row = 0
        self.right = 0.0

    def draw(self) -> None:
        roots = self.children.get("", [])
        # (first block of a run, x of its box, its row, x and row of the parent's right end)
        todo = [(root, _CHAIN_LEFT, -1, _CHAIN_LEFT - _BOX_GAP - 4, 0) for root in reversed(roots)]
        if roots:
            self.body.append(text(18, self._middle(0) + 4, "root", 11.5, MUTED))
        first = True
        while todo:
            item, x, row, from_x, from_row = todo.pop()
            if row < 0:
                if not first:
                    self.row += 1
                row = self.row
            first = False
            run = [item]
            kids = self.children.get(item.block_hash, [])
            while len(kids) == 1:
                run.append(kids[0])
                kids = self.children.get(kids[0].block_hash, [])
            end = self._run(run, x, row, from_x, from_row)
            for i in range(len(kids) - 1, -1, -1):
                todo.append((kids[i], end + _BOX_GAP, row if i == 0 else -1, end, row))
            if not kids:
                words = plural(run[-1].index + 1, "block")
                self.body.append(text(end + 8, self._middle(row) + 4, words, 11.5, MUTED))
                self.right = max(self.right, end + 8 + len(words) * 6.4)

    def _middle(self, row: int) -> float:
        return 52 + row * _ROW + _BOX_H / 2

    def _run(self, run: list[Published], x: float, row: int, from_x: float, from_row: int) -> float:
        y, middle = 52 + row * _ROW, self._middle(row)
        folded = len(run) > _RUN_SHOWN
        label_end = 0.0
        shown: list[Published | None] = [*run[:3], None, *run[-2:]] if folded else list(run)
        for place, item in enumerate(shown):
            bend = f"h{number(_BOX_GAP / 2)} V{number(middle)} " if place == 0 and from_row != row else ""
            start = self._middle(from_row) if place == 0 else middle
            line = f"M{number(from_x)} {number(start)} {bend}H{number(x - 3)}"
            self.body.append(el("path", d=line, fill="none", stroke=GREY, stroke_width=1.3, marker_end="url(#tip)"))
            width = _BOX_W
            if item is None:
                width += 26
                self.body.append(
                    rect(x, y + 6, width, _BOX_H - 12, "#f1f3f5", rx=13, stroke=GREY, stroke_dasharray="3 2")
                    + text(x + width / 2, middle + 4, f"{len(run) - 5} more", 11.5, MUTED, anchor="middle")
                )
            else:
                self._box(item, x, y)
                label = item.salt
                if not label and item.parent and item.parent not in self.moment.published:
                    label = "parent evicted"
                if label:
                    # A label says which tokens it is about, so it may stand further right than its block.
                    words, at = (f"· {label}", label_end) if x < label_end else (label, x)
                    self.body.append(text(at, y - 4, words, 10.5, bold=True))
                    label_end = at + len(words) * 6.3 + 4
            from_x = x + width
            x = from_x + _BOX_GAP
        self.right = max(self.right, from_x)
        return from_x

    def _box(self, item: Published, x: float, y: float) -> None:
        look = look_of(self.moment, item.block_id)
        self.body.append(
            rect(x, y, _BOX_W, _BOX_H, look.fill, rx=5, stroke=look.stroke)
            + text(x + _BOX_W / 2, y + 15, item.block_hash[:6], 10.5, look.ink, anchor="middle", mono=True)
            + text(x + _BOX_W / 2, y + 31, str(item.block_id), 12.5, look.ink, anchor="middle", bold=True)
        )


# --- States -----------------------------------------------------------------------------------------------


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
    told = "; ".join(f"{state.value} to {_listed(TRANSITIONS[state])}" for state in RequestState if TRANSITIONS[state])
    ends = _listed(state for state in RequestState if state.is_ended)
    alt = f"States of a request, and which may follow which: {told}. Nothing follows {ends}."
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
    ways = [f"{a.value} to {b.value} by {listed(names)}" for (a, b), names in actions.items() if a is not b]
    stays = [f"{a.value} stays so by {listed(names)}" for (a, b), names in actions.items() if a is b]
    alt = f"States of a block, and what leads from one to another: {'; '.join([*ways, *stays])}."
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
