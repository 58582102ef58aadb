"""What each request was doing when: the lanes of a timeline, as a fold over the log.

Knows events and what their times mean. Must not know how a lane is drawn.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

from minivllm.log import events as ev


class Phase(enum.Enum):
    """What a request is doing between its arrival and its end."""

    WAITING = "waiting"  # for a row, for tokens of the budget, or for blocks
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
    """What happens to a request at one moment."""

    FORKED = "forked"  # its prompt is computed: its further samples run on the same blocks
    JOINED = "joined"  # it is such a sample
    COPIED = "copied"  # copied a block that other samples read, before it wrote into it
    ADOPTED = "adopted"  # took blocks in mid-prefill that others had published


@dataclass(slots=True)
class Lane:
    """One request's way. ``end`` is "length", "stop", "abort" or "error", and None while it runs.

    ``behind`` names whom a held request waits for, and ``awaited_block`` the logical block, if it waits for one.
    ``role`` is as in the figures of `RequestMetrics`. ``happenings`` have their moments on the engine's clock.
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
        """Whom it waits for, and for what: "behind r0", "behind r0 for block 3"."""
        block = "" if self.awaited_block is None else f" for block {self.awaited_block:,}"
        return f"behind {self.behind}{block}"

    @property
    def phase(self) -> Phase | None:
        """What it is doing now; None before it has arrived and after its end."""
        return self.spans[-1].phase if self.spans and self.end is None else None

    def enter(self, phase: Phase, ms: float) -> None:
        """Leave the present phase, if any, and begin another."""
        if self.spans and self.spans[-1].end_ms is None:
            if self.spans[-1].phase is phase:
                return
            self.spans[-1].end_ms = ms
        self.spans.append(Span(phase, ms))

    def finish(self, end: str, ms: float) -> None:
        """The request has ended, in whatever way."""
        self.end = end
        if self.spans:
            self.spans[-1].end_ms = ms


class Lanes:
    """All requests of a log by id, in the order of their arrival, and the clock at the last event."""

    def __init__(self) -> None:
        self.lanes: dict[str, Lane] = {}
        self.start_ms: float | None = None
        self.now_ms = 0.0

    @classmethod
    def of(cls, events: Iterable[ev.Event]) -> Lanes:
        """Return the lanes of a whole log, or of the part of it that belongs to a race."""
        return cls().update(events)

    def update(self, events: Iterable[ev.Event]) -> Lanes:
        """Fold in events that are new, in order, and return self."""
        for event in events:
            self.now_ms = event.ms
            self._take(event)
        return self

    def _lane(self, request_id: str) -> Lane:
        return self.lanes.setdefault(request_id, Lane(request_id))

    def _take(self, event: ev.Event) -> None:
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
                    lane.enter(Phase.PREFILL, ms)  # no time passes until its first token is out
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
