"""The log itself: events in the order in which they happened.

Knows a clock to date them by. Must not know what any event means.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import overload

from minivllm.log.event import Event


class EventLog:
    """Append-only list of events. One thread appends; any thread may read what is there.

    ``now_ms`` is the engine's clock. ``step`` is set by the engine at the beginning of each step.
    """

    def __init__(self, now_ms: Callable[[], float]) -> None:
        self._now_ms = now_ms
        self._events: list[Event] = []
        self.step = 0

    def append(self, event: Event) -> None:
        """Number, date and keep the event."""
        event.seq = len(self._events)
        event.step = self.step
        event.ms = self._now_ms()
        self._events.append(event)

    def since(self, seq: int) -> list[Event]:
        """Return the events from number ``seq`` on, as a new list."""
        return self._events[seq:]

    def __len__(self) -> int:
        return len(self._events)

    def __iter__(self) -> Iterator[Event]:
        return iter(self._events[:])

    @overload
    def __getitem__(self, index: int) -> Event: ...

    @overload
    def __getitem__(self, index: slice) -> list[Event]: ...

    def __getitem__(self, index: int | slice) -> Event | list[Event]:
        return self._events[index]

    def __repr__(self) -> str:
        return f"EventLog({len(self._events)} events, step {self.step})"
