"""The cold-cache race: requests fired together at a cache that holds nothing.

    from minivllm.bench.race import run_race
    print(run_race(Race(num_requests=4), EngineConfig(coordination="single-flight"), model="virtual"))

`run_race` runs a `Race` on any model and returns a `RaceResult`: the figures, the log and what they mean. On
the virtual model an `EngineCore` is stepped on the caller's thread, so that every run gives the same bytes; on
a real one an `Engine` serves it. Knows engines, workloads and metrics; must not know terminals or files.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minivllm.bench.race_words import explain, race_heading
from minivllm.bench.workloads import Race, race_submissions
from minivllm.config import EngineConfig
from minivllm.engine.core import EngineCore
from minivllm.engine.engine import Engine
from minivllm.errors import ConfigError, EngineClosedError, EngineDeadError
from minivllm.log import events as ev
from minivllm.log.metrics import Metrics, RequestMetrics
from minivllm.log.timeline import draw_timeline
from minivllm.runners.virtual import VirtualRunner

if TYPE_CHECKING:
    from minivllm.models.progress import Progress

OnChange = Callable[[Sequence[ev.Event]], None]
"""Called on the caller's thread with the events that are new, after each step or several."""

_LOOK_SECONDS = 0.05
_LIFE_SIGN_SECONDS = 1.0
"""How long to wait for news before asking whether the engine is still there."""


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """The pool when the race was over: blocks that can be used, are free, and are published.

    ``duplicates`` are full blocks that were computed though another block held the same.
    """

    capacity: int
    free: int
    published: int
    duplicates: int


@dataclass(frozen=True)
class RaceResult:
    """What came of a race. Prints as a table with what it means; `as_dict` is its JSON.

    ``log`` begins with how the engine was set up and holds no event of earlier races, so that it can be drawn
    and read. It replays to the engine's own state only if the race was the engine's first.
    """

    race: Race
    config: EngineConfig
    model: str
    metrics: Metrics
    blocks: BlockCounts
    log: tuple[ev.Event, ...]

    @property
    def requests(self) -> list[RequestMetrics]:
        """The requests' figures in the order in which they were submitted."""
        return list(self.metrics.requests.values())

    def as_dict(self) -> dict[str, Any]:
        """Return the race as plain JSON values: ``config``, ``requests``, ``blocks`` and ``events``.

        Times are milliseconds on the engine's clock; a time that has not come is None.
        """
        return {
            "config": {"model": self.model, **self.race.as_dict(), **self.config.as_dict()},
            "requests": [
                {
                    "id": request.request_id,
                    "role": request.role,
                    "prompt_tokens": request.prompt_tokens,
                    "recovered_tokens": request.recovered_tokens,
                    "adopted_tokens": request.adopted_tokens,
                    "output_tokens": request.output_tokens,
                    "output_token_ids": list(request.output_token_ids),
                    "ttft_ms": _rounded(request.ttft_ms),
                    "completion_ms": _rounded(request.completion_ms),
                }
                for request in self.requests
            ],
            "blocks": {
                "capacity": self.blocks.capacity,
                "free": self.blocks.free,
                "published": self.blocks.published,
                "duplicates": self.blocks.duplicates,
            },
            "events": [event.as_dict() for event in self.log],
        }

    def timeline(self, width: int = 80, *, ascii_only: bool = False) -> str:
        """Return the race drawn in text, ``width`` columns wide."""
        return draw_timeline(self.log, width, ascii_only=ascii_only)

    def heading(self) -> str:
        """Return one line that says what was raced."""
        return race_heading(self.race, self.config, self.model)

    def explanation(self) -> str:
        """Return what the figures mean, in words."""
        return explain(self)

    def __repr__(self) -> str:
        return f"{self.heading()}\n{self.metrics!r}\n{self.explanation()}"


def run_race(
    race: Race | None = None,
    config: EngineConfig | None = None,
    model: str | None = None,
    *,
    engine: Engine | None = None,
    on_change: OnChange | None = None,
    progress: Progress | None = None,
) -> RaceResult:
    """Run a race to its end and return what came of it.

    ``model`` is "virtual", "smollm2" (the default), or any other that `Engine` takes; an engine is made for the
    race and closed after it. With ``engine`` the race runs on that one instead: its cache is reset first, so
    that it is cold, and it stays open.

    ``on_change`` gets the new events, at most 20 times a second on a real clock. ``progress`` hears of a
    model's download. Raises InvalidRequestError if a request can never run, ConfigError if ``engine`` is busy,
    EngineDeadError if the runner fails.
    """
    race = race or Race()
    report = on_change or (lambda events: None)
    if engine is not None:
        if config is not None or model is not None:
            raise ConfigError("pass either engine= or a config and a model, not both: an engine has its own")
        return _on_engine(race, engine, report)
    config = config or EngineConfig()
    model = model or "smollm2"
    if model == "virtual":
        return _on_virtual_clock(race, config, report)
    with Engine(model, config, progress=progress) as own:
        return _on_engine(race, own, report)


def _on_virtual_clock(race: Race, config: EngineConfig, report: OnChange) -> RaceResult:
    """Step a core here, so that nothing depends on threads."""
    runner = VirtualRunner()
    core = EngineCore(config, runner)
    core.submit_batch(race_submissions(race, runner.tokenizer))
    seen = 0
    while core.step():
        report(core.log.since(seen))
        seen = len(core.log)
    result = _result(race, core, core.log.since(0))
    core.close()
    return result


def _on_engine(race: Race, engine: Engine, report: OnChange) -> RaceResult:
    """Fire the race at an engine on its own thread, and follow its log."""
    changed = threading.Event()
    remove_listener = engine.add_listener(changed.set)
    names: list[str] = []
    try:
        # Looking, resetting and entering are one command: no other caller can come between.
        start, names = engine.call_alone(functools.partial(_enter, race))
        seen, running = start, set(names)
        while running:
            changed.wait(_LIFE_SIGN_SECONDS)
            changed.clear()
            alive = engine.is_alive
            fresh = engine.log.since(seen)
            seen += len(fresh)
            running -= {event.request_id for event in fresh if isinstance(event, _ENDS)}
            report(fresh)
            if not alive:
                break
            if running:
                threading.Event().wait(_LOOK_SECONDS)  # many steps at a time are enough for an eye
        if engine.error is not None:
            raise EngineDeadError(
                f"the engine stopped in the race ({type(engine.error).__name__}: {engine.error}); "
                "make a new engine to continue"
            ) from engine.error
        if not engine.is_alive:
            raise EngineClosedError("the engine was closed in the race; make a new one to continue")
        return engine.call(lambda core: _result(race, core, _part_of_log(core, start), names))
    except BaseException:
        for name in names:
            _abort(engine, name)
        raise
    finally:
        remove_listener()


_ENDS = (ev.RequestFinished, ev.RequestAborted, ev.RequestFailed)


def _enter(race: Race, core: EngineCore, reserved: Container[str]) -> tuple[int, list[str]]:
    """On the engine's thread: let the race in.

    Returns where its part of the log begins, and the requests' ids.
    """
    busy = sum(not request.state.is_ended for request in core.requests.values())
    if busy:
        raise ConfigError(f"the engine is busy: {busy} requests are in it; wait for them or abort them, then race")
    prefix = _free_prefix(race, core, reserved)
    submissions = race_submissions(race, core.runner.tokenizer, prefix=prefix)
    batch = core.prepare(submissions, reserved)  # refuse before the cache is forgotten
    if len(core.manager.index):
        core.reset_cache()
    start = len(core.log) if len(core.log) > 1 else 0  # an engine that has done nothing yet gives all of it
    core.enter(batch)
    return start, [request.request_id for prepared in batch for request in prepared.requests]


def _part_of_log(core: EngineCore, start: int) -> list[ev.Event]:
    """Return the log from ``start`` on, behind what says how the engine is set up: so it can be replayed."""
    before = core.log[:start]
    started = [event for event in before if isinstance(event, ev.EngineStarted)]
    changed = [event for event in before if isinstance(event, ev.PoliciesChanged)]
    return [*started, *changed[-1:], *core.log.since(start)]


def _free_prefix(race: Race, core: EngineCore, reserved: Container[str]) -> str:
    """Return "r", or "race2-r" and so on where an earlier race has used those ids, or ids of their samples."""
    numbers = [str(number) for number in range(race.num_requests)]
    ids = numbers + [f"{number}.{sample}" for number in numbers for sample in range(1, race.samples)]
    count, prefix = 1, "r"
    while any(prefix + each in core.requests or prefix + each in reserved for each in ids):
        count += 1
        prefix = f"race{count}-r"
    return prefix


def _abort(engine: Engine, name: str) -> None:
    with contextlib.suppress(EngineDeadError, EngineClosedError):  # then it has ended with the engine
        engine.abort(name)


def _result(race: Race, core: EngineCore, events: list[ev.Event], names: Iterable[str] = ()) -> RaceResult:
    metrics = Metrics.of(events)
    order = list(names) or sorted(metrics.requests, key=lambda name: core.requests[name].arrival)
    metrics.requests = {name: metrics.requests[name] for name in order}
    blocks = BlockCounts(
        core.config.num_blocks,
        core.manager.pool.num_free,
        len(core.manager.index),
        metrics.duplicated_blocks,
    )
    return RaceResult(race, core.config, core.runner.name, metrics, blocks, tuple(events))


def _rounded(ms: float | None) -> float | None:
    return None if ms is None else round(ms, 6)


# --- In words -----------------------------------------------------------------------------------------------
