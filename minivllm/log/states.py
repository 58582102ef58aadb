"""The tables of states: what a block, and a request in a flight, may be, and what may happen to it in each state.

A request's own states are in `minivllm/request.py`. The code moves along these tables, the replay refuses a log that
breaks them, `check_invariants()` reads states by them, tests walk through them and the diagrams are drawn from them.
What is not in a table cannot happen. Knows names alone.
"""

from __future__ import annotations

import enum

# --- Blocks -----------------------------------------------------------------------------------------------


class BlockState(enum.Enum):
    """What a block holds, and who may use it."""

    FREE = "free"  # no content that anybody may read
    OWNED = "owned"  # being filled by one request, or by the samples of one prompt
    PUBLISHED = "published"  # full, hashed, findable; in the free queue exactly while its count is 0


class BlockAction(enum.Enum):
    """What can happen to a block."""

    ALLOCATE = "allocate"  # popped from the free queue for a request
    PUBLISH = "publish"  # full and computed: its hash enters the index
    HIT = "hit"  # found by its hash: one more user
    FORK = "fork"  # a further sample of the same prompt: one more user
    FREE = "free"  # its last user frees it (others before only lower the count)
    EVICT = "evict"  # popped for another request: its hash leaves the index first
    RESET = "reset"  # nobody uses any block, and all hashes are forgotten


BLOCK_TRANSITIONS: dict[tuple[BlockState, BlockAction], BlockState] = {
    (BlockState.FREE, BlockAction.ALLOCATE): BlockState.OWNED,
    (BlockState.OWNED, BlockAction.PUBLISH): BlockState.PUBLISHED,
    (BlockState.OWNED, BlockAction.FORK): BlockState.OWNED,
    (BlockState.OWNED, BlockAction.FREE): BlockState.FREE,
    (BlockState.PUBLISHED, BlockAction.HIT): BlockState.PUBLISHED,
    (BlockState.PUBLISHED, BlockAction.FORK): BlockState.PUBLISHED,
    (BlockState.PUBLISHED, BlockAction.FREE): BlockState.PUBLISHED,
    (BlockState.PUBLISHED, BlockAction.EVICT): BlockState.FREE,
    (BlockState.PUBLISHED, BlockAction.RESET): BlockState.FREE,
}
"""A block that is not published is never hit, and one in use is never evicted (its count is above 0)."""


# --- Requests in a flight ---------------------------------------------------------------------------------


class Role(enum.Enum):
    """What a request is to single flight."""

    INDEPENDENT = "independent"  # in no flight: it has not arrived, has ended, or nothing is coordinated
    LEADER = "leader"  # computes the prompt that others wait for, or may come to wait for
    FOLLOWER = "follower"  # held behind the leader
    RELEASED = "released"  # waits for nobody any more, and has not ended


class FlightAction(enum.Enum):
    """What can happen to a request in a flight."""

    OPEN = "open"  # arrives, and nobody computes the same prompt
    JOIN = "join"  # arrives while a flight of the same prompt is open
    PUBLISH = "publish"  # has published its prompt: the flight is over
    RELEASE = "release"  # the flight is over: its prompt is published, by its leader or by others, or its leader ended
    LEAD = "lead"  # the leader ended too early: this one computes now
    END = "end"  # the request has ended, in whatever way


FLIGHT_TRANSITIONS: dict[tuple[Role, FlightAction], Role] = {
    (Role.INDEPENDENT, FlightAction.OPEN): Role.LEADER,
    (Role.INDEPENDENT, FlightAction.JOIN): Role.FOLLOWER,
    (Role.LEADER, FlightAction.PUBLISH): Role.RELEASED,
    (Role.LEADER, FlightAction.RELEASE): Role.RELEASED,
    (Role.FOLLOWER, FlightAction.RELEASE): Role.RELEASED,
    (Role.FOLLOWER, FlightAction.LEAD): Role.LEADER,
    (Role.LEADER, FlightAction.END): Role.INDEPENDENT,
    (Role.FOLLOWER, FlightAction.END): Role.INDEPENDENT,
    (Role.RELEASED, FlightAction.END): Role.INDEPENDENT,
}
"""Only a follower can come to lead, and who was released is never held again by the same flight."""
