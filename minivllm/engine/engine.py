"""One thread owns the engine; callers get handles.

Everything that a runner makes (weights, K/V, streams) is made, used and freed by one thread: MLX's streams are
thread-local, and another thread that reads the pool while it is written kills the process. Callers put commands
on a queue and get plain Python values back. Commands run between steps, in the order in which they came.

Knows how to start, talk to and stop that thread. Must not know scheduling, blocks or models.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import copy
import functools
import os
import queue
import sys
import threading
import warnings
import weakref
from collections.abc import AsyncIterator, Callable, Container, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from minivllm.config import EngineConfig
from minivllm.engine.core import EngineCore
from minivllm.engine.input_processor import Prepared, Submission, checked_text, make_sampling
from minivllm.engine.notebook_cells import MadeByCell
from minivllm.engine.output import Output
from minivllm.errors import (
    ConfigError,
    EngineClosedError,
    EngineDeadError,
    InvalidRequestError,
    MiniVLLMError,
    RequestFailedError,
    stopped_by,
)
from minivllm.log.event_log import EventLog
from minivllm.log.metrics import Metrics
from minivllm.log.state import State
from minivllm.models.cpu_blas import make_fast
from minivllm.request import MultimodalItem, RequestState, Sampling
from minivllm.step import Runner

if TYPE_CHECKING:
    from minivllm.models.downloads import Progress

_T = TypeVar("_T")

_engines = MadeByCell()


@dataclass(frozen=True, slots=True)
class Token:
    """An output token and the text that became certain with it (perhaps none, or more than its own)."""

    token_id: int
    text: str


@dataclass(frozen=True, slots=True)
class RequestResult:
    """What came of a request.

    ``finish_reason`` is "length", "stop" or "abort". Times are milliseconds; ``ttft_ms`` is None if no token
    came out.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    prompt_tokens: int
    recovered_tokens: int
    ttft_ms: float | None
    completion_ms: float | None


class Handle:
    """A caller's end of one request. Iterate it for tokens as they come, or ask for `result()`.

    A prompt with several samples has a handle for each, and ``samples`` of each holds them all; `submit` returns the
    first. Each is awaited and aborted by itself.
    """

    def __init__(self, request_id: str, prompt_token_ids: tuple[int, ...], owner: _Worker) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.samples: tuple[Handle, ...] = (self,)
        self._owner = owner
        self._changed = threading.Condition()
        self._tokens: list[Token] = []
        self._result: RequestResult | None = None
        self._error: BaseException | None = None
        self._wakers: list[Callable[[], object]] = []

    @property
    def done(self) -> bool:
        """Whether the request has ended, in whatever way."""
        return self._result is not None or self._error is not None

    @property
    def tokens(self) -> list[Token]:
        """The tokens so far, as a new list."""
        with self._changed:
            return list(self._tokens)

    def result(self, timeout: float | None = None) -> RequestResult:
        """Wait for the end and return it.

        Raises what ended the request if it failed, and TimeoutError after ``timeout`` seconds; the request
        goes on then.
        """
        self._check_thread()
        with self._changed:
            if not self._changed.wait_for(lambda: self.done, timeout):
                raise TimeoutError(f"request {self.request_id!r} has not ended after {timeout} s; it goes on")
        return self._outcome()

    def _outcome(self) -> RequestResult:
        if self._result is None:
            kind = EngineDeadError if self._owner.is_over else RequestFailedError
            raise kind(
                f"request {self.request_id!r} failed ({type(self._error).__name__}: {self._error})"
            ) from self._error
        return self._result

    def _check_thread(self) -> None:
        if not self.done and threading.current_thread() is self._owner.thread:
            raise MiniVLLMError(
                f"request {self.request_id!r} was waited for on the engine's own thread, which would never end; "
                "wait for it where it was submitted"
            )

    def __iter__(self) -> Iterator[Token]:
        """Yield each token when it comes out. Raises what ended the request if it failed."""
        place = 0
        while True:
            self._check_thread()
            with self._changed:
                self._changed.wait_for(lambda place=place: self.done or len(self._tokens) > place)  # type: ignore[misc]
                fresh, ended = self._tokens[place:], self.done
            yield from fresh
            place += len(fresh)
            if ended and place == len(self._tokens):
                self._outcome()
                return

    def __await__(self) -> Generator[Any, None, RequestResult]:
        """``await handle`` is `result()` for a coroutine: the event loop goes on meanwhile."""
        return self._wait_async().__await__()

    async def _wait_async(self) -> RequestResult:
        while not self.done:
            await self._change()
        return self._outcome()

    async def __aiter__(self) -> AsyncIterator[Token]:
        """Yield each token when it comes out, without blocking the event loop."""
        place = 0
        while True:
            fresh, ended = self.tokens[place:], self.done
            for token in fresh:
                yield token
            place += len(fresh)
            if ended and place == len(self._tokens):
                self._outcome()
                return
            if not fresh:
                await self._change(place)

    async def _change(self, place: int | None = None) -> None:
        """Wait until the request has ended, or has more than ``place`` tokens."""
        loop = asyncio.get_running_loop()
        woken = asyncio.Event()
        with self._changed:
            if self.done or (place is not None and len(self._tokens) > place):
                return
            self._wakers.append(functools.partial(loop.call_soon_threadsafe, woken.set))
        await woken.wait()

    def abort(self) -> bool:
        """Take the request back. Returns False if it has ended already; calling it twice is fine."""
        return not self.done and self._owner.abort(self.request_id)

    def _push(self, output: Output, result: RequestResult | None) -> None:
        """Engine thread: take a token in, or an end."""
        with self._changed:
            if output.token_id is not None:
                self._tokens.append(Token(output.token_id, output.text))
            self._result, self._error = result, output.error
            wakers, self._wakers = self._wakers, []
            self._changed.notify_all()
        for wake in wakers:
            with contextlib.suppress(RuntimeError):  # that event loop was closed meanwhile: nobody waits there
                wake()

    def __repr__(self) -> str:
        state = "ended" if self.done else "running"
        return f"Handle({self.request_id!r}, {len(self._tokens)} tokens, {state})"


class _Command(Protocol):
    """Something to do between two steps."""

    def run(self, core: EngineCore) -> None: ...

    def refuse(self, error: BaseException) -> None: ...


class _Call:
    """A function to run on the engine, and the future of its value."""

    def __init__(self, function: Callable[[EngineCore], Any]) -> None:
        self.function = function
        self.future: Future[Any] = Future()

    def run(self, core: EngineCore) -> None:
        try:
            self.future.set_result(self.function(core))
        except BaseException as error:
            self.future.set_exception(error)

    def refuse(self, error: BaseException) -> None:
        if not isinstance(error, (EngineDeadError, EngineClosedError)):
            error = stopped_by(error)
        self.future.set_exception(error)


class _Enter:
    """Prepared requests on their way in, with their handles."""

    def __init__(self, batch: list[Prepared], handles: list[Handle]) -> None:
        self.batch = batch
        self.handles = handles

    def run(self, core: EngineCore) -> None:
        try:
            core.enter(self.batch)
        except MiniVLLMError as error:
            for handle in self.handles:
                handle._owner.handles.pop(handle.request_id, None)
            self.refuse(error)

    def refuse(self, error: BaseException) -> None:
        for handle in self.handles:
            handle._push(Output(handle.request_id, None, "", RequestState.FAILED, error), None)


def _leave_thread() -> None:
    """Last act of an engine's thread: give up its MLX streams, if MLX was ever loaded."""
    mlx_runner = sys.modules.get("minivllm.runners.mlx")
    if mlx_runner is not None and hasattr(mlx_runner, "leave_thread"):
        mlx_runner.leave_thread()


class _Worker:
    """The thread and its queue. Holds no reference to the `Engine`, so that a forgotten one can be closed."""

    def __init__(self, make_runner: Callable[[], Runner], config: EngineConfig) -> None:
        self.commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self.started: Future[EngineCore] = Future()
        self.listeners: list[Callable[[], None]] = []
        self.handles: dict[str, Handle] = {}
        self.metrics = Metrics()
        self.lock = threading.Lock()
        self.closing = False
        self._make_runner = make_runner
        self._config = config
        self.thread = threading.Thread(target=self._run, name="minivllm-engine", daemon=True)
        self.thread.start()

    # -- The engine's thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        runner: Runner | None = None
        core: EngineCore | None = None
        crash: BaseException | None = None
        try:
            runner = self._make_runner()
            core = EngineCore(self._config, runner, self._listen)
            self.started.set_result(core)
            self._serve(core)
        except BaseException as error:
            crash = error
            if core is None:
                self.started.set_exception(error)  # first: closing a broken runner may raise as well
                if runner is not None:
                    with contextlib.suppress(Exception):
                        runner.close()
        finally:
            self._end(core, crash)
            del core, runner
            _leave_thread()

    def _serve(self, core: EngineCore) -> None:
        """Run commands and steps until the engine is closed or dies."""
        while True:
            heard = False
            command = self._next_command(wait=not core.has_work)
            while command is not _NONE:
                if command is None:
                    return
                command.run(core)
                heard = True
                command = self._next_command(wait=False)
            if heard:
                self._notify()  # who arrived or is held is seen before a step that may take seconds
            try:
                core.step()
            except EngineDeadError:
                self._notify()
                return
            self._notify()

    def _next_command(self, *, wait: bool) -> Any:
        try:
            return self.commands.get(block=wait)
        except queue.Empty:
            return _NONE

    def _listen(self, output: Output) -> None:
        handle = self.handles.get(output.request_id)
        if handle is None:
            return
        result = None
        if output.end is not None:
            del self.handles[output.request_id]
            if output.end is not RequestState.FAILED:
                result = self._result(output.request_id)
        handle._push(output, result)

    def _result(self, request_id: str) -> RequestResult:
        metrics = self.figures().requests[request_id]
        return RequestResult(
            request_id,
            metrics.text,
            tuple(metrics.output_token_ids),
            metrics.end or "",
            metrics.prompt_tokens,
            metrics.recovered_tokens,
            metrics.ttft_ms,
            metrics.completion_ms,
        )

    def figures(self) -> Metrics:
        """Bring the figures up to the end of the log. For the engine's thread; others get a `copy_of_figures`."""
        core = self.started.result()
        with self.lock:
            return self.metrics.update(core.log)

    def copy_of_figures(self) -> Metrics:
        """Return the figures so far, which change no more. Any thread."""
        core = self.started.result()
        with self.lock:
            return copy.deepcopy(self.metrics.update(core.log))

    @property
    def is_over(self) -> bool:
        """Whether the engine is dead or closed, or about to be."""
        return self.closing or self.started.result().error is not None

    def _notify(self) -> None:
        for listener in list(self.listeners):
            try:
                listener()
            except Exception:  # a view's fault is no reason to stop serving: it is not called again
                with contextlib.suppress(ValueError):
                    self.listeners.remove(listener)

    def _end(self, core: EngineCore | None, crash: BaseException | None) -> None:
        """Close what is there and refuse what still comes, so that nobody waits for ever."""
        with self.lock:
            self.closing = True
        if core is not None:
            try:
                if crash is not None and core.error is None:
                    core.die(crash)
                core.close()
            except BaseException as error:  # a policy may raise here, too; the handles below must hear of it
                core.error = core.error or error
        reason = (core.error if core else crash) or EngineClosedError(_CLOSED)
        while (command := self._next_command(wait=False)) is not _NONE:
            if command is not None:
                command.refuse(reason)
        for handle in list(self.handles.values()):
            handle._push(Output(handle.request_id, None, "", RequestState.FAILED, reason), None)
        self.handles.clear()
        self._notify()

    # -- Any other thread ----------------------------------------------------------------------------------

    def put(self, command: _Command) -> None:
        """Queue a command. Raises why not if the engine is dead or closed."""
        with self.lock:
            if not self.closing:
                self.commands.put(command)
                return
        self.started.result().check_open()
        raise EngineClosedError(_CLOSED)

    def call(self, function: Callable[[EngineCore], _T]) -> _T:
        """Run a function on the engine, between two steps, and return its value."""
        if threading.current_thread() is self.thread:
            return function(self.started.result())
        command = _Call(function)
        self.put(command)
        value: _T = command.future.result()
        return value

    def abort(self, request_id: str) -> bool:
        """Abort a request; False if it, or the whole engine, has ended."""
        try:
            return self.call(lambda core: core.abort(request_id))
        except (EngineDeadError, EngineClosedError):
            return False

    def stop(self) -> None:
        """Ask the thread to end after the step that it is in."""
        self.commands.put(None)


_NONE: Any = object()
_CLOSED = "the engine is closed; make a new one to go on"
_workers: weakref.WeakSet[_Worker] = weakref.WeakSet()


@atexit.register
def stop_all() -> None:
    """Stop every engine and wait for its thread: leaving Python while one computes may crash the process."""
    workers = list(_workers)
    for worker in workers:
        worker.stop()
    for worker in workers:
        worker.thread.join()


class Engine:
    """A serving engine on a thread of its own.

        with Engine("smollm2") as engine:
            handle = engine.submit("What is the capital of France?", max_tokens=32)
            print(handle.result().text)

    ``model`` is "smollm2", "tiny", "virtual", a hub name or a folder. Settings are an `EngineConfig`, or its
    fields by name. ``runner`` is a function that makes a runner on the engine's thread, in place of a model.
    ``progress`` hears how far the model's download is; without it, a long one is told on standard error.
    ``adapters`` are LoRA adapters for the model, by name and folder: ``submit(prompt, adapter=name)`` uses one.

    Running the notebook cell that made an engine again closes the old one. Raises ModelError, ConfigError or
    UnknownNameError if it cannot start.
    """

    def __init__(
        self,
        model: str = "smollm2",
        config: EngineConfig | None = None,
        *,
        runner: Callable[[], Runner] | None = None,
        progress: Progress | None = None,
        adapters: Mapping[str, str | os.PathLike[str]] | None = None,
        **config_fields: Any,
    ) -> None:
        if not isinstance(model, (str, os.PathLike)):
            raise ConfigError(f"model is {model!r}; give a name such as 'smollm2', or a folder")
        model = os.fspath(model)
        if config is not None and not isinstance(config, EngineConfig):
            raise ConfigError(f"config is {config!r}; pass an EngineConfig(...)")
        if runner is not None and adapters:
            raise ConfigError("adapters were given beside a runner; let the function that makes the runner load them")
        self.config = (config or EngineConfig()).replace(**config_fields)
        _engines.close_earlier()
        report = _Report() if progress is None else None
        make_runner = runner or runner_factory(model, progress or report, adapters)
        self._worker = _Worker(make_runner, self.config)
        _workers.add(self._worker)
        self._finalizer = weakref.finalize(self, self._worker.stop)
        try:
            core = report.wait(self._worker.started) if report else self._worker.started.result()
        except BaseException:
            self._worker.stop()
            raise
        self.name: str = core.runner.name
        self.log: EventLog = core.log
        self._core = core
        self._submitting = threading.Lock()
        _engines.remember(self)
        if runner is None and model != "virtual":
            note = make_fast().note
            if note:
                warnings.warn(note, RuntimeWarning, stacklevel=2)  # Python shows the same one once

    # -- Requests ------------------------------------------------------------------------------------------

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
    ) -> Handle:
        """Hand a prompt in (text or token ids) and return its handle at once.

        Fields of `Sampling` may be given by name: ``engine.submit(prompt, max_tokens=8, temperature=0.7)``. With
        ``n`` samples this is the handle of the first one, and its ``samples`` are all of them. Raises
        InvalidRequestError for a request that can never run.
        """
        chosen = make_sampling(sampling, sampling_fields)
        submission = Submission(prompt, chosen, request_id, cache_salt, after, adapter, multimodal, priority)
        return self.submit_batch([submission])[0]

    def submit_batch(self, submissions: Iterable[Submission]) -> list[Handle]:
        """Hand several in together: all arrive before the same step, or, if one is refused, none does.

        Returns the first sample's handle of each.
        """
        worker = self._worker
        with self._submitting:
            # Refusals come from here, on the caller's thread: a request that cannot run never reaches the engine.
            batch = self._core.prepare(submissions, worker.handles)
            first_handles: list[Handle] = []
            handles: list[Handle] = []
            for prepared in batch:
                group = tuple(Handle(r.request_id, r.prompt_token_ids, worker) for r in prepared.requests)
                for handle in group:
                    handle.samples = group
                first_handles.append(group[0])
                handles.extend(group)
            for handle in handles:
                worker.handles[handle.request_id] = handle
            try:
                worker.put(_Enter(batch, handles))
            except MiniVLLMError:
                for handle in handles:
                    worker.handles.pop(handle.request_id, None)
                raise
        return first_handles

    def chat(self, message: str, **fields: Any) -> Handle:
        """Submit a user's message in the model's chat template (as it is, if the model has none)."""
        return self.submit(chat_tokens(self._core.runner.tokenizer, message), **fields)

    def abort(self, request_id: str) -> bool:
        """Take a request back. Returns False if it has ended already.

        Raises UnknownRequestError for an id that this engine has never seen.
        """
        return self._worker.call(lambda core: core.abort(request_id))

    # -- Questions and settings ----------------------------------------------------------------------------

    def metrics(self) -> Metrics:
        """Return the figures so far, as a copy that changes no more; shown as a table."""
        return self._worker.copy_of_figures()

    def state(self) -> State:
        """Return a copy of the engine's state between two steps."""
        return self._worker.call(lambda core: core.state())

    def check_invariants(self) -> None:
        """Raise InvariantError if the engine's books are wrong."""
        self._worker.call(lambda core: core.check_invariants())

    def reset_cache(self, *, abort_running: bool = False) -> bool:
        """Forget every published block. Returns False, with nothing changed, while a block is in use.

        With ``abort_running`` the requests that hold blocks are aborted first; those that wait go on waiting.
        """
        return self._worker.call(lambda core: core.reset_cache(abort_running=abort_running))

    def set_policies(self, *, publication: Any = None, coordination: Any = None, release: Any = None) -> None:
        """Go on under other policies. Raises ConfigError while a request is in the engine."""

        def change(core: EngineCore) -> EngineConfig:
            core.set_policies(publication=publication, coordination=coordination, release=release)
            return core.config

        self.config = self._worker.call(change)

    def call(self, function: Callable[[EngineCore], _T]) -> _T:
        """Run a function on the engine's thread, between two steps, and return its (plain Python) value."""
        return self._worker.call(function)

    def call_alone(self, function: Callable[[EngineCore, Container[str]], _T]) -> _T:
        """Like `call`, while nobody else submits. The function also gets the ids of requests on their way in."""
        with self._submitting:
            return self._worker.call(lambda core: function(core, self._worker.handles))

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self._core.runner.tokenizer

    @property
    def vocab_size(self) -> int:
        """Token ids go from 0 to one below this."""
        return self._core.runner.vocab_size

    @property
    def is_alive(self) -> bool:
        """Whether requests can be submitted."""
        return self._worker.thread.is_alive() and not self._worker.closing

    @property
    def error(self) -> BaseException | None:
        """What ended the engine, or None."""
        return self._core.error

    def add_listener(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call ``listener`` on the engine's thread after each step and command; it must be quick.

        Returns the function that takes it off again. A listener that raises is taken off.
        """
        listeners = self._worker.listeners
        listeners.append(listener)

        def remove() -> None:
            if listener in listeners:
                listeners.remove(listener)

        return remove

    # -- The end -------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Abort what runs, free everything and wait for the thread. Calling it again does nothing."""
        self._worker.stop()
        if threading.current_thread() is not self._worker.thread:
            self._worker.thread.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "alive" if self.is_alive else "dead" if self.error else "closed"
        return f"Engine({self.name!r}, {self.config.num_blocks} blocks of {self.config.block_size}, {state})"


def chat_tokens(tokenizer: Any, message: str) -> list[int]:
    """Return the token ids of one user message in the tokenizer's chat template, or of the bare message.

    Raises InvalidRequestError for an empty message (the template's own words are no prompt) or no text.
    """
    if not isinstance(message, str) or not message:
        raise InvalidRequestError(f"the message is {message!r}; write some text to answer")
    checked_text(message)
    if getattr(tokenizer, "chat_template", None) is None:
        return list(tokenizer.encode(message))
    messages = [{"role": "user", "content": message}]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


def runner_factory(
    model: str, progress: Progress | None = None, adapters: Mapping[str, str | os.PathLike[str]] | None = None
) -> Callable[[], Runner]:
    """Return the function that makes the runner of a model, to be called on the thread that will use it.

    ``adapters`` are folders by name. The virtual model reads none of them and takes their names.
    """
    if adapters is not None and not isinstance(adapters, Mapping):
        raise ConfigError(f"adapters is {adapters!r}; give a folder for each name, such as {{'law': 'adapters/law'}}")
    if model == "virtual":
        from minivllm.runners.virtual import VirtualRunner

        return lambda: VirtualRunner(adapters=adapters or None)

    def load() -> Runner:
        from minivllm.runners.mlx import MLXRunner

        return MLXRunner.load(model, progress=progress, adapters=adapters)

    return load


class _Report:
    """Tells on standard error how far a download is, from the thread that waits for it."""

    def __init__(self) -> None:
        self._latest: tuple[str, int, int | None] | None = None

    def __call__(self, what: str, done: int, total: int | None) -> None:
        self._latest = (what, done, total)

    def wait(self, started: Future[EngineCore]) -> EngineCore:
        """Wait for the engine, and report meanwhile."""
        told = False
        while True:
            try:
                core = started.result(timeout=0.25)
            except TimeoutError:
                if started.done():
                    raise
                if self._latest is not None:
                    what, done, total = self._latest
                    of = f" of {total / 1e6:.0f}" if total else ""
                    sys.stderr.write(f"\r{what}: {done / 1e6:.0f}{of} MB")
                    sys.stderr.flush()
                    told = True
                continue
            finally:
                if told and started.done():
                    sys.stderr.write("\n")
            return core
