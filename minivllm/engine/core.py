"""The engine: a step is schedule, run, publish, tell.

    submit ─► arrive ─► coordinator ─► waiting ─┐
                                                ▼
              ┌── schedule ─► Runner.execute ─► publish ─► coordinator ─► end ──┐
              └─────────────────────────── next step ◄──────────────────────────┘

`EngineCore` is synchronous: whoever calls `step()` runs it, on the caller's thread. `engine_thread.py` puts one
on a thread of its own. It knows every part and the order in which they are asked; it must not know what a runner
computes, nor the rules of any policy.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minivllm.cache.block_hash import BlockHash
from minivllm.cache.kv_cache_manager import ComputedBlocks, KVCacheManager
from minivllm.cache.publication import PUBLICATION_POLICIES, Moment, is_safe
from minivllm.config import EngineConfig, policy_name
from minivllm.coordination.coordinator import Coordinator, LetGo, Outlook, Role
from minivllm.engine.input_processor import Door, Prepared, Submission, make_sampling
from minivllm.engine.invariants import check_books, state_of
from minivllm.engine.output import TextStream
from minivllm.errors import (
    ConfigError,
    DuplicateRequestError,
    EngineClosedError,
    EngineDeadError,
    InvariantError,
    MiniVLLMError,
    RowError,
    UnknownRequestError,
    describe,
    stopped_by,
)
from minivllm.log import events as ev
from minivllm.log.event_log import EventLog
from minivllm.log.state import State
from minivllm.request import MultimodalItem, Request, RequestState, Sampling
from minivllm.scheduling.scheduler import Scheduler, Verdict
from minivllm.step import Runner, ScheduledRow


@dataclass(frozen=True, slots=True)
class Output:
    """What one request got in a step: a token with its text, or an end, or both."""

    request_id: str
    token_id: int | None
    text: str
    end: RequestState | None = None
    error: BaseException | None = None


class EngineCore:
    """Scheduler, KV cache manager, publication and coordination over one runner.

    ``listener`` gets every `Output` as it happens and must not call the engine back. Not thread-safe: one thread calls.
    """

    def __init__(self, config: EngineConfig, runner: Runner, listener: Callable[[Output], None] | None = None) -> None:
        self.config = config
        self.runner = runner
        self.log = EventLog(runner.clock.now_ms)
        self.requests: dict[str, Request] = {}
        self.manager = KVCacheManager(
            config.num_blocks,
            config.block_size,
            config.prefix_index_policy(),
            config.eviction_policy,
            self.log.append,
            enable_prefix_caching=config.enable_prefix_caching,
            hasher=config.block_hash_policy,
            check_token_ids=config.check_token_ids,
        )
        self.scheduler = Scheduler(
            self.manager,
            self.log.append,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            admission=config.admission,
            num_reserved_blocks=config.num_reserved_blocks,
            adoption=config.adoption,
            watcher=self,
        )
        self.coordinator = self._make_coordinator(config)
        self._check_is_safe(config)
        self.error: BaseException | None = None
        self._listener = listener or (lambda output: None)
        self._texts: dict[str, TextStream] = {}
        self._prefilled: set[str] = set()
        self._deferred: dict[str, dict[str, tuple[int, Request]]] = {}  # who waits for tokens of whom
        self._trigger_of: dict[str, str] = {}
        self._late_samples: dict[str, list[Request]] = {}  # further samples of requests that have not arrived yet
        self._all_samples: dict[str, tuple[str, ...]] = {}
        self._in_flight: set[str] = set()  # ids that the coordinator knows
        self._in_step = False
        self._arrivals = itertools.count()
        self._door = Door(config, runner)
        self._steps = itertools.count(1)
        self._closed = False
        runner.allocate(config.num_blocks, config.block_size)
        self.log.append(
            ev.EngineStarted(
                config.num_blocks,
                config.block_size,
                config.max_num_seqs,
                config.max_num_batched_tokens,
                policy_name(config.publication_policy),
                policy_name(config.coordination_policy),
                policy_name(config.release_policy),
                runner.name,
                policy_name(config.scheduling_policy),
                config.block_hash_policy.name,
            )
        )

    def _make_coordinator(self, config: EngineConfig) -> Coordinator:
        coordinator = config.coordination_policy(config.release_policy, self.log.append)
        if getattr(coordinator, "cost", None) is None:
            coordinator.cost = getattr(self.runner, "cost", None)
        return coordinator

    def _check_is_safe(self, config: EngineConfig) -> None:
        """Raise ConfigError for a policy that would let a real model read K/V that was never computed."""
        name = policy_name(config.publication_policy)
        if self.runner.is_real and not is_safe(config.publication_policy) and config.allow_unsafe != name:
            raise ConfigError(
                f"publication {name!r} lets requests read K/V that was never computed; it is for teaching, on the "
                f'virtual model, or with allow_unsafe="{name}" on {self.runner.name!r}'
            )

    # -- The door ------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling | None = None,
        *,
        request_id: str | None = None,
        cache_salt: str | None = None,
        after: tuple[str, int] | None = None,
        adapter: str | None = None,
        multimodal: Sequence[MultimodalItem] = (),
        priority: int = 0,
        **sampling_fields: Any,
    ) -> Request:
        """Hand one request in and return it. Fields of `Sampling` may be given by name instead.

        With ``n`` samples the first one's request is returned; `samples_of` names the others. Raises
        InvalidRequestError for one that can never run.
        """
        chosen = make_sampling(sampling, sampling_fields)
        submission = Submission(prompt, chosen, request_id, cache_salt, after, adapter, multimodal, priority)
        return self.submit_batch([submission])[0]

    def samples_of(self, request_id: str) -> tuple[str, ...]:
        """Return the ids of all samples of a prompt, the first one first; only its own if there are no others.

        Raises UnknownRequestError for an id that was never submitted.
        """
        self._known(request_id)
        return self._all_samples.get(request_id, (request_id,))

    def submit_batch(self, submissions: Iterable[Submission]) -> list[Request]:
        """Hand requests in together: all arrive before the next step, or, if one is refused, none does.

        Returns the first sample's request of each.
        """
        requests = self.prepare(submissions)
        self.enter(requests)
        return [prepared.request for prepared in requests]

    def prepare(self, submissions: Iterable[Submission], reserved: Container[str] = ()) -> list[Prepared]:
        """Check submissions and make their requests; `enter` lets them in. Changes nothing.

        May be called from any thread, with the ids in ``reserved`` counting as in use. Raises
        InvalidRequestError, DuplicateRequestError or UnknownRequestError, and EngineDeadError or
        EngineClosedError if nothing can be submitted any more.
        """
        self._check_open()
        return self._door.prepare(submissions, lambda name: name in self.requests or name in reserved)

    def enter(self, batch: Iterable[Prepared]) -> None:
        """Let prepared requests in together: those without a trigger arrive now, in this order.

        Raises DuplicateRequestError, with nothing changed, if an id was taken since they were prepared.
        """
        self._check_open()
        batch = list(batch)
        entering: set[str] = set()
        for request in (request for prepared in batch for request in prepared.requests):
            if request.request_id in self.requests or request.request_id in entering:
                raise DuplicateRequestError(
                    f"request id {request.request_id!r} is in use; choose another or leave it out"
                )
            entering.add(request.request_id)
        for request in (request for prepared in batch for request in prepared.requests):
            request.rank = self._rank(request)  # before anything is held: a policy may answer nonsense
        try:
            for prepared in batch:
                self._enter(prepared)
        except BaseException as error:  # a coordinator raised: some are in its books, some are not
            self.die(error)
            raise

    def _enter(self, prepared: Prepared) -> None:
        request = prepared.request
        for each in prepared.requests:
            self.requests[each.request_id] = each
        if prepared.samples:
            self._late_samples[request.request_id] = list(prepared.samples)
            names = tuple(each.request_id for each in prepared.requests)
            self._all_samples.update(dict.fromkeys(names, names))
        if prepared.after is None:
            self._arrive(request)
        else:
            self._defer(request, *prepared.after)

    def _check_open(self) -> None:
        if self.error is not None:
            raise stopped_by(self.error)
        if self._closed:
            raise EngineClosedError("the engine is closed; make a new one to go on")

    # -- Arrival -------------------------------------------------------------------------------------------

    def _defer(self, request: Request, other: str, count: int) -> None:
        for each in (request, *self._late_samples.get(request.request_id, ())):
            each.state = RequestState.DEFERRED
            self.log.append(ev.RequestDeferred(each.request_id, other, count))
        self._deferred.setdefault(other, {})[request.request_id] = (count, request)
        self._trigger_of[request.request_id] = other
        if self._is_due(self.requests[other], count):
            self._come(request)

    @staticmethod
    def _is_due(other: Request, count: int) -> bool:
        return other.state.is_ended or len(other.output_token_ids) >= count

    def _fire_triggers(self, other: Request) -> None:
        """Let those arrive that waited for an output token of ``other`` that is there, or for its end."""
        waiting = self._deferred.get(other.request_id, {})
        for request in [request for count, request in waiting.values() if self._is_due(other, count)]:
            self._come(request)

    def _come(self, request: Request) -> None:
        """A request that was deferred arrives, with the further samples of its prompt."""
        self._forget_trigger(request)
        for each in (request, *self._late_samples.get(request.request_id, ())):
            each.move_to(RequestState.WAITING)
        self._arrive(request)

    def _forget_trigger(self, request: Request) -> None:
        other = self._trigger_of.pop(request.request_id, None)
        if other is not None:
            del self._deferred[other][request.request_id]
            if not self._deferred[other]:
                del self._deferred[other]

    def _arrive(self, request: Request) -> None:
        """A request comes in, with the further samples of its prompt: these are held until it is computed."""
        samples = self._late_samples.pop(request.request_id, [])
        self._enlist(request)
        for sample in samples:
            self._enlist(sample)
            self.log.append(ev.SampleHeld(sample.request_id, request.request_id))
            self.scheduler.hold(sample)
        self.scheduler.expect_samples(request, samples)
        self._meet_others(request)

    def _meet_others(self, request: Request) -> None:
        """Tell the coordinator of a request that stands in the waiting list."""
        self._in_flight.add(request.request_id)
        if self.coordinator.arrive(request) is Role.FOLLOWER:
            self.scheduler.hold(request)

    def _enlist(self, request: Request) -> None:
        """Give a request its number and seed, and put it into the waiting list."""
        request.arrival = next(self._arrivals)
        request.seed = request.sampling.seed if request.sampling.seed is not None else request.arrival
        self.log.append(
            ev.RequestArrived(
                request.request_id,
                request.arrival,
                request.prompt_token_ids,
                request.sampling.max_tokens,
                request.extra_keys,
                request.rank,
            )
        )
        self.scheduler.add(request)

    def _rank(self, request: Request) -> int:
        policy = self.config.scheduling_policy
        rank = policy.rank(request)
        if not isinstance(rank, int):
            raise ConfigError(
                f"scheduling policy {policy_name(policy)!r} gives request {request.request_id!r} rank {rank!r}; "
                "it must return a whole number"
            )
        return rank

    # -- A step --------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether requests can be submitted: neither closed nor ended on an error."""
        return self.error is None and not self._closed

    @property
    def has_work(self) -> bool:
        """Whether a step would do something."""
        return self.is_open and (self.scheduler.has_work or bool(self.scheduler.held))

    def step(self) -> bool:
        """Run one step. Returns False, with nothing done, if there is no request to run.

        Whatever the runner raises ends the engine: every request fails with it, their blocks are freed, and
        it is raised here as EngineDeadError.
        """
        self._check_open()
        if self._in_step:
            raise MiniVLLMError("a step is running; call step() again when it has ended")
        if not self.has_work:
            return False
        self._in_step = True
        try:
            if not self.scheduler.has_work:
                raise InvariantError(
                    f"requests {sorted(self.scheduler.held)} are held and nobody runs who could release them; "
                    f"coordination {self.coordinator.name!r} must let somebody go"
                )
            self._run_step()
        except BaseException as error:
            self.die(error)
            if not isinstance(error, Exception):  # Ctrl-C is the caller's, not a fault to wrap
                raise
            raise EngineDeadError(f"the engine stopped in step {self.log.step}: {describe(error)}") from error
        finally:
            self._in_step = False
        return True

    def _run_step(self) -> None:
        self.log.step = next(self._steps)
        step = self.scheduler.schedule(self.log.step)
        drawn = self.runner.execute(step)
        # A request that ended since it was scheduled is withdrawn: nothing of it counts as computed.
        rows = [row for row in step.rows if not row.is_withdrawn]
        self._check_drawn(rows, drawn)
        for row in rows:
            self._fail_non_finite(row, drawn)
        rows = [row for row in rows if not row.is_withdrawn]
        for row in rows:
            request = row.request
            request.num_computed_tokens += row.num_tokens
            self.log.append(ev.ChunkComputed(request.request_id, row.start, row.num_tokens, row.phase.value))
        # All K/V of the step is there: now, and not before, others may see it.
        for row in rows:
            self._publish(row.request, Moment.STEP_DONE, row.request.num_computed_tokens)
            self._settle_prompt(row.request)
        for row in rows:
            if row.samples:
                self._put_out_all(row, drawn)

    def _check_drawn(self, rows: Sequence[ScheduledRow], drawn: Mapping[str, int | RowError]) -> None:
        """Raise InvariantError unless there is one good result for each request that draws."""
        if not isinstance(drawn, Mapping):
            raise InvariantError(f"the runner returned {drawn!r}; it must return tokens by request id")
        expected = {request.request_id for row in rows for request in row.sampled}
        failed = {row.request_id for row in rows if isinstance(drawn.get(row.request_id), RowError)}
        if drawn.keys() != expected | failed:
            raise InvariantError(f"the runner drew tokens for {sorted(map(str, drawn))}, not for {sorted(expected)}")
        vocab_size = self.runner.vocab_size
        for name, token in drawn.items():
            is_token = isinstance(token, int) and not isinstance(token, bool) and 0 <= token < vocab_size
            if not is_token and not isinstance(token, RowError):
                raise InvariantError(
                    f"the runner drew {token!r} for request {name!r}; a token id is a whole number from 0 to "
                    f"{vocab_size - 1}"
                )

    def _fail_non_finite(self, row: ScheduledRow, drawn: Mapping[str, int | RowError]) -> None:
        """End the requests of a row whose numbers came out as NaN or infinite. No safe policy has shown any of it.

        All samples of a prompt hang on the same numbers. Those that are held are failed first, so that none takes the
        first one's place.
        """
        samples = tuple(self.scheduler.samples.get(row.request_id, ()))
        own = drawn.get(row.request_id)
        for request in (*reversed(samples), row.request):
            error = own if isinstance(own, RowError) else drawn.get(request.request_id)
            if isinstance(error, RowError):
                self._end(request, RequestState.FAILED, error=error)

    def _put_out_all(self, row: ScheduledRow, drawn: Mapping[str, int | RowError]) -> None:
        """Hand the drawn tokens out: of the request and, at the end of its prompt, of its further samples."""
        samples = self.scheduler.fork(row.request)
        for sample in samples:
            self._prefilled.add(sample.request_id)
            self.log.append(ev.PrefillFinished(sample.request_id))
        for request in (row.request, *samples):
            token = drawn[request.request_id]
            assert isinstance(token, int)
            self._put_out(request, token)

    # -- While the scheduler makes a step: it asks and tells -----------------------------------------------

    def may_admit(self, request: Request, computed: ComputedBlocks) -> Verdict:
        """Ask the coordinator whether a waiting request may run, given what is published for it."""
        if request.request_id not in self._in_flight or not self.config.enable_prefix_caching:
            return Verdict.GO
        manager, scheduler = self.manager, self.scheduler
        outlook = Outlook(
            hashes=manager.chain_hashes(request),
            num_found=len(computed.block_ids),
            num_usable=(request.num_tokens - 1) // manager.block_size,
            block_size=manager.block_size,
            chunk_limit=scheduler.chunk_limit,
            budget=self.config.max_num_batched_tokens,
            budget_left=scheduler.budget_left,
        )
        if self._publish_what_is_ready(outlook):
            return Verdict.LOOK_AGAIN
        return Verdict.GO if self.coordinator.may_admit(request, outlook) else Verdict.HOLD

    def _publish_what_is_ready(self, outlook: Outlook) -> bool:
        """Publish the next missing block if a leader has computed it and had nobody to publish it for until now."""
        if outlook.num_found >= outlook.num_usable:
            return False
        block_hash = outlook.hashes[outlook.num_found]
        leader_id = self.coordinator.who_computes(block_hash)
        if leader_id is None:
            return False
        leader = self.requests[leader_id]
        ready = min(leader.num_computed_tokens, leader.num_prompt_tokens)
        if ready < (outlook.num_found + 1) * outlook.block_size:
            return False
        hashes = self.manager.publish(leader, ready)
        self._tell_published(leader, hashes)
        return bool(hashes)

    def admitted(self, request: Request) -> None:
        """Tell the coordinator which prompt blocks the request is going to compute."""
        if request.request_id in self._in_flight:
            size = self.manager.block_size
            first, last = request.num_computed_tokens // size, request.num_prompt_tokens // size
            self.coordinator.admitted(request, self.manager.chain_hashes(request)[first:last])

    def preempted(self, request: Request) -> None:
        """Tell the coordinator that the request will not compute what it was about to."""
        if request.request_id in self._in_flight:
            self._let_go(self.coordinator.preempted(request.request_id))

    def allocated(self, request: Request, num_tokens: int) -> None:
        """Ask an unsafe policy whether others may see what is not computed yet."""
        if not is_safe(self.config.publication_policy):
            self._publish(request, Moment.ALLOCATED, num_tokens)

    # -- After the forward pass ----------------------------------------------------------------------------

    def _publish(self, request: Request, moment: Moment, num_tokens: int) -> None:
        """Publish what the policy now shows of the request's first ``num_tokens`` tokens, and tell who waits."""
        policy = self.config.publication_policy
        visible = policy.visible_tokens(num_tokens, moment)
        if not isinstance(visible, int) or visible < 0:
            raise ConfigError(
                f"publication policy {policy_name(policy)!r} says that {visible!r} tokens may be visible; "
                "it must return a whole number of 0 or more"
            )
        if self.coordinator.wants_blocks(request.request_id):
            visible = max(visible, min(request.num_computed_tokens, request.num_prompt_tokens))
        if visible:
            before = moment is Moment.ALLOCATED
            hashes = self.manager.publish(request, min(visible, num_tokens), before_computed=before)
            self._tell_published(request, hashes)

    def _tell_published(self, request: Request, hashes: Sequence[BlockHash]) -> None:
        if hashes:
            self._let_go(self.coordinator.published(request.request_id, hashes))

    def _settle_prompt(self, request: Request) -> None:
        """Once, when all of the prompt has K/V: publish it if a flight wants it, and release the followers."""
        name = request.request_id
        if name in self._prefilled or request.num_computed_tokens < request.num_prompt_tokens:
            return
        self._prefilled.add(name)
        self.log.append(ev.PrefillFinished(name))
        if self.coordinator.wants_prompt(name):
            self._tell_published(request, self.manager.publish(request, request.num_prompt_tokens))
            self._let_go(self.coordinator.prompt_published(name))

    def _put_out(self, request: Request, token_id: int) -> None:
        """Hand a drawn token out, and end the request if it was the last."""
        name = request.request_id
        index = len(request.output_token_ids)
        request.append_output(token_id)
        stream = self._texts.get(name)
        if stream is None:
            stream = TextStream(self.runner.tokenizer.detokenizer, request.sampling.stop)
            self._texts[name] = stream
        is_eos = token_id in self.runner.eos_token_ids and not request.sampling.ignore_eos
        text = "" if is_eos else stream.add(token_id)
        if is_eos or stream.stopped:
            request.finish_reason = "stop"
        elif index + 1 >= request.sampling.max_tokens:
            request.finish_reason = "length"
        if request.finish_reason is not None:
            text += stream.finish()
        self.log.append(ev.TokenOut(name, index, token_id, text))
        if request.finish_reason is None:
            self._listener(Output(name, token_id, text))
            self._fire_triggers(request)
        else:
            self._end(request, RequestState.FINISHED, token_id=token_id, text=text)

    # -- Ends ----------------------------------------------------------------------------------------------

    def _end(
        self,
        request: Request,
        end: RequestState,
        *,
        error: BaseException | None = None,
        token_id: int | None = None,
        text: str = "",
    ) -> None:
        """End a request in any way: publish if it ended well, free, tell the coordinator, tell the caller."""
        name = request.request_id
        had_arrived = request.state is not RequestState.DEFERRED
        if end is RequestState.FINISHED:
            self._publish(request, Moment.FINISHED, request.num_computed_tokens)
        prompt_is_published = self.manager.prompt_is_published(request)
        self.scheduler.remove(request)
        request.move_to(end)
        self.manager.free(request)
        if end is RequestState.FINISHED:
            assert request.finish_reason is not None
            self.log.append(ev.RequestFinished(name, request.finish_reason))
        elif end is RequestState.ABORTED:
            request.finish_reason = "abort"
            self.log.append(ev.RequestAborted(name))
        else:
            request.finish_reason = "error"
            self.log.append(ev.RequestFailed(name, describe(error) if error else "unknown"))
        if name in self._in_flight:
            self._in_flight.remove(name)
            self._let_go(self.coordinator.request_ended(name, end, prompt_is_published=prompt_is_published))
        self._leave_samples(request, had_arrived=had_arrived)
        if not had_arrived:
            self._forget_trigger(request)
        self._texts.pop(name, None)
        self._prefilled.discard(name)
        self.runner.forget(name)
        self._listener(Output(name, token_id, text, end, error))
        if self.error is None:
            self._fire_triggers(request)

    def _leave_samples(self, request: Request, *, had_arrived: bool) -> None:
        """A request ended: as a further sample it is expected no more; as the first one the next takes its place."""
        name = request.request_id
        groups = self.scheduler.samples if had_arrived else self._late_samples
        first_of = next((i for i in self._all_samples.get(name, ()) if request in groups.get(i, ())), None)
        if first_of is not None:
            groups[first_of].remove(request)
            if not groups[first_of]:
                del groups[first_of]
        elif name in groups and self.error is None:  # else all are ending, each by itself
            heir, *rest = groups.pop(name)
            if not had_arrived:
                self._inherit_trigger(request, heir)
                if rest:
                    groups[heir.request_id] = rest
                return
            self.log.append(ev.SampleLeads(name, heir.request_id))
            self.scheduler.release([heir.request_id])
            self.scheduler.expect_samples(heir, rest)
            self._meet_others(heir)

    def _inherit_trigger(self, request: Request, heir: Request) -> None:
        """Let another sample arrive in the stead of a request that ended before it arrived."""
        name, other = request.request_id, self._trigger_of[request.request_id]
        # In the place of the one that ended: who was submitted first arrives first.
        self._deferred[other] = {
            (heir.request_id if each == name else each): (count, heir if each == name else waiting)
            for each, (count, waiting) in self._deferred[other].items()
        }
        del self._trigger_of[name]
        self._trigger_of[heir.request_id] = other

    def _let_go(self, let_go: LetGo) -> None:
        self.scheduler.release(let_go.request_ids)

    def abort(self, request_id: str) -> bool:
        """Take a request back. Returns False if it has ended already, however often it is called.

        Raises UnknownRequestError for an id that was never submitted.
        """
        return self._end_early(request_id, RequestState.ABORTED, None)

    def fail(self, request_id: str, error: BaseException) -> bool:
        """End one request on an error; the engine goes on. Returns and raises like `abort`."""
        return self._end_early(request_id, RequestState.FAILED, error)

    def _end_early(self, request_id: str, end: RequestState, error: BaseException | None) -> bool:
        request = self._known(request_id)
        if request.state.is_ended:
            return False
        self._end(request, end, error=error)
        return True

    def _known(self, request_id: str) -> Request:
        request = self.requests.get(request_id)
        if request is None:
            raise UnknownRequestError(
                f"no request is called {request_id!r}; ask with an id that submit() returned on this engine"
            )
        return request

    def die(self, error: BaseException) -> None:
        """The engine ends on an error: the step, if one runs, is withdrawn, and nothing of it is published.

        Every request fails with the error, and every block is freed.
        """
        self.error = error
        self.log.append(ev.StepFailed(describe(error)))
        for request in self._in_order_of_ending():
            self._fail_for_sure(request, error)

    def _in_order_of_ending(self) -> list[Request]:
        """Return who has not ended, for an end of all: nobody then arrives, or leads, to be ended in turn.

        Those that have not arrived come first, then the held, the last one first.
        """
        order = {RequestState.DEFERRED: 0, RequestState.HELD: 1}
        live = [request for request in reversed(self.requests.values()) if not request.state.is_ended]
        return sorted(live, key=lambda request: order.get(request.state, 2))

    def _fail_for_sure(self, request: Request, error: BaseException) -> None:
        """End a request though the books may be broken: a policy that raised may raise again."""
        start = len(self.log)
        try:
            self._end(request, RequestState.FAILED, error=error)
        except Exception:
            name = request.request_id
            request.state = RequestState.FAILED
            if not any(isinstance(e, ev.RequestFailed) and e.request_id == name for e in self.log.since(start)):
                self.log.append(ev.RequestFailed(name, describe(error)))
            self._listener(Output(name, None, "", RequestState.FAILED, error))

    # -- Between steps -------------------------------------------------------------------------------------

    def run(self, max_steps: int | None = None) -> int:
        """Run steps until nothing is left to do, or ``max_steps`` are done. Returns how many were run."""
        count = 0
        while (max_steps is None or count < max_steps) and self.step():
            count += 1
        return count

    def reset_cache(self, *, abort_running: bool = False) -> bool:
        """Forget every published block. Returns False, with nothing changed, while a block is in use.

        With ``abort_running`` the requests that hold blocks are aborted first; those that wait go on waiting.
        """
        self._check_open()
        if abort_running:
            while self.scheduler.running:
                self.abort(self.scheduler.running[-1].request_id)
        return self.manager.reset()

    def set_policies(self, *, publication: Any = None, coordination: Any = None, release: Any = None) -> None:
        """Go on under other policies (None: as before). Only while no request is in the engine.

        Raises ConfigError while one is, UnknownNameError for a policy that does not exist.
        """
        self._check_open()
        if any(not request.state.is_ended for request in self.requests.values()):
            raise ConfigError("policies can change only while no request is in the engine; wait or abort them")
        given: dict[str, Any] = {"publication": publication, "coordination": coordination, "release": release}
        if publication is not None and self.config.allow_unsafe not in (
            *PUBLICATION_POLICIES,
            policy_name(publication),
        ):
            given["allow_unsafe"] = ""  # the consent was for a policy of somebody's own, which leaves
        config = self.config.replace(**{k: v for k, v in given.items() if v is not None})
        self._check_is_safe(config)
        coordinator = self._make_coordinator(config)  # may raise: nothing changed
        self.config, self.coordinator = config, coordinator
        self.log.append(
            ev.PoliciesChanged(
                policy_name(self.config.publication_policy),
                policy_name(self.config.coordination_policy),
                policy_name(self.config.release_policy),
            )
        )

    def close(self) -> None:
        """Abort what is left and free the runner. Calling it again does nothing."""
        if self._closed:
            return
        try:
            for request in self._in_order_of_ending():
                self.abort(request.request_id)
        finally:
            self._closed = True
            self.runner.close()

    # -- Books ---------------------------------------------------------------------------------------------

    def state(self) -> State:
        """Return the engine's own state, from its own objects: what replaying the log must give."""
        return state_of(self.requests, self.manager, self.scheduler, self.coordinator)

    def check_invariants(self) -> None:
        """Raise InvariantError if any of the books is wrong. Between steps only."""
        check_books(self.requests, self.manager, self.scheduler, self.coordinator, self.config.max_num_seqs)
