"""The state at any moment, as a pure fold over the log.

`State` is what the engine is between two steps: blocks, free queue, index, requests, lists, flights. Folding a
log to its end gives exactly `EngineCore.state()`: a test holds the two equal after every action. Views and the
time slider fold the same events, so that what they show is what the engine is.

Knows events only, and the two tables of transitions: a log that says what cannot be is refused. Must not look into
the engine, and adds nothing that an event does not say.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from minivllm import events as ev
from minivllm.block_pool import BLOCK_TRANSITIONS, BlockAction, BlockState
from minivllm.errors import InvariantError
from minivllm.request import TRANSITIONS, RequestState


@dataclass(slots=True)
class BlockView:
    """One block: its state, how many block tables it is in, and the hashes (hexadecimal, "" for none)."""

    state: BlockState = BlockState.FREE
    ref_count: int = 0
    block_hash: str = ""

    def move(self, action: BlockAction) -> None:
        """Let something happen to the block. Raises InvariantError for what `BLOCK_TRANSITIONS` does not have."""
        state = BLOCK_TRANSITIONS.get((self.state, action))
        if state is None:
            raise InvariantError(
                f"the log says {action.value!r} of a block that is {self.state.value}: it cannot be so"
            )
        self.state = state


@dataclass(slots=True)
class RequestView:
    """One request that has arrived or is to arrive: what it has computed, put out and holds."""

    state: RequestState
    arrival: int = -1
    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    num_recovered_tokens: int = 0
    num_adopted_tokens: int = 0
    num_preemptions: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    rank: int = 0
    sample_of: str = ""  # the first sample, while this one is held behind it

    def move(self, state: RequestState) -> None:
        """Change the state. Raises InvariantError for a move that `TRANSITIONS` does not have."""
        if state not in TRANSITIONS[self.state]:
            raise InvariantError(f"the log moves a request from {self.state.value} to {state.value}: it cannot be so")
        self.state = state


@dataclass(slots=True)
class FlightView:
    """One open flight: who leads and who is held behind, oldest first."""

    leader_id: str
    follower_ids: list[str] = field(default_factory=list)


@dataclass
class State:
    """The engine between two steps.

    ``free_queue`` goes from the head (reused next) to the end; ``prefix_index`` from hash to block id. ``samples``
    are held behind the first sample of their prompt, ``awaiting`` says behind whom a request is held that waits for
    a shared prefix.
    """

    blocks: dict[int, BlockView] = field(default_factory=dict)
    free_queue: OrderedDict[int, None] = field(default_factory=OrderedDict)
    prefix_index: dict[str, int] = field(default_factory=dict)
    requests: dict[str, RequestView] = field(default_factory=dict)
    waiting: list[str] = field(default_factory=list)
    running: list[str] = field(default_factory=list)
    flights: dict[int, FlightView] = field(default_factory=dict)
    released_request_ids: set[str] = field(default_factory=set)
    samples: dict[str, list[str]] = field(default_factory=dict)
    awaiting: dict[str, str] = field(default_factory=dict)

    def __eq__(self, other: object) -> bool:
        """Compare everything, the order of the free queue and of the lists included."""
        return isinstance(other, State) and self.as_dict() == other.as_dict()

    def as_dict(self) -> dict[str, Any]:
        """Return the state as plain JSON values; the browser's fold gives the same."""
        return {
            "blocks": {
                str(i): {"state": b.state.value, "ref_count": b.ref_count, "block_hash": b.block_hash}
                for i, b in self.blocks.items()
            },
            "free_queue": list(self.free_queue),
            "prefix_index": dict(self.prefix_index),
            "requests": {
                i: {
                    "state": r.state.value,
                    "arrival": r.arrival,
                    "num_prompt_tokens": r.num_prompt_tokens,
                    "num_computed_tokens": r.num_computed_tokens,
                    "num_recovered_tokens": r.num_recovered_tokens,
                    "num_adopted_tokens": r.num_adopted_tokens,
                    "num_preemptions": r.num_preemptions,
                    "output_token_ids": list(r.output_token_ids),
                    "block_ids": list(r.block_ids),
                    "rank": r.rank,
                }
                for i, r in self.requests.items()
            },
            "waiting": list(self.waiting),
            "running": list(self.running),
            "flights": {
                str(i): {"leader_id": f.leader_id, "follower_ids": list(f.follower_ids)}
                for i, f in self.flights.items()
            },
            "released_request_ids": sorted(self.released_request_ids),
            "samples": {i: list(held) for i, held in self.samples.items()},
            "awaiting": dict(sorted(self.awaiting.items())),
        }

    # -- small moves that several events share -------------------------------------------------------------

    def enqueue(self, request_ids: tuple[str, ...]) -> None:
        """Put requests into the waiting list by rank and arrival, behind preempted ones of their rank."""
        for request_id in request_ids:
            self.requests[request_id].move(RequestState.WAITING)
            bisect.insort_right(self.waiting, request_id, key=self.place)

    def place(self, request_id: str) -> tuple[int, int]:
        """Return a request's sort key in the waiting list. Sorting is stable: preempted ones keep their order."""
        view = self.requests[request_id]
        return view.rank, -1 if view.state is RequestState.PREEMPTED else view.arrival

    def hold(self, request_id: str) -> None:
        """Take a request out of the waiting list."""
        self.requests[request_id].move(RequestState.HELD)
        if self.waiting[-1] == request_id:  # it has just arrived: no search
            self.waiting.pop()
        else:
            self.waiting.remove(request_id)

    def end(self, request_id: str, state: RequestState) -> None:
        """Take a request out of every list."""
        view = self.requests[request_id]
        view.move(state)
        if request_id in self.waiting:
            self.waiting.remove(request_id)
        if request_id in self.running:
            self.running.remove(request_id)
        self.released_request_ids.discard(request_id)
        self.awaiting.pop(request_id, None)
        if (first := view.sample_of) and request_id in self.samples.get(first, ()):
            self.samples[first].remove(request_id)
            if not self.samples[first]:
                del self.samples[first]


def _engine_started(state: State, e: ev.EngineStarted) -> None:
    state.blocks = {block_id: BlockView() for block_id in range(1, e.num_blocks + 1)}
    state.free_queue = OrderedDict.fromkeys(state.blocks)


def _request_deferred(state: State, e: ev.RequestDeferred) -> None:
    state.requests[e.request_id] = RequestView(RequestState.DEFERRED)


def _request_arrived(state: State, e: ev.RequestArrived) -> None:
    view = RequestView(RequestState.WAITING, e.arrival, len(e.prompt_token_ids), rank=e.rank)
    state.requests[e.request_id] = view
    bisect.insort_right(state.waiting, e.request_id, key=state.place)


def _request_admitted(state: State, e: ev.RequestAdmitted) -> None:
    state.requests[e.request_id].move(RequestState.RUNNING)
    state.waiting.remove(e.request_id)
    state.running.append(e.request_id)


def _prefix_looked_up(state: State, e: ev.PrefixLookedUp) -> None:
    view = state.requests[e.request_id]
    view.num_computed_tokens = e.num_recovered_tokens
    if not e.resumed:
        view.num_recovered_tokens = e.num_recovered_tokens


def _chunk_computed(state: State, e: ev.ChunkComputed) -> None:
    state.requests[e.request_id].num_computed_tokens = e.start + e.num_tokens


def _token_out(state: State, e: ev.TokenOut) -> None:
    state.requests[e.request_id].output_token_ids.append(e.token_id)


def _request_preempted(state: State, e: ev.RequestPreempted) -> None:
    view = state.requests[e.request_id]
    view.move(RequestState.PREEMPTED)
    view.num_computed_tokens = 0
    view.num_preemptions += 1
    state.running.remove(e.request_id)
    bisect.insort_left(state.waiting, e.request_id, key=state.place)


def _request_finished(state: State, e: ev.RequestFinished) -> None:
    state.end(e.request_id, RequestState.FINISHED)


def _request_aborted(state: State, e: ev.RequestAborted) -> None:
    state.end(e.request_id, RequestState.ABORTED)


def _request_failed(state: State, e: ev.RequestFailed) -> None:
    state.end(e.request_id, RequestState.FAILED)


def _take_hits(state: State, block_ids: tuple[int, ...]) -> None:
    for block_id in block_ids:
        block = state.blocks[block_id]
        block.move(BlockAction.HIT)
        block.ref_count += 1
        state.free_queue.pop(block_id, None)


def _blocks_hit(state: State, e: ev.BlocksHit) -> None:
    _take_hits(state, e.block_ids)
    state.requests[e.request_id].block_ids.extend(e.block_ids)


def _blocks_evicted(state: State, e: ev.BlocksEvicted) -> None:
    for block_id, block_hash in zip(e.block_ids, e.block_hashes, strict=True):
        block = state.blocks[block_id]
        block.move(BlockAction.EVICT)
        block.block_hash = ""
        del state.prefix_index[block_hash]


def _blocks_allocated(state: State, e: ev.BlocksAllocated) -> None:
    for block_id in e.block_ids:
        block = state.blocks[block_id]
        block.move(BlockAction.ALLOCATE)
        block.ref_count = 1
        del state.free_queue[block_id]
    state.requests[e.request_id].block_ids.extend(e.block_ids)


def _blocks_published(state: State, e: ev.BlocksPublished) -> None:
    for block_id, block_hash in zip(e.block_ids, e.block_hashes, strict=True):
        block = state.blocks[block_id]
        block.move(BlockAction.PUBLISH)
        block.block_hash = block_hash
        state.prefix_index[block_hash] = block_id


def _blocks_freed(state: State, e: ev.BlocksFreed) -> None:
    for block_id in (*e.to_front, *e.to_back, *e.still_held):
        state.blocks[block_id].ref_count -= 1
    for block_id in reversed(e.to_front):
        state.free_queue[block_id] = None
        state.free_queue.move_to_end(block_id, last=False)
    for block_id in e.to_back:
        state.free_queue[block_id] = None
    for block_id in (*e.to_front, *e.to_back):
        state.blocks[block_id].move(BlockAction.FREE)
    state.requests[e.request_id].block_ids.clear()


def _block_copied(state: State, e: ev.BlockCopied) -> None:
    state.blocks[e.source_block_id].ref_count -= 1
    block = state.blocks[e.block_id]
    block.move(BlockAction.ALLOCATE)
    block.ref_count = 1
    del state.free_queue[e.block_id]
    table = state.requests[e.request_id].block_ids
    table[table.index(e.source_block_id)] = e.block_id


def _blocks_adopted(state: State, e: ev.BlocksAdopted) -> None:
    _take_hits(state, e.block_ids)
    view = state.requests[e.request_id]
    view.block_ids.extend(e.block_ids)
    view.num_computed_tokens += e.num_tokens
    view.num_adopted_tokens += e.num_tokens


def _sample_held(state: State, e: ev.SampleHeld) -> None:
    state.requests[e.request_id].sample_of = e.first_id
    state.samples.setdefault(e.first_id, []).append(e.request_id)
    state.hold(e.request_id)


def _sample_leads(state: State, e: ev.SampleLeads) -> None:
    state.requests[e.to_id].sample_of = ""
    rest = [i for i in state.samples.pop(e.from_id) if i != e.to_id]
    for request_id in rest:
        state.requests[request_id].sample_of = e.to_id
    if rest:
        state.samples[e.to_id] = rest
    state.enqueue((e.to_id,))


def _samples_forked(state: State, e: ev.SamplesForked) -> None:
    first = state.requests[e.request_id]
    for sample_id in e.sample_ids:
        view = state.requests[sample_id]
        view.move(RequestState.RUNNING)
        view.sample_of = ""
        view.num_computed_tokens = first.num_computed_tokens
        view.block_ids = list(e.block_ids)
        state.running.append(sample_id)
    for block_id in e.block_ids:
        state.blocks[block_id].move(BlockAction.FORK)
        state.blocks[block_id].ref_count += len(e.sample_ids)
    del state.samples[e.request_id]


def _prefix_awaited(state: State, e: ev.PrefixAwaited) -> None:
    if e.request_id not in state.awaiting:
        state.hold(e.request_id)
    state.awaiting[e.request_id] = e.leader_id


def _prefix_released(state: State, e: ev.PrefixReleased) -> None:
    for request_id in e.request_ids:
        del state.awaiting[request_id]
    state.enqueue(e.request_ids)


def _cache_reset(state: State, e: ev.CacheReset) -> None:
    for block_id in e.block_ids:
        block = state.blocks[block_id]
        del state.prefix_index[block.block_hash]
        block.move(BlockAction.RESET)
        block.block_hash = ""


def _flight_opened(state: State, e: ev.FlightOpened) -> None:
    state.flights[e.flight_id] = FlightView(e.leader_id)


def _flight_joined(state: State, e: ev.FlightJoined) -> None:
    state.flights[e.flight_id].follower_ids.append(e.request_id)
    state.hold(e.request_id)


def _flight_released(state: State, e: ev.FlightReleased) -> None:
    del state.flights[e.flight_id]
    if e.reason == "prefill":
        state.released_request_ids.add(e.leader_id)
    state.released_request_ids.update(e.request_ids)
    state.enqueue(e.request_ids)


def _flight_handed_over(state: State, e: ev.FlightHandedOver) -> None:
    flight = state.flights[e.flight_id]
    flight.leader_id = e.to_id
    flight.follower_ids.remove(e.to_id)
    state.enqueue((e.to_id,))


def _flight_left(state: State, e: ev.FlightLeft) -> None:
    state.flights[e.flight_id].follower_ids.remove(e.request_id)


_FOLDS: dict[type[ev.Event], Callable[[State, Any], None]] = {
    ev.EngineStarted: _engine_started,
    ev.RequestDeferred: _request_deferred,
    ev.RequestArrived: _request_arrived,
    ev.RequestAdmitted: _request_admitted,
    ev.PrefixLookedUp: _prefix_looked_up,
    ev.ChunkComputed: _chunk_computed,
    ev.TokenOut: _token_out,
    ev.RequestPreempted: _request_preempted,
    ev.RequestFinished: _request_finished,
    ev.RequestAborted: _request_aborted,
    ev.RequestFailed: _request_failed,
    ev.BlocksHit: _blocks_hit,
    ev.BlocksEvicted: _blocks_evicted,
    ev.BlocksAllocated: _blocks_allocated,
    ev.BlocksPublished: _blocks_published,
    ev.BlocksFreed: _blocks_freed,
    ev.BlockCopied: _block_copied,
    ev.BlocksAdopted: _blocks_adopted,
    ev.SampleHeld: _sample_held,
    ev.SampleLeads: _sample_leads,
    ev.SamplesForked: _samples_forked,
    ev.PrefixAwaited: _prefix_awaited,
    ev.PrefixReleased: _prefix_released,
    ev.CacheReset: _cache_reset,
    ev.FlightOpened: _flight_opened,
    ev.FlightJoined: _flight_joined,
    ev.FlightReleased: _flight_released,
    ev.FlightHandedOver: _flight_handed_over,
    ev.FlightLeft: _flight_left,
}
# Events that say something but move nothing: PoliciesChanged, StepScheduled, StepFailed, PrefillFinished,
# BlocksDuplicated, HashCollision, RecomputeChosen.


def fold(state: State, event: ev.Event) -> State:
    """Apply one event to ``state`` (in place) and return it."""
    apply = _FOLDS.get(type(event))
    if apply is not None:
        apply(state, event)
    return state


def replay(log: Iterable[ev.Event], until_seq: int | None = None) -> State:
    """Return the state after all events, or after those with a number below ``until_seq``."""
    state = State()
    for event in log:
        if until_seq is not None and event.seq >= until_seq:
            break
        fold(state, event)
    return state
