"""Random lives of an engine, for every combination of policies.

After every action the books add up, the log folded from its start (and from its recording as plain values) is the
engine's own state, no row has read K/V that is not its own, and requests have recovered what the slow model says.
At the end of each life every request ends, and then every block is free.
"""

from __future__ import annotations

import functools
import itertools
import zlib
from typing import Any

import pytest
from hypothesis import seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from minivllm import events as ev
from minivllm.config import EngineConfig
from minivllm.engine import EngineCore, Output, Submission
from minivllm.errors import (
    ConfigError,
    DuplicateRequestError,
    EngineDeadError,
    InvalidRequestError,
    UnknownRequestError,
)
from minivllm.eviction import EVICTION_POLICIES
from minivllm.flights import COORDINATORS, RELEASE_POLICIES
from minivllm.metrics import Metrics
from minivllm.publication import PUBLICATION_POLICIES
from minivllm.replay import State, fold, replay
from minivllm.request import RequestState, Sampling
from minivllm.runners.virtual import VirtualRunner
from tests.property.models import Fault, SlotRunner, Visible
from tests.property.steady import STEADY

MOST_STEPS = 3_000
"""No life here needs as many: a guard against an engine that goes round in circles."""

EARLY_ENDS = [RequestState.ABORTED, RequestState.ABORTED, RequestState.FAILED]
POLICY_NAMES = (PUBLICATION_POLICIES, COORDINATORS, RELEASE_POLICIES)


@functools.cache
def alone(prompt: tuple[int, ...], max_tokens: int, temperature: float, seed: int) -> tuple[int, ...]:
    """Return the tokens of a request that has an engine to itself."""
    core = EngineCore(EngineConfig(num_blocks=64), VirtualRunner())
    request = core.submit(prompt, max_tokens=max_tokens, temperature=temperature, seed=seed)
    core.run()
    return tuple(request.output_token_ids)


@st.composite
def prompts(draw: st.DrawFn) -> tuple[int, ...]:
    """A prompt of 1 to 12 tokens: the beginning of one of two families, and perhaps some tokens of its own."""
    family = draw(st.integers(1, 2))
    shared = draw(st.sampled_from([8, 9, 8, 4, 5, 0, 1, 2, 3, 6, 7]))
    own = draw(st.lists(st.integers(900, 902), min_size=0 if shared else 1, max_size=3))
    return (*range(100 * family, 100 * family + shared), *own)


@st.composite
def submissions(draw: st.DrawFn) -> Submission:
    """A prompt with its sampling and salt."""
    prompt = draw(prompts())
    sampling = Sampling(max_tokens=draw(st.integers(1, 9)), temperature=draw(st.sampled_from([0.0, 0.0, 0.7])), seed=7)
    return Submission(prompt, sampling, cache_salt=draw(st.sampled_from([None, None, None, "a", "b"])))


class EngineMachine(RuleBasedStateMachine):
    """One engine, or one after the other when a step has failed."""

    publication = "on-completion"
    coordination = "independent"
    release = "after-prefill"
    eviction = "lru"

    @initialize(
        block_size=st.sampled_from([4, 2, 1, 3]),
        num_blocks=st.sampled_from([6, 5, 8, 64]),
        budget=st.sampled_from([16, 6, 3, 1]),
        rows=st.sampled_from([4, 2, 1]),
        threshold=st.sampled_from([0, 0, 2]),
        caching=st.sampled_from([True, True, True, False]),
    )
    def start(self, block_size: int, num_blocks: int, budget: int, rows: int, threshold: int, caching: bool) -> None:
        self.config = EngineConfig(
            block_size=block_size,
            num_blocks=num_blocks,
            max_num_batched_tokens=budget,
            max_num_seqs=rows,
            long_prefill_token_threshold=threshold,
            enable_prefix_caching=caching,
            publication=self.publication,
            coordination=self.coordination,
            release=self.release,
            eviction=self.eviction,
        )
        self.make_core()

    def make_core(self) -> None:
        self.heard: dict[str, list[Output]] = {}
        self.runner = SlotRunner()
        self.core = EngineCore(self.config, self.runner, lambda o: self.heard.setdefault(o.request_id, []).append(o))
        self.visible = Visible(self.config.block_size, enable_prefix_caching=self.config.enable_prefix_caching)
        self.folded = State()
        self.num_seen = 0

    def live(self) -> list[str]:
        return [name for name, request in self.core.requests.items() if not request.state.is_ended]

    def fits(self, submission: Submission) -> bool:
        tokens = len(submission.prompt) + submission.sampling.max_tokens - 1
        return -(-tokens // self.config.block_size) <= self.config.num_blocks

    # -- Actions -------------------------------------------------------------------------------------------

    @rule(
        batch=st.lists(submissions(), min_size=1, max_size=3),
        copies=st.sampled_from([1, 3, 2]),
        trigger=st.none() | st.tuples(st.integers(0, 5), st.integers(1, 4)),
        steps=st.sampled_from([0, 0, 1, 3]),
        early=st.none() | st.tuples(st.integers(0, 3), st.sampled_from(EARLY_ENDS)),
    )
    def submit(
        self,
        batch: list[Submission],
        copies: int,
        trigger: tuple[int, int] | None,
        steps: int,
        early: tuple[int, RequestState] | None,
    ) -> None:
        """Submit a batch, its first prompt several times; the last one may wait for a token of another.

        Then run some steps, and perhaps end one of the batch early: the first leads if there are flights.
        """
        batch = [batch[0]] * copies + batch[1:]
        names = list(self.core.requests)
        if trigger is not None and names:
            last = batch[-1]
            after = names[-1 - trigger[0] % len(names)], trigger[1]
            batch[-1] = Submission(last.prompt, last.sampling, None, last.cache_salt, after)
        if all(map(self.fits, batch)):
            requests = self.core.submit_batch(batch)
            assert [request.prompt_token_ids for request in requests] == [tuple(s.prompt) for s in batch]
        else:
            requests = []
            self.refuse(batch)
        self.run_steps(steps)
        if early is not None and requests:
            self.end_one(requests[early[0] % len(requests)].request_id, early[1])

    @rule(count=st.sampled_from([1, 1, 2, 5]))
    def step(self, count: int) -> None:
        """Run some steps."""
        self.run_steps(count)

    def run_steps(self, count: int) -> None:
        """Run some steps and hold the books against each other after each."""
        for _ in range(count):
            had_work = self.core.has_work
            assert self.core.step() is had_work
            self.books_add_up()

    @precondition(lambda self: self.core.requests)
    @rule(choice=st.integers(0, 7), live=st.sampled_from([True, True, False]), end=st.sampled_from(EARLY_ENDS))
    def end_early(self, choice: int, live: bool, end: RequestState) -> None:
        """Abort or fail a request: one that lives, or any that ever came."""
        names = (self.live() if live else []) or list(self.core.requests)
        self.end_one(names[choice % len(names)], end)

    def end_one(self, name: str, end: RequestState) -> None:
        """Abort or fail one request; nothing happens to one that has ended."""
        ended = self.core.requests[name].state.is_ended
        call = self.core.abort if end is RequestState.ABORTED else functools.partial(self.core.fail, error=Fault("x"))
        assert call(name) is not ended
        assert self.core.requests[name].state is end or ended
        self.books_add_up()

    @rule(data=st.data(), what=st.sampled_from(["bad", "reset", "end", "crash", "policies"]))
    def rare(self, data: st.DataObject, what: str) -> None:
        """What happens less often."""
        if what == "reset":
            self.reset_cache()
        elif what == "end":
            self.run_to_the_end()
        elif what == "bad":
            self.submit_with_one_bad(data.draw(prompts()), data.draw(st.integers(0, 3)), data.draw(st.integers(0, 2)))
        elif what == "policies":
            self.set_policies(*(data.draw(st.sampled_from(sorted(names))) for names in POLICY_NAMES))
        else:
            self.crash()

    def submit_with_one_bad(self, prompt: tuple[int, ...], bad: int, place: int) -> None:
        """Submit a batch of which one can never run."""
        batch = [Submission(prompt, Sampling(max_tokens=1), "x"), Submission(prompt, Sampling(max_tokens=1), "y")]
        wrong = [
            Submission([]),
            Submission(prompt, Sampling(max_tokens=1), "x"),
            Submission(prompt, Sampling(max_tokens=1), after=("nobody", 1)),
            Submission(prompt, Sampling(max_tokens=100_000)),
        ]
        batch.insert(place, wrong[bad])
        self.refuse(batch)

    def refuse(self, batch: list[Submission]) -> None:
        """Hand a batch in that must be refused, and leave no trace."""
        before, num_events = self.core.state(), len(self.core.log)
        with pytest.raises((InvalidRequestError, DuplicateRequestError, UnknownRequestError)):
            self.core.submit_batch(batch)
        assert self.core.state() == before
        assert len(self.core.log) == num_events

    def reset_cache(self) -> None:
        """Forget everything, unless a block is in use."""
        pool = self.core.manager.pool
        unused = all(block.ref_count == 0 for block in pool.blocks)
        assert self.core.reset_cache() is unused
        assert not unused or len(self.core.manager.index) == 0

    def set_policies(self, publication: str, coordination: str, release: str) -> None:
        """Go on under other policies, if nobody is in the engine."""
        change = functools.partial(
            self.core.set_policies, publication=publication, coordination=coordination, release=release
        )
        if self.live():
            before = self.core.config
            with pytest.raises(ConfigError):
                change()
            assert self.core.config is before
        else:
            change()

    def run_to_the_end(self) -> None:
        """Every request ends, and then every block is free."""
        assert self.core.run(MOST_STEPS) < MOST_STEPS
        assert self.live() == []
        assert self.core.manager.pool.num_free == self.config.num_blocks
        assert self.core.coordinator.flights == {}
        assert self.core.coordinator.released_request_ids == set()

    def crash(self) -> None:
        """The runner raises in mid-step: all fail, nothing leaks, and a new engine takes over."""
        if not self.core.has_work:
            return
        self.runner.fail_next = True
        published = set(self.core.manager.index.items())
        live = self.live()
        with pytest.raises(EngineDeadError) as caught:
            self.core.step()
        assert isinstance(caught.value.__cause__, Fault)
        assert set(self.core.manager.index.items()) <= published
        assert self.core.manager.pool.num_free == self.config.num_blocks
        for name in live:
            assert self.core.requests[name].state is RequestState.FAILED
            assert self.heard[name][-1].error is caught.value.__cause__
        with pytest.raises(EngineDeadError):
            self.core.submit([1], max_tokens=1)
        self.books_add_up()
        self.make_core()

    # -- After every action --------------------------------------------------------------------------------

    @invariant()
    def books_add_up(self) -> None:
        """The engine's books, its log and the slow model agree."""
        core = self.core
        core.check_invariants()
        state = core.state()
        assert replay(core.log) == state
        for event in core.log.since(self.num_seen):
            self.visible.take(event)
            again = ev.event_from_dict(event.as_dict())
            assert again.as_dict() == event.as_dict()
            fold(self.folded, again)
        self.num_seen = len(core.log)
        assert self.folded == state

    @invariant()
    def steps_keep_their_limits(self) -> None:
        """Budget, rows, and one token of output at most for each row."""
        last = next((e for e in reversed(self.core.log[:]) if isinstance(e, ev.StepScheduled)), None)
        if last is not None:
            assert sum(row[2] for row in last.rows) <= self.config.max_num_batched_tokens
            assert len(last.rows) <= self.config.max_num_seqs
            preempted = {e.step for e in self.core.log if isinstance(e, ev.RequestPreempted)}
            admitted = {e.step for e in self.core.log if isinstance(e, ev.RequestAdmitted)}
            assert preempted.isdisjoint(admitted)

    @invariant()
    def outputs_are_those_of_a_request_alone(self) -> None:
        """Neither sharing, nor waiting, nor preemption changes a token; the listener heard each once."""
        for name, request in self.core.requests.items():
            sampling = request.sampling
            full = alone(request.prompt_token_ids, sampling.max_tokens, sampling.temperature, 7)
            output = tuple(request.output_token_ids)
            assert output == full[: len(output)]
            assert (request.state is not RequestState.FINISHED) or output == full
            heard = self.heard.get(name, [])
            assert tuple(o.token_id for o in heard if o.token_id is not None) == output
            assert [o.end for o in heard if o.end is not None] == [request.state] * request.state.is_ended

    @invariant()
    def figures_count_each_request_once(self) -> None:
        """Queried and recovered tokens are those of each request's first admission."""
        figures = Metrics.of(self.core.log)
        admitted = {e.request_id for e in self.core.log if isinstance(e, ev.RequestAdmitted)}
        requests = self.core.requests
        assert figures.queried_tokens == sum(requests[name].num_prompt_tokens for name in admitted)
        assert figures.recovered_tokens == sum(request.num_recovered_tokens for request in requests.values())
        assert all(request.num_recovered_tokens < request.num_prompt_tokens for request in requests.values())

    def teardown(self) -> None:
        """Every life ends well."""
        if hasattr(self, "core"):
            self.run_to_the_end()
            self.books_add_up()
            self.outputs_are_those_of_a_request_alone()


COMBINATIONS = list(
    itertools.product(
        sorted(PUBLICATION_POLICIES), sorted(COORDINATORS), sorted(RELEASE_POLICIES), sorted(EVICTION_POLICIES)
    )
)


@pytest.mark.parametrize(("publication", "coordination", "release", "eviction"), COMBINATIONS)
def test_the_books_add_up_after_every_action(publication: str, coordination: str, release: str, eviction: str) -> None:
    policies: dict[str, Any] = {
        "publication": publication,
        "coordination": coordination,
        "release": release,
        "eviction": eviction,
    }
    # Each combination lives lives of its own: the same in every run, others than the next one's.
    number = zlib.crc32("/".join(policies.values()).encode())
    machine = seed(number)(type("EngineMachine", (EngineMachine,), policies))
    run_state_machine_as_test(machine, settings=settings(STEADY, max_examples=70, stateful_step_count=30))
