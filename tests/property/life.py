"""One life of an engine: actions are applied to a real `EngineCore`, and after each all states are compared.

After every action the engine's invariants hold, the log folded so far (and from its recording as plain values) is
the engine's own state, no row has read K/V that is not its own, the slow model agrees on everything in the cache,
and every output is that of a lone request. Knows actions, the engine's calls and the models; must not know how
actions are drawn or who drives the life.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace

from minivllm.config import EngineConfig
from minivllm.engine.core import EngineCore
from minivllm.engine.output import Output
from minivllm.errors import (
    ConfigError,
    DuplicateRequestError,
    EngineDeadError,
    InvalidRequestError,
    RowError,
    UnknownRequestError,
)
from minivllm.log import events as ev
from minivllm.log.event import event_from_dict
from minivllm.log.metrics import Metrics
from minivllm.log.replay import fold, replay
from minivllm.log.state import State
from minivllm.request import RequestState
from minivllm.runners.virtual import VirtualRunner
from minivllm.step import ScheduledStep
from tests.property.actions import (
    LONGEST_OUTPUT,
    Abort,
    Action,
    Ask,
    Crash,
    CrashKind,
    Fail,
    Finish,
    Reset,
    SetPolicies,
    Setup,
    Step,
    Submit,
)
from tests.property.models import Fault, Mismatch, SlotRunner, SlowCache, expect

MOST_STEPS = 5_000
"""No life here needs as many: a guard against an engine that goes round in circles."""

WHOLE_REPLAY_EVERY = 16

REFUSALS = (InvalidRequestError, DuplicateRequestError, UnknownRequestError)


@functools.lru_cache(maxsize=100_000)
def alone(ask: Ask) -> tuple[int, ...]:
    """Return the tokens of a request that has an engine to itself."""
    core = EngineCore(EngineConfig(num_blocks=64), VirtualRunner())
    (request,) = core.submit_batch([ask.submission()])
    core.run()
    return tuple(request.output_token_ids)


def output_of(ask: Ask, number: int) -> tuple[int, ...]:
    """Return what sample ``number`` must generate: the same as a lone request, with a seed of its own."""
    seed = ask.seed + number if ask.temperature else 0
    lone = Ask("lone", ask.prompt, LONGEST_OUTPUT, ask.temperature, seed, 1, None, ask.adapter, ask.multimodal)
    return alone(lone)[: ask.max_tokens]


class Life:
    """An engine, and when a step has failed the next one.

    ``apply`` does one action and checks everything. It returns what was really done: an action that makes no sense
    any more (its request does not exist) does nothing and gives None, so that a shortened life can be lived, too.
    ``kinds`` counts the events of all its engines, ``done`` the actions.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.kinds: Counter[str] = Counter()
        self.done: Counter[str] = Counter()
        self.num_wrong_reads = 0
        self._next_id = 0
        self._start(EngineConfig(**setup))

    def _start(self, config: EngineConfig) -> None:
        self.heard: dict[str, list[Output]] = {}
        self.asks: dict[str, tuple[Ask, int]] = {}
        self.runner = SlotRunner()
        self.core = EngineCore(config, self.runner, self._listen)
        self.slow = SlowCache(config)
        self.folded = State()
        self.metrics = Metrics()
        self._num_seen = 0
        self._preempted_in = -1
        self._unsettled: dict[str, None] = {}
        self._early: dict[str, RequestState] = {}
        self._is_unsafe = config.publication == "at-allocation"
        self.runner.is_strict = not self._is_unsafe

    def _listen(self, output: Output) -> None:
        self.heard.setdefault(output.request_id, []).append(output)

    # -- What is to be seen when an action is drawn --------------------------------------------------------

    def known(self) -> list[str]:
        """Return every id of the present engine."""
        return list(self.core.requests)

    def live(self) -> list[str]:
        """Return the ids of those that have not ended."""
        return [name for name, request in self.core.requests.items() if not request.state.is_ended]

    def new_id(self) -> str:
        """Return an id that nobody has."""
        self._next_id += 1
        return f"r{self._next_id}"

    # -- Actions -------------------------------------------------------------------------------------------

    def apply(self, action: Action) -> Action | None:
        """Do one action and compare all states. Raises Mismatch, or whatever else shows a fault."""
        match action:
            case Submit(asks):
                done = self._submit(asks)
            case Step(count, withdraw, spoil):
                done = self._step(count, withdraw, spoil)
            case Abort(name) | Fail(name):
                done = action if name in self.core.requests else None
                if done is not None:
                    self._end(name, RequestState.ABORTED if isinstance(action, Abort) else RequestState.FAILED)
            case Reset(abort_running):
                done = action
                self._reset(abort_running)
            case SetPolicies(publication, coordination, release):
                done = action
                self._set_policies(publication, coordination, release)
            case Crash(kind):
                done = action if self.core.has_work else None
                if done is not None:
                    self._crash(kind)
            case Finish():
                done = action
                self._finish()
        self.check()
        if done is not None:
            self.done[type(action).__name__.lower()] += 1
        return done

    def _submit(self, asks: tuple[Ask, ...]) -> Action | None:
        """Hand a batch in: in it goes as a whole, or, where one cannot run, not at all."""
        names = [name for ask in asks for name in ask.names()]
        # In a shortened life the one that a request waits for may be gone; "nobody" never was there.
        here = {*self.core.requests, *names, "nobody"}
        asks = tuple(replace(a, after=None) if a.after and a.after[0] not in here else a for a in asks)
        if not asks:
            return None
        batch = [ask.submission() for ask in asks]
        if not self._must_refuse(asks):
            requests = self.core.submit_batch(batch)
            expect("submitted", "what was taken in", [r.prompt_token_ids for r in requests], [a.prompt for a in asks])
            for ask in asks:
                for number, name in enumerate(ask.names()):
                    self.asks[name] = ask, number
                    self._unsettled[name] = None
            return Submit(asks)
        before, num_events = self.core.state(), len(self.core.log)
        try:
            self.core.submit_batch(batch)
        except REFUSALS:
            if len(self.core.log) != num_events or vars(self.core.state()) != vars(before):
                raise Mismatch("refused", "a batch that was refused left a trace") from None
            return Submit(asks, refused=True)
        raise Mismatch("refused", f"the batch {asks} was taken in, and one of it can never run")

    def _must_refuse(self, asks: tuple[Ask, ...]) -> bool:
        """Whether one of the batch can never run, however long it waits."""
        config = self.core.config
        taken = set(self.core.requests)
        for ask in asks:
            num_tokens = len(ask.prompt)
            needed = -(-(num_tokens + ask.max_tokens - 1) // config.block_size)
            if num_tokens == 0 or needed > config.num_blocks or ask.n > config.max_num_seqs:
                return True
            if ask.after is not None and ask.after[0] not in taken:
                return True
            if any(offset + length > num_tokens for _, offset, length in ask.multimodal):
                return True
            for name in ask.names():
                if name in taken:
                    return True
                taken.add(name)
        return False

    def _step(self, count: int, withdraw: tuple[str, ...], spoil: tuple[str, ...]) -> Action | None:
        live = self.live()
        withdraw = tuple(name for name in withdraw if name in live)
        spoil = tuple(name for name in spoil if name in live)
        if withdraw and self.core.has_work:
            self.runner.in_step = functools.partial(self._withdraw, withdraw)
        if self.core.has_work:
            self.runner.spoil = frozenset(spoil)
        for number in range(count):
            held = dict(self.folded.samples)
            self._one_step()
            for name in self.runner.spoilt:
                # All samples hang on the numbers of one prompt: those still held behind it end with it.
                for other in (name, *held.get(name, ())):
                    self._early.setdefault(other, RequestState.FAILED)
            if number < count - 1:
                self.follow()
        return Step(count, withdraw, spoil)

    def _one_step(self) -> None:
        had_work = self.core.has_work
        try:
            expect("step", "whether a step was made", self.core.step(), had_work)
        except EngineDeadError as error:  # nothing here may kill it: show what did
            raise (error.__cause__ or error) from None

    def _withdraw(self, names: tuple[str, ...], step: ScheduledStep) -> None:
        """Abort some requests after their step was scheduled: none of their rows is computed."""
        for name in names:
            self.core.abort(name)
            self._early[name] = RequestState.ABORTED

    def _end(self, name: str, end: RequestState) -> None:
        """Abort or fail one request; nothing happens to one that has ended."""
        ended = self.core.requests[name].state.is_ended
        took_effect = self.core.abort(name) if end is RequestState.ABORTED else self.core.fail(name, Fault("told to"))
        expect("ended", f"whether {name} was ended", took_effect, not ended)
        self._early.setdefault(name, end)
        if not ended:
            expect("ended", f"core.requests[{name!r}].state.value", self.core.requests[name].state.value, end.value)

    def _reset(self, abort_running: bool) -> None:
        """Forget everything, unless a block is in use."""
        holders = [name for name, asked in self.slow.asked.items() if asked.pages]
        done = self.core.reset_cache(abort_running=abort_running)
        expect("reset", "whether the cache was reset", done, abort_running or not holders)
        if not done:
            return
        expect("reset", "len(core.state().prefix_index)", len(self.core.state().prefix_index), 0)
        self._early.update(dict.fromkeys(holders, RequestState.ABORTED))
        # What was shown before it was computed is forgotten, too.
        self._is_unsafe = self.core.config.publication == "at-allocation"
        self.runner.is_strict = not self._is_unsafe

    def _set_policies(self, publication: str, coordination: str, release: str) -> None:
        """Go on under other policies, if nobody is in the engine."""
        change = functools.partial(
            self.core.set_policies, publication=publication, coordination=coordination, release=release
        )
        before = self.core.config
        if not self.live():
            change()
            self._is_unsafe = self._is_unsafe or publication == "at-allocation"
            self.runner.is_strict = not self._is_unsafe
            return
        try:
            change()
        except ConfigError:
            if self.core.config is not before:
                raise Mismatch("policies", "a change that was refused changed the settings") from None
            return
        raise Mismatch("policies", "the policies were changed while a request was in the engine")

    def _finish(self) -> None:
        """Every request ends, and then every block is free."""
        count = 0
        while self.core.has_work:
            self._one_step()
            self.follow()
            count += 1
            if count >= MOST_STEPS:
                raise Mismatch("progress", f"{count} steps have ended nobody")
        expect("progress", "[i for i, r in core.requests.items() if not r.state.is_ended]", self.live(), [])
        num_free = self.core.manager.pool.num_free
        expect("leak", "core.manager.pool.num_free", num_free, self.core.config.num_blocks)
        coordinator = self.core.coordinator
        expect("leak", "core.coordinator.flights", coordinator.flights, {})
        expect("leak", "core.coordinator.released_request_ids", coordinator.released_request_ids, set())
        expect("leak", "core.coordinator.awaiting", coordinator.awaiting, {})

    def _crash(self, kind: CrashKind) -> None:
        """The runner breaks in mid-step: all fail, nothing leaks, and a new engine takes over."""
        core, live = self.core, self.live()

        def break_with(drawn: dict[str, int | RowError]) -> None:
            if kind is CrashKind.SHORT and drawn:
                drawn.popitem()
            elif kind is CrashKind.LONG:
                drawn["somebody else"] = 1
            else:
                raise Fault("told to")

        self.runner.break_with = break_with
        there = set(self.slow.published) | self.slow.computed()
        try:
            core.step()
        except EngineDeadError as error:
            cause = error.__cause__
        else:
            raise Mismatch("crash", "the runner broke and the step went on")
        if isinstance(cause, Mismatch):
            raise cause
        self.follow()
        if not self._is_unsafe and not set(self.slow.published) <= there:
            raise Mismatch("crash", "blocks of the broken step were published")
        expect("leak", "core.manager.pool.num_free", core.manager.pool.num_free, core.config.num_blocks)
        self._early.update(dict.fromkeys(live, RequestState.FAILED))
        for name in live:
            if self.heard[name][-1].error is not cause:
                raise Mismatch("crash", f"{name} did not hear the cause")
        try:
            core.submit([1], max_tokens=1)
        except EngineDeadError:
            pass
        else:
            raise Mismatch("crash", "a dead engine took a request in")
        self.check()
        self.num_wrong_reads += self.runner.num_wrong_reads
        self._start(core.config)

    # -- After every action --------------------------------------------------------------------------------

    def follow(self) -> None:
        """Take the new events in: the fold over the log, the slow model, the figures."""
        core = self.core
        new = core.log.since(self._num_seen)
        for event in new:
            self._num_seen = event.seq + 1
            self.kinds[event.kind] += 1
            if isinstance(event, ev.RequestAdmitted):
                expect("order", "who was admitted", event.request_id, self.folded.waiting[0])
            self.slow.take(event)
            recorded = event.as_dict()
            again = event_from_dict(recorded)
            if again.as_dict() != recorded:
                raise Mismatch("recording", f"{event} comes back from its recording as {again}")
            fold(self.folded, again)
            if isinstance(event, ev.StepScheduled):
                self._check_nobody_is_left_out(event)
            elif isinstance(event, ev.RequestPreempted):
                self._preempted_in = event.step
            elif isinstance(event, ev.BlocksEvicted):
                self.kinds["blocks that were evicted"] += len(event.block_ids)
        self.metrics.update(new)

    def _check_nobody_is_left_out(self, event: ev.StepScheduled) -> None:
        """The head of the waiting list waits only where rows, budget or room are used up, or somebody gave way."""
        state, config = self.folded, self.core.config
        budget = config.max_num_batched_tokens - sum(row[2] for row in event.rows)
        if not state.waiting or not budget or self._preempted_in == event.step:
            return
        head = state.waiting[0]
        num_rows = len(state.running) + sum(len(state.samples.get(name, ())) for name in (*state.running, head)) + 1
        limit = config.long_prefill_token_threshold or config.max_num_batched_tokens
        if num_rows <= config.max_num_seqs and self.slow.must_admit(head, budget, limit):
            raise Mismatch("admission", f"{head} is the head of the waiting list and was left out of step {event.step}")

    def check(self) -> None:
        """Hold everything together. Raises Mismatch or InvariantError."""
        core = self.core
        self.follow()
        core.check_invariants()
        state = core.state()
        if vars(state) != vars(self.folded) and state != self.folded:  # the second look is at what counts, and slower
            raise Mismatch("replay", _difference(self.folded, state), "assert replay(core.log) == core.state()")
        if self.done.total() % WHOLE_REPLAY_EVERY == 0 and replay(core.log) != state:
            raise Mismatch("replay", "the whole log says other things", "assert replay(core.log) == core.state()")
        self.slow.compare(core)
        self._check_outputs()
        expect("figures", "Metrics.of(core.log).queried_tokens", self.metrics.queried_tokens, self.slow.queried)
        recovered = sum(asked.num_recovered for asked in self.slow.asked.values())
        expect("figures", "Metrics.of(core.log).recovered_tokens", self.metrics.recovered_tokens, recovered)

    def _check_outputs(self) -> None:
        """Neither sharing, nor waiting, nor preemption changes a token; the listener heard each once."""
        for name in list(self._unsettled):
            request = self.core.requests[name]
            ask, number = self.asks[name]
            full = output_of(ask, number)
            output = tuple(request.output_token_ids)
            right = full if request.state is RequestState.FINISHED else full[: len(output)]
            if request.state.is_ended:
                end = self._early.get(name, RequestState.FINISHED)
                expect("ended", f"core.requests[{name!r}].state.value", request.state.value, end.value)
            elif name in self._early:
                raise Mismatch("ended", f"{name} had to end early and goes on")
            expect("output", f"core.requests[{name!r}].output_token_ids", list(output), list(right))
            heard = self.heard.get(name, [])
            told = [o.token_id for o in heard if o.token_id is not None]
            ends = [o.end for o in heard if o.end is not None]
            if told != list(output) or ends != [request.state] * request.state.is_ended:
                raise Mismatch(
                    "heard", f"{name} has generated {output} and is {request.state}; heard was {told}, {ends}"
                )
            if request.state.is_ended:
                del self._unsettled[name]


def _difference(folded: State, state: State) -> str:
    """Say where two states differ."""
    for name, mine in vars(folded).items():
        own = getattr(state, name)
        if mine != own:
            return f"the log says {name} = {mine!r}; the engine has {own!r}"
    return "they do not differ"
