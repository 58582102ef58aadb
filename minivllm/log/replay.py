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
from typing import Any

from minivllm.log import events as ev
from minivllm.log.state import BlockView, FlightView, RequestView, State
from minivllm.log.states import BlockAction, FlightAction
from minivllm.request import RequestState


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
    state.requests[e.leader_id].act(FlightAction.OPEN)
    state.flights[e.flight_id] = FlightView(e.leader_id)


def _flight_joined(state: State, e: ev.FlightJoined) -> None:
    state.requests[e.request_id].act(FlightAction.JOIN)
    state.flights[e.flight_id].follower_ids.append(e.request_id)
    state.hold(e.request_id)


def _flight_released(state: State, e: ev.FlightReleased) -> None:
    del state.flights[e.flight_id]
    if e.reason in ("prefill", "cached"):  # the leader goes on
        action = FlightAction.PUBLISH if e.reason == "prefill" else FlightAction.RELEASE
        state.requests[e.leader_id].act(action)
        state.released_request_ids.add(e.leader_id)
    for request_id in e.request_ids:
        state.requests[request_id].act(FlightAction.RELEASE)
    state.released_request_ids.update(e.request_ids)
    state.enqueue(e.request_ids)


def _flight_handed_over(state: State, e: ev.FlightHandedOver) -> None:
    flight = state.flights[e.flight_id]
    state.requests[e.to_id].act(FlightAction.LEAD)
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
