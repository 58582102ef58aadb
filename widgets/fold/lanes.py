"""What each request did over time, as lanes: folded from the log.

Knows events. Must not know how a lane is drawn or put into words. The page folds the same lanes in ``lanes.js``.

Time has two axes. Milliseconds count from the first arrival, with the time cut out in which no request was there.
Steps: step n lies between n - 1 and n, scheduling at its left end, results at its right end.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from minivllm import log as ev
from widgets.words import keys_words

Axis = Literal["ms", "step"]


class Phase(enum.Enum):
    """What a request does during a span."""

    WAITING = "waiting"
    HELD = "held"
    PREFILL = "prefill"
    DECODE = "decode"
    PREEMPTED = "preempted"


@dataclass(frozen=True, slots=True)
class Place:
    """A moment on both axes."""

    ms: float = 0.0
    step: int = 0

    def on(self, axis: Axis) -> float:
        """Return the moment on one axis."""
        return self.ms if axis == "ms" else float(self.step)


@dataclass(slots=True)
class Span:
    """A stretch of one phase. ``end`` is None while it lasts; ``tokens`` were computed in it.

    ``behind`` is whom a held request waits for; ``blocks`` are the first and the last logical block that it waited
    for meanwhile, None if it waits for a whole prompt.
    """

    phase: Phase
    start: Place
    end: Place | None = None
    tokens: int = 0
    behind: str = ""
    blocks: tuple[int, int] | None = None
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """What happened to a request at one moment: "first", "recovered", "adopted", "copied", "leads" or its end."""

    kind: str
    at: Place


@dataclass(frozen=True, slots=True)
class Arrow:
    """What ties requests at one moment.

    Others need not wait any more ("release"), another takes the place of one that ended ("handover"), samples begin
    on the blocks of the first ("fork"), or a request computes ``block`` beside the other that does ("beside"), with
    the times in milliseconds that were weighed.
    """

    kind: str
    at: Place
    from_id: str
    to_ids: tuple[str, ...]
    reason: str = ""
    block: int = 0
    wait_ms: float = 0.0
    recompute_ms: float = 0.0


@dataclass(slots=True)
class Lane:
    """One request. ``recovered`` is None until its prefix was looked up; times are in milliseconds.

    ``role`` is "alone", "leader", "follower", "held" (it waited for a shared prefix) or "sample", of ``sample_of``,
    on whose blocks it runs once it ``is_forked``.
    """

    request_id: str
    arrival_ms: float
    num_prompt_tokens: int
    salt: str = ""
    state: str = "waiting"
    role: str = "alone"
    behind: str = ""
    reason: str = ""
    sample_of: str = ""
    is_forked: bool = False
    recovered: int | None = None
    adopted: int = 0
    num_copied_blocks: int = 0
    num_output_tokens: int = 0
    ttft_ms: float | None = None
    completion_ms: float | None = None
    spans: list[Span] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)

    def open(self, phase: Phase, at: Place, behind: str = "", blocks: tuple[int, int] | None = None) -> None:
        """Begin a span."""
        self.spans.append(Span(phase, at, behind=behind, blocks=blocks))

    def hold(self, at: Place, behind: str, block: int | None = None) -> None:
        """Begin to wait for another, or go on to wait for a later block of the same one."""
        last = self.spans[-1] if self.spans else None
        if last is not None and last.end is None and last.behind == behind and last.blocks and block is not None:
            last.blocks = (min(last.blocks[0], block), max(last.blocks[1], block))
            return
        self.state, self.behind = "held", behind
        self.close(at)
        self.open(Phase.HELD, at, behind, None if block is None else (block, block))

    def release(self, at: Place) -> None:
        """Need not wait for another any more; for a row, yet."""
        self.state, self.behind = "waiting", ""
        self.close(at)
        self.open(Phase.WAITING, at)

    def close(self, at: Place) -> None:
        """End the span that lasts, if one does."""
        if self.spans and self.spans[-1].end is None:
            self.spans[-1].end = at


@dataclass(slots=True)
class Lanes:
    """All lanes of a log, oldest arrival first, with the arrows between them and the end of the time axes."""

    lanes: list[Lane] = field(default_factory=list)
    arrows: list[Arrow] = field(default_factory=list)
    end: Place = field(default_factory=Place)

    @property
    def num_recovered_tokens(self) -> int:
        """Prompt tokens taken from the cache, over all lanes."""
        return sum(lane.recovered or 0 for lane in self.lanes)

    @property
    def num_adopted_tokens(self) -> int:
        """Tokens taken from others in mid-prefill, over all lanes."""
        return sum(lane.adopted for lane in self.lanes)

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens of all lanes that were looked up."""
        return sum(lane.num_prompt_tokens for lane in self.lanes if lane.recovered is not None)


def lanes_of(log: Iterable[ev.Event]) -> Lanes:
    """Return the lanes of a log."""
    folder = _Folder()
    for event in log:
        folder.fold(event)
    return folder.out


class _Folder:
    def __init__(self) -> None:
        self.out = Lanes()
        self._by_id: dict[str, Lane] = {}
        self._active: set[str] = set()
        self._origin: tuple[float, int] | None = None
        self._idle_ms = 0.0
        self._computed_step = 0

    def fold(self, e: ev.Event) -> None:
        apply = _FOLDS.get(type(e))
        if apply is not None:
            apply(self, e)
        if self._origin is not None and self._active:
            self.out.end = self._place(e)

    def _raw_step(self, e: ev.Event) -> int:
        return e.step if e.step == self._computed_step else max(0, e.step - 1)

    def _place(self, e: ev.Event) -> Place:
        ms, step = self._origin or (e.ms, self._raw_step(e))
        return Place(max(0.0, e.ms - ms), max(0, self._raw_step(e) - step))

    def _wake_up(self, e: ev.Event) -> None:
        if self._active:
            return
        if self._origin is None:
            self._origin = (e.ms, self._raw_step(e))
        else:
            self._origin = (self._origin[0] + e.ms - self._idle_ms, self._origin[1])

    def deferred(self, e: ev.RequestDeferred) -> None:
        self._wake_up(e)
        self._active.add(e.request_id)

    def arrived(self, e: ev.RequestArrived) -> None:
        self._wake_up(e)
        self._active.add(e.request_id)
        lane = Lane(e.request_id, e.ms, len(e.prompt_token_ids), keys_words(e.extra_keys))
        lane.open(Phase.WAITING, self._place(e))
        self._by_id[e.request_id] = lane
        self.out.lanes.append(lane)

    def opened(self, e: ev.FlightOpened) -> None:
        self._by_id[e.leader_id].role = "leader"

    def joined(self, e: ev.FlightJoined) -> None:
        lane = self._by_id[e.request_id]
        lane.role = "follower"
        lane.hold(self._place(e), e.leader_id)

    def sample_held(self, e: ev.SampleHeld) -> None:
        lane = self._by_id[e.request_id]
        lane.role, lane.sample_of = "sample", e.first_id
        lane.hold(self._place(e), e.first_id)

    def forked(self, e: ev.SamplesForked) -> None:
        at = self._place(e)
        for request_id in e.sample_ids:
            lane = self._by_id[request_id]
            lane.state, lane.behind, lane.is_forked = "running", "", True
            lane.close(at)
        self.out.arrows.append(Arrow("fork", at, e.request_id, e.sample_ids))

    def awaited(self, e: ev.PrefixAwaited) -> None:
        lane, leader = self._by_id[e.request_id], self._by_id[e.leader_id]
        lane.role = "held"
        lane.hold(self._place(e), e.leader_id, e.block_index)
        if leader.role == "alone":
            leader.role = "leader"

    def recompute_chosen(self, e: ev.RecomputeChosen) -> None:
        at, to_ids = self._place(e), (e.request_id,)
        self.out.arrows.append(
            Arrow("beside", at, e.leader_id, to_ids, "", e.block_index, e.wait_ms, e.recompute_ms),
        )

    def adopted(self, e: ev.BlocksAdopted) -> None:
        lane = self._by_id[e.request_id]
        lane.adopted += e.num_tokens
        lane.marks.append(Mark("adopted", self._place(e)))

    def copied(self, e: ev.BlockCopied) -> None:
        lane = self._by_id[e.request_id]
        lane.num_copied_blocks += 1
        lane.marks.append(Mark("copied", self._place(e)))

    def released(self, e: ev.FlightReleased | ev.PrefixReleased) -> None:
        at = self._place(e)
        for request_id in e.request_ids:
            self._by_id[request_id].release(at)
        if e.request_ids:
            self.out.arrows.append(Arrow("release", at, e.leader_id, e.request_ids, e.reason))

    def handed_over(self, e: ev.FlightHandedOver) -> None:
        self._hand_over(e.from_id, e.to_id, "leader", self._place(e))

    def sample_leads(self, e: ev.SampleLeads) -> None:
        self._hand_over(e.from_id, e.to_id, "alone", self._place(e))

    def _hand_over(self, from_id: str, to_id: str, role: str, at: Place) -> None:
        """Let ``to_id`` be what ``from_id`` was; those held behind the one are held behind the other."""
        heir = self._by_id[to_id]
        for lane in self.out.lanes:
            if lane is not heir and lane.state == "held" and lane.behind == from_id and lane.role == heir.role:
                lane.sample_of = to_id if lane.sample_of else ""
                lane.hold(at, to_id)
        heir.role, heir.sample_of = role, ""
        heir.marks.append(Mark("leads", at))
        heir.release(at)
        self.out.arrows.append(Arrow("handover", at, from_id, (to_id,)))

    def admitted(self, e: ev.RequestAdmitted) -> None:
        lane = self._by_id[e.request_id]
        lane.state = "running"
        lane.close(self._place(e))

    def looked_up(self, e: ev.PrefixLookedUp) -> None:
        lane = self._by_id[e.request_id]
        if not e.resumed:
            lane.recovered = e.num_recovered_tokens
        if e.num_recovered_tokens:
            lane.marks.append(Mark("recovered", self._place(e)))

    def scheduled(self, e: ev.StepScheduled) -> None:
        at = self._place(e)
        for request_id, _, _, phase in e.rows:
            lane = self._by_id[request_id]
            last = lane.spans[-1]
            if phase == "decode" and last.phase is Phase.DECODE:
                last.end = None  # decode steps make one bar
            else:
                lane.open(Phase(phase), at)

    def computed(self, e: ev.ChunkComputed) -> None:
        self._computed_step = e.step
        lane = self._by_id[e.request_id]
        if lane.spans[-1].end is None:
            lane.spans[-1].tokens += e.num_tokens
        lane.close(self._place(e))

    def step_failed(self, e: ev.StepFailed) -> None:
        self._computed_step = e.step
        for lane in self.out.lanes:
            if lane.state == "running" and lane.spans[-1].end is None:
                lane.close(self._place(e))
                lane.spans[-1].failed = True

    def token_out(self, e: ev.TokenOut) -> None:
        lane = self._by_id[e.request_id]
        lane.num_output_tokens += 1
        if e.index == 0:
            lane.ttft_ms = e.ms - lane.arrival_ms
            lane.marks.append(Mark("first", self._place(e)))

    def preempted(self, e: ev.RequestPreempted) -> None:
        lane = self._by_id[e.request_id]
        lane.state = "preempted"
        lane.close(self._place(e))
        lane.open(Phase.PREEMPTED, self._place(e))

    def ended(self, e: ev.RequestFinished | ev.RequestAborted | ev.RequestFailed) -> None:
        how = e.kind.removeprefix("request_")
        self.out.end = at = self._place(e)
        lane = self._by_id.get(e.request_id)
        if lane is not None:
            lane.state = how
            lane.reason = getattr(e, "reason", getattr(e, "error", ""))
            lane.completion_ms = e.ms - lane.arrival_ms
            lane.close(at)
            lane.marks.append(Mark(how, at))
        self._active.discard(e.request_id)
        if not self._active:
            self._idle_ms = e.ms


_FOLDS: Mapping[type[ev.Event], Any] = {
    ev.RequestDeferred: _Folder.deferred,
    ev.RequestArrived: _Folder.arrived,
    ev.FlightOpened: _Folder.opened,
    ev.FlightJoined: _Folder.joined,
    ev.FlightReleased: _Folder.released,
    ev.FlightHandedOver: _Folder.handed_over,
    ev.SampleHeld: _Folder.sample_held,
    ev.SampleLeads: _Folder.sample_leads,
    ev.SamplesForked: _Folder.forked,
    ev.BlockCopied: _Folder.copied,
    ev.BlocksAdopted: _Folder.adopted,
    ev.PrefixAwaited: _Folder.awaited,
    ev.PrefixReleased: _Folder.released,
    ev.RecomputeChosen: _Folder.recompute_chosen,
    ev.RequestAdmitted: _Folder.admitted,
    ev.PrefixLookedUp: _Folder.looked_up,
    ev.StepScheduled: _Folder.scheduled,
    ev.ChunkComputed: _Folder.computed,
    ev.StepFailed: _Folder.step_failed,
    ev.TokenOut: _Folder.token_out,
    ev.RequestPreempted: _Folder.preempted,
    ev.RequestFinished: _Folder.ended,
    ev.RequestAborted: _Folder.ended,
    ev.RequestFailed: _Folder.ended,
}
