"""A still picture of the block pool.

Knows moments of the log and the looks of blocks. Must not know engines or widgets.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from minivllm import log as ev
from widgets.drawing import MUTED, WIDTH, Picture, picture, text
from widgets.fold import moment_of
from widgets.looks import LOOKS, UNCOMPUTED, after_words, cell, look_of
from widgets.words import plural

_MAX_CELLS = 1024


def picture_pool(log: Iterable[ev.Event], at: int | None = None) -> Picture:
    """Draw every block of the pool: what it holds, and in how many block tables it is."""
    moment = moment_of(log, at)
    blocks = moment.state.blocks
    counts = dict.fromkeys((look.name for look in LOOKS), 0)
    for block_id in blocks:
        counts[look_of(moment, block_id).name] += 1
    looks = [look for look in LOOKS if look is not UNCOMPUTED or counts[look.name]]
    counted = ", ".join(f"{counts[look.name]:,} {look.words}" for look in looks)
    alt = f"Block pool {after_words(moment)}: {plural(len(blocks), 'block')}; {counted}."

    body = [
        text(18, 28, f"Block pool, {after_words(moment)}", 14, bold=True),
        text(WIDTH - 18, 28, "number in a cell = ref_count", 11.5, MUTED, anchor="end"),
    ]
    size, gap = 24, 4
    columns = 32
    drawn = list(blocks)[:_MAX_CELLS]
    for place, block_id in enumerate(drawn):
        row, column = divmod(place, columns)
        look = look_of(moment, block_id)
        words = {"free": "", "kept": "·", "uncomputed": "?"}.get(look.name, str(blocks[block_id].ref_count))
        body.append(cell(30 + column * (size + gap), 46 + row * (size + gap), size, size, look, words, 11.5))
    y = 46 + math.ceil(len(drawn) / columns) * (size + gap) + 18
    if len(blocks) > len(drawn):
        body.append(text(30, y, f"The first {len(drawn):,} of {len(blocks):,} blocks.", 11.5, MUTED))
        y += 20
    x = 30.0
    for look in looks:
        words = f"{counts[look.name]:,} {look.words}"
        body.append(cell(x, y - 10, 13, 13, look, "", 9) + text(x + 19, y + 1, words, 12))
        x += 19 + len(words) * 6.4 + 22
    return picture(body, WIDTH, y + 20, alt, f"block pool, {after_words(moment)}")
