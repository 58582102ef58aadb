"""A still picture of the block tables.

Knows moments of the log and the looks of blocks. Must not know engines or widgets.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from minivllm import log as ev
from widgets.drawing import GROUND, MUTED, SKY, WIDTH, Picture, diamond, picture, rect, text, two_sheets
from widgets.fold import Moment, moment_of
from widgets.looks import COPY, OWNED, UNCOMPUTED, USED, after_words, cell, look_of
from widgets.tables.text import STATE_WORDS, held_behind, tables_text


def picture_tables(log: Iterable[ev.Event], at: int | None = None) -> Picture:
    """Draw the block table of every request: logical blocks from left to right, each with its physical id."""
    events = list(log)
    moment = moment_of(events, at)
    size = moment.config.block_size
    width, height, gap, left, per_line = 27.0, 22.0, 3.0, 138.0, 26
    body = [
        text(18, 28, f"Block tables, {after_words(moment)}", 14, bold=True),
        text(WIDTH - 18, 28, "logical block 0, 1, 2 … → block id", 11.5, MUTED, anchor="end"),
    ]
    y = 46.0
    for name, view in moment.state.requests.items():
        body.append(text(18, y + 15, name, 12.5, bold=True))
        body.append(text(56, y + 15, STATE_WORDS[view.state], 11, MUTED))
        for index, block_id in enumerate(view.block_ids):
            row, column = divmod(index, per_line)
            x, top = left + column * (width + gap), y + row * (height + gap)
            filled = (view.num_computed_tokens - index * size) / size
            body.append(_entry(moment, block_id, x, top, width, height, filled))
            if block_id in moment.adopted.get(name, ()):
                body.append(diamond(x + width - 2, top + 2, GROUND))
            if block_id in moment.copies:
                body.append(two_sheets(x + width - 3, top + 3))
        if not view.block_ids:
            behind = held_behind(moment, name)
            body.append(text(left, y + 15, f"no block, held behind {behind}" if behind else "no block", 11, MUTED))
        y += max(1, math.ceil(len(view.block_ids) / per_line)) * (height + gap) + 7
    if not moment.state.requests:
        body.append(text(18, y + 15, "no request", 12, MUTED))
        y += 30
    x = 18.0
    looks = [OWNED, COPY, USED, *([UNCOMPUTED] if moment.uncomputed else [])]
    legend = [(look.words.removesuffix(", in use"), look) for look in looks]
    for words, look in legend:
        body.append(cell(x, y + 4, 13, 13, look, "", 9) + text(x + 19, y + 15, words, 11.5, MUTED))
        x += 19 + len(words) * 6.2 + 22
    body.append(rect(x, y + 13, 13, 3, SKY) + text(x + 19, y + 15, "in more than one table", 11.5, MUTED))
    x += 19 + 22 * 6.2 + 22
    if moment.copies:
        body.append(two_sheets(x + 6, y + 11) + text(x + 19, y + 15, "copied on write", 11.5, MUTED))
        x += 19 + 15 * 6.2 + 22
    if any(moment.adopted.values()):
        body.append(diamond(x + 6, y + 11, GROUND) + text(x + 19, y + 15, "adopted in mid-prefill", 11.5, MUTED))
    return picture(body, WIDTH, y + 32, tables_text(events, at), f"block tables, {after_words(moment)}")


def _entry(moment: Moment, block_id: int, x: float, y: float, width: float, height: float, filled: float) -> str:
    """One entry of a block table; ``filled`` is the share of the block's tokens that have K/V."""
    look = look_of(moment, block_id)
    out = cell(x, y, width, height, look, str(block_id), 11)
    if filled < 1 and look is OWNED:
        empty = (width - 2) * (1 - max(0.0, filled))
        out += rect(x + width - 1 - empty, y + 1, empty, height - 2, GROUND, opacity=0.78)
        out += text(x + width / 2, y + 15, str(block_id), 11, anchor="middle", bold=True)
    if moment.state.blocks[block_id].ref_count > 1:
        out += rect(x + 1, y + height - 4, width - 2, 3, SKY)
    return out
