"""Block tables in words.

Knows moments of the log. Must not know how anything is drawn.
"""

from __future__ import annotations

from collections.abc import Iterable

from minivllm import log as ev
from minivllm.request import RequestState
from widgets.fold import Moment, moment_of
from widgets.looks import after_words, entry_words
from widgets.words import plural

STATE_WORDS = {
    RequestState.DEFERRED: "has not arrived",
    RequestState.WAITING: "waiting",
    RequestState.HELD: "held",
    RequestState.RUNNING: "running",
    RequestState.PREEMPTED: "preempted",
    RequestState.FINISHED: "done",
    RequestState.ABORTED: "aborted",
    RequestState.FAILED: "failed",
}


def tables_text(log: Iterable[ev.Event], at: int | None = None) -> str:
    """Return every request's block table in words, one line a request; neighbours that are alike are a range."""
    moment = moment_of(log, at)
    requests = moment.state.requests
    lines = [f"Block tables {after_words(moment)}:"]
    width = max((len(name) for name in requests), default=0)
    for name, view in requests.items():
        table = _table_words(moment, name, view.block_ids) or "no block"
        behind = held_behind(moment, name)
        if behind:
            table += f", held behind {behind}"
        lines.append(f"  {name:<{width}}  {STATE_WORDS[view.state]:<9}  {table}")
    if not requests:
        lines.append("  no request")
    free = len(moment.state.free_queue)
    lines.append(f"  {free:,} of {plural(len(moment.state.blocks), 'block')} free")
    return "\n".join(lines)


def held_behind(moment: Moment, name: str) -> str:
    """Return behind whom a request is held outside of a flight, "" for others."""
    if name in moment.state.awaiting:
        return moment.state.awaiting[name]
    return next((first for first, held in moment.state.samples.items() if name in held), "")


def _table_words(moment: Moment, name: str, block_ids: list[int]) -> str:
    runs: list[tuple[int, int, str]] = []
    for block_id in block_ids:
        words = entry_words(moment, name, block_id)
        if runs and runs[-1][1] + 1 == block_id and runs[-1][2] == words:
            runs[-1] = (runs[-1][0], block_id, words)
        else:
            runs.append((block_id, block_id, words))
    return "; ".join(f"{a if a == b else f'{a} to {b}'} ({words})" for a, b, words in runs)
