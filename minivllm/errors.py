"""The one tree of exceptions.

Every message is one sentence that says what was wrong, what the limit is and what to do about it.
Knows nothing of the engine.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class MiniVLLMError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(MiniVLLMError, ValueError):
    """A configuration value that no engine can run with."""


class InvalidRequestError(MiniVLLMError, ValueError):
    """A request that can never run: refused at submission, before it holds anything."""


class UnknownNameError(MiniVLLMError, ValueError):
    """A model, policy, profile or choice that does not exist; the message names the nearest one."""


class UnknownRequestError(MiniVLLMError, LookupError):
    """A request id that the engine, the scheduler or the coordinator has never seen or has forgotten."""


class DuplicateRequestError(MiniVLLMError, ValueError):
    """A request id that is in use already."""


class RequestFailedError(MiniVLLMError, RuntimeError):
    """One request ended on an error; the engine continues. ``__cause__`` holds the error."""


class RowError(MiniVLLMError, ArithmeticError):
    """A row of a step that came out as NaN or infinite: its request fails, the others continue."""


class OutOfBlocksError(MiniVLLMError, RuntimeError):
    """More blocks were asked for than are free. The pool was not changed."""


class InvariantError(MiniVLLMError, AssertionError):
    """The engine's own state contradicts itself: a bug, never the caller's mistake."""


class ModelError(MiniVLLMError, RuntimeError):
    """A model that cannot be fetched, read or run (missing, corrupt, not dense, no network, disk full)."""


class EngineDeadError(MiniVLLMError, RuntimeError):
    """The engine stopped on an error. ``__cause__`` holds it; make a new engine to continue."""


class EngineClosedError(MiniVLLMError, RuntimeError):
    """The engine was closed; make a new one to continue."""


def stopped_by(error: BaseException) -> EngineDeadError:
    """Return what whoever asks an engine hears that has stopped on ``error``, which is its cause."""
    dead = EngineDeadError(f"the engine stopped on an error ({describe(error)}); make a new engine to continue")
    dead.__cause__ = error
    return dead


def describe(error: BaseException) -> str:
    """Return the error in words: its kind and its message."""
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def nearest(name: object, known: Iterable[str]) -> str:
    """Return a hint: the known name nearest to ``name`` if one is near, else the list of all of them."""
    choices = list(known)
    close = difflib.get_close_matches(str(name), choices, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    return "choose one of " + ", ".join(choices)
