"""A race while it runs: a table that moves on a terminal, lines elsewhere.

Knows events and a stream to write on. Must not know engines.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from minivllm.cli.terminal import Channel
from minivllm.log import events as ev
from minivllm.log.lanes import Lanes, Phase
from minivllm.log.metrics import Metrics, RequestMetrics

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

_FRAME_SECONDS = 0.1


class LiveTable:
    """A table of the requests that is drawn again at most ten times a second, and removed at the end."""

    def __init__(self, out: Channel, heading: str, max_tokens: int) -> None:
        self._out = out
        self._heading = heading
        self._max_tokens = max_tokens
        self._lanes = Lanes()
        self._metrics = Metrics()
        self._drawn_at = 0.0
        self._live: Live | None = None

    def __enter__(self) -> LiveTable:
        from rich.console import Console
        from rich.live import Live

        console = Console(file=self._out.stream, width=self._out.width)
        self._live = Live(
            self._table(),
            console=console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._live is not None
        self._live.__exit__(kind, error, trace)

    def __call__(self, events: Sequence[ev.Event]) -> None:
        """Take new events in."""
        assert self._live is not None
        self._lanes.update(events)
        self._metrics.update(events)
        if time.monotonic() - self._drawn_at >= _FRAME_SECONDS:
            self._live.update(self._table(), refresh=True)
            self._drawn_at = time.monotonic()

    def _table(self) -> Table:
        from rich import box
        from rich.table import Table

        table = Table(title=self._heading, title_justify="left", box=box.SIMPLE_HEAD, title_style="")
        for name in ("request", "role", "now"):
            table.add_column(name)
        for name in ("prompt", "recovered", "computed", "output", "TTFT ms"):
            table.add_column(name, justify="right")
        for request in self._metrics.requests.values():
            table.add_row(*self._row(request))
        table.caption = f"step {self._metrics.num_steps}, {self._lanes.now_ms:,.0f} ms"
        table.caption_justify = "left"
        return table

    def _row(self, request: RequestMetrics) -> tuple[str, ...]:
        lane = self._lanes.lanes.get(request.request_id)
        now = "done" if request.end in ("length", "stop") else request.end or ""
        if lane is not None and lane.phase is not None:
            now = lane.phase.value + (f" {lane.held_words}" if lane.phase is Phase.HELD else "")
        adopted = f" + {request.adopted_tokens:,} adopted" if request.adopted_tokens else ""
        ttft = "" if request.ttft_ms is None else f"{request.ttft_ms:,.1f}"
        return (
            request.request_id,
            request.role,
            now,
            f"{request.prompt_tokens:,}",
            f"{request.recovered_tokens:,}{adopted}" if request.queried_tokens else "",
            f"{request.computed_tokens:,}",
            f"{request.output_tokens:,}/{self._max_tokens:,}",
            ttft,
        )


class StoryLines:
    """The same in lines, one for each thing that happened to one or more requests in a step."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._behind: dict[str, str] = {}

    def __call__(self, events: Sequence[ev.Event]) -> None:
        """Take new events in, and write what they mean."""
        reported: list[tuple[ev.Event, list[str], str]] = []
        for event in events:
            line = None if self._goes_on_waiting(event) else _report_of(event)
            if line is None:
                continue
            names, what = line
            if reported and (reported[-1][0].step, reported[-1][2]) == (event.step, what):
                reported[-1][1].extend(names)
            else:
                reported.append((event, list(names), what))
        for event, names, what in reported:
            self._write(f"{event.ms:10,.1f} ms  {', '.join(names)}: {what}\n")

    def _goes_on_waiting(self, event: ev.Event) -> bool:
        """Whether a held request only waits for the next block of the same leader: that is not reported again."""
        if isinstance(event, ev.PrefixReleased):
            for name in event.request_ids:
                self._behind.pop(name, None)
        if not isinstance(event, ev.PrefixAwaited):
            return False
        before = self._behind.get(event.request_id)
        self._behind[event.request_id] = event.leader_id
        return before == event.leader_id


def _report_of(event: ev.Event) -> tuple[Sequence[str], str] | None:
    """Return whom an event is about, and what it says; None for one too small to report."""
    match event:
        case ev.FlightOpened(leader_id=name):
            return [name], "leads: the first with this prompt"
        case ev.FlightJoined(request_id=name, leader_id=leader):
            return [name], f"held behind {leader}"
        case ev.FlightHandedOver(to_id=name, from_id=old):
            return [name], f"leads now, as {old} has ended before its prompt was published"
        case ev.FlightReleased(request_ids=names, leader_id=leader, reason=reason) if names:
            why = "their prompt is cached now" if reason == "cached" else f"the prompt of {leader} is published"
            return names, f"released: {why}"
        case ev.SampleHeld(request_id=name, first_id=first):
            return [name], f"held behind {first}, a sample of the same prompt"
        case ev.SampleLeads(from_id=old, to_id=name):
            return [name], f"computes the prompt now, as {old} has ended before it was computed"
        case ev.SamplesForked(request_id=first, sample_ids=names, block_ids=block_ids):
            return names, f"forked: run on the {_count(len(block_ids), 'block')} of {first}, whose prompt is computed"
        case ev.BlockCopied(request_id=name, source_block_id=source, block_id=copy, num_tokens=count):
            return [name], (
                f"copied block {source} to block {copy} ({_count(count, 'token')}) before its first write, "
                "as other samples read it"
            )
        case ev.BlocksAdopted(request_id=name, block_ids=block_ids, num_tokens=count):
            return [name], f"adopted {_count(count, 'token')} in {_count(len(block_ids), 'block')} published meanwhile"
        case ev.PrefixAwaited(request_id=name, leader_id=leader, block_index=index):
            return [name], f"held behind {leader}, which computes its block {index:,}{_times(event)}"
        case ev.PrefixReleased(request_ids=names, leader_id=leader, reason=reason) if names:
            return names, f"released: {_RELEASE_WORDS.get(reason, reason).format(leader=leader)}"
        case ev.RecomputeChosen(request_id=name, leader_id=leader, block_index=index):
            return [name], f"computes block {index:,} itself beside {leader}{_times(event)}"
        case ev.HashCollision(request_id=name, block_id=block_id, token_ids=asked, held_token_ids=held):
            return [name], (
                f"hash collision: block {block_id} has the hash that it asks for, but holds "
                f"{_difference(asked, held)}; it is not served"
            )
        case ev.PrefixLookedUp(request_id=name, num_recovered_tokens=found, num_queried_tokens=asked):
            again = "again " if event.resumed else ""
            return [name], f"admitted {again}with {found:,} of {asked:,} tokens recovered"
        case ev.PrefillFinished(request_id=name):
            return [name], "prompt computed"
        case ev.RequestPreempted(request_id=name):
            return [name], "preempted: blocks ran out"
        case ev.RequestFinished(request_id=name):
            return [name], "done"
        case ev.RequestAborted(request_id=name):
            return [name], "aborted"
        case ev.RequestFailed(request_id=name, error=error):
            return [name], f"failed: {error}"
    return None


_RELEASE_WORDS = {
    "published": "{leader} has published the awaited block",
    "ended": "{leader} has ended",
    "preempted": "{leader} was preempted",
}


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def _times(event: ev.PrefixAwaited | ev.RecomputeChosen) -> str:
    """Return the two times that a policy has weighed, "" if it has not."""
    if event.wait_ms is None or event.recompute_ms is None:
        return ""
    return f" ({event.wait_ms:,.1f} ms to its first token if it waits, {event.recompute_ms:,.1f} ms if it computes)"


def _difference(asked: Sequence[int], held: Sequence[int]) -> str:
    """Return what a block holds in place of what was asked for, from the first token that differs."""
    first = next((i for i, pair in enumerate(zip(asked, held, strict=True)) if pair[0] != pair[1]), None)
    if first is None:
        return "the same tokens after another beginning"
    return f"token ids {_tokens(held[first:])} in place of {_tokens(asked[first:])}"


def _tokens(token_ids: Sequence[int]) -> str:
    return " ".join(map(str, token_ids[:4])) + (" …" if len(token_ids) > 4 else "")
