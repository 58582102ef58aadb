"""The state after one engine step, with what the pictures need beside it.

Knows the log and its replay. Must not know how anything is drawn. ``at`` is an engine step everywhere: the state
after it, with what happened before the next one (None: after the last event).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from minivllm import log as ev
from minivllm.errors import ConfigError
from minivllm.log import State, fold
from minivllm.request import ExtraKeys
from widgets.fold.uncomputed import Uncomputed
from widgets.words import new_keys_words


@dataclass(slots=True)
class Moment:
    """The state after a step, with what the pictures need beside it.

    ``twins`` maps a private copy to the published block of the same content, ``copies`` a block that was copied on
    write to the one it was copied from. ``adopted`` are, by request, the blocks of its table that it took in
    mid-prefill.
    """

    state: State
    config: ev.EngineStarted
    step: int
    twins: dict[int, int] = field(default_factory=dict)
    published: dict[str, Published] = field(default_factory=dict)
    copies: dict[int, int] = field(default_factory=dict)
    adopted: dict[str, set[int]] = field(default_factory=dict)
    uncomputed: Uncomputed = field(default_factory=Uncomputed)

    def take(self, e: ev.Event) -> None:
        """Take one event in, except what concerns hashes. The state has it already."""
        if isinstance(e, ev.BlocksDuplicated):
            self.twins.update(zip(e.block_ids, e.twin_block_ids, strict=True))
        elif isinstance(e, ev.BlockCopied):
            self.copies[e.block_id] = e.source_block_id
        elif isinstance(e, ev.BlocksAdopted):
            self.adopted.setdefault(e.request_id, set()).update(e.block_ids)
        elif isinstance(e, ev.BlocksFreed):
            self.adopted.pop(e.request_id, None)
            for block_id in (*e.to_front, *e.to_back):
                self.twins.pop(block_id, None)
                self.copies.pop(block_id, None)
        self.uncomputed.take(e, self.state, self.config.block_size)


@dataclass(frozen=True, slots=True)
class Published:
    """One published hash: its parent ("" for the root), block, logical index, and its new extra keys in words."""

    block_hash: str
    parent: str
    block_id: int
    index: int
    salt: str


def moment_of(log: Iterable[ev.Event], at: int | None) -> Moment:
    """Fold a log up to a step. Raises ConfigError for a log without a beginning, or a step below 0."""
    if at is not None and (not isinstance(at, int) or isinstance(at, bool) or at < 0):
        raise ConfigError(f"at is {at!r}; give an engine step of 0 or more, or None for the end of the log")
    state, moment = State(), None
    keys: dict[str, ExtraKeys] = {}
    for e in log:
        if at is not None and e.step > at:
            break
        fold(state, e)
        if isinstance(e, ev.EngineStarted):
            moment = Moment(state, e, e.step)
        if moment is None:
            continue
        moment.step = e.step
        moment.take(e)
        published = moment.published
        if isinstance(e, ev.RequestArrived):
            keys[e.request_id] = e.extra_keys
        elif isinstance(e, ev.BlocksPublished):
            for i, block_hash in enumerate(e.block_hashes):
                salt = new_keys_words(keys[e.request_id], e.indices[i], moment.config.block_size)
                published[block_hash] = Published(block_hash, e.parent_hashes[i], e.block_ids[i], e.indices[i], salt)
        elif isinstance(e, ev.BlocksEvicted):
            for block_hash in e.block_hashes:
                published.pop(block_hash, None)
        elif isinstance(e, ev.CacheReset):
            published.clear()
    if moment is None:
        raise ConfigError("the log is empty; give the log of an engine, such as engine.log")
    return moment
