"""The block tables: for each request, the physical block of every logical one.

Owns the tables in words (``text.py``), the still picture (``picture.py``) and the live view (``tables.js``,
``tables.css``).

Draws from the fold with the shared looks. Must not know other views, engines, or how events arrive.

Read ``text.py``, ``picture.py``, then ``tables.js``.
"""

from widgets.tables.picture import picture_tables
from widgets.tables.text import tables_text

__all__ = ["picture_tables", "tables_text"]
