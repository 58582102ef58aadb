"""Figures, computed from the log and from nothing else.

Tokens are counted once, when a request is admitted; what a preempted request finds of its own work, and what a
running one adopts in mid-prefill, is counted apart. Times are the engine's clock: TTFT is from arrival to the first
output token, TPOT the mean time between output tokens after that, completion from arrival to the end. Knows events;
must not look into the engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from html import escape
from typing import Any

from minivllm.log import events as ev
from minivllm.log.event_log import EventLog


@dataclass(slots=True)
class RequestMetrics:
    """One request's figures. Times are milliseconds on the engine's clock, None while they have not come.

    ``recovered_tokens`` are prompt tokens taken from the cache at the first admission;
    ``adopted_tokens`` were taken afterwards, in mid-prefill, when others had published them meanwhile.
    ``resumed_recovered_tokens`` is what it found again after preemptions. ``computed_tokens`` counts every
    token whose K/V it computed, those computed again included.

    ``role`` is "independent", "leader", "follower", "held" (waited for a shared prefix; who computed it is a leader)
    or "sample" (runs on the blocks of the first sample, so it neither asks nor computes). Who is handed over to has
    the role of the one before: a follower becomes a leader, a sample the first one, "independent".
    """

    request_id: str
    role: str = "independent"
    prompt_tokens: int = 0
    queried_tokens: int = 0
    recovered_tokens: int = 0
    adopted_tokens: int = 0
    resumed_recovered_tokens: int = 0
    computed_tokens: int = 0
    duplicated_blocks: int = 0
    num_preemptions: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    text: str = ""
    arrived_ms: float | None = None
    first_token_ms: float | None = None
    last_token_ms: float | None = None
    ended_ms: float | None = None
    end: str | None = None

    @property
    def output_tokens(self) -> int:
        """Output tokens so far."""
        return len(self.output_token_ids)

    @property
    def ttft_ms(self) -> float | None:
        """Time to first token, from arrival."""
        return _since(self.arrived_ms, self.first_token_ms)

    @property
    def completion_ms(self) -> float | None:
        """Time from arrival to the end."""
        return _since(self.arrived_ms, self.ended_ms)

    @property
    def tpot_ms(self) -> float | None:
        """Time per output token after the first; None with fewer than two."""
        between = _since(self.first_token_ms, self.last_token_ms)
        return None if between is None or self.output_tokens < 2 else between / (self.output_tokens - 1)


def _since(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


class HitRate:
    """Recovered over queried tokens of the last ``window`` requests: a ratio of sums, not a mean of rates."""

    def __init__(self, window: int = 1000) -> None:
        self.window = window
        self._seen: deque[tuple[int, int, int]] = deque()
        self._requests = self._queried = self._recovered = 0

    def observe(self, num_requests: int, queried: int, recovered: int) -> None:
        """Take the sums of some requests in; the oldest sums leave once more than ``window`` are held."""
        self._seen.append((num_requests, queried, recovered))
        self._add(num_requests, queried, recovered)
        while self._requests > self.window and len(self._seen) > 1:
            old_requests, old_queried, old_recovered = self._seen.popleft()
            self._add(-old_requests, -old_queried, -old_recovered)

    def _add(self, num_requests: int, queried: int, recovered: int) -> None:
        self._requests += num_requests
        self._queried += queried
        self._recovered += recovered

    @property
    def rate(self) -> float | None:
        """The ratio, or None while nothing was queried: no query is not a rate of 0."""
        return self._recovered / self._queried if self._queried else None


class Metrics:
    """All figures of one log. `update` folds events in, each once, so that asking again costs little."""

    def __init__(self, hit_rate_window: int = 1000) -> None:
        self.requests: dict[str, RequestMetrics] = {}
        self.hit_rate = HitRate(hit_rate_window)
        self.num_steps = 0
        self.num_blocks = 0
        self.evicted_blocks = 0
        self._next_seq = 0

    @classmethod
    def of(cls, log: Iterable[ev.Event]) -> Metrics:
        """Return the figures of a whole log."""
        return cls().update(log)

    def update(self, log: Iterable[ev.Event]) -> Metrics:
        """Fold in the events of ``log`` that are new, and return self."""
        events = log.since(self._next_seq) if isinstance(log, EventLog) else log
        for event in events:
            if event.seq >= self._next_seq:
                self._take(event)
                self._next_seq = event.seq + 1
        return self

    def _request(self, request_id: str) -> RequestMetrics:
        return self.requests.setdefault(request_id, RequestMetrics(request_id))

    def _take(self, event: ev.Event) -> None:
        match event:
            case ev.TokenOut(request_id=name, token_id=token_id, text=text):
                request = self._request(name)
                request.output_token_ids.append(token_id)
                request.text += text
                request.last_token_ms = event.ms
                if request.first_token_ms is None:
                    request.first_token_ms = event.ms
            case ev.ChunkComputed(request_id=name, num_tokens=count):
                self._request(name).computed_tokens += count
            case ev.StepScheduled():
                self.num_steps += 1  # not the step's number: the log may be a part of a longer one
            case ev.PrefixLookedUp(request_id=name, num_queried_tokens=queried, num_recovered_tokens=found):
                request = self._request(name)
                if event.resumed:
                    request.resumed_recovered_tokens += found
                else:
                    request.queried_tokens, request.recovered_tokens = queried, found
                    self.hit_rate.observe(1, queried, found)
            case ev.RequestArrived(request_id=name, prompt_token_ids=tokens):
                request = self._request(name)
                request.prompt_tokens, request.arrived_ms = len(tokens), event.ms
            case ev.RequestPreempted(request_id=name):
                self._request(name).num_preemptions += 1
            case ev.RequestFinished(request_id=name, reason=reason):
                self._end(name, reason, event.ms)
            case ev.RequestAborted(request_id=name):
                self._end(name, "abort", event.ms)
            case ev.RequestFailed(request_id=name):
                self._end(name, "error", event.ms)
            case ev.FlightOpened(leader_id=name) | ev.FlightHandedOver(to_id=name):
                self._request(name).role = "leader"
            case ev.FlightJoined(request_id=name):
                self._request(name).role = "follower"
            case ev.SampleHeld(request_id=name):
                self._request(name).role = "sample"
            case ev.SampleLeads(to_id=name):
                self._request(name).role = "independent"
            case ev.PrefixAwaited(request_id=name, leader_id=leader):
                self._request(name).role = "held"
                if self._request(leader).role == "independent":
                    self._request(leader).role = "leader"
            case ev.BlocksAdopted(request_id=name, num_tokens=count):
                self._request(name).adopted_tokens += count
            case ev.BlocksDuplicated(request_id=name, block_ids=block_ids):
                self._request(name).duplicated_blocks += len(block_ids)
            case ev.BlocksEvicted(block_ids=block_ids):
                self.evicted_blocks += len(block_ids)
            case ev.EngineStarted(num_blocks=count):
                self.num_blocks = count

    def _end(self, name: str, end: str, ms: float) -> None:
        request = self._request(name)
        request.end, request.ended_ms = end, ms

    # -- Sums ----------------------------------------------------------------------------------------------

    @property
    def recovered_tokens(self) -> int:
        """Prompt tokens taken from the cache, over all requests."""
        return sum(request.recovered_tokens for request in self.requests.values())

    @property
    def adopted_tokens(self) -> int:
        """Tokens taken from others in mid-prefill, over all requests."""
        return sum(request.adopted_tokens for request in self.requests.values())

    @property
    def queried_tokens(self) -> int:
        """Prompt tokens asked for, over all admitted requests."""
        return sum(request.queried_tokens for request in self.requests.values())

    @property
    def computed_tokens(self) -> int:
        """Tokens whose K/V was computed, over all requests."""
        return sum(request.computed_tokens for request in self.requests.values())

    @property
    def duplicated_blocks(self) -> int:
        """Full blocks that held what another published block held already."""
        return sum(request.duplicated_blocks for request in self.requests.values())

    @property
    def mean_ttft_ms(self) -> float | None:
        """Mean time to first token over the requests that have one."""
        times = [r.ttft_ms for r in self.requests.values() if r.ttft_ms is not None]
        return sum(times) / len(times) if times else None

    @property
    def slowest_completion_ms(self) -> float | None:
        """The longest completion time so far."""
        return max((r.completion_ms for r in self.requests.values() if r.completion_ms is not None), default=None)

    # -- Tables --------------------------------------------------------------------------------------------

    COLUMNS = ("request", "role", "prompt", "recovered", "adopted", "output", "TTFT ms", "completion ms", "end")

    @property
    def columns(self) -> tuple[str, ...]:
        """Heads of the table: ``COLUMNS``, without "adopted" while nothing was."""
        return self.COLUMNS if self.adopted_tokens else tuple(name for name in self.COLUMNS if name != "adopted")

    def rows(self) -> list[tuple[str, ...]]:
        """Return the table's cells as text, one row a request, one cell for each of `columns`."""
        with_adopted = bool(self.adopted_tokens)
        return [
            (
                r.request_id,
                r.role,
                str(r.prompt_tokens),
                str(r.recovered_tokens),
                *([str(r.adopted_tokens)] if with_adopted else []),
                str(r.output_tokens),
                _ms(r.ttft_ms),
                _ms(r.completion_ms),
                r.end or "running",
            )
            for r in self.requests.values()
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return the sums as plain JSON values."""
        return {
            "num_steps": self.num_steps,
            "queried_tokens": self.queried_tokens,
            "recovered_tokens": self.recovered_tokens,
            "adopted_tokens": self.adopted_tokens,
            "computed_tokens": self.computed_tokens,
            "duplicated_blocks": self.duplicated_blocks,
            "evicted_blocks": self.evicted_blocks,
            "hit_rate": self.hit_rate.rate,
            "mean_ttft_ms": self.mean_ttft_ms,
            "slowest_completion_ms": self.slowest_completion_ms,
        }

    def _summary(self) -> str:
        adopted = f"{self.adopted_tokens} adopted, " if self.adopted_tokens else ""
        return (
            f"{self.recovered_tokens} of {self.queried_tokens} prompt tokens recovered, {adopted}"
            f"{self.computed_tokens} computed in {self.num_steps} steps, {self.duplicated_blocks} blocks duplicated"
        )

    def __repr__(self) -> str:
        table = [self.columns, *self.rows()]
        widths = [max(len(row[i]) for row in table) for i in range(len(self.columns))]
        lines = [
            "  ".join(
                cell.ljust(width) if i in (0, 1, len(widths) - 1) else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in table
        ]
        return "\n".join([*lines, self._summary()])

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{escape(name)}</th>" for name in self.columns)
        body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in self.rows())
        return (
            f"<table><caption>{escape(self._summary())}</caption>"
            f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        )


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"
