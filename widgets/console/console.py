"""The race console: choose a race, fire it, abort its leader, reset the cache, and watch.

Knows engines, races and sentences. Must not know how the page draws. A command of the page is only put on a queue; one
thread takes it off and drives the engine, so that the console works while a cell runs and nothing of it ever raises
into the kernel. The page shows what goes wrong, in a sentence; nothing is printed.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from minivllm.bench import race_submissions
from minivllm.config import EngineConfig
from minivllm.engine import Engine, Handle
from minivllm.errors import ConfigError, MiniVLLMError
from minivllm.log import RequestArrived, RequestDeferred
from minivllm.runners import VirtualRunner
from minivllm.step import ScheduledStep
from widgets.console.controls import make_fields, race_of
from widgets.console.leader import abort_leader
from widgets.live import PANELS, LogWidget, chosen_panels, source_of, views_of_cells

_CLOSE_SECONDS = 2.0  # how long closing waits; a thread that brings a model ends by itself when it is there
_LOOK_SECONDS = 0.1  # how often a running race is looked at; its events reach the page without this


@dataclass(slots=True)
class _Load:
    """Make the engine, if there is none that lives."""


@dataclass(slots=True)
class _Fire:
    options: dict[str, Any]


@dataclass(slots=True)
class _AbortLeader:
    pass


@dataclass(slots=True)
class _ResetCache:
    pass


@dataclass(slots=True)
class _Close:
    pass


_Command = _Load | _Fire | _AbortLeader | _ResetCache | _Close


class _Pace:
    """Holds a virtual engine's steps back, so that the eye can follow and a leader can be aborted."""

    def __init__(self) -> None:
        self.steps_per_second = 0.0
        self.stop = threading.Event()

    def __call__(self, step: ScheduledStep) -> None:
        if self.steps_per_second > 0:
            self.stop.wait(1.0 / self.steps_per_second)


_consoles: weakref.WeakValueDictionary[Any, RaceConsole] = weakref.WeakValueDictionary()
"""The open console of each engine or model: a cell that is run again closes the console of the time before."""


class RaceConsole(LogWidget):
    """Controls and live views of one race after another.

    Without ``engine`` (or with a model's name in its place) it loads ``model`` in the background, shows how far it
    is, and owns the engine: closing the console closes it. An ``engine`` that is given stays the caller's. If the
    engine dies, the page says why, and the next Fire makes a new one. ``config`` are the engine's settings;
    publication, coordination and release are chosen in the page.

    Raises ConfigError for something that is no engine, no model's name or no EngineConfig, UnknownNameError for a
    panel or a control that does not exist.
    """

    def __init__(
        self,
        engine: Engine | str | None = None,
        *,
        model: str = "smollm2",
        config: EngineConfig | None = None,
        show: Iterable[str] = PANELS,
        **options: Any,
    ) -> None:
        if isinstance(engine, str):
            model, engine = engine, None
        if engine is not None and not isinstance(engine, Engine):
            kind = type(engine).__name__
            article = "an" if kind[0] in "AEIOUaeiou" else "a"
            raise ConfigError(f"a race console cannot drive {article} {kind}; give it an Engine, or a model's name")
        if not isinstance(model, str):
            raise ConfigError(f"model is {model!r}; give a model's name, such as 'smollm2' or 'virtual'")
        if config is not None and not isinstance(config, EngineConfig):
            raise ConfigError(f"config is {config!r}; pass an EngineConfig(...)")
        self._config = engine.config if engine is not None else config or EngineConfig()
        self._model = engine.name if engine is not None else model
        self._pace = _Pace() if engine is None and model == "virtual" else None
        self.status: dict[str, Any] | None = None
        self._engine = engine
        self._owns_engine = engine is None
        self._handles: list[Handle] = []
        self._num_races = 0
        self._last_report_s = 0.0
        self._saying = threading.Lock()
        self._closing = threading.Event()
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        panels = chosen_panels(show)
        is_virtual, has_pace = self._model == "virtual", self._pace is not None
        fields = make_fields(self._config, options, is_virtual=is_virtual, has_pace=has_pace)
        super().__init__(
            show=panels,
            title=f"Race console · {self._model}",
            per_race=True,
            paced=engine is not None and engine.name == "virtual",
            controls={"title": f"Race console · {self._model}", "fields": fields},
        )
        key = engine if engine is not None else model
        before = _consoles.get(key)
        if before is not None:
            before.close()
        _consoles[key] = self
        views_of_cells.close_earlier()
        views_of_cells.remember(self)
        if engine is not None:
            self.publisher.attach(source_of(engine))
        self._thread = threading.Thread(target=self._serve, name="race-console", daemon=True)
        self._commands.put(_Load())
        self._thread.start()

    # -- From the page -------------------------------------------------------------------------------------

    def _on_message(self, _widget: Any, content: Any, _buffers: Any) -> None:
        """Put a command on the queue, nothing more: this may be any thread, at any time."""
        super()._on_message(_widget, content, _buffers)
        if not isinstance(content, dict):
            return
        if "want" in content:  # a page that has just come: it has not heard the last sentence
            self._send_again()
        elif content.get("do") == "fire":
            options = content.get("options")
            self.fire(**{str(k): v for k, v in options.items()} if isinstance(options, dict) else {})
        elif content.get("do") == "abort_leader":
            self.abort_leader()
        elif content.get("do") == "reset_cache":
            self.reset_cache()

    # -- From a cell; each returns at once -----------------------------------------------------------------

    def fire(self, **options: Any) -> None:
        """Start a race, as the button does. ``options`` are controls by name; others are as first shown."""
        defaults = {field["name"]: field["value"] for field in self.controls["fields"]}
        self._commands.put(_Fire(defaults | options))

    def abort_leader(self) -> None:
        """Abort whoever leads now, as the button does."""
        self._commands.put(_AbortLeader())

    def reset_cache(self) -> None:
        """Forget every published block, as the button does."""
        self._commands.put(_ResetCache())

    @property
    def engine(self) -> Engine | None:
        """The engine, or None while there is none."""
        return self._engine

    # -- The console's thread ------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            self._serve_commands()
        finally:
            # Here and not in `close`: a model may still be on its way when the console is closed.
            if self._engine is not None and self._owns_engine:
                self._engine.close()

    def _serve_commands(self) -> None:
        while not self._closing.is_set():
            try:
                command: _Command | None = self._commands.get(timeout=_LOOK_SECONDS if self._handles else None)
            except queue.Empty:
                command = None
            if isinstance(command, _Close):
                return
            try:
                if command is not None:
                    self._do(command)
                self._look_at_race()
            except MiniVLLMError as error:
                self._say(_sentence(error), "error")
            except Exception as error:  # a fault of ours or of a student's policy: the console must live on
                self._say(f"That did not work: {type(error).__name__}: {_sentence(error)}", "error")

    def _do(self, command: _Command) -> None:
        if isinstance(command, _Load):
            self._live_engine()
            if not self._handles:
                self._say(f"{self._model} is ready. Choose a race and press Fire.", "ready")
        elif isinstance(command, _Fire):
            self._fire(command.options)
        elif isinstance(command, _AbortLeader):
            self._abort_leader()
        elif isinstance(command, _ResetCache):
            self._reset_cache()

    def _live_engine(self) -> Engine:
        """Return the engine; make one if there is none or if it has died."""
        if self._engine is not None and self._engine.is_alive:
            return self._engine
        self._say(f"Loading {self._model} …", "busy", 0.0)
        if self._engine is not None and self._owns_engine:
            self._engine.close()
        pace = self._pace
        runner = (lambda: VirtualRunner(on_step=pace)) if pace is not None else None
        engine = Engine(self._model, self._config, runner=runner, progress=self._report)
        self._engine, self._owns_engine = engine, True
        self.publisher.attach(source_of(engine))
        return engine

    def _report(self, what: str, done: int, total: int | None) -> None:
        """Report to the page how far the model's download is, a few times a second at most."""
        now = time.monotonic()
        if now - self._last_report_s < 0.1 and done != total:
            return
        self._last_report_s = now
        of = f" of {total / 1e6:,.0f}" if total else ""
        self._say(f"{what}: {done / 1e6:,.0f}{of} MB", "progress", done / total if total else 0.0)

    def _fire(self, options: dict[str, Any]) -> None:
        if self._is_racing():
            self._say("A race is running; wait until it is over, or abort its leader.", "error")
            return
        race = race_of(self.controls["fields"], options)
        engine = self._live_engine()
        engine.set_policies(**{name: options[name] for name in ("publication", "coordination", "release")})
        if options["cache"] == "cold" and not engine.reset_cache():
            raise ConfigError("a block is in use, so the cache cannot be reset; wait until all requests have ended")
        if self._pace is not None:
            self._pace.steps_per_second = float(options["speed"])
        prefix = self._free_prefix(engine, race.num_requests)
        self._handles = engine.submit_batch(race_submissions(race, engine.tokenizer, prefix=prefix))
        self._num_races += 1
        count = race.num_requests
        coming = "1 request is on its way" if count == 1 else f"{count} requests are on their way"
        self._say(f"Race {self._num_races} runs: {coming}.", "racing")

    def _free_prefix(self, engine: Engine, count: int) -> str:
        """Return what the ids of a new race begin with: "r", then "r2.", "r3." and so on."""
        used = {e.request_id for e in engine.log if isinstance(e, (RequestArrived, RequestDeferred))}
        number = self._num_races + 1
        prefix = "r"
        while any(f"{prefix}{i}" in used for i in range(count)):
            number = max(2, number)
            prefix = f"r{number}."
            number += 1
        return prefix

    def _is_racing(self) -> bool:
        return any(not handle.done for handle in self._handles)

    def _look_at_race(self) -> None:
        """Say how a race ended, once all of its requests have."""
        if not self._handles or self._is_racing():
            return
        engine, self._handles = self._engine, []
        if engine is not None and engine.error is not None:
            cause = engine.error
            self._say(
                f"The engine stopped on an error ({type(cause).__name__}: {cause}). Fire makes a new engine.", "error"
            )
            return
        if engine is not None and not engine.is_alive:
            self._say("The engine was closed. Fire makes a new one.", "error")
            return
        self._say(f"Race {self._num_races} is over.", "ready")

    def _abort_leader(self) -> None:
        engine = self._engine
        if engine is None or not engine.is_alive or not self._is_racing():
            self._say("No race is running, so there is no leader to abort; press Fire first.", "error")
            return
        # Chosen and aborted on the engine's thread, in one go: between the two nobody can end or hand over.
        said = engine.call(abort_leader)
        if said is None:
            self._say("The leader has ended already; there is nothing to abort.", "error")
        else:
            self._say(said, "racing")

    def _reset_cache(self) -> None:
        engine = self._live_engine()
        if engine.reset_cache():
            self._say("The cache is reset: nothing is published any more.", "ready")
        else:
            self._say("A block is in use, so the cache cannot be reset; wait until the race is over.", "error")

    # -- To the page ---------------------------------------------------------------------------------------

    def _say(self, text: str, level: str, progress: float | None = None) -> None:
        """Show a sentence. ``level`` is ready, busy, progress, racing or error."""
        with self._saying, contextlib.suppress(Exception):  # the page is gone: nobody is there to read it
            self.status = {"type": "status", "text": text, "level": level, "progress": progress}
            self.send(self.status)

    def _send_again(self) -> None:
        with self._saying, contextlib.suppress(Exception):
            if self.status is not None:
                self.send(self.status)

    def close(self) -> None:
        """Stop the race, close the engine if it is the console's own, and take the console off the page.

        Waits for that a short time only: a model that is on its way is closed by the console's thread once it is there.
        """
        if not getattr(self, "_is_closed", True):
            self._closing.set()
            self._commands.put(_Close())
            if self._pace is not None:
                self._pace.stop.set()
            if threading.current_thread() is not self._thread:
                self._thread.join(_CLOSE_SECONDS)
        super().close()

    def __repr__(self) -> str:
        return f"RaceConsole({self._model})"


def _sentence(error: BaseException) -> str:
    """Return an error's message as a sentence: a capital at the beginning, a full stop at the end."""
    text = str(error).strip() or type(error).__name__
    return text[0].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")
