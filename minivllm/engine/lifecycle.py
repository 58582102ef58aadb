"""The life of a request in the engine: it arrives, generates tokens, and ends.

    enter ──► deferred ──due──► arrive ──► waiting, held, running ──► output ... ──► end
         └─────────────────────────┘

A deferred request is submitted but has not arrived: it waits for its trigger, an output token of another request.
Every end, for any reason, goes through `RequestLifecycle.end`, which frees the blocks and lets waiting requests
continue. Knows requests, their text, and the parts that an arrival or an end concerns. Must not know how rows are
chosen or computed, nor when the engine itself ends.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping

from minivllm.cache.kv_cache_manager import KVCacheManager
from minivllm.cache.publication import Moment
from minivllm.config import policy_name
from minivllm.engine.arrivals import DeferredRequests
from minivllm.engine.input_processor import Prepared
from minivllm.engine.output import Output, TextStream
from minivllm.engine.sharing import BlockSharing
from minivllm.errors import ConfigError, RowError, describe
from minivllm.log import events as ev
from minivllm.log.event_log import EventLog
from minivllm.request import Request, RequestState
from minivllm.scheduling.policies import SchedulingPolicy
from minivllm.scheduling.scheduler import Scheduler
from minivllm.step import Runner, ScheduledRow


class RequestLifecycle:
    """Arrivals, output tokens and ends of requests. ``requests`` has every request ever submitted, by id.

    Once the engine has failed, no deferred request arrives, and no sample takes the place of one that ends.
    """

    def __init__(
        self,
        requests: dict[str, Request],
        runner: Runner,
        manager: KVCacheManager,
        scheduler: Scheduler,
        sharing: BlockSharing,
        log: EventLog,
        listener: Callable[[Output], None],
    ) -> None:
        self._has_failed = False
        self._requests = requests
        self._runner = runner
        self._manager = manager
        self._scheduler = scheduler
        self._sharing = sharing
        self._log = log
        self._emit = log.append
        self._listener = listener
        self._deferred = DeferredRequests()
        self._sample_ids: dict[str, tuple[str, ...]] = {}
        self._texts: dict[str, TextStream] = {}
        self._arrivals = itertools.count()

    def samples_of(self, request_id: str) -> tuple[str, ...]:
        """Return the ids of all samples of the request's prompt, the first one first; one id if it has no others."""
        return self._sample_ids.get(request_id, (request_id,))

    @property
    def num_kept(self) -> int:
        """Number of entries kept here for live requests: 0 when all have ended. For leak tests."""
        return len(self._texts) + len(self._deferred)

    @staticmethod
    def rank(requests: Iterable[Request], policy: SchedulingPolicy) -> None:
        """Set the rank of each request by the scheduling policy, before the engine stores anything for it.

        Raises ConfigError for a policy that does not return a whole number.
        """
        for request in requests:
            rank = policy.rank(request)
            if not isinstance(rank, int):
                raise ConfigError(
                    f"scheduling policy {policy_name(policy)!r} gives request {request.request_id!r} rank {rank!r}; "
                    "it must return a whole number"
                )
            request.rank = rank

    # -- Arrival -------------------------------------------------------------------------------------------

    def enter(self, prepared: Prepared) -> None:
        """Take in all samples of a prepared prompt: they arrive now, or are deferred until their trigger."""
        for each in prepared.requests:
            self._requests[each.request_id] = each
        if prepared.samples:
            names = tuple(each.request_id for each in prepared.requests)
            self._sample_ids.update(dict.fromkeys(names, names))
        if prepared.after is None:
            self._arrive(*prepared.requests)
            return
        other_id, output_token = prepared.after
        for each in prepared.requests:
            each.state = RequestState.DEFERRED
            self._emit(ev.RequestDeferred(each.request_id, other_id, output_token))
        self._deferred.add(prepared.requests, prepared.after)
        self._admit_due(self._requests[other_id])

    def _admit_due(self, other: Request) -> None:
        """Let deferred requests arrive if ``other`` has generated the token that they wait for, or has ended."""
        for requests in self._deferred.pop_due(other):
            for request in requests:
                request.move_to(RequestState.WAITING)
            self._arrive(*requests)

    def _arrive(self, request: Request, *samples: Request) -> None:
        """Put a request into the waiting list, and hold the further samples until their prompt is computed."""
        self._enqueue(request)
        for sample in samples:
            self._enqueue(sample)
            self._emit(ev.SampleHeld(sample.request_id, request.request_id))
            self._scheduler.hold(sample)
        self._scheduler.expect_samples(request, samples)
        self._coordinate(request)

    def _enqueue(self, request: Request) -> None:
        """Set the arrival number and the seed of a request, and put it into the waiting list."""
        request.arrival = next(self._arrivals)
        request.seed = request.sampling.seed if request.sampling.seed is not None else request.arrival
        self._emit(
            ev.RequestArrived(
                request.request_id,
                request.arrival,
                request.prompt_token_ids,
                request.sampling.max_tokens,
                request.extra_keys,
                request.rank,
            )
        )
        self._scheduler.add(request)

    def _coordinate(self, request: Request) -> None:
        """Report a waiting request to the coordinator, and hold the request if it says so."""
        if self._sharing.arrive(request):
            self._scheduler.hold(request)

    # -- Output --------------------------------------------------------------------------------------------

    def output(self, request: Request, token_id: int) -> None:
        """Append and output a drawn token, and end the request if it is the last one."""
        name = request.request_id
        index = len(request.output_token_ids)
        request.append_output(token_id)
        stream = self._texts.get(name)
        if stream is None:
            stream = TextStream(self._runner.tokenizer.detokenizer, request.sampling.stop)
            self._texts[name] = stream
        is_eos = token_id in self._runner.eos_token_ids and not request.sampling.ignore_eos
        text = "" if is_eos else stream.add(token_id)
        if is_eos or stream.stopped:
            request.finish_reason = "stop"
        elif index + 1 >= request.sampling.max_tokens:
            request.finish_reason = "length"
        if request.finish_reason is not None:
            text += stream.finish()
        self._emit(ev.TokenOut(name, index, token_id, text))
        if request.finish_reason is None:
            self._listener(Output(name, token_id, text))
            self._admit_due(request)
        else:
            self.end(request, RequestState.FINISHED, token_id=token_id, text=text)

    # -- Ends ----------------------------------------------------------------------------------------------

    def end(
        self,
        request: Request,
        end: RequestState,
        *,
        error: BaseException | None = None,
        token_id: int | None = None,
        text: str = "",
    ) -> None:
        """End a request: publish if it finished normally, free, then report to the coordinator and the listener."""
        name = request.request_id
        had_arrived = request.state is not RequestState.DEFERRED
        if end is RequestState.FINISHED:
            self._sharing.publish_visible(request, Moment.FINISHED, request.num_computed_tokens)
        prompt_is_published = self._manager.prompt_is_published(request)
        self._scheduler.remove(request)
        request.move_to(end)
        self._manager.free(request)
        if end is RequestState.FINISHED:
            assert request.finish_reason is not None
            self._emit(ev.RequestFinished(name, request.finish_reason))
        elif end is RequestState.ABORTED:
            request.finish_reason = "abort"
            self._emit(ev.RequestAborted(name))
        else:
            request.finish_reason = "error"
            self._emit(ev.RequestFailed(name, describe(error) if error else "unknown"))
        self._sharing.ended(name, end, prompt_is_published=prompt_is_published)
        if had_arrived:
            self._leave_samples(request)
        else:
            self._deferred.remove(request)
        self._texts.pop(name, None)
        self._runner.forget(name)
        self._listener(Output(name, token_id, text, end, error))
        if not self._has_failed:
            self._admit_due(request)

    def _leave_samples(self, request: Request) -> None:
        """If an ended request was to compute the prompt of several samples, let the next sample take its place."""
        heir = self._scheduler.leave_samples(request)
        if heir is not None and not self._has_failed:
            self._emit(ev.SampleLeads(request.request_id, heir.request_id))
            self._scheduler.release([heir.request_id])
            self._coordinate(heir)

    def fail_non_finite(self, row: ScheduledRow, drawn: Mapping[str, int | RowError]) -> None:
        """Fail the requests of a row whose results are NaN or infinite. No safe policy has published its new blocks.

        All samples of a prompt depend on these results. The held ones fail first, so that none of them takes the place
        of the first one.
        """
        samples = tuple(self._scheduler.samples.get(row.request_id, ()))
        own = drawn.get(row.request_id)
        for request in (*reversed(samples), row.request):
            error = own if isinstance(own, RowError) else drawn.get(request.request_id)
            if isinstance(error, RowError):
                self.end(request, RequestState.FAILED, error=error)

    def fail_all(self, error: BaseException) -> None:
        """Fail every request because the engine failed. No sample or deferred request starts meanwhile."""
        self._has_failed = True
        for request in self._in_order_of_ending():
            name, start = request.request_id, len(self._log)
            try:
                self.end(request, RequestState.FAILED, error=error)
            except Exception:  # a faulty policy may raise again: the request must end anyway
                request.state = RequestState.FAILED
                if not any(isinstance(e, ev.RequestFailed) and e.request_id == name for e in self._log.since(start)):
                    self._emit(ev.RequestFailed(name, describe(error)))
                self._listener(Output(name, None, "", RequestState.FAILED, error))

    def abort_all(self) -> None:
        """Abort every request that has not ended."""
        for request in self._in_order_of_ending():
            if not request.state.is_ended:
                self.end(request, RequestState.ABORTED)

    def _in_order_of_ending(self) -> list[Request]:
        """Return the live requests in an order in which no end makes another one arrive or take its place.

        Deferred requests come first, then held ones, then the rest; in each group the latest submitted comes first.
        """
        order = {RequestState.DEFERRED: 0, RequestState.HELD: 1}
        live = [request for request in reversed(self._requests.values()) if not request.state.is_ended]
        return sorted(live, key=lambda request: order.get(request.state, 2))
