"""A still picture of the hash chain: the published blocks from parent to child.

Knows moments of the log and the looks of blocks. Must not know engines or widgets.
"""

from __future__ import annotations

from collections.abc import Iterable

from minivllm import log as ev
from widgets.drawing import GREY, MUTED, WIDTH, Picture, el, number, picture, rect, text
from widgets.fold import Moment, Published, moment_of
from widgets.looks import after_words, look_of
from widgets.words import plural

_BOX_W, _BOX_H, _BOX_GAP, _ROW, _CHAIN_LEFT = 52.0, 38.0, 16.0, 54.0, 66.0
_RUN_SHOWN = 9


def picture_chain(log: Iterable[ev.Event], at: int | None = None) -> Picture:
    """Draw the published blocks from parent to child; long runs without a branch are folded."""
    moment = moment_of(log, at)
    children: dict[str, list[Published]] = {}
    for item in moment.published.values():
        parent = item.parent if item.parent in moment.published else ""
        children.setdefault(parent, []).append(item)
    chain = _ChainDrawing(moment, children)
    chain.draw()
    ends = sum(1 for item in moment.published.values() if item.block_hash not in children)
    alt = (
        f"Hash chain {after_words(moment)}: {plural(len(moment.published), 'published block')}, "
        f"{plural(len(children.get('', [])), 'first block')}, {plural(ends, 'end')}."
    )
    if not moment.published:
        chain.body.append(text(18, 64, "Nothing is published.", 12, MUTED))
    body = [
        text(18, 28, f"Hash chain, {after_words(moment)}", 14, bold=True),
        text(WIDTH - 18, 28, "hash over block id; parent → child", 11.5, MUTED, anchor="end"),
        *chain.body,
    ]
    width = max(float(WIDTH), chain.right + 20)
    return picture(body, width, 52 + (chain.row + 1) * _ROW, alt, f"hash chain, {after_words(moment)}")


class _ChainDrawing:
    """Boxes in rows: an only child stands right of its parent, each further child begins a row of its own."""

    def __init__(self, moment: Moment, children: dict[str, list[Published]]) -> None:
        self.moment = moment
        self.children = children
        self.body: list[str] = []
        self.row = 0
        self.right = 0.0

    def draw(self) -> None:
        roots = self.children.get("", [])
        # (first block of a run, x of its box, its row, x and row of the parent's right end)
        todo = [(root, _CHAIN_LEFT, -1, _CHAIN_LEFT - _BOX_GAP - 4, 0) for root in reversed(roots)]
        if roots:
            self.body.append(text(18, self._middle(0) + 4, "root", 11.5, MUTED))
        first = True
        while todo:
            item, x, row, from_x, from_row = todo.pop()
            if row < 0:
                if not first:
                    self.row += 1
                row = self.row
            first = False
            run = [item]
            kids = self.children.get(item.block_hash, [])
            while len(kids) == 1:
                run.append(kids[0])
                kids = self.children.get(kids[0].block_hash, [])
            end = self._run(run, x, row, from_x, from_row)
            for i in range(len(kids) - 1, -1, -1):
                todo.append((kids[i], end + _BOX_GAP, row if i == 0 else -1, end, row))
            if not kids:
                words = plural(run[-1].index + 1, "block")
                self.body.append(text(end + 8, self._middle(row) + 4, words, 11.5, MUTED))
                self.right = max(self.right, end + 8 + len(words) * 6.4)

    def _middle(self, row: int) -> float:
        return 52 + row * _ROW + _BOX_H / 2

    def _run(self, run: list[Published], x: float, row: int, from_x: float, from_row: int) -> float:
        y, middle = 52 + row * _ROW, self._middle(row)
        folded = len(run) > _RUN_SHOWN
        label_end = 0.0
        shown: list[Published | None] = [*run[:3], None, *run[-2:]] if folded else list(run)
        for place, item in enumerate(shown):
            bend = f"h{number(_BOX_GAP / 2)} V{number(middle)} " if place == 0 and from_row != row else ""
            start = self._middle(from_row) if place == 0 else middle
            line = f"M{number(from_x)} {number(start)} {bend}H{number(x - 3)}"
            self.body.append(el("path", d=line, fill="none", stroke=GREY, stroke_width=1.3, marker_end="url(#tip)"))
            width = _BOX_W
            if item is None:
                width += 26
                self.body.append(
                    rect(x, y + 6, width, _BOX_H - 12, "#f1f3f5", rx=13, stroke=GREY, stroke_dasharray="3 2")
                    + text(x + width / 2, middle + 4, f"{len(run) - 5} more", 11.5, MUTED, anchor="middle")
                )
            else:
                self._box(item, x, y)
                label = item.salt
                if not label and item.parent and item.parent not in self.moment.published:
                    label = "parent evicted"
                if label:
                    # A label says which tokens it is about, so it may stand further right than its block.
                    words, at = (f"· {label}", label_end) if x < label_end else (label, x)
                    self.body.append(text(at, y - 4, words, 10.5, bold=True))
                    label_end = at + len(words) * 6.3 + 4
            from_x = x + width
            x = from_x + _BOX_GAP
        self.right = max(self.right, from_x)
        return from_x

    def _box(self, item: Published, x: float, y: float) -> None:
        look = look_of(self.moment, item.block_id)
        self.body.append(
            rect(x, y, _BOX_W, _BOX_H, look.fill, rx=5, stroke=look.stroke)
            + text(x + _BOX_W / 2, y + 15, item.block_hash[:6], 10.5, look.ink, anchor="middle", mono=True)
            + text(x + _BOX_W / 2, y + 31, str(item.block_id), 12.5, look.ink, anchor="middle", bold=True)
        )
