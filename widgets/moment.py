"""The state after one engine step, and how a block looks in it.

Knows the log and its replay. Must not know how a picture is laid out. ``at`` is an engine step everywhere: the state
after it, with what happened before the next one (None: after the last event).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from minivllm import events as ev
from minivllm.errors import ConfigError
from minivllm.replay import BlockState, State, fold
from widgets.svg import BLUE, LINE, MUTED, TEXT, rect, text


@dataclass(slots=True)
class Moment:
    """The state after a step, with what the pictures need beside it."""

    state: State
    config: ev.EngineStarted
    step: int
    twins: dict[int, int]
    published: dict[str, Published]


@dataclass(frozen=True, slots=True)
class Published:
    """One published hash: its parent ("" for the root), block, logical index, and the extra keys in words."""

    block_hash: str
    parent: str
    block_id: int
    index: int
    salt: str


def moment_of(log: Iterable[ev.Event], at: int | None) -> Moment:
    """Fold a log up to a step. Raises ConfigError for a log without a beginning, or a step below 0."""
    if at is not None and (not isinstance(at, int) or isinstance(at, bool) or at < 0):
        raise ConfigError(f"at is {at!r}; give an engine step of 0 or more, or None for the end of the log")
    state, config, step = State(), None, 0
    twins: dict[int, int] = {}
    published: dict[str, Published] = {}
    salts: dict[str, str] = {}
    for e in log:
        if at is not None and e.step > at:
            break
        step = e.step
        fold(state, e)
        if isinstance(e, ev.EngineStarted):
            config = e
        elif isinstance(e, ev.RequestArrived):
            salts[e.request_id] = ", ".join(f"{kind.replace('_', ' ')} {value}" for kind, value in e.extra_keys)
        elif isinstance(e, ev.BlocksDuplicated):
            twins.update(zip(e.block_ids, e.twin_block_ids, strict=True))
        elif isinstance(e, ev.BlocksFreed):
            for block_id in (*e.to_front, *e.to_back):
                twins.pop(block_id, None)
        elif isinstance(e, ev.BlocksPublished):
            for i, block_hash in enumerate(e.block_hashes):
                salt = salts[e.request_id] if e.indices[i] == 0 else ""
                published[block_hash] = Published(block_hash, e.parent_hashes[i], e.block_ids[i], e.indices[i], salt)
        elif isinstance(e, ev.BlocksEvicted):
            for block_hash in e.block_hashes:
                published.pop(block_hash, None)
        elif isinstance(e, ev.CacheReset):
            published.clear()
    if config is None:
        raise ConfigError("the log is empty; give the log of an engine, such as engine.log")
    return Moment(state, config, step, twins, published)


@dataclass(frozen=True, slots=True)
class Look:
    """How a block is drawn and told."""

    name: str
    words: str
    fill: str
    stroke: str
    ink: str


FREE = Look("free", "free", "none", LINE, MUTED)
OWNED = Look("owned", "owned", "url(#owned)", "#b97f00", "#111111")
COPY = Look("copy", "private copy", "#f3c766", "#8a4b00", "#111111")
USED = Look("used", "published, in use", BLUE, "#005a8e", "#ffffff")
KEPT = Look("kept", "published, ref_count 0", "#c4e3f6", BLUE, TEXT)
LOOKS = (FREE, OWNED, COPY, USED, KEPT)


def look_of(moment: Moment, block_id: int) -> Look:
    block = moment.state.blocks[block_id]
    if block.state is BlockState.FREE:
        return FREE
    if block.state is BlockState.OWNED:
        return COPY if block_id in moment.twins else OWNED
    return USED if block.ref_count else KEPT


def cell(x: float, y: float, width: float, height: float, look: Look, words: str, size: float) -> str:
    dash = "3 2" if look is COPY else None
    box = rect(
        x,
        y,
        width,
        height,
        look.fill,
        rx=3,
        stroke=look.stroke,
        stroke_dasharray=dash,
        stroke_width=1.6 if dash else 1,
    )
    if not words:
        return box
    return box + text(x + width / 2, y + height / 2 + size * 0.36, words, size, look.ink, anchor="middle", bold=True)


def after_words(moment: Moment) -> str:
    return "before the first step" if moment.step == 0 else f"after step {moment.step}"
