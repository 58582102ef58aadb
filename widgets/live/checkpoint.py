"""Checkpoints: where a page that misses too many events may begin, and what it must know there.

Knows the log and its replay. Must not know pages or threads.
"""

from __future__ import annotations

from typing import Any

from minivllm.log import (
    BlocksEvicted,
    BlocksPublished,
    CacheReset,
    EngineStarted,
    EventLog,
    PoliciesChanged,
    State,
    fold,
)
from widgets.fold import Uncomputed

_COMING = {"request_arrived", "request_deferred"}
_GOING = {"request_finished", "request_aborted", "request_failed"}


class IdlePlace:
    """Where a page may begin: the last place of a log at which no request was in the engine.

    Each call continues where the last one ended, so that a log is read once.
    """

    def __init__(self, log: EventLog) -> None:
        self.num_seen = 0
        self._log = log
        self._active: set[str] = set()
        self._place = 0

    def before(self, end: int) -> int:
        """Return the number of the event after the last idle moment among those below ``end`` (0: none).

        ``end`` never falls: a log only grows.
        """
        for event in self._log[self.num_seen : max(end, self.num_seen)]:
            if event.kind in _COMING:
                self._active.add(event.request_id)  # type: ignore[attr-defined]
            elif event.kind in _GOING:
                self._active.discard(event.request_id)  # type: ignore[attr-defined]
            if not self._active:
                self._place = event.seq + 1
            self.num_seen = event.seq + 1
        return self._place


def make_checkpoint(log: EventLog, seq: int) -> dict[str, Any]:
    """Return what a page needs to begin at event ``seq``: the state there, the configuration, the hashes.

    Requests that have ended are left out. Hashes come with parent, block, logical index and who published them.
    ``uncomputed`` are the published blocks that nobody has computed.
    """
    state = State()
    config: dict[str, Any] = {}
    hashes: dict[str, dict[str, Any]] = {}
    uncomputed = Uncomputed()
    last = None
    for event in log[:seq]:
        fold(state, event)
        last = event
        uncomputed.take(event, state, config.get("block_size", 1))
        if isinstance(event, EngineStarted):
            config = event.as_dict()
        elif isinstance(event, PoliciesChanged):
            config |= {
                "publication": event.publication,
                "coordination": event.coordination,
                "release": event.release,
            }
        elif isinstance(event, BlocksPublished):
            for block, digest, parent, index in zip(
                event.block_ids, event.block_hashes, event.parent_hashes, event.indices, strict=True
            ):
                hashes[digest] = {
                    "parent": parent,
                    "block": block,
                    "index": index,
                    "by": event.request_id,
                    "seq": event.seq,
                    "salt": "",
                    "label": "",
                }
        elif isinstance(event, BlocksEvicted):
            for digest in event.block_hashes:
                hashes.pop(digest, None)
        elif isinstance(event, CacheReset):
            hashes.clear()
    for name in [name for name, view in state.requests.items() if view.state.is_ended]:
        del state.requests[name]
    return {
        "seq": seq,
        "step": last.step if last else 0,
        "ms": last.ms if last else 0.0,
        "config": config,
        "hashes": hashes,
        "uncomputed": {str(block): {"by": by, "end": end} for block, (by, end) in uncomputed.items()},
        "state": state.as_dict(),
    }
