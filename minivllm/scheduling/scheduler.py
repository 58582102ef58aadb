"""Who runs in this step, and how many tokens.

    arrive ──► waiting ──admit──► running ──► ended
                 ▲  ▲                │
       released  │  └──── preempted ─┘ (to the head of its rank)
                held

A step has a budget of tokens. Rows in decode come first (one token each), then running prefills, then requests
admitted from the head of the waiting list, each with as much of its prompt as the budget leaves (chunked
prefill). When blocks run out, a victim (of the least important running requests the newest) gives all of its own
up and will compute again; a step that preempts admits nobody.

Knows requests, lists and numbers of tokens; it alone changes which list a request is in. Must not know when
blocks are published, who waits for whom and why, or how a step is computed: it asks its `SchedulerHooks`.
"""

from __future__ import annotations

import bisect
import enum
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from minivllm.cache.block_table import NOTHING_COMPUTED, ComputedBlocks
from minivllm.cache.kv_cache_manager import KVCacheManager
from minivllm.errors import UnknownRequestError
from minivllm.log import events as ev
from minivllm.request import Request, RequestState
from minivllm.scheduling.policies import BY_CHUNK, WHOLE_PROMPT
from minivllm.step import BlockCopy, Phase, ScheduledRow, ScheduledStep


class Verdict(enum.Enum):
    """What a `SchedulerHooks` says of a request that is about to be admitted."""

    GO = "go"
    HOLD = "hold"  # others compute what it needs, until it is released
    LOOK_AGAIN = "look again"  # more has just been published for it


class SchedulerHooks(Protocol):
    """What the scheduler calls while it makes a step: all that it knows of coordination and publication."""

    def may_admit(self, request: Request, computed: ComputedBlocks, budget_left: int) -> Verdict:
        """Whether a waiting request may run, given what was found for it and the tokens that the step has left."""
        ...

    def admitted(self, request: Request) -> None:
        """A request has become a running row, and knows what it recovered."""
        ...

    def preempted(self, request: Request) -> None:
        """A running request has given its blocks up."""
        ...

    def allocated(self, request: Request, num_tokens: int) -> None:
        """A row has blocks for its first ``num_tokens`` tokens, which this step will complete."""
        ...


# --- The scheduler ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Plan:
    """A row of the step that is being made."""

    request: Request
    num_tokens: int
    copy: BlockCopy | None


def _place(request: Request) -> tuple[int, int]:
    """Sort key of the waiting list. Sorting is stable: preempted requests keep their order."""
    return request.rank, -1 if request.state is RequestState.PREEMPTED else request.arrival


class Scheduler:
    """The lists of requests, and the choice of each step's rows.

    ``max_num_batched_tokens`` is the budget of a step, ``max_num_seqs`` the most running rows,
    ``long_prefill_token_threshold`` the most prompt tokens of one request in a step (0: no such limit).
    ``num_reserved_blocks`` (the watermark) stay free when a request is admitted beside running ones, so that these
    can grow. With ``adoption`` running prefills look up again before each chunk; chunks then end at block
    boundaries, because only there can blocks of others be taken.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        emit: Callable[[ev.Event], None],
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        long_prefill_token_threshold: int = 0,
        admission: str = BY_CHUNK,
        num_reserved_blocks: int = 0,
        adoption: bool = False,
        hooks: SchedulerHooks,
    ) -> None:
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.held: dict[str, Request] = {}
        self.samples: dict[str, list[Request]] = {}
        self._first_of: dict[str, str] = {}  # the first sample that a further one is held behind
        self.budget_left = max_num_batched_tokens
        self._chunk_limit = long_prefill_token_threshold or max_num_batched_tokens
        self._manager = manager
        self._emit = emit
        self._budget = max_num_batched_tokens
        self._max_rows = max_num_seqs
        self._admission = admission
        self._num_reserved = num_reserved_blocks
        self._adoption = adoption
        self._hooks = hooks

    # -- Lists ---------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """A request takes its place in the waiting list: at its rank by arrival, behind preempted ones."""
        bisect.insort_right(self.waiting, request, key=_place)

    def hold(self, request: Request) -> None:
        """A request leaves the waiting list until it is released."""
        if self.waiting and self.waiting[-1] is request:  # it has just arrived: no search
            self.waiting.pop()
        else:
            self.waiting.remove(request)
        request.move_to(RequestState.HELD)
        self.held[request.request_id] = request

    def release(self, request_ids: Iterable[str]) -> None:
        """Let held requests wait for admission, at their places by rank and arrival, behind preempted ones.

        Raises UnknownRequestError for a request that is not held.
        """
        for request_id in request_ids:
            request = self.held.pop(request_id, None)
            if request is None:
                raise UnknownRequestError(f"request {request_id!r} was released but is not held")
            request.move_to(RequestState.WAITING)
            self.add(request)

    def remove(self, request: Request) -> None:
        """Take a request that ends out of whichever list it is in."""
        if request.state is RequestState.RUNNING:
            self.running.remove(request)
        elif request.state is RequestState.HELD:
            del self.held[request.request_id]
        elif request.state in (RequestState.WAITING, RequestState.PREEMPTED):
            self.waiting.remove(request)

    @property
    def has_work(self) -> bool:
        """Whether a step would have rows. Held requests wait for one that is in one of the two lists."""
        return bool(self.waiting or self.running)

    # -- Samples of one prompt -----------------------------------------------------------------------------

    def expect_samples(self, first: Request, samples: Sequence[Request]) -> None:
        """Further samples, held already, wait until ``first`` has computed the prompt: rows are kept for them."""
        if samples:
            self.samples[first.request_id] = list(samples)
            self._first_of.update((sample.request_id, first.request_id) for sample in samples)

    def leave_samples(self, request: Request) -> Request | None:
        """A request has ended: as a further sample it is expected no more.

        Of a first one whose samples still wait, return the sample that takes its place: the others are behind it now,
        and it is held until it is released.
        """
        first_id = self._first_of.pop(request.request_id, None)
        if first_id is not None:
            self.samples[first_id].remove(request)
            if not self.samples[first_id]:
                del self.samples[first_id]
            return None
        heir, *rest = self.samples.pop(request.request_id, [None])
        if heir is not None:
            del self._first_of[heir.request_id]
            self.expect_samples(heir, [sample for sample in rest if sample is not None])
        return heir

    def fork(self, first: Request) -> list[Request]:
        """The prompt of ``first`` is computed: its further samples run now, on the same blocks. Returns them."""
        samples = self.samples.pop(first.request_id, [])
        if samples:
            self._manager.fork(first, samples)
        for sample in samples:
            del self.held[sample.request_id], self._first_of[sample.request_id]
            sample.move_to(RequestState.RUNNING)
            sample.num_computed_tokens = first.num_computed_tokens
            self.running.append(sample)
        return samples

    def _num_rows(self) -> int:
        """Rows that run, and rows that samples will take when their prompt is computed."""
        return len(self.running) + sum(len(self.samples.get(r.request_id, ())) for r in self.running)

    # -- A step --------------------------------------------------------------------------------------------

    def schedule(self, number: int) -> ScheduledStep:
        """Choose the rows of step ``number`` and allocate their blocks."""
        planned: dict[str, _Plan] = {}
        self.budget_left = self._budget
        preempted = self._schedule_running(planned)
        if not preempted:
            self._admit_waiting(planned)
        rows = [self._row(plan) for plan in planned.values()]
        # One that resumes with all but its last token recovered is in decode, and was admitted after prefills.
        rows.sort(key=lambda row: row.phase is not Phase.DECODE)
        self._emit(
            ev.StepScheduled(
                tuple([(row.request_id, row.start, row.num_tokens, row.phase.value) for row in rows]),
                len(self.waiting),
                len(self.held),
            )
        )
        copies = tuple([plan.copy for plan in planned.values() if plan.copy is not None])
        return ScheduledStep(number, tuple(rows), copies)

    def _schedule_running(self, planned: dict[str, _Plan]) -> bool:
        """Phase 1: rows that run already, decode first. Returns whether a request was preempted."""
        preempted = False
        decoding = [request for request in self.running if request.is_decoding]
        prefilling = [request for request in self.running if not request.is_decoding]
        for request in (*decoding, *prefilling):
            if request.state is RequestState.PREEMPTED or self.budget_left == 0:
                continue
            adopted = NOTHING_COMPUTED
            if self._adoption and not request.is_decoding:
                adopted = self._manager.get_adoptable_blocks(request)
            count = self._chunk(request, adopted)
            while not self._manager.has_room(request, count, adopted):
                # The newest has the least to lose. It may be a row of this step already: then it is taken
                # back, and its blocks with it, before anything was computed in them.
                victim = self._victim()
                self._preempt(victim)
                preempted = True
                withdrawn = planned.pop(victim.request_id, None)
                if withdrawn is not None:
                    self.budget_left += withdrawn.num_tokens
                if victim is request:
                    break
            if request.state is RequestState.RUNNING:
                self._plan(planned, request, count, adopted)
                self._hooks.allocated(request, request.num_computed_tokens + count)
                request.num_adopted_tokens += adopted.num_tokens
        return preempted

    def _admit_waiting(self, planned: dict[str, _Plan]) -> None:
        """Phase 2: admit from the head of the waiting list while rows, budget and blocks last.

        Nobody overtakes the head: a request that needs much room is not starved by small ones behind it. One that
        is held, because others are computing what it needs, leaves the list and is not the head any more.
        """
        while self.waiting and self.budget_left > 0:
            request = self.waiting[0]
            num_rows = 1 + len(self.samples.get(request.request_id, ()))
            if self._num_rows() + num_rows > self._max_rows:
                break
            computed = self._manager.get_computed_blocks(request)
            resumed = request.state is RequestState.PREEMPTED
            verdict = Verdict.GO if resumed else self._hooks.may_admit(request, computed, self.budget_left)
            if verdict is Verdict.GO and self.waiting[0] is not request:
                continue  # the answer let somebody go who comes first
            if verdict is not Verdict.GO:
                if verdict is Verdict.HOLD:
                    self.hold(request)
                continue
            count = self._chunk(request, computed)
            if not self._may_take_room(request, count, computed):
                break
            self.waiting.popleft()
            request.move_to(RequestState.RUNNING)
            self.running.append(request)
            self._emit(ev.RequestAdmitted(request.request_id, resumed))
            # Counted here and not at the look-up, so that a refused request is counted once.
            self._emit(ev.PrefixLookedUp(request.request_id, request.num_tokens, computed.num_tokens, resumed))
            if not resumed:
                request.num_recovered_tokens = computed.num_tokens
            self._plan(planned, request, count, computed)
            self._hooks.admitted(request)
            self._hooks.allocated(request, request.num_computed_tokens + count)

    def _chunk(self, request: Request, computed: ComputedBlocks) -> int:
        """Return how many tokens of the request fit in the step, after those found in ``computed``."""
        known = request.num_computed_tokens + computed.num_tokens
        count = min(request.num_tokens - known, self.budget_left, self._chunk_limit)
        if self._adoption and known + count < request.num_tokens:
            boundary = (known + count) // self._manager.block_size * self._manager.block_size
            if boundary > known:
                return boundary - known
        return count

    def _may_take_room(self, request: Request, count: int, computed: ComputedBlocks) -> bool:
        """Whether a request may be admitted with ``count`` tokens now.

        Alone it always may if the chunk fits: nobody could ever make more room for it.
        """
        if not self.running:
            return self._manager.has_room(request, count, computed)
        spare = self._num_reserved
        if self._admission == WHOLE_PROMPT:
            count = request.num_tokens - computed.num_tokens
            spare += sum(self._num_blocks_to_come(other) for other in self.running)
        return self._manager.has_room(request, count, computed, num_spare=spare)

    def _num_blocks_to_come(self, request: Request) -> int:
        """Blocks that a running request has no room for yet, and was promised with its whole prompt."""
        return self._manager.num_blocks_for(request.num_tokens) - len(self._manager.block_ids(request.request_id))

    def _plan(self, planned: dict[str, _Plan], request: Request, count: int, computed: ComputedBlocks) -> None:
        """Make a row: take the blocks that were found, and new ones for ``count`` tokens."""
        copy = self._manager.allocate_slots(request, count, computed)
        request.num_computed_tokens += computed.num_tokens
        planned[request.request_id] = _Plan(request, count, copy)
        self.budget_left -= count

    def _row(self, plan: _Plan) -> ScheduledRow:
        request, count = plan.request, plan.num_tokens
        sampled: tuple[Request, ...] = ()
        if request.num_computed_tokens + count == request.num_tokens:
            sampled = (request, *self.samples.get(request.request_id, ()))
        return ScheduledRow(
            request,
            request.num_computed_tokens,
            count,
            self._manager.block_ids(request.request_id),
            Phase.DECODE if request.is_decoding else Phase.PREFILL,
            sampled,
        )

    def _victim(self) -> Request:
        """Return who must give way: of the highest rank, the one that was admitted last."""
        worst = max(request.rank for request in self.running)
        return next(request for request in reversed(self.running) if request.rank == worst)

    def _preempt(self, request: Request) -> None:
        """Give all of a running request's blocks up and put it at the head of those of its rank."""
        self._emit(ev.RequestPreempted(request.request_id, request.num_computed_tokens))
        self._manager.free(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.move_to(RequestState.PREEMPTED)
        self.running.remove(request)
        bisect.insort_left(self.waiting, request, key=_place)
        self._hooks.preempted(request)
