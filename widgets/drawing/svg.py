"""Writing SVG, and a picture of it for a notebook.

A picture is written here, without a browser or a drawing package: the same facts give the same bytes on every
machine. In a notebook it is an ``<img>`` with the facts as its alternative text, which shows without a kernel and
in a notebook that nobody trusts. It has a ground of its own, so that it reads on a light and a dark page.

Knows elements and colours. Must not know what is drawn.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable
from pathlib import Path

# From the Okabe-Ito palette, with a ground and inks that have contrast on it.
ORANGE, SKY, GREEN, BLUE, RED, PINK = "#e69f00", "#56b4e9", "#009e73", "#0072b2", "#d55e00", "#cc79a7"
GROUND, TEXT, MUTED, LINE, GREY = "#ffffff", "#1b1f24", "#57606a", "#d8dce1", "#8b929b"
_SANS = "system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif"
_MONO = "ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace"
WIDTH = 960


class Picture:
    """An SVG picture and what it says, for a notebook or a file."""

    def __init__(self, svg: str, alt: str, name: str = "picture") -> None:
        self.svg = svg
        self.alt = alt
        self.name = name

    def _repr_html_(self) -> str:
        data = base64.b64encode(self.svg.encode("utf-8")).decode("ascii")
        return f'<img alt="{html.escape(self.alt, quote=True)}" src="data:image/svg+xml;base64,{data}">'

    def save(self, path: str | Path) -> Path:
        """Write the picture as an SVG file and return where it is."""
        target = Path(path)
        target.write_text(self.svg, encoding="utf-8")
        return target

    def __repr__(self) -> str:
        return f"Picture({self.name})"


# --- Writing SVG ------------------------------------------------------------------------------------------


def number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def el(tag: str, content: str = "", /, **attributes: str | float | None) -> str:
    parts = [tag]
    for name, value in attributes.items():
        if value is not None:
            text = value if isinstance(value, str) else number(value)
            parts.append(f'{name.rstrip("_").replace("_", "-")}="{html.escape(text, quote=True)}"')
    return f"<{' '.join(parts)}>{content}</{tag}>" if content else f"<{' '.join(parts)}/>"


def text(
    x: float,
    y: float,
    words: str,
    size: float = 12,
    fill: str = TEXT,
    *,
    anchor: str | None = None,
    bold: bool = False,
    mono: bool = False,
    halo: bool = False,
) -> str:
    return el(
        "text",
        html.escape(words, quote=False),
        x=x,
        y=y,
        font_size=size,
        fill=fill,
        text_anchor=anchor,
        font_weight="600" if bold else None,
        font_family=_MONO if mono else None,
        paint_order="stroke" if halo else None,
        stroke=GROUND if halo else None,
        stroke_width=3.5 if halo else None,
        stroke_linejoin="round" if halo else None,
    )


def rect(x: float, y: float, width: float, height: float, fill: str, **extra: str | float | None) -> str:
    return el("rect", x=x, y=y, width=width, height=height, fill=fill, **extra)


def _hatch(name: str, colour: str, ground: str, size: float = 6) -> str:
    inside = rect(0, 0, size, size, ground) + rect(0, 0, size / 2.4, size, colour)
    return el(
        "pattern",
        inside,
        id=name,
        width=size,
        height=size,
        patternUnits="userSpaceOnUse",
        patternTransform="rotate(45)",
    )


_DEFS = el(
    "defs",
    _hatch("held", "#dfa9c8", "#f8edf4")
    + _hatch("preempted", "#e58e4d", "#fbeee4")
    + _hatch("owned", "#efbf55", ORANGE, 5)
    + el(
        "marker",
        el("path", d="M0 0 L6 3 L0 6 z", fill=GREY),
        id="tip",
        viewBox="0 0 6 6",
        refX=4,
        refY=3,
        markerWidth=6,
        markerHeight=6,
        orient="auto",
    ),
)


def diamond(x: float, y: float, fill: str, stroke_width: float | None = None) -> str:
    """A small mark with its middle at (x, y)."""
    d = f"M{number(x)} {number(y - 5)} l4.5 5 l-4.5 5 l-4.5 -5 z"
    return el("path", d=d, fill=fill, stroke=BLUE, stroke_width=stroke_width)


def two_sheets(x: float, y: float) -> str:
    """The same, of a copy."""
    behind = rect(x - 4.5, y - 5, 6.5, 7, ORANGE, stroke="#8a4b00", stroke_width=0.8)
    return behind + rect(x - 1.5, y - 2, 6.5, 7, GROUND, stroke="#8a4b00", stroke_width=0.8)


def picture(body: Iterable[str], width: float, height: float, alt: str, name: str) -> Picture:
    ground = rect(0.5, 0.5, width - 1, height - 1, GROUND, rx=8, stroke=LINE)
    size = f'width="{number(width)}" height="{number(height)}" viewBox="0 0 {number(width)} {number(height)}"'
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{_SANS}">'
        f"<title>{html.escape(alt.splitlines()[0], quote=False)}</title>{_DEFS}{ground}{''.join(body)}</svg>"
    )
    return Picture(svg, alt, name)
