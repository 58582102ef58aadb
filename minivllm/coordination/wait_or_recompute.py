"""Wait for a block that another computes, or compute it as well: whichever gives the first token sooner.

Waiting saves work, and is mostly sooner, because a block costs its leader the same whether somebody waits or not. It
is later when the leader has much to compute before it comes to the block, or when the block is so small that a step
more costs more than computing it. Both times are predicted by playing the next steps of the two requests with a cost
model. With a target for the time to the first token (TTFT), waiting is good enough as soon as it meets the target:
then the work is saved.

Knows numbers of tokens, and what they cost. Must not know blocks, a clock or the scheduler's lists.
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
    """What two requests have to compute, in tokens.

    The leader has ``leader_left`` of its prompt left, and has passed the shared part after ``until_shared`` of them.
    The follower misses ``shared`` tokens that it could take from the leader, and has ``own`` more. In a step each
    computes at most ``chunk_limit``, both at most ``budget``; in the first one ``first_budget`` is left for the
    follower.
    """

    leader_left: int
    until_shared: int
    shared: int
    own: int
    chunk_limit: int
    budget: int
    first_budget: int


def predict(case: TwoRequests, cost: CostModel) -> Prediction:
    """Return the follower's times to its first token, played step by step. O(steps)."""
    return Prediction(_time(case, cost, waits=True), _time(case, cost, waits=False))


def _time(case: TwoRequests, cost: CostModel, *, waits: bool) -> float:
    leader_left, until_shared = case.leader_left, case.until_shared
    own = case.own if waits else case.shared + case.own
    room = 0 if waits else case.first_budget
    ms = 0.0
    while True:
        leader = min(leader_left, case.chunk_limit, case.budget)
        follower = min(own, case.chunk_limit, room)
        leader_left, until_shared, own = leader_left - leader, until_shared - leader, own - follower
        # A row that has finished its prompt draws a token in the same step, and is in decode from then on.
        ms += cost.step(leader + follower, (leader_left == 0) + (own == 0 and room > 0))
        if own == 0 and room > 0:
            return ms
        # A leader that has nothing left will not come to the block: with a weak hash it may only look like its own.
        released = not waits or until_shared <= 0 or leader_left == 0
        room = case.budget - min(leader_left, case.chunk_limit, case.budget) if released else 0


class WaitOrRecompute(SharedPrefixCoordinator):
    """Hold a request for a shared prefix only where waiting is the better choice.

    ``cost`` is the cost model of the predictions (None: the runner's own, or the usual one), ``ttft_target_ms`` the
    target, None for "as soon as possible". Both are the class's, as every engine makes its coordinator anew;
    `choosing` returns a class with others.
    """

    name = "wait-or-recompute"
    ttft_target_ms: float | None = None

    def __init__(self, release: ReleasePolicy, emit: Callable[[ev.Event], None]) -> None:
        super().__init__(release, emit)
        self._chosen: dict[str, ev.RecomputeChosen] = {}

    @classmethod
    def choosing(cls, *, cost: CostModel | None = None, ttft_target_ms: float | None = None) -> type[WaitOrRecompute]:
        """Return this policy with another cost model and target, to be given as an engine's ``coordination``."""
        members: dict[str, Any] = {"cost": cost, "ttft_target_ms": ttft_target_ms, "__doc__": cls.__doc__}
        return type(cls.__name__, (cls,), members)

    def _predict(self, request: Request, leader: Request, outlook: Outlook) -> Prediction | None:
        """Play the next steps of the two."""
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

    def _shall_wait(self, request: Request, leader_id: str, outlook: Outlook, prediction: Prediction | None) -> bool:
        """Wait if that is as soon, or soon enough."""
        assert prediction is not None
        self._chosen.pop(request.request_id, None)
        if prediction.wait_ms <= prediction.recompute_ms:
            return True
        if self.ttft_target_ms is not None and prediction.wait_ms <= self.ttft_target_ms:
            return True
        # Said when it is admitted, so that it is said once even if there is no room for it yet.
        self._chosen[request.request_id] = ev.RecomputeChosen(
            request.request_id, leader_id, outlook.num_found, prediction.wait_ms, prediction.recompute_ms
        )
        return False

    def admitted(self, request: Request, hashes: Sequence[BlockHash]) -> None:
        """Say so if the request computes what it could have waited for."""
        chosen = self._chosen.pop(request.request_id, None)
        if chosen is not None:
            self._emit(chosen)
        super().admitted(request, hashes)

    def request_ended(self, request_id: str, end: RequestState, *, prompt_is_published: bool) -> Released:
        """Forget what was chosen and never came to be."""
        self._chosen.pop(request_id, None)
        return super().request_ended(request_id, end, prompt_is_published=prompt_is_published)
