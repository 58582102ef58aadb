"""The engine that a notebook uses: a thread of its own, and a handle for each request.

    Engine ──commands──► Worker (thread) ──step──► EngineCore
    Handle ◄──tokens, results──┘

Knows how to start, ask and close the thread. Must not know scheduling, blocks or models.
"""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

from minivllm.config import EngineConfig
from minivllm.engine.core import EngineCore
from minivllm.engine.handle import Handle
from minivllm.engine.input_processor import Submission, chat_tokens, make_sampling
from minivllm.engine.registry import engines_of_cells, workers
from minivllm.engine.worker import Enter, Worker
from minivllm.errors import ConfigError, MiniVLLMError
from minivllm.log.event_log import EventLog
from minivllm.log.metrics import Metrics
from minivllm.log.state import State
from minivllm.models.progress import Progress, ProgressOnStderr
from minivllm.request import MultimodalItem, Sampling
from minivllm.runners.factory import runner_factory, slow_note
from minivllm.step import Runner

T = TypeVar("T")


class Engine:
    """A serving engine on a thread of its own.

        with Engine("smollm2") as engine:
            handle = engine.submit("What is the capital of France?", max_tokens=32)
            print(handle.result().text)

    ``model`` is "smollm2", "tiny", "virtual", a hub name or a folder. Settings are an `EngineConfig`, or its
    fields by name. ``runner`` is a function that makes a runner on the engine's thread, in place of a model.
    ``progress`` gets how far the model's download is; without it, a long one is reported on standard error.
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
        engines_of_cells.close_earlier()
        report = ProgressOnStderr() if progress is None else None
        make_runner = runner or runner_factory(model, progress or report, adapters)
        self._worker = Worker(make_runner, self.config)
        workers.add(self._worker)
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
        engines_of_cells.remember(self)
        note = slow_note(model) if runner is None else ""
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
        """Submit a prompt (text or token ids) and return its handle at once.

        Fields of `Sampling` may be given by name: ``engine.submit(prompt, max_tokens=8, temperature=0.7)``. With
        ``n`` samples this is the handle of the first one, and its ``samples`` are all of them. Raises
        InvalidRequestError for a request that can never run.
        """
        chosen = make_sampling(sampling, sampling_fields)
        submission = Submission(prompt, chosen, request_id, cache_salt, after, adapter, multimodal, priority)
        return self.submit_batch([submission])[0]

    def submit_batch(self, submissions: Iterable[Submission]) -> list[Handle]:
        """Submit several together: all arrive before the same step, or, if one is refused, none does.

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
                worker.put(Enter(batch, handles, worker.handles))
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
        """Raise InvariantError if the engine's state contradicts itself."""
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

    def call(self, function: Callable[[EngineCore], T]) -> T:
        """Run a function on the engine's thread, between two steps, and return its (plain Python) value."""
        return self._worker.call(function)

    def call_alone(self, function: Callable[[EngineCore, Container[str]], T]) -> T:
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
