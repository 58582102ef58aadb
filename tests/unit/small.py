"""Small engines for tests of ideas: block size 4, eight blocks, a virtual clock.

Knows how to build and drive an `EngineCore`, and how to compare its state with its log. Must not know what any
single test is about.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from minivllm.config import EngineConfig
from minivllm.engine.core import EngineCore
from minivllm.engine.output import Output
from minivllm.log import events as ev
from minivllm.log.replay import replay
from minivllm.request import Request
from minivllm.runners.virtual import VirtualRunner
from minivllm.step import ScheduledStep

E = TypeVar("E", bound=ev.Event)

FULL_PROMPT = [10, 11, 12, 13, 14, 15, 16, 17, 18]
"""Two full blocks of four tokens and one token more."""


def small_core(
    *,
    on_step: Callable[[ScheduledStep], None] | None = None,
    listener: Callable[[Output], None] | None = None,
    **settings: Any,
) -> EngineCore:
    """Return an engine of eight blocks of four tokens, unless ``settings`` say otherwise."""
    config = EngineConfig(**{"block_size": 4, "num_blocks": 8, **settings})
    return EngineCore(config, VirtualRunner(on_step=on_step), listener)


def check(core: EngineCore) -> None:
    """Check the invariants, and compare the state with the log."""
    core.check_invariants()
    assert core.state() == replay(core.log)


def step(core: EngineCore, count: int = 1) -> None:
    """Run ``count`` steps, each of which must have work, and check the invariants after each."""
    for _ in range(count):
        assert core.step()
        check(core)


def run(core: EngineCore) -> None:
    """Run to the end, checking the invariants after each step: every request ends and every block is free."""
    while core.step():
        check(core)
    check(core)
    assert all(request.state.is_ended for request in core.requests.values())
    assert core.manager.pool.num_free == core.manager.pool.num_blocks


def events_of(core: EngineCore, kind: type[E]) -> list[E]:
    """Return the log's events of one kind."""
    return [event for event in core.log if isinstance(event, kind)]


def rows_of_steps(core: EngineCore) -> list[list[tuple[str, int]]]:
    """Return, for each step, (request id, number of tokens) of its rows."""
    return [[(row[0], row[2]) for row in event.rows] for event in events_of(core, ev.StepScheduled)]


def recovered(requests: Sequence[Request]) -> list[int]:
    """Return the recovered tokens of each request."""
    return [request.num_recovered_tokens for request in requests]
