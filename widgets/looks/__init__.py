"""How one block and one request look and what they are called: the same in every view.

Owns the looks of a block (free, owned, private copy, in use, kept, not computed), the role and state of a request in
words, and the lines of their tooltips.

Knows the fold, and how to draw. Must not know which view asks, or how it is laid out.

Read ``blocks.py``, then ``blocks.js`` (with ``blocks.css``) and ``requests.js``.
"""

from widgets.looks.blocks import (
    COPY,
    FREE,
    KEPT,
    LOOKS,
    OWNED,
    UNCOMPUTED,
    USED,
    Look,
    after_words,
    cell,
    entry_words,
    look_of,
)

__all__ = [
    "COPY",
    "FREE",
    "KEPT",
    "LOOKS",
    "OWNED",
    "UNCOMPUTED",
    "USED",
    "Look",
    "after_words",
    "cell",
    "entry_words",
    "look_of",
]
