"""The hash chain: the published blocks from parent to child.

Owns the still picture (``picture.py``) and the live view (``chain.js``, ``chain.css``). Each has a layout of its own:
the live one must not jump when a block is added.

Draws from the fold with the shared looks. Must not know other views, engines, or how events arrive.

Read ``picture.py``, then ``chain.js``.
"""

from widgets.chain.picture import picture_chain

__all__ = ["picture_chain"]
