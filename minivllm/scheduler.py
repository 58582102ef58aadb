"""Who runs in this step, and how many tokens.

    arrive ──► waiting ──admit──► running ──► ended
                 ▲  ▲                │
       released  │  └──── preempted ─┘ (to the head)
                held

A step has a budget of tokens. Rows in decode come first (one token each), then running prefills, then requests
admitted from the head of the waiting list, each with as much of its prompt as the budget leaves (chunked
prefill). When blocks run out, the newest running request gives all of its own up and will compute again; a step
that preempts admits nobody.

Knows requests, lists and numbers of tokens; it alone changes which list a request is in. Must not know when
blocks are published, who leads a flight, or how a step is computed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from minivllm import events as ev
from minivllm.errors import UnknownRequestError
from minivllm.kv_cache_manager import KVCacheManager
from minivllm.request import Request, RequestState
from minivllm.step import Phase, ScheduledRow, ScheduledStep


class Scheduler:
    """The lists of requests, and the choice of each step's rows.

    ``max_num_batched_tokens`` is the budget of a step, ``max_num_seqs`` the most running rows,
    ``long_prefill_token_threshold`` the most prompt tokens of one request in a step (0: no such limit).
    """

    def __init__(
        self,
        manager: KVCacheManager,
        emit: Callable[[ev.Event], None],
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        long_prefill_token_threshold: int = 0,
    ) -> None:
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.held: dict[str, Request] = {}
        self._manager = manager
        self._emit = emit
        self._budget = max_num_batched_tokens
        self._max_rows = max_num_seqs
        self._chunk_limit = long_prefill_token_threshold or max_num_batched_tokens

    # -- Lists ---------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """A request that has just arrived stands at the end of the waiting list."""
        self.waiting.append(request)

    def hold(self, request: Request) -> None:
        """A follower leaves the waiting list until somebody releases it."""
        if self.waiting and self.waiting[-1] is request:  # it has just arrived: no search
            self.waiting.pop()
        else:
            self.waiting.remove(request)
        request.move_to(RequestState.HELD)
        self.held[request.request_id] = request

    def release(self, request_ids: Iterable[str]) -> None:
        """Let held requests wait for admission, at their places by arrival but behind preempted ones.

        Raises UnknownRequestError for a request that is not held.
        """
        released: list[Request] = []
        for request_id in request_ids:
            request = self.held.pop(request_id, None)
            if request is None:
                raise UnknownRequestError(f"request {request_id!r} was released but is not held")
            request.move_to(RequestState.WAITING)
            released.append(request)
        if not released:
            return
        # Preempted requests are always a run at the head: only the head is admitted, and preempting puts there.
        preempted = [request for request in self.waiting if request.state is RequestState.PREEMPTED]
        others = [request for request in self.waiting if request.state is not RequestState.PREEMPTED]
        others = sorted([*others, *released], key=lambda request: request.arrival)
        self.waiting = deque([*preempted, *others])

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
        """Whether a step would have rows. Held requests wait for a leader that is in one of the two lists."""
        return bool(self.waiting or self.running)

    # -- A step --------------------------------------------------------------------------------------------

    def schedule(self, number: int) -> ScheduledStep:
        """Choose the rows of step ``number`` and allocate their blocks."""
        planned, budget, preempted = self._schedule_running()
        if not preempted:
            self._admit_waiting(planned, budget)
        rows = [self._row(request, count) for request, count in planned.values()]
        # One that resumes with all but its last token recovered is in decode, and was admitted after prefills.
        rows.sort(key=lambda row: row.phase is not Phase.DECODE)
        self._emit(
            ev.StepScheduled(
                tuple((row.request_id, row.start, row.num_tokens, row.phase.value) for row in rows),
                len(self.waiting),
                len(self.held),
            )
        )
        return ScheduledStep(number, tuple(rows))

    def _schedule_running(self) -> tuple[dict[str, tuple[Request, int]], int, bool]:
        """Phase 1: rows that run already, decode first. Returns the plan, the budget left, who preempted."""
        planned: dict[str, tuple[Request, int]] = {}
        budget, preempted = self._budget, False
        decoding = [request for request in self.running if request.is_decoding]
        prefilling = [request for request in self.running if not request.is_decoding]
        for request in (*decoding, *prefilling):
            if request.state is RequestState.PREEMPTED or budget == 0:
                continue
            count = min(request.num_uncomputed_tokens, budget, self._chunk_limit)
            while not self._manager.has_room(request, count):
                # The newest has the least to lose. It may be a row of this step already: then it is taken
                # back, and its blocks with it, before anything was computed in them.
                victim = self.running[-1]
                self._preempt(victim)
                preempted = True
                _, returned = planned.pop(victim.request_id, (victim, 0))
                budget += returned
                if victim is request:
                    break
            if request.state is RequestState.RUNNING:
                self._manager.allocate_slots(request, count)
                planned[request.request_id] = (request, count)
                budget -= count
        return planned, budget, preempted

    def _admit_waiting(self, planned: dict[str, tuple[Request, int]], budget: int) -> None:
        """Phase 2: admit from the head of the waiting list while rows, budget and blocks last.

        Nobody overtakes the head: a request that needs much room is not starved by small ones behind it.
        """
        while self.waiting and len(self.running) < self._max_rows and budget > 0:
            request = self.waiting[0]
            computed = self._manager.get_computed_blocks(request)
            count = min(request.num_tokens - computed.num_tokens, budget, self._chunk_limit)
            if not self._manager.has_room(request, count, computed):
                break
            self.waiting.popleft()
            resumed = request.state is RequestState.PREEMPTED
            request.move_to(RequestState.RUNNING)
            self.running.append(request)
            self._emit(ev.RequestAdmitted(request.request_id, resumed))
            # Counted here and not at the look-up, so that a refused request is counted once.
            self._emit(ev.PrefixLookedUp(request.request_id, request.num_tokens, computed.num_tokens, resumed))
            self._manager.allocate_slots(request, count, computed)
            request.num_computed_tokens = computed.num_tokens
            if not resumed:
                request.num_recovered_tokens = computed.num_tokens
            planned[request.request_id] = (request, count)
            budget -= count

    def _row(self, request: Request, count: int) -> ScheduledRow:
        return ScheduledRow(
            request,
            request.num_computed_tokens,
            count,
            self._manager.block_ids(request.request_id),
            Phase.DECODE if request.is_decoding else Phase.PREFILL,
            samples=request.num_computed_tokens + count == request.num_tokens,
        )

    def _preempt(self, request: Request) -> None:
        """Give all of a running request's blocks up and put it at the head of the waiting list."""
        self._emit(ev.RequestPreempted(request.request_id, request.num_computed_tokens))
        self._manager.free(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.move_to(RequestState.PREEMPTED)
        self.running.remove(request)
        self.waiting.appendleft(request)
