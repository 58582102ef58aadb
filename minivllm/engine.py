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
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from minivllm import events as ev
from minivllm.block_hash import make_extra_keys
from minivllm.config import EngineConfig, policy_name
from minivllm.errors import (
    ConfigError,
    DuplicateRequestError,
    EngineClosedError,
    EngineDeadError,
    InvalidRequestError,
    InvariantError,
    UnknownRequestError,
)
from minivllm.flights import Coordinator, LetGo, Role
from minivllm.kv_cache_manager import KVCacheManager
from minivllm.output import TextStream
from minivllm.publication import Moment
from minivllm.replay import BlockState, BlockView, FlightView, RequestView, State
from minivllm.request import Request, RequestState, Sampling
from minivllm.scheduler import Scheduler
from minivllm.step import Runner, ScheduledStep


@dataclass(frozen=True, slots=True)
class Submission:
    """What a caller hands in: a prompt (text, or token ids) and what goes with it.

    ``after`` = (request id, n) lets the request arrive when that other one has put its n-th output token out
    (the first is 1), or has ended without. ``cache_salt`` keeps its blocks to those with the same salt.
    """

    prompt: str | Sequence[int]
    sampling: Sampling = field(default_factory=Sampling)
    request_id: str | None = None
    cache_salt: str | None = None
    after: tuple[str, int] | None = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checked submission: its request, and what the request waits for before it arrives."""

    request: Request
    after: tuple[str, int] | None


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
        self.log = ev.EventLog(runner.clock.now_ms)
        self.requests: dict[str, Request] = {}
        self.manager = KVCacheManager(
            config.num_blocks,
            config.block_size,
            config.prefix_index_policy(),
            config.eviction_policy,
            self.log.append,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        self.scheduler = Scheduler(
            self.manager,
            self.log.append,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
        )
        self.coordinator: Coordinator = config.coordination_policy(config.release_policy, self.log.append)
        self.error: BaseException | None = None
        self._listener = listener or (lambda output: None)
        self._texts: dict[str, TextStream] = {}
        self._prefilled: set[str] = set()
        self._deferred: dict[str, list[tuple[int, Request]]] = {}
        self._arrivals = itertools.count()
        self._ids = itertools.count()
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
            )
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
        **sampling_fields: Any,
    ) -> Request:
        """Hand one request in and return it. Fields of `Sampling` may be given by name instead.

        Raises InvalidRequestError for one that can never run.
        """
        chosen = make_sampling(sampling, sampling_fields)
        return self.submit_batch([Submission(prompt, chosen, request_id, cache_salt, after)])[0]

    def submit_batch(self, submissions: Iterable[Submission]) -> list[Request]:
        """Hand requests in together: all arrive before the next step, or, if one is refused, none does."""
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
        prepared: list[Prepared] = []
        names: set[str] = set()
        if isinstance(submissions, (str, Submission)) or not isinstance(submissions, Iterable):
            raise InvalidRequestError(f"a batch is {submissions!r}; pass a list of Submission(...)")
        for submission in submissions:
            if not isinstance(submission, Submission):
                raise InvalidRequestError(f"a batch holds {submission!r}; wrap each prompt: Submission(prompt)")
            request = self._checked(submission, names, reserved)
            # The trigger first: a request that waited for itself would never arrive.
            prepared.append(Prepared(request, self._checked_trigger(submission.after, names, reserved)))
            names.add(request.request_id)
        return prepared

    def enter(self, batch: Iterable[Prepared]) -> None:
        """Let prepared requests in together: those without a trigger arrive now, in this order.

        Raises DuplicateRequestError, with nothing changed, if an id was taken since they were prepared.
        """
        self._check_open()
        batch = list(batch)
        for prepared in batch:
            if prepared.request.request_id in self.requests:
                raise DuplicateRequestError(
                    f"request id {prepared.request.request_id!r} is in use; choose another or leave it out"
                )
        for prepared in batch:
            request = prepared.request
            self.requests[request.request_id] = request
            if prepared.after is None:
                self._arrive(request)
            else:
                self._defer(request, *prepared.after)

    def _checked(self, submission: Submission, names: set[str], reserved: Container[str]) -> Request:
        """Return the request of a submission. Raises InvalidRequestError; changes nothing."""
        prompt = submission.prompt
        if isinstance(prompt, str):
            tokens = tuple(self.runner.tokenizer.encode(checked_text(prompt)))
        else:
            tokens = _checked_tokens(prompt, self.runner.vocab_size)
        if not tokens:
            raise InvalidRequestError("the prompt is empty; give it at least one token")
        if not isinstance(submission.sampling, Sampling):
            raise InvalidRequestError(f"sampling is {submission.sampling!r}; pass a Sampling(...)")
        most = submission.sampling.max_tokens
        self._check_length(len(tokens), most)
        salt = submission.cache_salt
        if salt is not None and not isinstance(salt, str):
            raise InvalidRequestError(f"cache_salt is {salt!r}; it must be a string, or None for no salt")

        def in_use(name: str) -> bool:
            return name in self.requests or name in names or name in reserved

        name = submission.request_id
        if name is None:
            name = next(n for n in map("r{}".format, self._ids) if not in_use(n))
        elif not isinstance(name, str) or not name:
            raise InvalidRequestError(f"request_id is {name!r}; it must be a string of one character or more")
        if in_use(name):
            raise DuplicateRequestError(f"request id {name!r} is in use; choose another or leave it out")
        return Request(name, tokens, submission.sampling, make_extra_keys(cache_salt=salt))

    def _check_length(self, num_prompt: int, max_tokens: int) -> None:
        limit = self.runner.max_model_len
        if num_prompt + max_tokens > limit:
            raise InvalidRequestError(
                f"the prompt has {num_prompt:,} tokens and max_tokens is {max_tokens:,}, together more than the "
                f"{limit:,} that model {self.runner.name!r} can hold; shorten the prompt or lower max_tokens"
            )
        # The token that comes out last needs no K/V: the request ends with it.
        needed = self.manager.num_blocks_for(num_prompt + max_tokens - 1)
        if needed > self.config.num_blocks:
            room = self.config.num_blocks * self.config.block_size
            raise InvalidRequestError(
                f"the prompt has {num_prompt:,} tokens and max_tokens is {max_tokens:,}: that needs {needed:,} blocks, "
                f"and the pool has {self.config.num_blocks:,} (room for {room:,} tokens); shorten the prompt, lower "
                "max_tokens or raise num_blocks"
            )

    def _checked_trigger(
        self, after: tuple[str, int] | None, names: set[str], reserved: Container[str]
    ) -> tuple[str, int] | None:
        if after is None:
            return None
        if not isinstance(after, (tuple, list)) or len(after) != 2 or not isinstance(after[0], str):
            raise InvalidRequestError(f"after is {after!r}; give (request id, output token), such as ('r0', 1)")
        other, count = after
        if other not in self.requests and other not in names and other not in reserved:
            raise UnknownRequestError(f"after names request {other!r}, which is not known; submit that one first")
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise InvalidRequestError(f"after waits for output token {count!r}; the first output token is 1")
        return other, count

    def _check_open(self) -> None:
        if self.error is not None:
            raise EngineDeadError(
                f"the engine stopped on an error ({_describe(self.error)}); make a new engine to go on"
            ) from self.error
        if self._closed:
            raise EngineClosedError("the engine is closed; make a new one to go on")

    # -- Arrival -------------------------------------------------------------------------------------------

    def _defer(self, request: Request, other: str, count: int) -> None:
        request.state = RequestState.DEFERRED
        self.log.append(ev.RequestDeferred(request.request_id, other, count))
        self._deferred.setdefault(other, []).append((count, request))
        self._fire_triggers(self.requests[other])

    def _fire_triggers(self, other: Request) -> None:
        """Let those arrive that waited for an output token of ``other`` that is there, or for its end."""
        waiting = self._deferred.get(other.request_id)
        if not waiting:
            return
        count = len(other.output_token_ids)
        due = [request for n, request in waiting if n <= count or other.state.is_ended]
        rest = [(n, request) for n, request in waiting if n > count and not other.state.is_ended]
        if rest:
            self._deferred[other.request_id] = rest
        else:
            del self._deferred[other.request_id]
        for request in due:
            request.move_to(RequestState.WAITING)
            self._arrive(request)

    def _arrive(self, request: Request) -> None:
        request.arrival = next(self._arrivals)
        request.seed = request.sampling.seed if request.sampling.seed is not None else request.arrival
        self.log.append(
            ev.RequestArrived(
                request.request_id,
                request.arrival,
                request.prompt_token_ids,
                request.sampling.max_tokens,
                request.extra_keys,
            )
        )
        self.scheduler.add(request)
        if self.coordinator.arrive(request) is Role.FOLLOWER:
            self.scheduler.hold(request)

    # -- A step --------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether requests can be submitted: neither closed nor ended on an error."""
        return self.error is None and not self._closed

    @property
    def has_work(self) -> bool:
        """Whether a step would do something."""
        return self.is_open and self.scheduler.has_work

    def step(self) -> bool:
        """Run one step. Returns False, with nothing done, if there is no request to run.

        Whatever the runner raises ends the engine: every request fails with it, their blocks are freed, and
        it is raised here as EngineDeadError.
        """
        self._check_open()
        if not self.scheduler.has_work:
            return False
        try:
            self._run_step()
        except BaseException as error:
            self.die(error)
            if not isinstance(error, Exception):  # Ctrl-C is the caller's, not a fault to wrap
                raise
            raise EngineDeadError(f"the engine stopped in step {self.log.step}: {_describe(error)}") from error
        return True

    def _run_step(self) -> None:
        self.log.step = next(self._steps)
        step = self.scheduler.schedule(self.log.step)
        drawn = self.runner.execute(step)
        self._check_drawn(step, drawn)
        for row in step.rows:
            request = row.request
            request.num_computed_tokens += row.num_tokens
            self.log.append(ev.ChunkComputed(request.request_id, row.start, row.num_tokens, row.phase.value))
        # All K/V of the step is there: now, and not before, others may see it.
        for row in step.rows:
            self._publish(row.request, Moment.STEP_DONE)
            self._settle_prompt(row.request)
        for row in step.rows:
            if row.samples:
                self._put_out(row.request, drawn[row.request_id])

    def _check_drawn(self, step: ScheduledStep, drawn: dict[str, int]) -> None:
        expected = {row.request_id for row in step.rows if row.samples}
        if drawn.keys() != expected:
            raise InvariantError(f"the runner drew tokens for {sorted(drawn)}, not for {sorted(expected)}")

    def _publish(self, request: Request, moment: Moment) -> None:
        policy = self.config.publication_policy
        visible = policy.visible_tokens(request.num_computed_tokens, moment)
        if not isinstance(visible, int) or visible < 0:
            raise ConfigError(
                f"publication policy {policy_name(policy)!r} says that {visible!r} tokens may be visible; "
                "it must return a whole number of 0 or more"
            )
        if visible:
            self.manager.publish(request, min(visible, request.num_computed_tokens))

    def _settle_prompt(self, request: Request) -> None:
        """Once, when all of the prompt has K/V: publish it if a flight wants it, and release the followers."""
        name = request.request_id
        if name in self._prefilled or request.num_computed_tokens < request.num_prompt_tokens:
            return
        self._prefilled.add(name)
        self.log.append(ev.PrefillFinished(name))
        if self.coordinator.wants_prompt(name):
            self.manager.publish(request, request.num_prompt_tokens)
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
            self._publish(request, Moment.FINISHED)
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
            self.log.append(ev.RequestFailed(name, _describe(error) if error else "unknown"))
        if had_arrived:
            self._let_go(self.coordinator.request_ended(name, end, prompt_is_published=prompt_is_published))
        else:
            self._deferred = {
                other: rest
                for other, waiting in self._deferred.items()
                if (rest := [(n, r) for n, r in waiting if r is not request])
            }
        self._texts.pop(name, None)
        self._prefilled.discard(name)
        self.runner.forget(name)
        self._listener(Output(name, token_id, text, end, error))
        if self.error is None:
            self._fire_triggers(request)

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
        request = self.requests.get(request_id)
        if request is None:
            raise UnknownRequestError(
                f"no request is called {request_id!r}; ask with an id that submit() returned on this engine"
            )
        if request.state.is_ended:
            return False
        self._end(request, end, error=error)
        return True

    def die(self, error: BaseException) -> None:
        """The engine ends on an error: the step, if one runs, is withdrawn, and nothing of it is published.

        Every request fails with the error, and every block is freed.
        """
        self.error = error
        self.log.append(ev.StepFailed(_describe(error)))
        # Followers first: then no flight can make one of them leader while all are ending.
        order = {RequestState.DEFERRED: 0, RequestState.HELD: 1}
        for request in sorted(self.requests.values(), key=lambda r: order.get(r.state, 2)):
            if not request.state.is_ended:
                self._fail_for_sure(request, error)

    def _fail_for_sure(self, request: Request, error: BaseException) -> None:
        """End a request though the books may be broken: a policy that raised may raise again."""
        start = len(self.log)
        try:
            self._end(request, RequestState.FAILED, error=error)
        except Exception:
            name = request.request_id
            request.state = RequestState.FAILED
            if not any(isinstance(e, ev.RequestFailed) and e.request_id == name for e in self.log.since(start)):
                self.log.append(ev.RequestFailed(name, _describe(error)))
            self._listener(Output(name, None, "", RequestState.FAILED, error))

    # -- Between steps -------------------------------------------------------------------------------------

    def run(self, max_steps: int | None = None) -> int:
        """Run steps until nothing is left to do, or ``max_steps`` are done. Returns how many were run."""
        count = 0
        while (max_steps is None or count < max_steps) and self.step():
            count += 1
        return count

    def reset_cache(self) -> bool:
        """Forget every published block. Returns False, with nothing changed, while a block is in use."""
        self._check_open()
        return self.manager.reset()

    def set_policies(self, *, publication: Any = None, coordination: Any = None, release: Any = None) -> None:
        """Go on under other policies (None: as before). Only while no request is in the engine.

        Raises ConfigError while one is, UnknownNameError for a policy that does not exist.
        """
        self._check_open()
        if any(not request.state.is_ended for request in self.requests.values()):
            raise ConfigError("policies can change only while no request is in the engine; wait or abort them")
        given = {"publication": publication, "coordination": coordination, "release": release}
        config = self.config.replace(**{k: v for k, v in given.items() if v is not None})
        coordinator = config.coordination_policy(config.release_policy, self.log.append)  # may raise: nothing changed
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
            for request in list(self.requests.values()):
                if not request.state.is_ended:
                    self.abort(request.request_id)
        finally:
            self._closed = True
            self.runner.close()

    # -- Books ---------------------------------------------------------------------------------------------

    def state(self) -> State:
        """Return the engine's own state, from its own objects: what replaying the log must give."""
        manager, coordinator = self.manager, self.coordinator
        blocks = {}
        for block in manager.pool.blocks:
            if block.block_hash is not None:
                kind = BlockState.PUBLISHED
            else:
                kind = BlockState.OWNED if block.ref_count else BlockState.FREE
            name = block.block_hash.hex() if block.block_hash is not None else ""
            blocks[block.block_id] = BlockView(kind, block.ref_count, name)
        state = State(blocks)
        state.free_queue.update((block.block_id, None) for block in manager.pool.free_queue)
        state.prefix_index = {block_hash.hex(): block_id for block_hash, block_id in manager.index.items()}
        for name, request in self.requests.items():
            state.requests[name] = RequestView(
                request.state,
                request.arrival,
                request.num_prompt_tokens if request.arrival >= 0 else 0,
                request.num_computed_tokens,
                request.num_recovered_tokens,
                request.num_preemptions,
                list(request.output_token_ids),
                list(manager.block_ids(name)),
            )
        state.waiting = [request.request_id for request in self.scheduler.waiting]
        state.running = [request.request_id for request in self.scheduler.running]
        state.flights = {
            number: FlightView(flight.leader_id, list(flight.followers))
            for number, flight in coordinator.flights.items()
        }
        state.released_request_ids = set(coordinator.released_request_ids)
        return state

    def check_invariants(self) -> None:
        """Raise InvariantError if any of the books is wrong. Between steps only."""
        self.manager.check_invariants()
        self.coordinator.check_invariants()
        scheduler = self.scheduler
        lists = {
            RequestState.WAITING: {r.request_id for r in scheduler.waiting if r.state is RequestState.WAITING},
            RequestState.PREEMPTED: {r.request_id for r in scheduler.waiting if r.state is RequestState.PREEMPTED},
            RequestState.RUNNING: {r.request_id for r in scheduler.running},
            RequestState.HELD: set(scheduler.held),
        }
        for state, listed in lists.items():
            actual = {name for name, r in self.requests.items() if r.state is state}
            if actual != listed:
                raise InvariantError(f"{state.value} requests are {sorted(actual)}, listed are {sorted(listed)}")
        if len(scheduler.waiting) != len(lists[RequestState.WAITING]) + len(lists[RequestState.PREEMPTED]):
            raise InvariantError("the waiting list holds a request twice, or one that does not wait")
        if len(scheduler.running) > self.config.max_num_seqs:
            raise InvariantError(f"{len(scheduler.running)} rows run; the limit is {self.config.max_num_seqs}")
        followers = {name for flight in self.coordinator.flights.values() for name in flight.followers}
        if followers != set(scheduler.held):
            raise InvariantError(f"held are {sorted(scheduler.held)}, followers are {sorted(followers)}")
        if followers and not scheduler.has_work:
            raise InvariantError(f"requests {sorted(followers)} wait for a leader that is nowhere")
        for name, request in self.requests.items():
            held = len(self.manager.block_ids(name))
            if request.state is not RequestState.RUNNING and held:
                raise InvariantError(f"request {name!r} is {request.state.value} and holds {held} blocks")
            if request.state is RequestState.RUNNING:
                if held != self.manager.num_blocks_for(request.num_computed_tokens):
                    raise InvariantError(
                        f"request {name!r} has {request.num_computed_tokens} tokens computed in {held} blocks"
                    )
                if request.num_uncomputed_tokens < 1:
                    raise InvariantError(f"request {name!r} runs and has nothing left to compute")


def make_sampling(sampling: Sampling | None, fields: dict[str, Any]) -> Sampling:
    """Return ``sampling``, or a Sampling of the fields given by name. Raises InvalidRequestError for both."""
    if not fields:
        return sampling if sampling is not None else Sampling()
    if sampling is not None:
        raise InvalidRequestError(f"pass either sampling= or {', '.join(fields)}, not both")
    try:
        return Sampling(**fields)
    except TypeError as error:
        raise InvalidRequestError(
            f"{error}; sampling has max_tokens, temperature, top_p, top_k, seed, stop and ignore_eos"
        ) from None


def checked_text(prompt: str) -> str:
    """Return the prompt. Raises InvalidRequestError for half a surrogate pair, which no tokenizer can encode."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"character {error.start} of the prompt is half of a surrogate pair; remove it, it stands for no text"
        ) from None
    return prompt


def _checked_tokens(prompt: object, vocab_size: int) -> tuple[int, ...]:
    """Return token ids as whole numbers of the vocabulary. Raises InvalidRequestError."""
    if isinstance(prompt, (bytes, bytearray)) or not isinstance(prompt, Iterable):
        raise InvalidRequestError(f"the prompt is a {type(prompt).__name__}; give a string or a list of token ids")
    tokens = []
    for place, item in enumerate(prompt):
        try:
            if isinstance(item, (bool, str, float)):
                raise TypeError
            token = int(item)
        except (TypeError, ValueError):
            raise InvalidRequestError(f"token {place} of the prompt is {item!r}; token ids are whole numbers") from None
        if not 0 <= token < vocab_size:
            raise InvalidRequestError(
                f"token {place} of the prompt is {token}; the vocabulary has ids 0 to {vocab_size - 1}"
            )
        tokens.append(token)
    return tuple(tokens)


def _describe(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
