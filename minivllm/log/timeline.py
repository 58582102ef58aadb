"""The race as a drawing in text: one lane a request, time from left to right.

    r0 leader    ██━━━━━━━━━━━━━━━●
    r1 follower  ░░█━━━━━━━━━━━━━━●
                 └────┴────┴────┴──
                 0    50   100  150 ms

`Lanes` folds the log into what each request was doing when, and `draw_timeline` draws that. Knows events, and
what their times mean; must not know engines or terminals.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from minivllm.log import events as ev
from minivllm.log.lanes import Happening, Lane, Lanes, Phase

# --- The drawing --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Marks:
    """The characters of a drawing. ``axis`` are the corner, the line and the tick."""

    phases: dict[Phase, str]
    happenings: dict[Happening, str]
    done: str
    broken: str
    axis: tuple[str, str, str]


_UNICODE = Marks(
    {
        Phase.WAITING: "·",
        Phase.HELD: "░",
        Phase.PREFILL: "█",
        Phase.DECODE: "━",
        Phase.PREEMPTED: "▒",
    },
    {Happening.FORKED: "┳", Happening.JOINED: "┗", Happening.COPIED: "▣", Happening.ADOPTED: "◆"},
    "●",
    "×",
    ("└", "─", "┴"),
)
_ASCII = Marks(
    {
        Phase.WAITING: ".",
        Phase.HELD: ":",
        Phase.PREFILL: "#",
        Phase.DECODE: "-",
        Phase.PREEMPTED: "?",
    },
    {Happening.FORKED: "Y", Happening.JOINED: "L", Happening.COPIED: "C", Happening.ADOPTED: "A"},
    "O",
    "X",
    ("+", "-", "+"),
)
_WORDS = {
    Phase.WAITING: "waiting",
    Phase.HELD: "held behind its leader",
    Phase.PREFILL: "prefill",
    Phase.DECODE: "decode",
    Phase.PREEMPTED: "preempted",
}
_LED = frozenset({"leader", "follower", "held"})
"""Roles of requests that are, or were, held behind a leader; samples are held behind the first of them."""
_HAPPENING_WORDS = {
    Happening.FORKED: "forked",
    Happening.JOINED: "begins as a sample",
    Happening.COPIED: "copied a block",
    Happening.ADOPTED: "adopted blocks",
}
_LEAST_COLUMNS = 20
_LEAST_SHARE = 0.1
"""A phase shorter than this part of a column is not drawn: the moment between arrival and the first step."""


def can_write(encoding: str | None) -> bool:
    """Return whether text in this encoding can hold the marks; the others are plain ASCII."""
    try:
        "·░█━▒┳┗▣◆●×└─┴".encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def draw_timeline(events: Iterable[ev.Event], width: int = 80, *, ascii_only: bool = False) -> str:
    """Return the drawing, ``width`` columns wide, with an axis in milliseconds and a legend.

    Time 0 is the first arrival. A column shows what the request did for most of the time that the column
    stands for; a phase that is shorter than a column still gets one if a neighbour can spare it, and is left
    out below a tenth of a column. What happened at one moment stands over the phases.
    """
    folded = Lanes.of(events)
    if not folded.lanes:
        return "no request has arrived"
    marks = _ASCII if ascii_only else _UNICODE
    start = folded.start_ms or 0.0
    total = folded.now_ms - start
    names = [f"{lane.request_id} {lane.role}" for lane in folded.lanes.values()]
    margin = max(map(len, names)) + 2
    columns = max(width - margin - 1, _LEAST_COLUMNS)  # one column is kept for the mark of the end
    scale = columns / total if total > 0 else 0.0
    lines = [
        name.ljust(margin) + _draw_lane(lane, start, scale, columns, folded.now_ms, marks)
        for name, lane in zip(names, folded.lanes.values(), strict=True)
    ]
    lines += [" " * margin + text for text in _draw_axis(total, columns, marks)]
    lines.append(_legend(folded, 0.0 if scale == 0 else _LEAST_SHARE / scale, marks))
    return "\n".join(line.rstrip() for line in lines)


def _draw_lane(lane: Lane, start: float, scale: float, columns: int, now: float, marks: Marks) -> str:
    """Return one lane: a character a column, and the mark of the end behind the last one."""
    spans = [
        ((span.start_ms - start) * scale, ((now if span.end_ms is None else span.end_ms) - start) * scale, span.phase)
        for span in lane.spans
    ]
    cells: list[Phase | None] = []
    for column in range(columns):
        shares: dict[Phase, float] = {}
        for left, right, phase in spans:
            share = min(right, column + 1) - max(left, column)
            if share > 0:
                shares[phase] = shares.get(phase, 0.0) + share
        # A column that the lane covers by less than a half is left blank: it begins or ends beside it.
        covered = sum(shares.values()) >= 0.5
        cells.append(max(shares, key=lambda phase: shares[phase]) if covered else None)
    for left, right, phase in spans:
        _give_a_column(cells, left, right, phase)
    drawn = [" " if cell is None else marks.phases[cell] for cell in cells]
    for place, happening in _places(lane, start, scale, len(cells)):
        drawn[place] = marks.happenings[happening]
    text = "".join(drawn)
    if lane.end is None:
        return text
    return text.rstrip() + (marks.done if lane.end in ("length", "stop") else marks.broken)


def _places(lane: Lane, start: float, scale: float, columns: int) -> Iterator[tuple[int, Happening]]:
    """Return the columns of what happened: one that is taken gives way to the right, and the same twice is one."""
    taken: dict[int, Happening] = {}
    for happening, ms in lane.happenings:
        place = min(int((ms - start) * scale), columns - 1)
        while taken.get(place, happening) is not happening and place < columns - 1:
            place += 1
        if place not in taken:
            taken[place] = happening
            yield place, happening


def _give_a_column(cells: list[Phase | None], left: float, right: float, phase: Phase) -> None:
    """Make a short phase visible: it may take a column of a phase that keeps another one."""
    if right - left < _LEAST_SHARE:
        return
    first, last = int(left), min(math.ceil(right), len(cells)) - 1
    if phase in cells[max(first - 1, 0) : last + 2]:
        return
    place = min(int((left + right) / 2), len(cells) - 1)
    there = cells[place]
    if there is None or cells.count(there) > 1:
        cells[place] = phase


def _draw_axis(total: float, columns: int, marks: Marks) -> list[str]:
    """Return the line with its ticks, and the numbers under them, in milliseconds."""
    corner, line, tick = marks.axis
    step = _round_step(total / max(columns // 12, 2))
    ticks = [0.0]
    while step > 0 and ticks[-1] + step <= total:
        ticks.append(ticks[-1] + step)
    drawn = [line] * columns
    numbers = ""
    for place, value in enumerate(ticks):
        column = min(round(value / total * columns), columns - 1) if total > 0 else 0
        drawn[column] = corner if place == 0 else tick
        label = f"{value:,.10g}" + (" ms" if place == len(ticks) - 1 else "")
        # The last number stays inside the drawing, even if it then ends under its tick.
        numbers = numbers.ljust(min(column, columns + 1 - len(label))) + label
    return ["".join(drawn), numbers]


def _round_step(rough: float) -> float:
    """Return the next number of 1, 2 or 5 times a power of ten from ``rough`` on (0 for 0)."""
    if rough <= 0:
        return 0.0
    power: float = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)


def _legend(folded: Lanes, least_ms: float, marks: Marks) -> str:
    """Return the meaning of the marks that were drawn, in the order of a request's life."""
    lanes = folded.lanes.values()
    seen = {
        span.phase
        for lane in lanes
        for span in lane.spans
        if (folded.now_ms if span.end_ms is None else span.end_ms) - span.start_ms >= max(least_ms, 1e-9)
    }
    words = dict(_WORDS)
    if not all(lane.role in _LED for lane in lanes if any(span.phase is Phase.HELD for span in lane.spans)):
        words[Phase.HELD] = "held behind another"
    parts = [f"{mark} {words[phase]}" for phase, mark in marks.phases.items() if phase in seen]
    happened = {happening for lane in lanes for happening, _ in lane.happenings}
    parts += [f"{mark} {_HAPPENING_WORDS[what]}" for what, mark in marks.happenings.items() if what in happened]
    ends = {lane.end for lane in lanes} - {None}
    if ends & {"length", "stop"}:
        parts.append(f"{marks.done} done")
    if ends & {"abort", "error"}:
        parts.append(f"{marks.broken} aborted or failed")
    return "  ".join(parts)
