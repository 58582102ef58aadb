"""Timelines: a lane for each request, as a picture and as text.

Knows lanes. Must not know states, blocks or engines. ``axis`` is "ms" (the engine's clock) or "step" (the same on
every machine, whatever the model).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from minivllm.errors import ConfigError
from minivllm.log import events as ev
from widgets.lanes import Arrow, Axis, Lane, Lanes, Phase, Place, Span, lanes_of
from widgets.svg import (
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
    plural,
    rect,
    text,
    two_sheets,
)
from widgets.words import count_range

_ENDS = {"finished": "✓", "aborted": "✕", "failed": "!"}
_LANE_WORDS = {"finished": "done"}
_RELEASES = {
    "prefill": "its prompt is published",
    "finished": "it has ended",
    "published": "the awaited block is published",
    "ended": "it has ended",
}
_MAX_TICKS = 8


def _time(ms: float) -> str:
    # Halves go up, as on the page.
    return f"{math.floor(ms + 0.5):,} ms" if ms >= 10 else f"{number(ms)} ms"


def _moment_words(place: Place, axis: Axis) -> str:
    return _time(place.ms) if axis == "ms" else f"step {place.step}"


def _span_words(span: Span, axis: Axis, end: Place) -> str:
    what_for = f" for {count_range(*span.blocks, 'block')}" if span.blocks else ""
    what = {
        Phase.WAITING: "waiting",
        Phase.HELD: f"held behind {span.behind}{what_for}",
        Phase.PREEMPTED: "preempted",
        Phase.PREFILL: f"prefill {span.tokens:,}",
        Phase.DECODE: f"decode {span.tokens:,}",
    }[span.phase]
    last = span.end or end
    if axis == "ms":
        return f"{what} ({_time(span.start.ms).removesuffix(' ms')} to {_time(last.ms)})"
    first, final = span.start.step + 1, last.step
    return f"{what} (step {first})" if first >= final else f"{what} (steps {first} to {final})"


def _shown_spans(lane: Lane, axis: Axis) -> list[Span]:
    return [span for span in lane.spans if span.end is None or span.end.on(axis) > span.start.on(axis)]


def _lane_role(lane: Lane) -> str:
    return "independent" if lane.role == "alone" else lane.role


def _arrow_words(arrow: Arrow, axis: Axis) -> str:
    when = _moment_words(arrow.at, axis)
    others = ", ".join(arrow.to_ids)
    if arrow.kind == "handover":
        return f"{arrow.from_id} hands over to {others} ({when})"
    if arrow.kind == "fork":
        begin = "begins" if len(arrow.to_ids) == 1 else "begin"
        return f"{others} {begin} on the blocks of {arrow.from_id} ({when}): the prompt of these samples is computed"
    if arrow.kind == "beside":
        if axis == "step":
            when = f"step {arrow.at.step + 1}"  # chosen at the beginning of this step
        times = f"first token in {_time(arrow.recompute_ms)}, or in {_time(arrow.wait_ms)} if it waited"
        return f"{others} computes block {arrow.block:,} beside {arrow.from_id} ({when}): {times}"
    why = _RELEASES.get(arrow.reason, f"it was {arrow.reason}")
    return f"{arrow.from_id} releases {others} ({when}): {why}"


def timeline_text(log: Iterable[ev.Event], axis: Axis = "ms") -> str:
    """Return each request's way in words, one line a request, then what happened to the flights.

    ``axis`` "step" says nothing of time and is the same on every machine.
    """
    lanes = lanes_of(log)
    return "\n".join(_timeline_lines(lanes, _checked_axis(axis)))


def _timeline_lines(lanes: Lanes, axis: Axis) -> list[str]:
    lines = []
    name_width = max((len(lane.request_id) for lane in lanes.lanes), default=0)
    role_width = max((len(_lane_role(lane)) for lane in lanes.lanes), default=0)
    for lane in lanes.lanes:
        way = [_span_words(span, axis, lanes.end) for span in _shown_spans(lane, axis)]
        way.append(_LANE_WORDS.get(lane.state, lane.state))
        facts = f"recovered {lane.recovered or 0:,} of {lane.num_prompt_tokens:,}"
        if lane.is_forked:
            facts = f"the prompt of {lane.sample_of}"
        if lane.adopted:
            facts += f", adopted {lane.adopted:,}"
        if lane.num_copied_blocks:
            facts += f", {plural(lane.num_copied_blocks, 'block')} copied on write"
        if axis == "ms" and lane.ttft_ms is not None:
            facts += f", TTFT {_time(lane.ttft_ms)}"
        lines.append(f"{lane.request_id:<{name_width}}  {_lane_role(lane):<{role_width}}  {' → '.join(way)}; {facts}")
    lines.extend(_arrow_words(arrow, axis) for arrow in lanes.arrows)
    if not lines:
        lines.append("no request")
    else:
        lines.append(f"in all {_sums(lanes)}")
    return lines


def _sums(lanes: Lanes) -> str:
    adopted = f", {lanes.num_adopted_tokens:,} adopted" if lanes.num_adopted_tokens else ""
    return f"{lanes.num_recovered_tokens:,} of {lanes.num_prompt_tokens:,} prompt tokens recovered{adopted}"


def picture_timeline(log: Iterable[ev.Event], title: str | None = None, axis: Axis = "ms") -> Picture:
    """Draw a lane for each request: waiting, held, prefill, decode, preempted, done; leader tied to followers."""
    return _timelines({title or "Timeline": lanes_of(log)}, _checked_axis(axis), title or "timeline")


def compare_timelines(logs: Mapping[str, Iterable[ev.Event]], axis: Axis = "ms") -> Picture:
    """Draw the timelines of several logs, one below the other, on one axis. Raises ConfigError for none."""
    if not logs:
        raise ConfigError("there is no log to compare; give at least one, such as {'cold': engine.log}")
    return _timelines({name: lanes_of(log) for name, log in logs.items()}, _checked_axis(axis), " and ".join(logs))


def _checked_axis(axis: Axis) -> Axis:
    if axis not in ("ms", "step"):
        raise ConfigError(f"axis is {axis!r}; it must be 'ms' or 'step'")
    return axis


_LEFT, _RIGHT, _BAR = 112, 214, 17


def _timelines(groups: Mapping[str, Lanes], axis: Axis, name: str) -> Picture:
    end = max((lanes.end.on(axis) for lanes in groups.values()), default=0.0) or 1.0
    plot = WIDTH - _LEFT - _RIGHT
    scale = _Scale(_LEFT, plot, end, axis)
    body: list[str] = []
    y = 14.0
    for title, lanes in groups.items():
        body.append(text(18, y + 16, title, 14, bold=True))
        body.append(text(WIDTH - 18, y + 16, _sums(lanes), 12, MUTED, anchor="end"))
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
        lines += [f"{title}:", *_timeline_lines(lanes, axis)]
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
    state = _LANE_WORDS.get(lane.state, lane.state)
    yield text(18, y - 1, lane.request_id, 12.5, bold=True)
    role = "was held" if lane.role == "held" else lane.role
    yield text(18, y + 11, state if lane.role in ("alone", state) else f"{role} · {state}", 10.5, MUTED)
    for span in _shown_spans(lane, scale.axis):
        x = scale(span.start)
        # A hair between two bars, so that neighbouring chunks of prefill can be told apart.
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
        long = _span_words(span, scale.axis, end).partition(" (")[0]
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
            words = f"TTFT {_time(lane.ttft_ms)} · {words}"
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
        if arrow.kind == "beside":  # tied, but nobody lets anybody go
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
