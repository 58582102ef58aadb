"""The lanes of a timeline: what each request was doing at each time, as a fold over the log.

Knows events and what their times mean. Must not know how a lane is drawn.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

from minivllm.log import events as ev


class Phase(enum.Enum):
    """What a request is doing between its arrival and its end."""

    WAITING = "waiting"  # for admission: a free row, token budget or blocks
    HELD = "held"  # behind its leader, or behind the first sample of its prompt
    PREFILL = "prefill"  # from admission to the first token out
    DECODE = "decode"
    PREEMPTED = "preempted"  # freed its blocks and waits to be admitted again


@dataclass(slots=True)
class Span:
    """One phase of one request, on the engine's clock; ``end_ms`` is None while it lasts."""

    phase: Phase
    start_ms: float
    end_ms: float | None = None


class Happening(enum.Enum):
    """An event in a lane that has no duration."""

    FORKED = "forked"  # its prompt was computed, and its further samples started on the same blocks
    JOINED = "joined"  # it is one of these samples
    COPIED = "copied"  # copied a block that other samples read, to write into it (copy on write)
    ADOPTED = "adopted"  # took blocks during its prefill that others had published


@dataclass(slots=True)
class Lane:
    """The phases and events of one request. ``end`` is "length", "stop", "abort" or "error", None before its end.

    ``behind`` is the id of the request that a held one waits for, ``awaited_block`` the index of the block, if it waits
    for one. ``role`` is as in `RequestMetrics`. ``happenings`` have times in ms on the engine's clock.
    """

    request_id: str
    role: str = "independent"
    spans: list[Span] = field(default_factory=list)
    happenings: list[tuple[Happening, float]] = field(default_factory=list)
    behind: str | None = None
    awaited_block: int | None = None
    end: str | None = None

    @property
    def held_words(self) -> str:
        """What the request waits for, as text: "behind r0", "behind r0 for block 3"."""
        block = "" if self.awaited_block is None else f" for block {self.awaited_block:,}"
        return f"behind {self.behind}{block}"

    @property
    def phase(self) -> Phase | None:
        """The current phase; None before the request's arrival and after its end."""
        return self.spans[-1].phase if self.spans and self.end is None else None

    def enter(self, phase: Phase, ms: float) -> None:
        """End the current phase, if any, and begin ``phase``. Does nothing if that is the current one."""
        if self.spans and self.spans[-1].end_ms is None:
            if self.spans[-1].phase is phase:
                return
            self.spans[-1].end_ms = ms
        self.spans.append(Span(phase, ms))

    def finish(self, end: str, ms: float) -> None:
        """End the lane, and its current phase."""
        self.end = end
        if self.spans:
            self.spans[-1].end_ms = ms


class Lanes:
    """The lanes of all requests by id, in order of arrival, and the times of the first arrival and the last event."""

    def __init__(self) -> None:
        self.lanes: dict[str, Lane] = {}
        self.start_ms: float | None = None
        self.now_ms = 0.0

    @classmethod
    def of(cls, events: Iterable[ev.Event]) -> Lanes:
        """Return the lanes of a whole log, or of the part of it that belongs to a race."""
        return cls().update(events)

    def update(self, events: Iterable[ev.Event]) -> Lanes:
        """Apply new events, in order, and return self."""
        for event in events:
            self.now_ms = event.ms
            self._apply(event)
        return self

    def _lane(self, request_id: str) -> Lane:
        return self.lanes.setdefault(request_id, Lane(request_id))

    def _apply(self, event: ev.Event) -> None:
        ms = event.ms
        match event:
            case ev.RequestArrived(request_id=name):
                if self.start_ms is None:
                    self.start_ms = ms
                self._lane(name).enter(Phase.WAITING, ms)
            case ev.FlightOpened(leader_id=name):
                self._lane(name).role = "leader"
            case ev.FlightJoined(request_id=name, leader_id=leader):
                lane = self._lane(name)
                lane.role, lane.behind = "follower", leader
                lane.enter(Phase.HELD, ms)
            case ev.FlightHandedOver(from_id=old, to_id=name):
                for lane in self.lanes.values():
                    if lane.behind == old and lane.phase is Phase.HELD:
                        lane.behind = name
                heir = self._lane(name)
                heir.role, heir.behind = "leader", None
                heir.enter(Phase.WAITING, ms)
            case ev.FlightReleased(request_ids=names):
                for name in names:
                    self._lane(name).enter(Phase.WAITING, ms)
            case ev.SampleHeld(request_id=name, first_id=first):
                lane = self._lane(name)
                lane.role, lane.behind = "sample", first
                lane.enter(Phase.HELD, ms)
            case ev.SampleLeads(from_id=old, to_id=name):
                for lane in self.lanes.values():
                    if lane.behind == old and lane.role == "sample" and lane.phase is Phase.HELD:
                        lane.behind = name
                heir = self._lane(name)
                heir.role, heir.behind = "independent", None
                heir.enter(Phase.WAITING, ms)
            case ev.SamplesForked(request_id=first, sample_ids=names):
                self._lane(first).happenings.append((Happening.FORKED, ms))
                for name in names:
                    lane = self._lane(name)
                    lane.behind = None
                    lane.happenings.append((Happening.JOINED, ms))
                    lane.enter(Phase.PREFILL, ms)  # a span of no length: its first token comes in the same step
            case ev.BlockCopied(request_id=name):
                self._lane(name).happenings.append((Happening.COPIED, ms))
            case ev.BlocksAdopted(request_id=name):
                self._lane(name).happenings.append((Happening.ADOPTED, ms))
            case ev.PrefixAwaited(request_id=name, leader_id=leader, block_index=index):
                lane = self._lane(name)
                lane.role, lane.behind, lane.awaited_block = "held", leader, index
                lane.enter(Phase.HELD, ms)
                if self._lane(leader).role == "independent":
                    self._lane(leader).role = "leader"
            case ev.PrefixReleased(request_ids=names):
                for name in names:
                    lane = self._lane(name)
                    lane.behind = lane.awaited_block = None
                    lane.enter(Phase.WAITING, ms)
            case ev.RequestAdmitted(request_id=name):
                self._lane(name).enter(Phase.PREFILL, ms)
            case ev.TokenOut(request_id=name):
                self._lane(name).enter(Phase.DECODE, ms)
            case ev.RequestPreempted(request_id=name):
                self._lane(name).enter(Phase.PREEMPTED, ms)
            case ev.RequestFinished(request_id=name, reason=reason):
                self._lane(name).finish(reason, ms)
            case ev.RequestAborted(request_id=name):
                self._lane(name).finish("abort", ms)
            case ev.RequestFailed(request_id=name):
                self._lane(name).finish("error", ms)
