"""The block pool: every block, what it holds, and in how many block tables it is.

Owns the still picture (``picture.py``) and the live view (``pool.js``, ``pool.css``).

Draws from the fold with the shared looks. Must not know other views, engines, or how events arrive.

Read ``picture.py``, then ``pool.js``.
"""

from widgets.pool.picture import picture_pool

__all__ = ["picture_pool"]
