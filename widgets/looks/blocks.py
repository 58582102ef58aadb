"""How a block looks, and what it is in a request's table: the same in every picture.

Knows moments of the log. Must not know how a picture is laid out. The page draws the same looks in ``blocks.js``.
"""

from __future__ import annotations

from dataclasses import dataclass

from minivllm.log import BlockState
from widgets.drawing import BLUE, GROUND, LINE, MUTED, RED, TEXT, rect, text
from widgets.fold import Moment


@dataclass(frozen=True, slots=True)
class Look:
    """How a block is drawn, and what it is called."""

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
UNCOMPUTED = Look("uncomputed", "published, not computed", GROUND, RED, "#a84300")
LOOKS = (FREE, OWNED, COPY, USED, KEPT, UNCOMPUTED)


def look_of(moment: Moment, block_id: int) -> Look:
    """Return how a block looks at a moment."""
    block = moment.state.blocks[block_id]
    if block.state is BlockState.FREE:
        return FREE
    if block.state is BlockState.OWNED:
        return COPY if block_id in moment.twins else OWNED
    if block_id in moment.uncomputed:
        return UNCOMPUTED
    return USED if block.ref_count else KEPT


def entry_words(moment: Moment, request_id: str, block_id: int) -> str:
    """Return what a block is in a request's table, and how it came there when that is out of the ordinary."""
    look, count = look_of(moment, block_id), moment.state.blocks[block_id].ref_count
    words = [look.words.removesuffix(", in use")]
    if block_id in moment.copies:
        words.insert(0, f"copy of {moment.copies[block_id]}")
    if block_id in moment.adopted.get(request_id, ()):
        words.insert(0, "adopted")
    if look is OWNED and count > 1:
        words.append("shared by samples")
    return ", ".join([*words, f"ref_count {count}"])


def cell(x: float, y: float, width: float, height: float, look: Look, words: str, size: float) -> str:
    """Draw one block, with ``words`` in its middle."""
    dash = "3 2" if look in (COPY, UNCOMPUTED) else None
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
    """Return which moment a picture shows: "after step 3"."""
    return "before the first step" if moment.step == 0 else f"after step {moment.step}"
