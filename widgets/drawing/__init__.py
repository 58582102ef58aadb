"""Drawing, whatever is drawn: SVG written in Python, nodes of a page made in JavaScript, graphs by Graphviz.

Owns the colours and the `Picture` that a notebook shows (``svg.py``), the program that lays out graphs (``graph.py``),
and the page's nodes, panels and basic styles (``elements.js``, ``elements.css``).

Must not know the engine, its log, or what a picture is about. Imports no other part of `widgets`.

Read ``svg.py``, ``graph.py``, ``elements.js``.
"""

from widgets.drawing.graph import dot_svg, find_dot
from widgets.drawing.svg import (
    BLUE,
    GREEN,
    GREY,
    GROUND,
    LINE,
    MUTED,
    ORANGE,
    PINK,
    RED,
    SKY,
    TEXT,
    WIDTH,
    Picture,
    diamond,
    el,
    number,
    picture,
    rect,
    text,
    two_sheets,
)

__all__ = [
    "BLUE",
    "GREEN",
    "GREY",
    "GROUND",
    "LINE",
    "MUTED",
    "ORANGE",
    "PINK",
    "RED",
    "SKY",
    "TEXT",
    "WIDTH",
    "Picture",
    "diamond",
    "dot_svg",
    "el",
    "find_dot",
    "number",
    "picture",
    "rect",
    "text",
    "two_sheets",
]
