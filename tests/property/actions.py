"""The language of an engine's life: what may be done to it, as plain data, and how such actions are drawn.

An action names requests by their ids and holds numbers and strings only, so that a life can be written down, done
again, shrunk and printed. Everything is drawn through one function that picks from a list: hypothesis has one, and
so has `random.Random`. Knows the engine's settings and its door; must not know what any action should lead to.
"""

from __future__ import annotations

import enum
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from minivllm.cache.eviction.names import EVICTION_POLICIES
from minivllm.cache.publication import PUBLICATION_POLICIES
from minivllm.coordination.names import COORDINATORS
from minivllm.coordination.release import RELEASE_POLICIES
from minivllm.engine.input_processor import Submission
from minivllm.request import MultimodalItem, Sampling
from minivllm.scheduling.policies import ADMISSIONS, SCHEDULING_POLICIES

T = TypeVar("T")

COORDINATIONS = tuple(COORDINATORS)
SCHEDULINGS = tuple(SCHEDULING_POLICIES)
LONGEST_OUTPUT = 9


class Choose(Protocol):
    """Picks one of some options: the source of all chance."""

    def __call__(self, options: Sequence[T]) -> T: ...


# --- Actions ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ask:
    """One submission as plain data. ``multimodal`` items are (content hash, offset, number of tokens)."""

    request_id: str
    prompt: tuple[int, ...]
    max_tokens: int = 1
    temperature: float = 0.0
    seed: int = 7
    n: int = 1
    cache_salt: str | None = None
    adapter: str | None = None
    multimodal: tuple[tuple[str, int, int], ...] = ()
    priority: int = 0
    after: tuple[str, int] | None = None

    def submission(self) -> Submission:
        """Return what is handed to the engine."""
        return Submission(
            self.prompt,
            Sampling(max_tokens=self.max_tokens, temperature=self.temperature, seed=self.seed, n=self.n),
            self.request_id,
            self.cache_salt,
            self.after,
            adapter=self.adapter,
            multimodal=tuple(MultimodalItem(*item) for item in self.multimodal),
            priority=self.priority,
        )

    def names(self) -> list[str]:
        """Return the ids of all samples, the first one's first."""
        return [self.request_id, *(f"{self.request_id}.{number}" for number in range(1, self.n))]


@dataclass(frozen=True, slots=True)
class Submit:
    """Hand a batch in. If the engine must refuse one of them, none may leave a trace.

    ``refused`` is noted when it was done, and changes nothing.
    """

    asks: tuple[Ask, ...]
    refused: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """Run some steps. In the first, ``withdraw`` are aborted between scheduling and computing, and the rows of
    ``spoil`` come out as NaN."""

    count: int = 1
    withdraw: tuple[str, ...] = ()
    spoil: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Abort:
    """Take a request back, between two steps."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Fail:
    """End one request on an error, between two steps."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Reset:
    """Forget what is published."""

    abort_running: bool = False


@dataclass(frozen=True, slots=True)
class SetPolicies:
    """Go on under other policies: refused while anybody is in the engine."""

    publication: str
    coordination: str
    release: str


class CrashKind(enum.Enum):
    """What the runner does wrong."""

    RAISES = "raises"
    SHORT = "short"  # leaves a token out
    LONG = "long"  # draws for somebody who is not in the step


@dataclass(frozen=True, slots=True)
class Crash:
    """The runner breaks in mid-step: the engine dies, and a new one takes its place."""

    kind: CrashKind = CrashKind.RAISES


@dataclass(frozen=True, slots=True)
class Finish:
    """Run until nobody is left."""


Action = Submit | Step | Abort | Fail | Reset | SetPolicies | Crash | Finish
Setup = dict[str, Any]
"""Fields of `EngineConfig`, as numbers and names."""


# --- Setups -----------------------------------------------------------------------------------------------

POLICIES = tuple(
    {"publication": publication, "coordination": coordination, "release": release, "eviction": eviction}
    for publication in sorted(PUBLICATION_POLICIES)
    for coordination, release in (
        *((name, "after-prefill") for name in COORDINATIONS),
        ("single-flight", "on-completion"),
    )
    for eviction in sorted(EVICTION_POLICIES)
)
"""Every combination of the policies that decide about blocks. Release only matters to single flight."""

SWITCHES = tuple(
    {
        "scheduling": scheduling,
        "admission": admission,
        "watermark": watermark,
        "adoption": adoption,
        "enable_prefix_caching": caching,
    }
    for scheduling, admission, watermark, adoption in itertools.product(
        SCHEDULINGS, ADMISSIONS, (0.0, 0.25), (False, True)
    )
    for caching in (True, True, True, False)
)
"""Every combination of the others; without a cache there is less to see, so that is rarer."""


def draw_setup(choose: Choose, policies: Setup, switches: Setup) -> Setup:
    """Return a setup with these policies and switches: blocks, pool and steps are small, so that room is short."""
    setup: Setup = {
        "block_size": choose([4, 2, 1, 3]),
        "num_blocks": choose([12, 8, 40] if switches["adoption"] else [6, 5, 8, 12, 40]),
        "max_num_batched_tokens": choose([7, 10, 5, 3] if switches["adoption"] else [16, 6, 40, 3, 1]),
        "max_num_seqs": choose([4, 2, 8, 1]),
        "long_prefill_token_threshold": choose([0, 2, 5] if switches["adoption"] else [0, 0, 2, 5]),
        **policies,
        **switches,
    }
    setup["block_hash"] = choose(["sha256", "sha256", "xxh3-128", "weak-4"])
    setup["check_token_ids"] = setup["block_hash"] == "weak-4"  # a collision is seen, and not served
    if setup["coordination"] == "wait-or-recompute":
        setup["ttft_target_ms"] = choose([None, None, 30.0, 200.0])
    return setup


# --- How actions are drawn --------------------------------------------------------------------------------


class Sight(Protocol):
    """What must be known of a life to draw an action that makes sense in it."""

    setup: Setup

    def known(self) -> list[str]:
        """Return every id of the present engine."""
        ...

    def live(self) -> list[str]:
        """Return the ids of those that have not ended."""
        ...

    def new_id(self) -> str:
        """Return an id that nobody has."""
        ...


def draw_prompt(choose: Choose, setup: Setup, most: int) -> tuple[int, ...]:
    """Return 1 to ``most`` tokens: the beginning of one of three families, and perhaps some tokens of its own."""
    size = setup["block_size"]
    shared = choose(
        [2 * size, 2 * size + 1, size, 3 * size, 0, 1, size - 1, size + 1, 4 * size - 1, 6 * size, 9 * size]
    )
    own = choose([0, 1, 2, 1, size, 2 * size + 1])
    first = 100 * choose([1, 1, 1, 2, 3])
    prompt = [*range(first, first + min(shared, 99)), *(900 + choose([0, 1, 2]) for _ in range(own))]
    return tuple(prompt[:most]) or (first,)


def draw_ask(choose: Choose, sight: Sight) -> Ask:
    """Return one submission that fits the pool."""
    setup = sight.setup
    room = setup["num_blocks"] * setup["block_size"]
    max_tokens = min(choose([1, 2, 3, 5, LONGEST_OUTPUT]), room)
    prompt = draw_prompt(choose, setup, room - max_tokens + 1)
    ask = Ask(
        sight.new_id(),
        prompt,
        max_tokens,
        choose([0.0, 0.0, 0.7]),
        choose([7, 8, 9]),
        choose([1, 1, 1, 1, 1, 2, 3]),
        priority=choose([0, 0, 1, 2, -1]),
    )
    if choose([True, True, True, False]):  # most are plain, so that there is something to share
        return ask
    return replace(
        ask,
        cache_salt=choose([None, "a", "b", ""]),
        adapter=choose([None, "a", "foo"]),
        multimodal=draw_items(choose, len(prompt)),
    )


def draw_items(choose: Choose, num_tokens: int) -> tuple[tuple[str, int, int], ...]:
    """Return some images in a prompt. The same content always takes as many tokens."""
    items: list[tuple[str, int, int]] = []
    first = 0
    for _ in range(choose([0, 1, 2])):
        length = choose([2, 3, 5])
        offset = first + choose([0, 1, 2, 4])
        if offset + length <= num_tokens:
            items.append((f"image-of-{length}", offset, length))
            first = offset + length
    return tuple(items)


def draw_submit(choose: Choose, sight: Sight) -> Submit:
    """Return a batch: its first prompt perhaps several times; the last one may wait for a token of another."""
    first = draw_ask(choose, sight)
    copies = [
        Ask(
            sight.new_id(),
            first.prompt,
            first.max_tokens,
            first.temperature,
            first.seed + number,
            cache_salt=first.cache_salt,
            adapter=first.adapter,
            multimodal=first.multimodal,
            priority=first.priority,
        )
        for number in range(1, choose([1, 1, 2, 3]))
    ]
    asks = [first, *copies, *(draw_ask(choose, sight) for _ in range(choose([0, 0, 1, 2])))]
    if choose([False, False, False, True]):
        others = [*sight.known()[-5:], *(name for ask in asks[:-1] for name in ask.names())]
        if others:
            asks[-1] = replace(asks[-1], after=(choose(others), choose([1, 2, 4])))
    return Submit(tuple(asks))


def draw_bad_batch(choose: Choose, sight: Sight) -> Submit:
    """Return a batch of which one can never run."""
    asks = [draw_ask(choose, sight), draw_ask(choose, sight)]
    good = asks[0]
    bad = [
        replace(good, request_id=sight.new_id(), prompt=()),
        replace(good, request_id=asks[1].request_id),
        replace(good, request_id=sight.new_id(), after=("nobody", 1)),
        replace(good, request_id=sight.new_id(), max_tokens=100_000),
        replace(good, request_id=sight.new_id(), multimodal=(("image", len(good.prompt), 1),)),
    ]
    known = sight.known()
    if known:
        bad.append(replace(good, request_id=choose(known)))
    asks.insert(choose([2, 1, 0]), choose(bad))
    return Submit(tuple(asks))


def draw_step(choose: Choose, sight: Sight) -> Step:
    """Return some steps; in the first, somebody is withdrawn, or a row is spoiled, now and then."""
    live = sight.live()
    withdraw: tuple[str, ...] = ()
    spoil: tuple[str, ...] = ()
    if live:
        what = choose([*["plain"] * 9, "withdraw", "spoil", "both"])
        if what in ("withdraw", "both"):
            withdraw = tuple({choose(live): None for _ in range(choose([1, 1, 2]))})
        if what in ("spoil", "both"):
            spoil = tuple({choose(live): None for _ in range(choose([1, 1, 3]))})
    return Step(choose([1, 1, 1, 2, 4]), withdraw, spoil)


ENDS: list[type[Abort] | type[Fail]] = [Abort, Abort, Fail]


def draw_end(choose: Choose, sight: Sight) -> Action:
    """Return an abort or a failure: of one that lives, or of any that ever came."""
    live, known = sight.live(), sight.known()
    if not known:
        return Step()
    name = choose(choose([live, live, live, known]) or known)
    return choose(ENDS)(name)


def draw_rare(choose: Choose, sight: Sight) -> Action:
    """Return what happens less often."""
    what = choose(["reset", "reset running", "finish", "bad", "bad", "policies", "crash"])
    if what == "reset":
        return Reset()
    if what == "reset running":
        return Reset(abort_running=True)
    if what == "finish":
        return Finish()
    if what == "bad":
        return draw_bad_batch(choose, sight)
    if what == "policies":
        return SetPolicies(
            choose(sorted(PUBLICATION_POLICIES)), choose(COORDINATIONS), choose(sorted(RELEASE_POLICIES))
        )
    return Crash(choose(list(CrashKind)))


DRAWS: dict[Callable[[Choose, Sight], Action], int] = {draw_submit: 5, draw_step: 11, draw_end: 2, draw_rare: 1}
"""What is drawn, and how often."""


def draw_action(choose: Choose, sight: Sight) -> Action:
    """Return one action. With many in the engine, nobody else comes for a while."""
    draws = [draw for draw, weight in DRAWS.items() for _ in range(weight)]
    if len(sight.live()) > 14:
        draws = [draw for draw in draws if draw is not draw_submit]
    return choose(draws)(choose, sight)


def chooser(rng: random.Random) -> Choose:
    """Return a source of chance over ``rng``, faster than ``rng.choice``."""
    draw = rng.random

    def choose(options: Sequence[T]) -> T:
        return options[int(draw() * len(options))]

    return choose
