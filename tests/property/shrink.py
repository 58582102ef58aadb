"""Make a life that fails as small as it can be made: fewer actions, then simpler ones, then a plainer setup.

Plain delta debugging: take something away, live the rest, keep it if it still fails in the same way. Knows actions
and whether a life fails; must not know what is wrong with the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tests.property.actions import Abort, Action, Ask, Crash, Fail, Reset, Setup, Step, Submit
from tests.property.life import Life
from tests.property.models import Mismatch

PLAIN: Setup = {
    "block_hash": "sha256",
    "enable_prefix_caching": True,
    "adoption": False,
    "watermark": 0.0,
    "admission": "by-chunk",
    "scheduling": "fcfs",
    "ttft_target_ms": None,
    "long_prefill_token_threshold": 0,
    "coordination": "independent",
    "release": "after-prefill",
    "eviction": "lru",
    "publication": "incremental",
    "max_num_batched_tokens": 40,
    "max_num_seqs": 4,
    "block_size": 4,
    "num_blocks": 8,
}
"""What each setting is set to, where the failure does not need another value."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A life that fails with its last action. ``error`` is what was raised; ``kind`` says in which way it failed."""

    setup: Setup
    actions: tuple[Action, ...]
    error: BaseException

    @property
    def kind(self) -> str:
        """Two failures of one kind are taken for the same fault."""
        return kind_of(self.error)


def kind_of(error: BaseException) -> str:
    """Return the kind of a failure: what did not agree, or the class of the exception."""
    return error.kind if isinstance(error, Mismatch) else type(error).__name__


def live(setup: Setup, actions: Sequence[Action]) -> Failure | None:
    """Live a life. Returns how it failed, with the actions that took effect up to there; None if it did not."""
    life = Life(setup)
    done: list[Action] = []
    for action in actions:
        try:
            effect = life.apply(action)
        except Exception as error:
            return Failure(setup, (*done, action), error)
        if effect is not None:
            done.append(effect)
    return None


def shrink(failure: Failure, *, max_lives: int = 4_000) -> Failure:
    """Return the smallest failure of the same kind that ``max_lives`` lives find."""
    left = max_lives

    def fails(setup: Setup, actions: Sequence[Action]) -> Failure | None:
        nonlocal left
        if left <= 0:
            return None
        left -= 1
        try:
            found = live(setup, actions)
        except Exception:  # a setup that no engine can have
            return None
        return found if found is not None and found.kind == failure.kind else None

    best = fails(failure.setup, single_steps(failure.actions)) or failure
    while left > 0:
        smaller = _fewer(best, fails)
        smaller = _simpler(smaller, fails)
        if (smaller.setup, smaller.actions) == (best.setup, best.actions):
            break
        best = smaller
    return best


Fails = Callable[[Setup, Sequence[Action]], Failure | None]


def _fewer(best: Failure, fails: Fails) -> Failure:
    """Leave runs of actions out: halves first, then ever shorter ones, single ones at last."""
    size = max(1, len(best.actions) // 2)
    while True:
        start, shorter = 0, False
        while start < len(best.actions):
            rest = (*best.actions[:start], *best.actions[start + size :])
            found = fails(best.setup, rest)
            if found is not None and len(found.actions) < len(best.actions):
                best, shorter = found, True
            else:
                start += size
        if size == 1 and not shorter:
            return best
        size = max(1, size // 2)


def _simpler(best: Failure, fails: Fails) -> Failure:
    """Make each action and each setting simpler, one thing at a time."""
    place = 0
    while place < len(best.actions):
        for candidate in simpler_actions(best.actions[place]):
            actions = [*best.actions]
            actions[place] = candidate
            found = fails(best.setup, actions)
            if found is not None and len(found.actions) <= len(best.actions):
                best = found
                break
        else:
            place += 1
    for name, value in PLAIN.items():
        if best.setup.get(name, value) != value:
            found = fails({**best.setup, name: value}, best.actions)
            if found is not None and len(found.actions) <= len(best.actions):
                best = found
    return best


def single_steps(actions: Sequence[Action]) -> list[Action]:
    """Return the same life with one step to an action."""
    out: list[Action] = []
    for action in actions:
        if isinstance(action, Step):
            out.append(replace(action, count=1))
            out.extend(Step() for _ in range(action.count - 1))
        else:
            out.append(action)
    return out


def simpler_actions(action: Action) -> Iterator[Action]:
    """Yield what an action may be replaced by, the boldest first."""
    match action:
        case Submit(asks):
            if len(asks) > 1:
                for place in range(len(asks)):
                    yield Submit((*asks[:place], *asks[place + 1 :]))
            for place, ask in enumerate(asks):
                for simpler in simpler_asks(ask):
                    yield Submit((*asks[:place], simpler, *asks[place + 1 :]))
        case Step(count, withdraw, spoil):
            if withdraw:
                yield Step(count, withdraw[1:], spoil)
            if spoil:
                yield Step(count, withdraw, spoil[1:])
        case Fail(name):
            yield Abort(name)
        case Reset(abort_running=True):
            yield Reset()
        case Crash(kind) if kind is not Crash().kind:
            yield Crash()
        case _:
            return


def simpler_asks(ask: Ask) -> Iterator[Ask]:
    """Yield simpler submissions: without what is special, with a shorter prompt, with fewer tokens of output."""
    plain: dict[str, Any] = {
        "after": None,
        "n": 1,
        "multimodal": (),
        "adapter": None,
        "cache_salt": None,
        "temperature": 0.0,
        "priority": 0,
        "seed": 7,
    }
    for name, value in plain.items():
        if getattr(ask, name) != value:
            yield replace(ask, **{name: value})
    if ask.n > 2:
        yield replace(ask, n=2)
    for max_tokens in sorted({1, ask.max_tokens // 2, ask.max_tokens - 1}):
        if 1 <= max_tokens < ask.max_tokens:
            yield replace(ask, max_tokens=max_tokens)
    for length in sorted({1, len(ask.prompt) // 2, len(ask.prompt) - 1}):
        if 1 <= length < len(ask.prompt):
            yield replace(ask, prompt=ask.prompt[:length])
