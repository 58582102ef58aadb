"""The engine core: one step is schedule, execute, publish, output.

    submit ─► arrive ─► coordinator ─► waiting ─┐
                                                ▼
              ┌── schedule ─► Runner.execute ─► publish ─► coordinator ─► output, end ──┐
              └─────────────────────────── next step ◄──────────────────────────────────┘

`EngineCore` is synchronous: `step()` runs on the caller's thread. `engine.py` runs a core on a thread of its own.
Knows every part and the order in which they are called. Must not know what a runner computes, nor any policy's rules.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

from minivllm.cache.kv_cache_manager import KVCacheManager
from minivllm.config import EngineConfig, policy_name
from minivllm.coordination.coordinator import Coordinator
from minivllm.engine.input_processor import InputProcessor, Prepared, Submission, make_submission
from minivllm.engine.invariants import check_engine, state_of
from minivllm.engine.lifecycle import RequestLifecycle
from minivllm.engine.output import Output, check_drawn
from minivllm.engine.sharing import BlockSharing
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
from minivllm.request import Request, RequestState, Sampling
from minivllm.scheduling.scheduler import Scheduler
from minivllm.step import Runner, ScheduledRow


class EngineCore:
    """Scheduler, KV cache manager, publication and coordination over one runner.

    ``listener`` is called with every `Output` as it happens; it must not call the engine. Not thread-safe: use one
    thread (only `prepare` may be called from any).
    """

    def __init__(self, config: EngineConfig, runner: Runner, listener: Callable[[Output], None] | None = None) -> None:
        self.runner = runner
        self.log = EventLog(runner.clock.now_ms)
        self.requests: dict[str, Request] = {}
        self.error: BaseException | None = None
        self._listener = listener or (lambda output: None)
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
        self._sharing = BlockSharing(
            config,
            runner,
            self.manager,
            self.requests,
            lambda request_ids: self.scheduler.release(request_ids),
            self.log.append,
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
            hooks=self._sharing,
        )
        self._input = InputProcessor(config, runner)
        self._lifecycle = RequestLifecycle(
            self.requests, runner, self.manager, self.scheduler, self._sharing, self.log, self._listener
        )
        self._steps = itertools.count(1)
        self._in_step = False
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

    @property
    def config(self) -> EngineConfig:
        """The current settings; `set_policies` changes some of them."""
        return self._sharing.config

    @property
    def coordinator(self) -> Coordinator:
        """The coordinator, which decides which requests wait for which."""
        return self._sharing.coordinator

    # -- Submitting ----------------------------------------------------------------------------------------

    def submit(self, prompt: str | Sequence[int], sampling: Sampling | None = None, **fields: Any) -> Request:
        """Submit one request and return it. ``fields`` are fields of `Submission` or `Sampling`.

        With ``n`` samples it returns the request of the first one; `samples_of` returns the ids of all. Raises
        InvalidRequestError for a request that can never run, and otherwise like `prepare`.
        """
        return self.submit_batch([make_submission(prompt, sampling, fields)])[0]

    def samples_of(self, request_id: str) -> tuple[str, ...]:
        """Return the ids of all samples of the request's prompt, the first one first; one id if it has no others.

        Raises UnknownRequestError for an id that was never submitted.
        """
        self._known(request_id)
        return self._lifecycle.samples_of(request_id)

    def submit_batch(self, submissions: Iterable[Submission]) -> list[Request]:
        """Submit requests together: if one is refused, none is submitted.

        All without a trigger (``after``) arrive before the next step. Returns the request of each one's first sample.
        Raises like `prepare`.
        """
        requests = self.prepare(submissions)
        self.enter(requests)
        return [prepared.request for prepared in requests]

    def prepare(self, submissions: Iterable[Submission], reserved: Container[str] = ()) -> list[Prepared]:
        """Check submissions and make their requests, for `enter`. Changes nothing.

        May be called from any thread. Ids in ``reserved`` count as in use. Raises
        InvalidRequestError, DuplicateRequestError or UnknownRequestError, and EngineDeadError or
        EngineClosedError if nothing can be submitted any more.
        """
        self.check_open()
        return self._input.prepare(submissions, lambda name: name in self.requests or name in reserved)

    def enter(self, batch: Iterable[Prepared]) -> None:
        """Submit prepared requests together: those without a trigger (``after``) arrive now, in this order.

        Raises DuplicateRequestError, with nothing changed, if an id was taken since they were prepared.
        """
        self.check_open()
        batch = list(batch)
        requests = [request for prepared in batch for request in prepared.requests]
        for name, count in Counter(request.request_id for request in requests).items():
            if count > 1 or name in self.requests:
                raise DuplicateRequestError(f"request id {name!r} is in use; choose another or leave it out")
        self._lifecycle.rank(requests, self.config.scheduling_policy)
        try:
            for prepared in batch:
                self._lifecycle.enter(prepared)
        except BaseException as error:  # such as a coordinator's: some requests are in, some not
            self.die(error)
            raise

    def check_open(self) -> None:
        """Raise EngineDeadError or EngineClosedError if nothing can be submitted any more."""
        if self.error is not None:
            raise stopped_by(self.error)
        if self._closed:
            raise EngineClosedError("the engine is closed; make a new one to continue")

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

        Any error in the step ends the engine: every request fails with it, all blocks are freed, and EngineDeadError
        is raised from it (KeyboardInterrupt and the like are raised as they are). Raises MiniVLLMError if called
        within a step, and like `check_open`.
        """
        self.check_open()
        if self._in_step:
            raise MiniVLLMError("a step is running; call step() again when it has ended")
        if not self.has_work:
            return False
        self._in_step = True
        try:
            if not self.scheduler.has_work:
                raise InvariantError(
                    f"requests {sorted(self.scheduler.held)} are held and no request runs that could release them; "
                    f"coordination {self.coordinator.name!r} must release one of them"
                )
            self._run_step()
        except BaseException as error:
            self.die(error)
            if not isinstance(error, Exception):  # KeyboardInterrupt and the like: for the caller, unchanged
                raise
            raise EngineDeadError(f"the engine stopped in step {self.log.step}: {describe(error)}") from error
        finally:
            self._in_step = False
        return True

    def _run_step(self) -> None:
        self.log.step = next(self._steps)
        step = self.scheduler.schedule(self.log.step)
        drawn = self.runner.execute(step)
        # Rows of requests that ended since scheduling are withdrawn: none of their tokens count as computed.
        rows = [row for row in step.rows if not row.is_withdrawn]
        check_drawn(rows, drawn, self.runner.vocab_size)
        for row in rows:
            self._lifecycle.fail_non_finite(row, drawn)
        rows = [row for row in rows if not row.is_withdrawn]
        for row in rows:
            request = row.request
            request.num_computed_tokens += row.num_tokens
            self.log.append(ev.ChunkComputed(request.request_id, row.start, row.num_tokens, row.phase.value))
        # Publish only now that all K/V of the step is computed.
        for row in rows:
            self._sharing.computed(row.request)
        for row in rows:
            if row.samples:
                self._output_all(row, drawn)

    def _output_all(self, row: ScheduledRow, drawn: Mapping[str, int | RowError]) -> None:
        """Output the drawn tokens: of the request and, when its prompt is complete, of its further samples."""
        samples = self.scheduler.fork(row.request)
        for sample in samples:
            self.log.append(ev.PrefillFinished(sample.request_id))
        for request in (row.request, *samples):
            token = drawn[request.request_id]
            assert isinstance(token, int)
            self._lifecycle.output(request, token)

    # -- Ends ----------------------------------------------------------------------------------------------

    def abort(self, request_id: str) -> bool:
        """Abort a request. Returns False if it has already ended; repeated calls are fine.

        Raises UnknownRequestError for an id that was never submitted.
        """
        return self._end_early(request_id, RequestState.ABORTED, None)

    def fail(self, request_id: str, error: BaseException) -> bool:
        """End one request on an error; the engine continues. Returns and raises like `abort`."""
        return self._end_early(request_id, RequestState.FAILED, error)

    def _end_early(self, request_id: str, end: RequestState, error: BaseException | None) -> bool:
        request = self._known(request_id)
        if request.state.is_ended:
            return False
        self._lifecycle.end(request, end, error=error)
        return True

    def _known(self, request_id: str) -> Request:
        request = self.requests.get(request_id)
        if request is None:
            raise UnknownRequestError(
                f"no request is called {request_id!r}; ask with an id that submit() returned on this engine"
            )
        return request

    def die(self, error: BaseException) -> None:
        """End the engine on an error. A running step is discarded, and nothing of it is published.

        Every request fails with the error, and all blocks are freed.
        """
        self.error = error
        self.log.append(ev.StepFailed(describe(error)))
        self._lifecycle.fail_all(error)

    # -- Between steps -------------------------------------------------------------------------------------

    def run(self, max_steps: int | None = None) -> int:
        """Run steps until there is no work, or ``max_steps`` are done. Returns the number of steps run."""
        count = 0
        while (max_steps is None or count < max_steps) and self.step():
            count += 1
        return count

    def reset_cache(self, *, abort_running: bool = False) -> bool:
        """Unpublish all blocks. Returns False, without doing so, while a block is in use.

        With ``abort_running`` the running requests are aborted first; waiting ones stay.
        """
        self.check_open()
        if abort_running:
            while self.scheduler.running:
                self.abort(self.scheduler.running[-1].request_id)
        return self.manager.reset()

    def set_policies(self, *, publication: Any = None, coordination: Any = None, release: Any = None) -> None:
        """Switch to other policies (None: keep the current one). Only while no request is in the engine.

        Raises ConfigError while a request is, and UnknownNameError for a policy that does not exist.
        """
        self.check_open()
        if any(not request.state.is_ended for request in self.requests.values()):
            raise ConfigError("policies can change only while no request is in the engine; wait or abort them")
        self._sharing.use(self.config.with_policies(publication, coordination, release))
        self.log.append(
            ev.PoliciesChanged(
                policy_name(self.config.publication_policy),
                policy_name(self.config.coordination_policy),
                policy_name(self.config.release_policy),
            )
        )

    def close(self) -> None:
        """Abort all requests and close the runner. Calling it again does nothing."""
        if self._closed:
            return
        try:
            self._lifecycle.abort_all()
        finally:
            self._closed = True
            self.runner.close()

    # -- State ---------------------------------------------------------------------------------------------

    def state(self) -> State:
        """Return the engine's state, read from its parts. Replaying the log must give the same state."""
        return state_of(self.requests, self.manager, self.scheduler, self.coordinator)

    def check_invariants(self) -> None:
        """Raise InvariantError if the parts contradict each other. Between steps only."""
        check_engine(self.requests, self.manager, self.scheduler, self.coordinator, self.config.max_num_seqs)
