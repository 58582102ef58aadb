"""The state of an engine between two steps, as plain values.

`replay.py` folds a log into one, and `EngineCore.state()` returns one of its own objects. Knows the tables of
transitions: a move that they do not have is refused. Must not know events or engines.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from minivllm.errors import InvariantError
from minivllm.log.states import (
    BLOCK_TRANSITIONS,
    FLIGHT_TRANSITIONS,
    BlockAction,
    BlockState,
    FlightAction,
    Role,
)
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
    """One request that has arrived or is to arrive: what it has computed, generated and holds."""

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
    role: Role = Role.INDEPENDENT  # in a flight

    def move(self, state: RequestState) -> None:
        """Change the state. Raises InvariantError for a move that `TRANSITIONS` does not have."""
        if state not in TRANSITIONS[self.state]:
            raise InvariantError(f"the log moves a request from {self.state.value} to {state.value}: it cannot be so")
        self.state = state

    def act(self, action: FlightAction) -> None:
        """Change the role. Raises InvariantError for what `FLIGHT_TRANSITIONS` does not have."""
        role = FLIGHT_TRANSITIONS.get((self.role, action))
        if role is None:
            raise InvariantError(
                f"the log says {action.value!r} of a request that is {self.role.value} in its flight: it cannot be so"
            )
        self.role = role


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
        if view.role is not Role.INDEPENDENT:
            view.act(FlightAction.END)
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
