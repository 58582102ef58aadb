"""Coordination of requests that share a prefix: one computes a block, the others wait for that block.

Single flight holds requests with identical prompts. Most requests share only a prefix: a system prompt, a document, the
turns of a chat so far. Here, before a request is admitted, it is held if a running request (its leader) is computing
its *next missing block*. It follows the leader block by block, and is released when the leader has published the last
block that the two share:

    leader     [0][1][2][3][4]──own tokens──►          publishes each block after the step that computed it
    follower   held for 0 ─► held for 3 ─► admitted    takes 0 to 4 from the cache, computes the rest

(In the picture the leader's first step computes blocks 0 to 2, its second step 3 and 4.)

Only running requests are leaders, and a running request is never held: so there is no deadlock. A running request
computes its blocks, ends or is preempted: so no request is held forever. If the leader ends early or is preempted, its
followers are released; the first one admitted computes the block, and the others are held behind it.

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
    """A running request, the prompt blocks that it has not published yet, and the requests held behind it."""

    request: Request
    hashes: dict[BlockHash, None]
    followers: dict[str, None]


@dataclass(slots=True)
class _Follower:
    """A held request: its chain hashes, how many of these blocks it can use, and the index of the one it waits for."""

    request_id: str
    hashes: Sequence[BlockHash]
    num_usable: int
    index: int


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted times to a request's first token, in ms from now: if it waits, and if it computes the block itself."""

    wait_ms: float
    recompute_ms: float


class SharedPrefixCoordinator(Coordinator):
    """Hold a request while its next missing block is being computed by another."""

    name = "shared-prefix"

    def __init__(self, release: ReleasePolicy, emit: Callable[[ev.Event], None]) -> None:
        super().__init__(release, emit)
        self._leaders: dict[str, _Leader] = {}
        self._followers: dict[str, _Follower] = {}
        self._computing: dict[BlockHash, dict[str, None]] = {}  # block -> running requests that compute it, in order
        self._awaited: dict[BlockHash, dict[str, None]] = {}  # block -> requests held for it

    # -- A request's life ------------------------------------------------------------------------------------

    def may_admit(self, request: Request, outlook: Outlook) -> bool:
        """Return whether the request may run now.

        If a running request computes its next missing block, and waiting is right, it becomes a follower instead.
        """
        if outlook.num_found >= outlook.num_usable:
            return True
        leader_id = self.who_computes(outlook.hashes[outlook.num_found])
        if leader_id is None:
            return True
        prediction = self._predict(request, self._leaders[leader_id].request, outlook)
        if not self._should_wait(request, leader_id, outlook, prediction):
            return True
        follower = _Follower(request.request_id, outlook.hashes, outlook.num_usable, outlook.num_found)
        self._followers[request.request_id] = follower
        self._await(follower, leader_id, prediction)
        return False

    def who_computes(self, block_hash: BlockHash) -> str | None:
        """Return the running request that computes this block (the first, if several do), or None."""
        return next(iter(self._computing.get(block_hash, ())), None)

    def _predict(self, request: Request, leader: Request, outlook: Outlook) -> Prediction | None:
        """Return None: this policy needs no prediction. A subclass may predict both times."""
        return None

    def _should_wait(self, request: Request, leader_id: str, outlook: Outlook, prediction: Prediction | None) -> bool:
        """Return True: this policy always waits. A subclass may compare the predicted times."""
        return True

    def _await(self, follower: _Follower, leader_id: str, prediction: Prediction | None = None) -> None:
        """Hold a follower behind ``leader_id`` until the block at the follower's index is published."""
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
        """Make the request a leader for these blocks. Where an earlier one computes the same block, that one leads."""
        self._leaders[request.request_id] = _Leader(request, dict.fromkeys(hashes), {})
        for block_hash in hashes:
            self._computing.setdefault(block_hash, {})[request.request_id] = None

    def wants_blocks(self, request_id: str) -> bool:
        """Whether a request is held behind this one: then its blocks are published as soon as they are computed."""
        leader = self._leaders.get(request_id)
        return leader is not None and bool(leader.followers)

    def published(self, request_id: str, hashes: Sequence[BlockHash]) -> Released:
        """Let followers of these blocks wait for the leader's next block, or release them."""
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
        """Return whether the follower waits for its leader's next block, too. If not, `may_admit` decides again."""
        if follower.index >= follower.num_usable:
            return False
        leader_id = self.awaiting[follower.request_id]
        if follower.hashes[follower.index] not in self._leaders[leader_id].hashes:
            return False
        self._await(follower, leader_id)
        return True

    def preempted(self, request_id: str) -> Released:
        """Release its followers: it may take long until the request runs again."""
        return self._gone(request_id, "preempted")

    def request_ended(self, request_id: str, end: RequestState, *, prompt_is_published: bool) -> Released:
        """Remove a follower, or remove a leader and release its followers."""
        super().request_ended(request_id, end, prompt_is_published=prompt_is_published)
        if request_id in self._followers:
            follower = self._followers[request_id]
            block_hash = follower.hashes[follower.index]
            del self._awaited[block_hash][request_id]
            if not self._awaited[block_hash]:
                del self._awaited[block_hash]
            self._remove_follower(request_id)
            return NOBODY
        return self._gone(request_id, "ended")

    def _gone(self, request_id: str, reason: str) -> Released:
        """Remove a request that computes no more, if it is a leader, and release its followers."""
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
        released = self._release(followers, request_id, reason)
        del self._leaders[request_id]
        return released

    def _release(self, request_ids: list[str], leader_id: str, reason: str) -> Released:
        if not request_ids:
            return NOBODY
        for request_id in request_ids:
            self._remove_follower(request_id)
        self._emit(ev.PrefixReleased(tuple(request_ids), leader_id, reason))
        return tuple(request_ids)

    def _remove_follower(self, follower_id: str) -> None:
        del self._followers[follower_id]
        del self._leaders[self.awaiting.pop(follower_id)].followers[follower_id]

    # -- Invariants ------------------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Raise InvariantError if leaders, followers and blocks disagree, or a request waits for what none computes."""
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
