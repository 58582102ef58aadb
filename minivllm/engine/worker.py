"""The engine's thread: commands in, steps between them, outputs to the handles.

Everything that a runner makes (weights, K/V, streams) is made, used and freed by one thread: MLX's streams are
thread-local, and another thread that reads the pool while it is written kills the process. Callers put commands on a
queue and get plain Python values back. Commands run between steps, in the order in which they came.

Knows how to start, serve and stop that thread. Must not know scheduling, blocks or models.
"""

from __future__ import annotations

import contextlib
import copy
import queue
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from minivllm.config import EngineConfig
from minivllm.engine.core import EngineCore
from minivllm.engine.handle import Handle, RequestResult
from minivllm.engine.input_processor import Prepared
from minivllm.engine.output import Output
from minivllm.errors import EngineClosedError, EngineDeadError, MiniVLLMError, describe, stopped_by
from minivllm.log.metrics import Metrics
from minivllm.request import RequestState
from minivllm.step import Runner

T = TypeVar("T")


class Command(Protocol):
    """Something to do between two steps."""

    def run(self, core: EngineCore) -> None: ...

    def refuse(self, error: BaseException) -> None: ...


class Call:
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


class Enter:
    """Prepared requests on their way in, with their handles."""

    def __init__(self, batch: list[Prepared], handles: list[Handle], handles_in_use: dict[str, Handle]) -> None:
        self.batch = batch
        self.handles = handles
        self.handles_in_use = handles_in_use

    def run(self, core: EngineCore) -> None:
        try:
            core.enter(self.batch)
        except MiniVLLMError as error:
            for handle in self.handles:
                self.handles_in_use.pop(handle.request_id, None)
            self.refuse(error)

    def refuse(self, error: BaseException) -> None:
        for handle in self.handles:
            handle.push(Output(handle.request_id, None, "", RequestState.FAILED, error), None)


def _leave_thread() -> None:
    """Last act of an engine's thread: give up its MLX streams, if MLX was ever loaded."""
    mlx_runner = sys.modules.get("minivllm.runners.mlx")
    if mlx_runner is not None and hasattr(mlx_runner, "leave_thread"):
        mlx_runner.leave_thread()


class Worker:
    """The thread and its queue. Holds no reference to the `Engine`, so that a forgotten one can be closed."""

    def __init__(self, make_runner: Callable[[], Runner], config: EngineConfig) -> None:
        self.commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
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
        handle.push(output, result)

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
            except Exception as error:  # a view's fault is no reason to stop serving: it is not called again
                with contextlib.suppress(ValueError):
                    self.listeners.remove(listener)
                warnings.warn(
                    f"a listener of the engine raised {describe(error)}; it is not called again",
                    RuntimeWarning,
                    stacklevel=2,
                )

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
            handle.push(Output(handle.request_id, None, "", RequestState.FAILED, reason), None)
        self.handles.clear()
        self._notify()

    # -- Any other thread ----------------------------------------------------------------------------------

    def put(self, command: Command) -> None:
        """Queue a command. Raises why not if the engine is dead or closed."""
        with self.lock:
            if not self.closing:
                self.commands.put(command)
                return
        self.started.result().check_open()
        raise EngineClosedError(_CLOSED)

    def call(self, function: Callable[[EngineCore], T]) -> T:
        """Run a function on the engine, between two steps, and return its value."""
        if threading.current_thread() is self.thread:
            return function(self.started.result())
        command = Call(function)
        self.put(command)
        value: T = command.future.result()
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
_CLOSED = "the engine is closed; make a new one to continue"
