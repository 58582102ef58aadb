"""The scheduler: which requests run in a step, and how many tokens of each.

    arrive ──► waiting ──admit──► running ──► ended
                 ▲  ▲                │
       released  │  └──── preempted ─┘ (to the head of its rank)
                held

Each step has a token budget. It goes first to requests in decode (one token each), then to running prefills, then to
requests admitted from the head of the waiting list; a prefill gets as much as the budget leaves (chunked prefill).

The waiting list is sorted by rank (given by the scheduling policy, lower first); within a rank, preempted requests come
first, then the others by arrival. If a running request needs blocks and too few are free, the scheduler preempts: of
the running requests with the highest rank, the last admitted frees all of its blocks and is computed again later. A
step that preempts admits no request.

Knows requests, lists and numbers of tokens; it alone moves a request between lists. Must not know when blocks are
published, who waits for whom and why, or how a step is computed: it asks its `SchedulerHooks`.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from minivllm.cache.block_table import NOTHING_COMPUTED, ComputedBlocks
from minivllm.cache.kv_cache_manager import KVCacheManager
from minivllm.errors import UnknownRequestError
from minivllm.log import events as ev
from minivllm.request import Request, RequestState
from minivllm.scheduling.hooks import SchedulerHooks, Verdict
from minivllm.scheduling.policies import BY_CHUNK, WHOLE_PROMPT
from minivllm.step import BlockCopy, Phase, ScheduledRow, ScheduledStep


@dataclass(slots=True)
class _PlannedRow:
    """A row of the step, while it may still be withdrawn by a preemption."""

    request: Request
    num_tokens: int
    copy: BlockCopy | None


def _place(request: Request) -> tuple[int, int]:
    """Sort key of the waiting list. Preempted requests of one rank are equal: the last one preempted goes first."""
    return request.rank, -1 if request.state is RequestState.PREEMPTED else request.arrival


class Scheduler:
    """The lists of requests, and the choice of each step's rows.

    ``max_num_batched_tokens`` is the token budget of a step, ``max_num_seqs`` the most running requests,
    ``long_prefill_token_threshold`` the most tokens of one request in a step (0: no such limit). ``admission`` says
    whether a request is admitted when its first chunk fits (`BY_CHUNK`) or only when all of its tokens would
    (`WHOLE_PROMPT`). ``num_reserved_blocks`` (vLLM: the watermark) stay free when a request is admitted while others
    run, so that these can grow.

    With ``adoption`` a running prefill looks up its prefix again before each chunk and takes ("adopts") blocks that
    others have published since. Its chunks then end at block boundaries, because it can take blocks only there.
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
        self._first_sample_of: dict[str, str] = {}  # held sample -> first sample, which computes the prompt
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
        """Insert a request into the waiting list by rank and arrival, behind preempted ones of its rank."""
        bisect.insort_right(self.waiting, request, key=_place)

    def hold(self, request: Request) -> None:
        """Move a request from the waiting list to the held requests, until it is released."""
        if self.waiting and self.waiting[-1] is request:  # the usual case, a new arrival: no search
            self.waiting.pop()
        else:
            self.waiting.remove(request)
        request.move_to(RequestState.HELD)
        self.held[request.request_id] = request

    def release(self, request_ids: Iterable[str]) -> None:
        """Move held requests back to the waiting list, by rank and arrival, behind preempted ones of their rank.

        Raises UnknownRequestError for a request that is not held.
        """
        for request_id in request_ids:
            request = self.held.pop(request_id, None)
            if request is None:
                raise UnknownRequestError(f"request {request_id!r} was released but is not held")
            request.move_to(RequestState.WAITING)
            self.add(request)

    def remove(self, request: Request) -> None:
        """Remove a request that ends from the list it is in."""
        if request.state is RequestState.RUNNING:
            self.running.remove(request)
        elif request.state is RequestState.HELD:
            del self.held[request.request_id]
        elif request.state in (RequestState.WAITING, RequestState.PREEMPTED):
            self.waiting.remove(request)

    @property
    def has_work(self) -> bool:
        """Whether a step can have rows. Held requests do not count: only progress of another request releases them."""
        return bool(self.waiting or self.running)

    # -- Samples of one prompt -----------------------------------------------------------------------------

    def expect_samples(self, first: Request, samples: Sequence[Request]) -> None:
        """Reserve rows for further samples, already held, until ``first`` has computed their common prompt."""
        if samples:
            self.samples[first.request_id] = list(samples)
            self._first_sample_of.update((sample.request_id, first.request_id) for sample in samples)

    def leave_samples(self, request: Request) -> Request | None:
        """Remove an ended request from the samples of its prompt.

        If it was the first sample and others are held behind it, return the one that takes its place. The rest are
        behind that one now; it is itself still held, and the caller releases it. Otherwise return None.
        """
        first_id = self._first_sample_of.pop(request.request_id, None)
        if first_id is not None:
            self.samples[first_id].remove(request)
            if not self.samples[first_id]:
                del self.samples[first_id]
            return None
        heir, *rest = self.samples.pop(request.request_id, [None])
        if heir is not None:
            del self._first_sample_of[heir.request_id]
            self.expect_samples(heir, [sample for sample in rest if sample is not None])
        return heir

    def fork(self, first: Request) -> list[Request]:
        """Start the held samples of ``first``, whose prompt is computed, on the same blocks. Returns these samples."""
        samples = self.samples.pop(first.request_id, [])
        if samples:
            self._manager.fork(first, samples)
        for sample in samples:
            del self.held[sample.request_id], self._first_sample_of[sample.request_id]
            sample.move_to(RequestState.RUNNING)
            sample.num_computed_tokens = first.num_computed_tokens
            self.running.append(sample)
        return samples

    def _num_rows(self) -> int:
        """Return the number of running requests, plus the rows reserved for their held samples."""
        return len(self.running) + sum(len(self.samples.get(r.request_id, ())) for r in self.running)

    # -- A step --------------------------------------------------------------------------------------------

    def schedule(self, number: int) -> ScheduledStep:
        """Choose the rows of step ``number`` and allocate their blocks."""
        planned: dict[str, _PlannedRow] = {}
        self.budget_left = self._budget
        preempted = self._schedule_running(planned)
        if not preempted:
            self._admit_waiting(planned)
        rows = [self._row(plan) for plan in planned.values()]
        # Decode goes first. A preempted request is admitted after prefills, yet is in decode if only its last token
        # is not cached.
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

    def _schedule_running(self, planned: dict[str, _PlannedRow]) -> bool:
        """Phase 1: running requests, decode before prefill. Returns whether a request was preempted."""
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
                # The last admitted has the least to recompute. If it already has a row in this step, the row is
                # withdrawn: nothing is computed in its blocks yet.
                victim = self._victim()
                self._preempt(victim)
                preempted = True
                withdrawn = planned.pop(victim.request_id, None)
                if withdrawn is not None:
                    self.budget_left += withdrawn.num_tokens
                if victim is request:
                    break
            if request.state is RequestState.RUNNING:
                self._add_row(planned, request, count, adopted)
                self._hooks.allocated(request, request.num_computed_tokens + count)
                request.num_adopted_tokens += adopted.num_tokens
        return preempted

    def _admit_waiting(self, planned: dict[str, _PlannedRow]) -> None:
        """Phase 2: admit requests from the head of the waiting list while rows, budget and blocks last.

        No request overtakes the head, so that small requests do not starve a large one. A request that the hooks hold
        leaves the list, and the next one becomes the head.
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
                continue  # may_admit released a request that is the head now
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
            # Reported here and not at the look-up: a request that finds no room is looked up again in the next step.
            queried = request.num_tokens if self._manager.enable_prefix_caching else 0  # else nothing was looked up
            self._emit(ev.PrefixLookedUp(request.request_id, queried, computed.num_tokens, resumed))
            if not resumed:
                request.num_recovered_tokens = computed.num_tokens
            self._add_row(planned, request, count, computed)
            self._hooks.admitted(request)
            self._hooks.allocated(request, request.num_computed_tokens + count)

    def _chunk(self, request: Request, computed: ComputedBlocks) -> int:
        """Return how many tokens of the request this step computes, after the hits in ``computed``."""
        known = request.num_computed_tokens + computed.num_tokens
        count = min(request.num_tokens - known, self.budget_left, self._chunk_limit)
        if self._adoption and known + count < request.num_tokens:
            boundary = (known + count) // self._manager.block_size * self._manager.block_size
            if boundary > known:
                return boundary - known
        return count

    def _may_take_room(self, request: Request, count: int, computed: ComputedBlocks) -> bool:
        """Whether there is room to admit a request with a chunk of ``count`` tokens.

        If no request runs, it is enough that the chunk fits: no other request could free more blocks.
        """
        if not self.running:
            return self._manager.has_room(request, count, computed)
        spare = self._num_reserved
        if self._admission == WHOLE_PROMPT:
            count = request.num_tokens - computed.num_tokens
            spare += sum(self._num_blocks_to_come(other) for other in self.running)
        return self._manager.has_room(request, count, computed, num_spare=spare)

    def _num_blocks_to_come(self, request: Request) -> int:
        """Return how many blocks a running request still needs for all of its tokens, reserved under `WHOLE_PROMPT`."""
        return self._manager.num_blocks_for(request.num_tokens) - len(self._manager.block_ids(request.request_id))

    def _add_row(self, planned: dict[str, _PlannedRow], request: Request, count: int, computed: ComputedBlocks) -> None:
        """Add a row to the step: allocate the hits and new blocks for ``count`` tokens."""
        copy = self._manager.allocate_slots(request, count, computed)
        request.num_computed_tokens += computed.num_tokens
        planned[request.request_id] = _PlannedRow(request, count, copy)
        self.budget_left -= count

    def _row(self, plan: _PlannedRow) -> ScheduledRow:
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
        """Return the request to preempt: of those with the highest rank, the last admitted."""
        worst = max(request.rank for request in self.running)
        return next(request for request in reversed(self.running) if request.rank == worst)

    def _preempt(self, request: Request) -> None:
        """Free all blocks of a running request and put it back into the waiting list, at the head of its rank."""
        self._emit(ev.RequestPreempted(request.request_id, request.num_computed_tokens))
        self._manager.free(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.move_to(RequestState.PREEMPTED)
        self.running.remove(request)
        bisect.insort_left(self.waiting, request, key=_place)
        self._hooks.preempted(request)
