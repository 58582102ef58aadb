"""The engine's state from its own objects, and whether its parts agree.

Replaying the log must give the same state: a test holds the two equal after every action. Knows the parts of the
engine, and changes none.
"""

from __future__ import annotations

from collections.abc import Mapping

from minivllm.cache.kv_cache_manager import KVCacheManager
from minivllm.coordination.coordinator import Coordinator
from minivllm.errors import InvariantError
from minivllm.log.state import BlockView, FlightView, RequestView, State
from minivllm.request import Request, RequestState
from minivllm.scheduling.scheduler import Scheduler


def state_of(
    requests: Mapping[str, Request], manager: KVCacheManager, scheduler: Scheduler, coordinator: Coordinator
) -> State:
    """Return the state of an engine with these parts, between two steps."""
    blocks = {}
    for block in manager.pool.blocks:
        name = block.block_hash.hex() if block.block_hash is not None else ""
        blocks[block.block_id] = BlockView(block.state, block.ref_count, name)
    state = State(blocks)
    state.free_queue.update((block.block_id, None) for block in manager.pool.free_queue)
    state.prefix_index = {block_hash.hex(): block_id for block_hash, block_id in manager.index.items()}
    for name, request in requests.items():
        state.requests[name] = RequestView(
            request.state,
            request.arrival,
            request.num_prompt_tokens if request.arrival >= 0 else 0,
            request.num_computed_tokens,
            request.num_recovered_tokens,
            request.num_adopted_tokens,
            request.num_preemptions,
            list(request.output_token_ids),
            list(manager.block_ids(name)),
            request.rank if request.arrival >= 0 else 0,
        )
    state.waiting = [request.request_id for request in scheduler.waiting]
    state.running = [request.request_id for request in scheduler.running]
    state.flights = {
        number: FlightView(flight.leader_id, list(flight.followers)) for number, flight in coordinator.flights.items()
    }
    state.released_request_ids = set(coordinator.released_request_ids)
    state.samples = {name: [sample.request_id for sample in samples] for name, samples in scheduler.samples.items()}
    state.awaiting = dict(coordinator.awaiting)
    return state


def check_engine(
    requests: Mapping[str, Request],
    manager: KVCacheManager,
    scheduler: Scheduler,
    coordinator: Coordinator,
    max_num_seqs: int,
) -> None:
    """Raise InvariantError for the first contradiction. Between steps only."""
    manager.check_invariants()
    coordinator.check_invariants()
    lists = {
        RequestState.WAITING: {r.request_id for r in scheduler.waiting if r.state is RequestState.WAITING},
        RequestState.PREEMPTED: {r.request_id for r in scheduler.waiting if r.state is RequestState.PREEMPTED},
        RequestState.RUNNING: {r.request_id for r in scheduler.running},
        RequestState.HELD: set(scheduler.held),
    }
    for state, listed in lists.items():
        actual = {name for name, r in requests.items() if r.state is state}
        if actual != listed:
            raise InvariantError(f"{state.value} requests are {sorted(actual)}, listed are {sorted(listed)}")
    if len(scheduler.waiting) != len(lists[RequestState.WAITING]) + len(lists[RequestState.PREEMPTED]):
        raise InvariantError("the waiting list holds a request twice, or one that does not wait")
    if len(scheduler.running) > max_num_seqs:
        raise InvariantError(f"{len(scheduler.running)} rows run; the limit is {max_num_seqs}")
    followers = {name for flight in coordinator.flights.values() for name in flight.followers}
    samples = {sample.request_id for group in scheduler.samples.values() for sample in group}
    held_by = [followers, samples, set(coordinator.awaiting)]
    if sum(map(len, held_by)) != len(set().union(*held_by)):
        raise InvariantError(f"a request is held for two reasons: {list(map(sorted, held_by))}")
    if set().union(*held_by) != set(scheduler.held):
        raise InvariantError(f"held are {sorted(scheduler.held)}, those who wait are {list(map(sorted, held_by))}")
    if scheduler.held and not scheduler.has_work:
        raise InvariantError(f"requests {sorted(scheduler.held)} wait for a leader that is nowhere")
    for name, request in requests.items():
        held = len(manager.block_ids(name))
        if request.state is not RequestState.RUNNING and held:
            raise InvariantError(f"request {name!r} is {request.state.value} and holds {held} blocks")
        if request.state is RequestState.RUNNING:
            if held != manager.num_blocks_for(request.num_computed_tokens):
                raise InvariantError(
                    f"request {name!r} has {request.num_computed_tokens} tokens computed in {held} blocks"
                )
            if request.num_uncomputed_tokens < 1:
                raise InvariantError(f"request {name!r} runs and has nothing left to compute")
