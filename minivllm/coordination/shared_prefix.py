"""Requests that share a prefix: one computes a block, the others wait for that block and no longer.

Single flight holds requests with identical prompts. Most requests share only their beginning: a system prompt, a
document, the turns of a chat so far. Here a request that is about to be admitted is held while its *next missing
block* is being computed by a running one, and follows it block by block:

    leader     [0][1][2][3][4]──own tokens──►          publishes each block after the step that computed it
    follower   held for 0 ─► held for 3 ─► admitted    takes 0 to 4 from the cache, computes what is its own

Only running requests are waited for, and a running request waits for nobody: so there can be no circle. A running
request sooner or later computes, ends or is preempted: so nobody waits for ever. When the leader ends early or is
preempted its followers look again: the first that is admitted computes, and the others are held behind that one.

Knows hashes of blocks and which running request computes them; must not know block ids, lists or time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from minivllm.cache.block_hash import BlockHash
from minivllm.coordination.coordinator import NOBODY, Coordinator, Outlook, Released
from minivllm.coordination.release import ReleasePolicy
from minivllm.errors import InvariantError
from minivllm.log import events as ev
from minivllm.request import Request, RequestState


@dataclass(slots=True)
class _Leader:
    """A running request, the prompt blocks that it still has to publish, and who is held behind it."""

    request: Request
    hashes: dict[BlockHash, None]
    followers: dict[str, None]


@dataclass(slots=True)
class _Follower:
    """A held request: its chain, how much of it can be used, and the block that it waits for now."""

    request_id: str
    hashes: Sequence[BlockHash]
    num_usable: int
    index: int


@dataclass(frozen=True, slots=True)
class Prediction:
    """Times to a request's first token, in milliseconds from now: if it waits, and if it computes itself."""

    wait_ms: float
    recompute_ms: float


class SharedPrefixCoordinator(Coordinator):
    """Hold a request while its next missing block is being computed by another."""

    name = "shared-prefix"

    def __init__(self, release: ReleasePolicy, emit: Callable[[ev.Event], None]) -> None:
        super().__init__(release, emit)
        self._leaders: dict[str, _Leader] = {}
        self._followers: dict[str, _Follower] = {}
        self._computing: dict[BlockHash, dict[str, None]] = {}  # who computes it, the first one first
        self._awaited: dict[BlockHash, dict[str, None]] = {}  # who is held for it

    # -- A request's way -------------------------------------------------------------------------------------

    def may_admit(self, request: Request, outlook: Outlook) -> bool:
        """Hold the request if somebody is computing its next missing block, unless it should not wait."""
        if outlook.num_found >= outlook.num_usable:
            return True
        leader_id = self.who_computes(outlook.hashes[outlook.num_found])
        if leader_id is None:
            return True
        prediction = self._predict(request, self._leaders[leader_id].request, outlook)
        if not self._shall_wait(request, leader_id, outlook, prediction):
            return True
        follower = _Follower(request.request_id, outlook.hashes, outlook.num_usable, outlook.num_found)
        self._followers[request.request_id] = follower
        self._await(follower, leader_id, prediction)
        return False

    def who_computes(self, block_hash: BlockHash) -> str | None:
        """Return the first of the running requests that compute this block."""
        return next(iter(self._computing.get(block_hash, ())), None)

    def _predict(self, request: Request, leader: Request, outlook: Outlook) -> Prediction | None:
        """Nothing is predicted here."""
        return None

    def _shall_wait(self, request: Request, leader_id: str, outlook: Outlook, prediction: Prediction | None) -> bool:
        """Waiting is always right here."""
        return True

    def _await(self, follower: _Follower, leader_id: str, prediction: Prediction | None = None) -> None:
        """Let a follower wait for the block at its index, behind ``leader_id``."""
        block_hash = follower.hashes[follower.index]
        self._awaited.setdefault(block_hash, {})[follower.request_id] = None
        self._leaders[leader_id].followers[follower.request_id] = None
        self.awaiting[follower.request_id] = leader_id
        self._emit(
            ev.PrefixAwaited(
                follower.request_id,
                leader_id,
                follower.index,
                block_hash.hex(),
                prediction.wait_ms if prediction else None,
                prediction.recompute_ms if prediction else None,
            )
        )

    def admitted(self, request: Request, hashes: Sequence[BlockHash]) -> None:
        """The request is the one that others wait for, block by block, unless an earlier one computes the same."""
        self._leaders[request.request_id] = _Leader(request, dict.fromkeys(hashes), {})
        for block_hash in hashes:
            self._computing.setdefault(block_hash, {})[request.request_id] = None

    def wants_blocks(self, request_id: str) -> bool:
        """Whether anybody is held behind this request: then its blocks are published as they are computed."""
        leader = self._leaders.get(request_id)
        return leader is not None and bool(leader.followers)

    def published(self, request_id: str, hashes: Sequence[BlockHash]) -> Released:
        """Followers go on to the next block that their leader computes, or are released."""
        for block_hash in hashes:
            for owner in self._computing.pop(block_hash, ()):
                del self._leaders[owner].hashes[block_hash]
        if not self._followers:
            return NOBODY
        found = set(hashes)
        released: list[str] = []
        for block_hash in hashes:
            for follower_id in self._awaited.pop(block_hash, ()):
                follower = self._followers[follower_id]
                while follower.index < follower.num_usable and follower.hashes[follower.index] in found:
                    follower.index += 1
                if not self._goes_on(follower):
                    released.append(follower_id)
        return self._release(released, request_id, "published")

    def _goes_on(self, follower: _Follower) -> bool:
        """Whether the follower's leader computes its next block, too. Behind anybody else it is decided anew."""
        if follower.index >= follower.num_usable:
            return False
        leader_id = self.awaiting[follower.request_id]
        if follower.hashes[follower.index] not in self._leaders[leader_id].hashes:
            return False
        self._await(follower, leader_id)
        return True

    def preempted(self, request_id: str) -> Released:
        """Its followers look again: it may be long until it runs."""
        return self._gone(request_id, "preempted")

    def request_ended(self, request_id: str, end: RequestState, *, prompt_is_published: bool) -> Released:
        """A follower leaves without a trace; the followers of a leader look again."""
        super().request_ended(request_id, end, prompt_is_published=prompt_is_published)
        if request_id in self._followers:
            follower = self._followers[request_id]
            block_hash = follower.hashes[follower.index]
            del self._awaited[block_hash][request_id]
            if not self._awaited[block_hash]:
                del self._awaited[block_hash]
            self._forget(request_id)
            return NOBODY
        return self._gone(request_id, "ended")

    def _gone(self, request_id: str, reason: str) -> Released:
        """A request that may have been computing does so no more."""
        leader = self._leaders.get(request_id)
        if leader is None:
            return NOBODY
        for block_hash in leader.hashes:
            owners = self._computing[block_hash]
            del owners[request_id]
            if not owners:
                del self._computing[block_hash]
        followers = list(leader.followers)
        for follower_id in followers:
            follower = self._followers[follower_id]
            block_hash = follower.hashes[follower.index]
            del self._awaited[block_hash][follower_id]
            if not self._awaited[block_hash]:
                del self._awaited[block_hash]
        let_go = self._release(followers, request_id, reason)
        del self._leaders[request_id]
        return let_go

    def _release(self, request_ids: list[str], leader_id: str, reason: str) -> Released:
        if not request_ids:
            return NOBODY
        for request_id in request_ids:
            self._forget(request_id)
        self._emit(ev.PrefixReleased(tuple(request_ids), leader_id, reason))
        return tuple(request_ids)

    def _forget(self, follower_id: str) -> None:
        del self._followers[follower_id]
        del self._leaders[self.awaiting.pop(follower_id)].followers[follower_id]

    # -- Invariants ------------------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Raise InvariantError if leaders, followers and blocks contradict each other, or somebody waits in vain."""
        computing: dict[BlockHash, set[str]] = {}
        for leader_id, leader in self._leaders.items():
            if leader.request.state is not RequestState.RUNNING:
                raise InvariantError(f"request {leader_id!r} is waited for and does not run")
            for block_hash in leader.hashes:
                computing.setdefault(block_hash, set()).add(leader_id)
        if {block_hash: set(owners) for block_hash, owners in self._computing.items()} != computing:
            raise InvariantError("the index of blocks that are computed differs from the running requests")
        awaited: dict[BlockHash, set[str]] = {}
        for follower_id, follower in self._followers.items():
            block_hash = follower.hashes[follower.index]
            awaited.setdefault(block_hash, set()).add(follower_id)
            leader_id = self.awaiting.get(follower_id, "")
            if leader_id not in self._leaders or follower_id not in self._leaders[leader_id].followers:
                raise InvariantError(f"request {follower_id!r} waits for {leader_id!r}, which does not know it")
            if leader_id not in self._computing.get(block_hash, ()):
                raise InvariantError(f"request {follower_id!r} waits for a block that {leader_id!r} does not compute")
        if {block_hash: set(ids) for block_hash, ids in self._awaited.items()} != awaited:
            raise InvariantError("the index of awaited blocks differs from the held requests")
        behind = {name for leader in self._leaders.values() for name in leader.followers}
        if not self._followers.keys() == self.awaiting.keys() == behind:
            raise InvariantError("the held requests differ from those that somebody is waited for by")
