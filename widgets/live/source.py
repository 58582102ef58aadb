"""Where a view's events come from: an engine, a synchronous core, or a finished log.

Knows these three. Must not know pages, or how events are sent.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from minivllm.errors import ConfigError
from minivllm.log import EngineStarted, EventLog


@dataclass(slots=True)
class Source:
    """A log and its surroundings.

    After ``subscribe(fn)`` the source calls ``fn()`` whenever something is new; it returns a function that ends this.
    ``is_alive()`` says whether more events may come; a source that stays silent is polled every
    ``poll_seconds`` while it is alive.
    """

    log: EventLog
    subscribe: Callable[[Callable[[], None]], Callable[[], None]] | None = None
    is_alive: Callable[[], bool] = field(default=lambda: False)
    poll_seconds: float = 1.0


def source_of(shown: Any) -> Source:
    """Return what the publisher needs of an engine, of a synchronous core, or of a log.

    Raises ConfigError for anything else.
    """
    if isinstance(shown, EventLog):
        return Source(shown)
    log = getattr(shown, "log", None)
    if not isinstance(log, EventLog):
        raise ConfigError(
            f"a view cannot show a {type(shown).__name__}; give it an Engine, an EngineCore or an event log"
        )
    if hasattr(shown, "add_listener"):
        return Source(log, shown.add_listener, lambda: bool(shown.is_alive))
    # A core calls no listener: it is polled while it may still step. The reference is weak: nobody can step a core
    # that only a view knows, and a notebook makes a new one each time its cell is run.
    core = weakref.ref(shown)
    return Source(log, None, lambda: _may_step(core()), poll_seconds=0.1)


def _may_step(core: Any) -> bool:
    """Whether a synchronous core is there, open and in order."""
    return core is not None and bool(getattr(core, "is_open", True))


def runner_name(log: EventLog) -> str:
    """Return the name of what computes, as the log's first event says ("" for an empty log)."""
    first = log[0] if len(log) else None
    return first.runner if isinstance(first, EngineStarted) else ""
