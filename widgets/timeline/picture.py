"""Timelines as a picture: a lane for each request.

Knows lanes and their words. Must not know states, blocks or engines.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from minivllm import log as ev
from minivllm.errors import ConfigError
from widgets.drawing import (
    GREEN,
    GREY,
    GROUND,
    LINE,
    MUTED,
    ORANGE,
    PINK,
    RED,
    SKY,
    TEXT,
    WIDTH,
    Picture,
    diamond,
    el,
    number,
    picture,
    rect,
    text,
    two_sheets,
)
from widgets.fold import Arrow, Axis, Lane, Lanes, Phase, Place, lanes_of
from widgets.timeline.text import LANE_WORDS, checked_axis, shown_spans, span_words, sums, time_words, timeline_lines
from widgets.words import plural

_ENDS = {"finished": "✓", "aborted": "✕", "failed": "!"}
_MAX_TICKS = 8


def picture_timeline(log: Iterable[ev.Event], title: str | None = None, axis: Axis = "ms") -> Picture:
    """Draw a lane for each request: waiting, held, prefill, decode, preempted, done; leader tied to followers."""
    return _timelines({title or "Timeline": lanes_of(log)}, checked_axis(axis), title or "timeline")


def compare_timelines(logs: Mapping[str, Iterable[ev.Event]], axis: Axis = "ms") -> Picture:
    """Draw the timelines of several logs, one below the other, on one axis. Raises ConfigError for none."""
    if not logs:
        raise ConfigError("there is no log to compare; give at least one, such as {'cold': engine.log}")
    return _timelines({name: lanes_of(log) for name, log in logs.items()}, checked_axis(axis), " and ".join(logs))


_LEFT, _RIGHT, _BAR = 112, 214, 17


def _timelines(groups: Mapping[str, Lanes], axis: Axis, name: str) -> Picture:
    end = max((lanes.end.on(axis) for lanes in groups.values()), default=0.0) or 1.0
    plot = WIDTH - _LEFT - _RIGHT
    scale = _Scale(_LEFT, plot, end, axis)
    body: list[str] = []
    y = 14.0
    for title, lanes in groups.items():
        body.append(text(18, y + 16, title, 14, bold=True))
        body.append(text(WIDTH - 18, y + 16, sums(lanes), 12, MUTED, anchor="end"))
        y += 28
        height = 34 if len(lanes.lanes) <= 8 else 27
        bottom = y + len(lanes.lanes) * height
        body.extend(el("path", d=f"M{number(x)} {number(y)} V{number(bottom)}", stroke=LINE) for x in scale.xs)
        places = {}
        for lane in lanes.lanes:
            places[lane.request_id] = y + height / 2
            body.extend(_lane(lane, y + height / 2, scale, lanes.end))
            y += height
        body.extend(_arrow(arrow, places, scale) for arrow in lanes.arrows)
        y += 8
    for x, words in zip(scale.xs, scale.words, strict=True):
        body.append(text(x, y + 8, words, 11, MUTED, anchor="start" if x == _LEFT else "middle"))
    y += 20
    marks = {mark.kind for lanes in groups.values() for lane in lanes.lanes for mark in lane.marks}
    kinds = {arrow.kind for lanes in groups.values() for arrow in lanes.arrows}
    body.append(_legend(y + 12))
    if more := _more_legend(y + 32, marks | kinds):
        body.append(more)
        y += 20
    lines: list[str] = []
    for title, lanes in groups.items():
        lines += [f"{title}:", *timeline_lines(lanes, axis)]
    return picture(body, WIDTH, y + 28, "\n".join(lines), name)


class _Scale:
    """From a moment to a place on the paper."""

    def __init__(self, left: float, width: float, end: float, axis: Axis) -> None:
        self.axis = axis
        self._left, self._width, self._end = left, width, end
        raw = end / _MAX_TICKS
        power = 10.0 ** math.floor(math.log10(raw))
        tick = next(f * power for f in (1, 2, 5, 10) if f * power >= raw * 0.999)
        if axis == "step":
            tick = max(1.0, tick)
        values = [i * tick for i in range(int(end / tick * 1.0001) + 1)]
        unit = " ms" if axis == "ms" else " steps"
        self.xs = [self._x(value) for value in values]
        self.words = [f"{value:,.10g}" + (unit if value == values[-1] else "") for value in values]

    def _x(self, value: float) -> float:
        return self._left + value / self._end * self._width

    def __call__(self, place: Place) -> float:
        return self._x(place.on(self.axis))


_FILLS = {
    Phase.WAITING: "#f1f3f5",
    Phase.HELD: "url(#held)",
    Phase.PREEMPTED: "url(#preempted)",
    Phase.PREFILL: ORANGE,
    Phase.DECODE: GREEN,
}
_STROKES = {Phase.WAITING: GREY, Phase.HELD: PINK, Phase.PREEMPTED: RED}


def _lane(lane: Lane, y: float, scale: _Scale, end: Place) -> Iterable[str]:
    state = LANE_WORDS.get(lane.state, lane.state)
    yield text(18, y - 1, lane.request_id, 12.5, bold=True)
    role = "was held" if lane.role == "held" else lane.role
    yield text(18, y + 11, state if lane.role in ("alone", state) else f"{role} · {state}", 10.5, MUTED)
    for span in shown_spans(lane, scale.axis):
        x = scale(span.start)
        # A hair between two bars, so that neighbouring chunks of prefill stay two.
        width = max(1.5, scale(span.end or end) - x - (1 if span.phase is Phase.PREFILL else 0))
        thin = span.phase in _STROKES
        height = 11 if thin else _BAR
        yield rect(
            x,
            y - height / 2,
            width,
            height,
            RED if span.failed else _FILLS[span.phase],
            rx=min(3.0, width / 2),
            stroke=_STROKES.get(span.phase),
            stroke_dasharray="3 2" if span.phase is Phase.WAITING else None,
        )
        long = span_words(span, scale.axis, end).partition(" (")[0]
        brief = f"{span.tokens:,}" if span.tokens else long.partition(" for ")[0]
        words = next((w for w in (long, brief) if w and len(w) * 6.3 + 8 < width), "")
        if words:
            yield text(x + width / 2, y + 4, words, 11, "#111111", anchor="middle", halo=thin)
    for mark in lane.marks:
        x = scale(mark.at)
        if mark.kind == "first":
            yield el("circle", cx=x, cy=y + _BAR / 2, r=3.2, fill=TEXT, stroke=GROUND, stroke_width=1)
        elif mark.kind in _SHAPES:
            yield _shape(mark.kind, x, y - 10)
        elif mark.kind == "leads":
            yield text(x + 4, y - 7, "leads", 10, "#9c3f75", bold=True, halo=True)
        elif mark.kind in _ENDS:
            ink = "#007a59" if mark.kind == "finished" else RED
            yield text(x + 5, y + 4.5, _ENDS[mark.kind], 12.5, ink, bold=True)
    left = WIDTH - _RIGHT + 30
    some = bool(lane.recovered or lane.adopted)
    yield text(left, y - 1, _facts(lane), 12, TEXT if some else MUTED, bold=some)
    if lane.num_output_tokens:
        words = f"{plural(lane.num_output_tokens, 'token')} out"
        if lane.ttft_ms is not None and scale.axis == "ms":
            words = f"TTFT {time_words(lane.ttft_ms)} · {words}"
        yield text(left, y + 11, words, 10.5, MUTED)


def _facts(lane: Lane) -> str:
    if lane.is_forked:
        return f"the prompt of {lane.sample_of}"
    if lane.recovered is None:
        return "not looked up"
    if lane.adopted and not lane.recovered:
        return f"{lane.adopted:,} of {lane.num_prompt_tokens:,} adopted"
    if lane.adopted:
        return f"{lane.recovered:,} recovered, {lane.adopted:,} adopted"
    return f"{lane.recovered:,} of {lane.num_prompt_tokens:,} recovered"


_SHAPES = {"recovered", "adopted", "copied"}


def _shape(kind: str, x: float, y: float) -> str:
    """Draw the mark of one kind with its middle at (x, y)."""
    return two_sheets(x, y) if kind == "copied" else diamond(x, y, SKY if kind == "recovered" else GROUND, 0.8)


def _arrow(arrow: Arrow, places: Mapping[str, float], scale: _Scale) -> str:
    targets = [places[name] for name in arrow.to_ids if name in places]
    start = places.get(arrow.from_id)
    if start is None or not targets:
        return ""
    x = scale(arrow.at)
    ink = {"handover": RED, "fork": "#007a59", "beside": MUTED}.get(arrow.kind, TEXT)
    line = f"M{number(x)} {number(min(start, *targets))} V{number(max(start, *targets))}"
    dash = {"handover": "4 3", "beside": "1.5 3"}.get(arrow.kind)
    out = el("path", d=line, stroke=ink, stroke_width=1.6, stroke_dasharray=dash)
    out += el("circle", cx=x, cy=start, r=3.6, fill=ink)
    for y in targets:
        if arrow.kind == "beside":  # tied, but nobody is released
            out += el("circle", cx=x, cy=y, r=3.6, fill=GROUND, stroke=ink, stroke_width=1.6)
            continue
        d = f"M{number(x - 1)} {number(y - 5)} l9 5 l-9 5 z"
        out += el("path", d=d, fill=ink, stroke=GROUND, stroke_width=1)
    return out


def _legend(y: float) -> str:
    x = float(_LEFT)
    out = ""
    for phase in Phase:
        words = {"prefill": "prefill (tokens)", "decode": "decode (tokens)"}.get(phase.value, phase.value)
        out += rect(
            x,
            y - 9,
            17,
            10,
            _FILLS[phase],
            rx=2,
            stroke=_STROKES.get(phase),
            stroke_dasharray="3 2" if phase is Phase.WAITING else None,
        )
        out += text(x + 23, y, words, 11, MUTED)
        x += 23 + len(words) * 5.9 + 16
    out += el("circle", cx=x + 4, cy=y - 4, r=3.2, fill=TEXT) + text(x + 12, y, "first token", 11, MUTED)
    x += 12 + 11 * 5.9 + 16
    return out + diamond(x + 4, y - 4, SKY) + text(x + 13, y, "recovered from the cache", 11, MUTED)


_MORE_WORDS = {
    "adopted": "adopted in mid-prefill",
    "copied": "block copied on write",
    "fork": "samples begin on the same blocks",
    "beside": "computes beside another",
}


def _more_legend(y: float, seen: set[str]) -> str:
    """Explain the marks and ties that not every timeline has; "" if this one has none of them."""
    x = float(_LEFT)
    out = ""
    for kind, words in _MORE_WORDS.items():
        if kind not in seen:
            continue
        if kind in _SHAPES:
            out += _shape(kind, x + 5, y - 4)
        else:
            ink, dash = ("#007a59", None) if kind == "fork" else (MUTED, "1.5 3")
            line = f"M{number(x + 5)} {number(y - 10)} v12"
            out += el("path", d=line, stroke=ink, stroke_width=1.6, stroke_dasharray=dash)
            out += el("circle", cx=x + 5, cy=y - 10, r=2.6, fill=ink)
        out += text(x + 15, y, words, 11, MUTED)
        x += 15 + len(words) * 5.9 + 16
    return out
