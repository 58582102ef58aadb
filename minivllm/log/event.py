"""What an event is: numbered, dated, and plain enough to be written as JSON.

Knows nothing of what can happen: `events.py` lists that.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

EVENT_KINDS: dict[str, type[Event]] = {}
"""Event classes by kind, for example ``"blocks_allocated"``: filled as the classes below are made."""

_FIELD_NAMES: dict[str, tuple[str, ...]] = {}

_E = TypeVar("_E", bound="type[Event]")


@dataclass(slots=True)
class Event:
    """One thing that happened.

    ``seq`` counts from 0 without gaps, ``step`` is the engine step in which it happened (0 before the first
    one), ``ms`` is the engine's clock in milliseconds. The log fills the three in when it takes the event.
    """

    kind: ClassVar[str] = "event"
    seq: int = dataclasses.field(default=-1, init=False)
    step: int = dataclasses.field(default=0, init=False)
    ms: float = dataclasses.field(default=0.0, init=False)

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON values: ``kind``, ``seq``, ``step``, ``ms``, then the event's own fields."""
        kind = self.kind
        out: dict[str, Any] = {"kind": kind, "seq": self.seq, "step": self.step, "ms": round(self.ms, 6)}
        for name in _FIELD_NAMES[kind]:
            value = getattr(self, name)
            out[name] = _listed(value) if isinstance(value, tuple) else value
        return out


def event_from_dict(data: dict[str, Any]) -> Event:
    """Return the event that `Event.as_dict` wrote (lists come back as tuples).

    Raises ValueError for a kind that does not exist.
    """
    cls = EVENT_KINDS.get(data["kind"])
    if cls is None:
        raise ValueError(f"no event of kind {data['kind']!r}: the recording is of another version")
    event = cls(**{name: _tupled(data[name]) for name in _FIELD_NAMES[cls.kind]})
    event.seq, event.step, event.ms = data["seq"], data["step"], data["ms"]
    return event


def _listed(value: Any) -> Any:
    return [_listed(item) for item in value] if isinstance(value, tuple) else value


def _tupled(value: Any) -> Any:
    return tuple(_tupled(item) for item in value) if isinstance(value, list) else value


def register(cls: _E) -> _E:
    cls.kind = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()
    EVENT_KINDS[cls.kind] = cls
    _FIELD_NAMES[cls.kind] = tuple(f.name for f in dataclasses.fields(cls) if f.init)
    return cls
