"""The state at any moment, as a pure fold over the log.

`State` is what the engine is between two steps: blocks, free queue, index, requests, lists, flights. Folding a
log to its end gives exactly `EngineCore.state()`: a test holds the two equal after every action. Views and the
time slider fold the same events, so that what they show is what the engine is.

Knows events only. Must not look into the engine, and adds nothing that an event does not say.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from minivllm import events as ev
from minivllm.request import RequestState


class BlockState(enum.Enum):
    """What a block holds, and who may use it."""

    FREE = "free"  # no content that anybody may read
    OWNED = "owned"  # being filled by one request
    PUBLISHED = "published"  # full, hashed, findable; in the free queue exactly while its count is 0


@dataclass(slots=True)
class BlockView:
    """One block: its state, how many block tables it is in, and the hashes (hexadecimal, "" for none)."""

    state: BlockState = BlockState.FREE
    ref_count: int = 0
    block_hash: str = ""


@dataclass(slots=True)
class RequestView:
    """One request that has arrived or is to arrive: what it has computed, put out and holds."""

    state: RequestState
    arrival: int = -1
    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    num_recovered_tokens: int = 0
    num_preemptions: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)


@dataclass(slots=True)
class FlightView:
    """One open flight: who leads and who is held behind, oldest first."""

    leader_id: str
    follower_ids: list[str] = field(default_factory=list)


@dataclass
class State:
    """The engine between two steps.

    ``free_queue`` goes from the head (reused next) to the end; ``prefix_index`` from hash to block id.
    """

    blocks: dict[int, BlockView] = field(default_factory=dict)
    free_queue: OrderedDict[int, None] = field(default_factory=OrderedDict)
    prefix_index: dict[str, int] = field(default_factory=dict)
    requests: dict[str, RequestView] = field(default_factory=dict)
    waiting: list[str] = field(default_factory=list)
    running: list[str] = field(default_factory=list)
    flights: dict[int, FlightView] = field(default_factory=dict)
    released_request_ids: set[str] = field(default_factory=set)

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
                    "num_preemptions": r.num_preemptions,
                    "output_token_ids": list(r.output_token_ids),
                    "block_ids": list(r.block_ids),
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
        }

    # -- small moves that several events share -------------------------------------------------------------

    def enqueue(self, request_ids: tuple[str, ...]) -> None:
        """Put requests into the waiting list by their arrival, behind all preempted ones."""
        if not request_ids:
            return
        for request_id in request_ids:
            self.requests[request_id].state = RequestState.WAITING
        preempted = [i for i in self.waiting if self.requests[i].state is RequestState.PREEMPTED]
        others = [i for i in self.waiting if self.requests[i].state is not RequestState.PREEMPTED]
        others = sorted([*others, *request_ids], key=lambda i: self.requests[i].arrival)
        self.waiting = [*preempted, *others]

    def end(self, request_id: str, state: RequestState) -> None:
        """Take a request out of every list."""
        view = self.requests[request_id]
        view.state = state
        if request_id in self.waiting:
            self.waiting.remove(request_id)
        if request_id in self.running:
            self.running.remove(request_id)
        self.released_request_ids.discard(request_id)


def _engine_started(state: State, e: ev.EngineStarted) -> None:
    state.blocks = {block_id: BlockView() for block_id in range(1, e.num_blocks + 1)}
    state.free_queue = OrderedDict.fromkeys(state.blocks)


def _request_deferred(state: State, e: ev.RequestDeferred) -> None:
    state.requests[e.request_id] = RequestView(RequestState.DEFERRED)


def _request_arrived(state: State, e: ev.RequestArrived) -> None:
    state.requests[e.request_id] = RequestView(RequestState.WAITING, e.arrival, len(e.prompt_token_ids))
    state.waiting.append(e.request_id)


def _request_admitted(state: State, e: ev.RequestAdmitted) -> None:
    state.requests[e.request_id].state = RequestState.RUNNING
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
    view.state = RequestState.PREEMPTED
    view.num_computed_tokens = 0
    view.num_preemptions += 1
    state.running.remove(e.request_id)
    state.waiting.insert(0, e.request_id)


def _request_finished(state: State, e: ev.RequestFinished) -> None:
    state.end(e.request_id, RequestState.FINISHED)


def _request_aborted(state: State, e: ev.RequestAborted) -> None:
    state.end(e.request_id, RequestState.ABORTED)


def _request_failed(state: State, e: ev.RequestFailed) -> None:
    state.end(e.request_id, RequestState.FAILED)


def _blocks_hit(state: State, e: ev.BlocksHit) -> None:
    for block_id in e.block_ids:
        state.blocks[block_id].ref_count += 1
        state.free_queue.pop(block_id, None)
    state.requests[e.request_id].block_ids.extend(e.block_ids)


def _blocks_evicted(state: State, e: ev.BlocksEvicted) -> None:
    for block_id, block_hash in zip(e.block_ids, e.block_hashes, strict=True):
        state.blocks[block_id].state = BlockState.FREE
        state.blocks[block_id].block_hash = ""
        del state.prefix_index[block_hash]


def _blocks_allocated(state: State, e: ev.BlocksAllocated) -> None:
    for block_id in e.block_ids:
        state.blocks[block_id].state = BlockState.OWNED
        state.blocks[block_id].ref_count = 1
        del state.free_queue[block_id]
    state.requests[e.request_id].block_ids.extend(e.block_ids)


def _blocks_published(state: State, e: ev.BlocksPublished) -> None:
    for block_id, block_hash in zip(e.block_ids, e.block_hashes, strict=True):
        state.blocks[block_id].state = BlockState.PUBLISHED
        state.blocks[block_id].block_hash = block_hash
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
        if not state.blocks[block_id].block_hash:  # never published: nothing that others could read
            state.blocks[block_id].state = BlockState.FREE
    state.requests[e.request_id].block_ids.clear()


def _cache_reset(state: State, e: ev.CacheReset) -> None:
    for block_id in e.block_ids:
        block = state.blocks[block_id]
        del state.prefix_index[block.block_hash]
        block.state, block.block_hash = BlockState.FREE, ""


def _flight_opened(state: State, e: ev.FlightOpened) -> None:
    state.flights[e.flight_id] = FlightView(e.leader_id)


def _flight_joined(state: State, e: ev.FlightJoined) -> None:
    state.flights[e.flight_id].follower_ids.append(e.request_id)
    state.requests[e.request_id].state = RequestState.HELD
    if state.waiting[-1] == e.request_id:  # it has just arrived: no search
        state.waiting.pop()
    else:
        state.waiting.remove(e.request_id)


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
    ev.CacheReset: _cache_reset,
    ev.FlightOpened: _flight_opened,
    ev.FlightJoined: _flight_joined,
    ev.FlightReleased: _flight_released,
    ev.FlightHandedOver: _flight_handed_over,
    ev.FlightLeft: _flight_left,
}
# Events that say something but move nothing: PoliciesChanged, StepScheduled, StepFailed, PrefillFinished,
# BlocksDuplicated.


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
