"""A runner, virtual or real, that goes wrong in a step that was chosen before.

Knows scheduled steps. Must not know why a step was chosen.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Mapping
from typing import Any

from minivllm.errors import RowError
from minivllm.step import Runner, ScheduledStep


class Trouble(enum.Enum):
    """What goes wrong in a step."""

    RAISES_BEFORE = "raises before it computes"
    RAISES_AFTER = "raises when it has computed"
    SLEEPS = "sleeps a little"
    SHORT = "returns a result too few"
    ODD = "returns something that is no token"
    NAN = "one row comes out as NaN"
    ALL_NAN = "all rows come out as NaN"
    WITHDRAWN = "a request is aborted between scheduling and computing"

    @property
    def is_deadly(self) -> bool:
        """Whether the engine cannot go on."""
        return self in (Trouble.RAISES_BEFORE, Trouble.RAISES_AFTER, Trouble.SHORT, Trouble.ODD)


class DeviceFault(RuntimeError):
    """What a device would raise."""


class FaultyRunner:
    """Has a real runner do the work, and spoils some steps. ``troubles`` goes from a step's number to what happens.

    ``met`` are the troubles that took effect: a step may have no row to spoil. ``withdraw`` aborts a request by id;
    it is called on the engine's thread, in mid-step.
    """

    def __init__(self, inner: Runner, troubles: Mapping[int, Trouble], withdraw: Callable[[str], Any]) -> None:
        self._inner = inner
        self._troubles = troubles
        self._withdraw = withdraw
        self.met: list[Trouble] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def execute(self, step: ScheduledStep) -> dict[str, Any]:
        """Do the step, as well as it goes."""
        trouble = self._troubles.get(step.number)
        if trouble is Trouble.RAISES_BEFORE:
            self.met.append(trouble)
            raise DeviceFault("before the step")
        if trouble is Trouble.SLEEPS:
            self.met.append(trouble)
            time.sleep(0.003)
        if trouble is Trouble.WITHDRAWN:
            self.met.append(trouble)
            self._withdraw(step.rows[step.number % len(step.rows)].request_id)
        drawn: dict[str, Any] = dict(self._inner.execute(step))
        if trouble is Trouble.RAISES_AFTER:
            self.met.append(trouble)
            raise DeviceFault("after the step")
        if trouble is Trouble.SHORT and drawn:
            self.met.append(trouble)
            drawn.popitem()
        if trouble is Trouble.ODD and drawn:
            self.met.append(trouble)
            drawn[next(iter(drawn))] = "no token"
        if trouble in (Trouble.NAN, Trouble.ALL_NAN):
            self.met.append(trouble)
            rows = step.rows if trouble is Trouble.ALL_NAN else [step.rows[step.number % len(step.rows)]]
            for row in rows:
                for request in row.sampled or (row.request,):
                    drawn[request.request_id] = RowError("the logits are not finite")
        return drawn
