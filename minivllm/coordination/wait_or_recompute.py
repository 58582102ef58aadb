"""Wait for a block that another request computes, or compute it too: whichever gives the first token sooner.

Waiting saves work. It is usually also sooner, because the leader computes the block anyway. It is later if the leader
has much to compute before it reaches the block, or if the block is so small that one more step costs more than
computing it. Both times are predicted: a cost model simulates the next steps of the two requests. With a target for
the time to first token (TTFT), a request also waits if waiting meets the target, because that saves work.

Knows numbers of tokens and their cost. Must not know block ids, a clock or the scheduler's lists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from minivllm.cache.block_hash import BlockHash
from minivllm.coordination.coordinator import Outlook, Released
from minivllm.coordination.release import ReleasePolicy
from minivllm.coordination.shared_prefix import Prediction, SharedPrefixCoordinator
from minivllm.cost import CostModel
from minivllm.log import events as ev
from minivllm.request import Request, RequestState


@dataclass(frozen=True, slots=True)
class TwoRequests:
    """What a leader and a possible follower have to compute, in tokens.

    ``leader_left``: rest of the leader's prompt. ``until_shared``: how many of these until the shared part is done.
    ``shared``: tokens that the follower can take from the leader, or compute itself. ``own``: the rest of its prompt.
    ``chunk_limit``: the most tokens of one request in a step. ``budget``: the most of both. ``first_budget``: what
    the first step has left for the follower.
    """

    leader_left: int
    until_shared: int
    shared: int
    own: int
    chunk_limit: int
    budget: int
    first_budget: int


def predict(case: TwoRequests, cost: CostModel) -> Prediction:
    """Return the follower's predicted times to first token, simulated step by step. O(steps)."""
    return Prediction(_ttft_ms(case, cost, waits=True), _ttft_ms(case, cost, waits=False))


def _ttft_ms(case: TwoRequests, cost: CostModel, *, waits: bool) -> float:
    leader_left, until_shared = case.leader_left, case.until_shared
    own = case.own if waits else case.shared + case.own
    room = 0 if waits else case.first_budget
    ms = 0.0
    while True:
        leader = min(leader_left, case.chunk_limit, case.budget)
        follower = min(own, case.chunk_limit, room)
        leader_left, until_shared, own = leader_left - leader, until_shared - leader, own - follower
        # A request draws a token in the step that completes its prompt and in each step after it (decode).
        ms += cost.step(leader + follower, (leader_left == 0) + (own == 0 and room > 0))
        if own == 0 and room > 0:
            return ms
        # With a weak hash the leader may not compute this block at all (same hash, other tokens): then it releases
        # its followers when its prompt is complete.
        released = not waits or until_shared <= 0 or leader_left == 0
        room = case.budget - min(leader_left, case.chunk_limit, case.budget) if released else 0


class WaitOrRecompute(SharedPrefixCoordinator):
    """Hold a request for a shared prefix only if waiting is the better choice.

    ``cost`` is the cost model of the predictions (None: the runner's, or else the default `CostModel`).
    ``ttft_target_ms`` is the TTFT target (None: as soon as possible). Both are class attributes, because each engine
    instantiates its coordinator itself; `choosing` returns a subclass with other values.
    """

    name = "wait-or-recompute"
    ttft_target_ms: float | None = None

    def __init__(self, release: ReleasePolicy, emit: Callable[[ev.Event], None]) -> None:
        super().__init__(release, emit)
        self._decisions: dict[str, ev.RecomputeChosen] = {}

    @classmethod
    def choosing(cls, *, cost: CostModel | None = None, ttft_target_ms: float | None = None) -> type[WaitOrRecompute]:
        """Return a subclass with this cost model and target, to pass as an engine's ``coordination``."""
        members: dict[str, Any] = {"cost": cost, "ttft_target_ms": ttft_target_ms, "__doc__": cls.__doc__}
        return type(cls.__name__, (cls,), members)

    def _predict(self, request: Request, leader: Request, outlook: Outlook) -> Prediction | None:
        """Simulate the next steps of the request and its leader."""
        computed_by_leader = self._leaders[leader.request_id].hashes
        end = outlook.num_found
        while end < outlook.num_usable and outlook.hashes[end] in computed_by_leader:
            end += 1
        found, shared_end = outlook.num_found * outlook.block_size, end * outlook.block_size
        case = TwoRequests(
            leader_left=max(leader.num_prompt_tokens - leader.num_computed_tokens, 0),
            until_shared=shared_end - leader.num_computed_tokens,
            shared=shared_end - found,
            own=request.num_prompt_tokens - shared_end,
            chunk_limit=outlook.chunk_limit,
            budget=outlook.budget,
            first_budget=outlook.budget_left,
        )
        return predict(case, self.cost or CostModel())

    def _should_wait(self, request: Request, leader_id: str, outlook: Outlook, prediction: Prediction | None) -> bool:
        """Wait if the first token is not later than by recomputing, or meets the target."""
        assert prediction is not None
        self._decisions.pop(request.request_id, None)
        if prediction.wait_ms <= prediction.recompute_ms:
            return True
        if self.ttft_target_ms is not None and prediction.wait_ms <= self.ttft_target_ms:
            return True
        # Reported on admission: without room for the request, this decision is made again in the next step.
        self._decisions[request.request_id] = ev.RecomputeChosen(
            request.request_id, leader_id, outlook.num_found, prediction.wait_ms, prediction.recompute_ms
        )
        return False

    def admitted(self, request: Request, hashes: Sequence[BlockHash]) -> None:
        """Report it if the request computes what it could have waited for."""
        chosen = self._decisions.pop(request.request_id, None)
        if chosen is not None:
            self._emit(chosen)
        super().admitted(request, hashes)

    def request_ended(self, request_id: str, end: RequestState, *, prompt_is_published: bool) -> Released:
        """Drop a decision whose request was never admitted."""
        self._decisions.pop(request_id, None)
        return super().request_ended(request_id, end, prompt_is_published=prompt_is_published)
