"""Who computes, who waits, until when.

Identical prompts that arrive together would each compute the same K/V, because nothing is published yet. Under
single flight the first becomes the leader of a flight; the others are its followers and are held until the
leader has published. What is shared is the computation of the prompt, never the answer: each follower decodes
with its own sampling.

    arrive ──► leader ──────────────► prompt published ──► flight over, followers released   (after prefill)
          └──► follower (held) ─┘     request ended ─────► flight over, followers released   (on completion)
                                      ended too early ───► the oldest follower leads

A flight exists only while somebody waits or may come to wait: releasing removes the flight and its index entry. Of
requests that were released but have not ended, only the ids are kept, so that an end can still be distinguished from an
unknown id. Knows request ids, keys and flights; must not know blocks, the scheduler's lists or time. The design, with
its two ways of release, is that of mini-vllm-rs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from minivllm.cache.block_hash import BlockHash
from minivllm.coordination.coordinator import NOBODY, Coordinator, Released
from minivllm.coordination.flight import Flight, FlightKey
from minivllm.coordination.release import ReleasePolicy
from minivllm.errors import InvariantError, UnknownRequestError
from minivllm.log import events as ev
from minivllm.log.states import FLIGHT_TRANSITIONS, FlightAction, Role
from minivllm.request import Request, RequestState

_REFUSALS = {
    FlightAction.PUBLISH: "request {request_id!r} published its prompt but leads no flight",
    FlightAction.END: "request {request_id!r} ended but is no leader, no follower and was not released",
}


class PrefixCacheFlightCoordinator(Coordinator):
    """Single flight for identical prompts.

    ``flights`` maps a flight's id to the flight; ``released_request_ids`` are requests that were released (a
    leader after its prefill, followers) and have not ended yet.
    """

    name = "single-flight"
    asks_what_is_missing = True

    def __init__(self, release: ReleasePolicy, emit: Callable[[ev.Event], None]) -> None:
        super().__init__(release, emit)
        self._flight_by_key: dict[FlightKey, Flight] = {}
        self._flight_by_request: dict[str, Flight] = {}
        self._flights_missing: dict[BlockHash, dict[int, Flight]] = {}
        self._next_flight_id = 0

    def arrive(self, request: Request, missing: Sequence[BlockHash] | None = None) -> Role | None:
        """Join the flight of this prompt and these extra keys, or open it.

        A request that can find all it could ever use goes on its own: waiting would give it nothing.
        """
        if missing is not None and not missing:
            return None
        key = (request.prompt_token_ids, request.extra_keys)
        flight = self._flight_by_key.get(key)
        if flight is None:
            wanted: set[BlockHash] | None = None if missing is None else set()
            flight = Flight(self._next_flight_id, key, request, OrderedDict(), wanted)
            self._next_flight_id += 1
            self._wait_for(flight, missing)
            self.flights[flight.flight_id] = flight
            self._flight_by_key[key] = flight
            self._flight_by_request[request.request_id] = flight
            self._emit(ev.FlightOpened(flight.flight_id, request.request_id))
            return Role.LEADER
        self._wait_for(flight, missing)  # what was found before may have been evicted since
        flight.followers[request.request_id] = request
        self._flight_by_request[request.request_id] = flight
        self._emit(ev.FlightJoined(flight.flight_id, flight.leader_id, request.request_id))
        return Role.FOLLOWER

    def _wait_for(self, flight: Flight, missing: Sequence[BlockHash] | None) -> None:
        if flight.missing is not None:
            for block_hash in missing or ():
                flight.missing.add(block_hash)
                self._flights_missing.setdefault(block_hash, {})[flight.flight_id] = flight

    def role_of(self, request_id: str) -> Role:
        """Return what the request is to single flight now."""
        if request_id in self.released_request_ids:
            return Role.RELEASED
        flight = self._flight_by_request.get(request_id)
        if flight is None:
            return Role.INDEPENDENT
        return Role.LEADER if flight.leader_id == request_id else Role.FOLLOWER

    def _check(self, request_id: str, action: FlightAction) -> Role:
        """Return the request's role. Raises UnknownRequestError for what `FLIGHT_TRANSITIONS` does not have."""
        role = self.role_of(request_id)
        if (role, action) not in FLIGHT_TRANSITIONS:
            raise UnknownRequestError(_REFUSALS[action].format(request_id=request_id))
        return role

    def published(self, request_id: str, hashes: Sequence[BlockHash]) -> Released:
        """Close each flight whose prompt can be found whole now, whoever has published it.

        A leader closes its own flight by ending, or in `prompt_published`, if it is about to do either.
        """
        released: list[str] = []
        for block_hash in hashes:
            for flight in list(self._flights_missing.get(block_hash, {}).values()):
                assert flight.missing is not None
                if flight.leader_id == request_id and self._is_about_to_close(flight):
                    continue
                flight.missing.discard(block_hash)
                self._no_longer_missing(block_hash, flight)
                if not flight.missing:
                    released += self._close(flight, "cached")
                    self.released_request_ids.add(flight.leader_id)
        return tuple(released)

    def _is_about_to_close(self, flight: Flight) -> bool:
        leader = flight.leader
        prompt_is_computed = leader.num_computed_tokens >= leader.num_prompt_tokens
        return leader.finish_reason is not None or (prompt_is_computed and self.wants_prompt(leader.request_id))

    def _no_longer_missing(self, block_hash: BlockHash, flight: Flight) -> None:
        flights = self._flights_missing[block_hash]
        del flights[flight.flight_id]
        if not flights:
            del self._flights_missing[block_hash]

    def wants_prompt(self, request_id: str) -> bool:
        """Whether this is the leader of an open flight that is released after prefill."""
        if self.role_of(request_id) is not Role.LEADER:
            return False
        return self.release.after_prefill(len(self._flight_by_request[request_id].followers))

    def prompt_published(self, request_id: str) -> Released:
        """Close the leader's flight and release its followers.

        Raises UnknownRequestError if the request leads no flight.
        """
        self._check(request_id, FlightAction.PUBLISH)
        released = self._close(self._flight_by_request[request_id], "prefill")
        self.released_request_ids.add(request_id)
        return released

    def request_ended(self, request_id: str, end: RequestState, *, prompt_is_published: bool) -> Released:
        """Forget a request.

        A follower leaves without a trace. A leader that ended normally, or whose prompt is published already, has
        done what the others wait for: they are released. Otherwise the oldest follower leads, and is released alone.
        Raises UnknownRequestError for an id that is no leader, no follower and was not released.
        """
        role = self._check(request_id, FlightAction.END)
        if role is Role.RELEASED:
            self.released_request_ids.remove(request_id)
            return NOBODY
        flight = self._flight_by_request[request_id]
        if role is Role.FOLLOWER:
            del flight.followers[request_id], self._flight_by_request[request_id]
            self._emit(ev.FlightLeft(flight.flight_id, request_id))
            return NOBODY
        if end is RequestState.FINISHED or prompt_is_published or not flight.followers:
            return self._close(flight, end.value)
        return self._hand_over(flight)

    def _close(self, flight: Flight, reason: str) -> Released:
        """Remove the flight and its index entries; its followers are released."""
        followers = tuple(flight.followers)
        del self.flights[flight.flight_id], self._flight_by_key[flight.key]
        for block_hash in flight.missing or ():
            self._no_longer_missing(block_hash, flight)
        for request_id in (flight.leader_id, *followers):
            del self._flight_by_request[request_id]
        self.released_request_ids.update(followers)
        self._emit(ev.FlightReleased(flight.flight_id, flight.leader_id, followers, reason))
        return followers

    def _hand_over(self, flight: Flight) -> Released:
        """Make the oldest follower the leader; the others wait for it."""
        old = flight.leader_id
        del self._flight_by_request[old]
        _, flight.leader = flight.followers.popitem(last=False)
        self._emit(ev.FlightHandedOver(flight.flight_id, old, flight.leader_id))
        return (flight.leader_id,)

    def check_invariants(self) -> None:
        """Raise InvariantError if flights, their index and the released ids contradict each other."""
        members: dict[str, Flight] = {}
        for flight_id, flight in self.flights.items():
            if flight.flight_id != flight_id or self._flight_by_key.get(flight.key) is not flight:
                raise InvariantError(f"flight {flight_id} is not found by its id and key")
            for request_id in (flight.leader_id, *flight.followers):
                if request_id in members:
                    raise InvariantError(f"request {request_id!r} is in two flights")
                members[request_id] = flight
        if len(self._flight_by_key) != len(self.flights):
            raise InvariantError("the index of flights has an entry without a flight")
        if members != self._flight_by_request:
            raise InvariantError("the index of requests differs from the flights")
        missing: dict[BlockHash, set[int]] = {}
        for flight in self.flights.values():
            if flight.missing is not None and not flight.missing:
                raise InvariantError(f"flight {flight.flight_id} is open and waits for nothing")
            for block_hash in flight.missing or ():
                missing.setdefault(block_hash, set()).add(flight.flight_id)
        if {block_hash: set(flights) for block_hash, flights in self._flights_missing.items()} != missing:
            raise InvariantError("the index of missing blocks differs from the flights")
        both = self.released_request_ids & members.keys()
        if both:
            raise InvariantError(f"requests {sorted(both)} are released and still in a flight")
        for request_id in (*members, *self.released_request_ids):
            if (self.role_of(request_id), FlightAction.END) not in FLIGHT_TRANSITIONS:
                raise InvariantError(f"request {request_id!r} has a role that it could never end in")
