"""What the cache manager costs: figures, their targets, and a table.

Knows microseconds. Must not know how they are measured.
"""

from __future__ import annotations

import enum
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


class Operation(enum.Enum):
    """What is timed. The value is what the table calls it."""

    HASH = "hash a block (SHA-256)"
    HASH_XXH3 = "hash a block (XXH3, 128 bits)"
    COLD = "allocate and publish, cold"
    LOOK_UP = "look up, warm"
    HITS_IN_USE = "take the hits, in use"
    HITS_FREE = "take the hits, in the free queue"
    FREE_SHARED = "free, others still hold them"
    FREE_LAST = "free, nobody else holds them"


TARGETS_US: dict[Operation, float] = {
    Operation.HASH: 1.0,
    Operation.COLD: 600.0,
    Operation.LOOK_UP: 250.0,
    Operation.HITS_IN_USE: 75.0,
    Operation.HITS_FREE: 75.0,
    Operation.FREE_SHARED: 66.0,
    Operation.FREE_LAST: 66.0,
}
"""What the manager should need at most for 1,024 blocks of 16 tokens, in µs (a hash: for one block)."""


OTHER_ENGINE_US: dict[Operation, float] = {
    Operation.HASH: 1.5,
    Operation.COLD: 850.0,
    Operation.LOOK_UP: 500.0,
    Operation.HITS_IN_USE: 75.0,
    Operation.HITS_FREE: 75.0,
    Operation.FREE_SHARED: 66.0,
    Operation.FREE_LAST: 66.0,
}
"""What a well-known engine's own manager needed for the same on a machine like those that the targets are for. It gave
one figure for hits and one for freeing."""


_PER_BLOCK = frozenset({Operation.HASH, Operation.HASH_XXH3})


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, least and most of several measurements, in µs."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values_us: Sequence[float]) -> Spread:
        """Sum up. Raises statistics.StatisticsError for no values."""
        return cls(statistics.median(values_us), min(values_us), max(values_us))

    def as_dict(self) -> dict[str, float]:
        """Return plain JSON values."""
        return {"median_us": _rounded(self.median), "min_us": _rounded(self.least), "max_us": _rounded(self.most)}


@dataclass(frozen=True, slots=True)
class OperationCost:
    """One line of the table. Times are µs for the whole prompt, or for one block where the name says so.

    ``manager`` has events kept by a log, ``unlogged`` has them made and dropped, ``events`` is what making and keeping
    them takes by itself (None: there are none). ``obvious`` is the slow manager (None: it has no such thing).
    """

    operation: Operation
    manager: Spread
    unlogged: Spread
    events: Spread | None
    obvious: Spread | None

    @property
    def target_us(self) -> float | None:
        """What it should take at most; None: nothing was promised."""
        return TARGETS_US.get(self.operation)

    @property
    def other_engine_us(self) -> float | None:
        """The well-known engine's figure, None if it has none."""
        return OTHER_ENGINE_US.get(self.operation)

    @property
    def ratio(self) -> float | None:
        """How many times as long the obvious manager takes."""
        return None if self.obvious is None else self.obvious.median / self.manager.median

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "operation": self.operation.name.lower(),
            "manager": self.manager.as_dict(),
            "unlogged": self.unlogged.as_dict(),
            "events": None if self.events is None else self.events.as_dict(),
            "obvious": None if self.obvious is None else self.obvious.as_dict(),
            "ratio": None if self.ratio is None else _rounded(self.ratio),
            "target_us": self.target_us,
            "other_engine_us": self.other_engine_us,
        }


@dataclass(frozen=True, slots=True)
class GrowthCost:
    """What one request cost, from look-up to free, at the beginning and at the end of many. Times are µs.

    The pool is full before the first of them, so that each evicts what it takes. ``recovered_blocks`` were hits,
    ``evicted_blocks`` were forgotten, both in all of the requests.
    """

    num_requests: int
    num_blocks: int
    blocks_per_request: int
    recovered_blocks: int
    evicted_blocks: int
    first_tenth: Spread
    last_tenth: Spread

    @property
    def ratio(self) -> float:
        """The last tenth's median over the first one's."""
        return self.last_tenth.median / self.first_tenth.median

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "num_requests": self.num_requests,
            "num_blocks": self.num_blocks,
            "blocks_per_request": self.blocks_per_request,
            "recovered_blocks": self.recovered_blocks,
            "evicted_blocks": self.evicted_blocks,
            "first_tenth": self.first_tenth.as_dict(),
            "last_tenth": self.last_tenth.as_dict(),
            "ratio": _rounded(self.ratio),
        }

    def describe(self) -> str:
        """Return the figures as a sentence."""
        return (
            f"{self.num_requests:,} requests of {self.blocks_per_request} blocks, each sharing half of them with an "
            f"earlier one, in a full pool of {self.num_blocks:,} blocks ({self.recovered_blocks:,} recovered, "
            f"{self.evicted_blocks:,} evicted): {self.first_tenth.median:.1f} µs a request in the first tenth, "
            f"{self.last_tenth.median:.1f} µs in the last, {self.ratio:.2f} times as much."
        )


@dataclass(slots=True)
class ManagerBench:
    """All that was measured. ``stopped_by`` is the Ctrl-C that ended it early: what was done by then is here."""

    num_blocks: int
    block_size: int
    num_runs: int
    costs: list[OperationCost] = field(default_factory=list)
    growth: GrowthCost | None = None
    stopped_by: KeyboardInterrupt | None = None

    @property
    def num_tokens(self) -> int:
        """Length of the prompt: full blocks and one token, so that all of them can be hits."""
        return self.num_blocks * self.block_size + 1

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "num_tokens": self.num_tokens,
            "num_blocks": self.num_blocks,
            "block_size": self.block_size,
            "num_runs": self.num_runs,
            "complete": self.stopped_by is None,
            "costs": [cost.as_dict() for cost in self.costs],
            "growth": None if self.growth is None else self.growth.as_dict(),
        }

    def heading(self) -> str:
        """Return one line that says what was measured."""
        return (
            f"A prompt of {self.num_tokens:,} tokens ({self.num_blocks:,} blocks of {self.block_size}), "
            f"medians of {self.num_runs} runs in µs"
        )

    columns = ("", "median", "(min – max)", "target", "of it events", "obvious way", "ratio", "other engine")

    def rows(self) -> list[tuple[str, ...]]:
        """Return the table's cells."""
        return [
            (
                cost.operation.value,
                _us(cost.manager.median),
                f"({_us(cost.manager.least)} – {_us(cost.manager.most)})",
                _us(cost.target_us),
                _us(None if cost.events is None else cost.events.median),
                _us(None if cost.obvious is None else cost.obvious.median),
                "–" if cost.ratio is None else f"{cost.ratio:,.0f} x",
                _us(cost.other_engine_us),
            )
            for cost in self.costs
        ]

    def explanation(self) -> str:
        """Return what the columns mean, in words."""
        text = (
            "The obvious way is a dictionary of token tuples and a list as the queue, in the same runs. The other "
            "engine's figures are published ones."
        )
        pairs = [(cost, cost.events) for cost in self.costs if cost.events is not None]
        if pairs:
            kept = sum(cost.manager.median for cost, _ in pairs)
            dropped = sum(cost.unlogged.median for cost, _ in pairs)
            events = sum(spread.median for _, spread in pairs)
            text += (
                f" Of the operations with events, {kept:,.0f} µs in all, events are about {events:,.0f} µs "
                f"({events / kept:.0%}); with a log that drops them it is {dropped:,.0f} µs."
            )
        return text

    def __repr__(self) -> str:
        parts = []
        if self.costs:
            table = [self.columns, *self.rows()]
            widths = [max(len(row[i]) for row in table) for i in range(len(self.columns))]
            lines = (
                "  ".join(
                    cell.rjust(width) if i else cell.ljust(width)
                    for i, (cell, width) in enumerate(zip(row, widths, strict=True))
                ).rstrip()
                for row in table
            )
            parts += [self.heading(), *lines, self.explanation()]
        if self.growth is not None:
            parts.append(self.growth.describe())
        if self.stopped_by is not None:
            parts.append("Stopped early: this is what was done by then.")
        return "\n".join(parts)


def _rounded(value: float) -> float:
    return round(value, 3)


def _us(value: float | None) -> str:
    return "–" if value is None else f"{value:,.2f}" if value < 10 else f"{value:,.0f}"
