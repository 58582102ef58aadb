"""Two clocks: one that passes by itself, one that a runner moves.

The engine reads milliseconds and does not know which clock it has. Must not know what is being timed.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Milliseconds since the engine began; never goes back."""

    def now_ms(self) -> float:
        """Return the time in milliseconds."""
        ...


class WallClock:
    """Real time, from the moment that the clock was made."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def now_ms(self) -> float:
        """Return the milliseconds since the clock was made."""
        return (time.perf_counter() - self._start) * 1000.0


class VirtualClock:
    """Time that stands still until it is advanced: the same on every machine."""

    def __init__(self) -> None:
        self._ms = 0.0

    def now_ms(self) -> float:
        """Return the milliseconds that were advanced so far."""
        return self._ms

    def advance(self, ms: float) -> None:
        """Let ``ms`` milliseconds pass. Raises ValueError if negative."""
        if ms < 0:
            raise ValueError(f"cannot advance by {ms} ms; time does not go back")
        self._ms += ms
