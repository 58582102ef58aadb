"""Timelines in words: each request's way, then what tied requests to each other.

Knows lanes. Must not know blocks, or how a lane is drawn. ``axis`` is "ms" (the engine's clock) or "step" (the same on
every machine, whatever the model).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from minivllm import log as ev
from minivllm.errors import ConfigError
from widgets.fold import Arrow, Axis, Lane, Lanes, Phase, Place, Span, lanes_of
from widgets.words import count_range, plural

LANE_WORDS = {"finished": "done"}
_RELEASES = {
    "prefill": "its prompt is published",
    "finished": "it has ended",
    "published": "the awaited block is published",
    "cached": "their prompt is cached now",
    "ended": "it has ended",
}


def time_words(ms: float) -> str:
    """Return milliseconds in words. Halves go up, as on the page."""
    return f"{math.floor(ms + 0.5):,} ms" if ms >= 10 else f"{ms:.1f}".removesuffix(".0") + " ms"


def _moment_words(place: Place, axis: Axis) -> str:
    return time_words(place.ms) if axis == "ms" else f"step {place.step}"


def span_words(span: Span, axis: Axis, end: Place) -> str:
    """Return what a request did during a span, and when."""
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
        return f"{what} ({time_words(span.start.ms).removesuffix(' ms')} to {time_words(last.ms)})"
    first, final = span.start.step + 1, last.step
    return f"{what} (step {first})" if first >= final else f"{what} (steps {first} to {final})"


def shown_spans(lane: Lane, axis: Axis) -> list[Span]:
    """Return the spans of a lane that have a length on the axis."""
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
        times = f"first token in {time_words(arrow.recompute_ms)}, or in {time_words(arrow.wait_ms)} if it waited"
        return f"{others} computes block {arrow.block:,} beside {arrow.from_id} ({when}): {times}"
    why = _RELEASES.get(arrow.reason, f"it was {arrow.reason}")
    return f"{arrow.from_id} releases {others} ({when}): {why}"


def timeline_text(log: Iterable[ev.Event], axis: Axis = "ms") -> str:
    """Return each request's way in words, one line a request, then what happened to the flights.

    ``axis`` "step" says nothing of time and is the same on every machine.
    """
    lanes = lanes_of(log)
    return "\n".join(timeline_lines(lanes, checked_axis(axis)))


def timeline_lines(lanes: Lanes, axis: Axis) -> list[str]:
    """Return a line for each lane and each arrow, and the sum."""
    lines = []
    name_width = max((len(lane.request_id) for lane in lanes.lanes), default=0)
    role_width = max((len(_lane_role(lane)) for lane in lanes.lanes), default=0)
    for lane in lanes.lanes:
        way = [span_words(span, axis, lanes.end) for span in shown_spans(lane, axis)]
        way.append(LANE_WORDS.get(lane.state, lane.state))
        facts = f"recovered {lane.recovered or 0:,} of {lane.num_prompt_tokens:,}"
        if lane.is_forked:
            facts = f"the prompt of {lane.sample_of}"
        if lane.adopted:
            facts += f", adopted {lane.adopted:,}"
        if lane.num_copied_blocks:
            facts += f", {plural(lane.num_copied_blocks, 'block')} copied on write"
        if axis == "ms" and lane.ttft_ms is not None:
            facts += f", TTFT {time_words(lane.ttft_ms)}"
        lines.append(f"{lane.request_id:<{name_width}}  {_lane_role(lane):<{role_width}}  {' → '.join(way)}; {facts}")
    lines.extend(_arrow_words(arrow, axis) for arrow in lanes.arrows)
    if not lines:
        lines.append("no request")
    else:
        lines.append(f"in all {sums(lanes)}")
    return lines


def sums(lanes: Lanes) -> str:
    """Return what all lanes recovered together."""
    adopted = f", {lanes.num_adopted_tokens:,} adopted" if lanes.num_adopted_tokens else ""
    return f"{lanes.num_recovered_tokens:,} of {lanes.num_prompt_tokens:,} prompt tokens recovered{adopted}"


def checked_axis(axis: Axis) -> Axis:
    """Return the axis. Raises ConfigError for one that does not exist."""
    if axis not in ("ms", "step"):
        raise ConfigError(f"axis is {axis!r}; it must be 'ms' or 'step'")
    return axis
