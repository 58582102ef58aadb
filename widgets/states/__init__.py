"""The state machines: of a request, and of a block.

Owns the two diagrams. They are drawn from the tables of transitions that the engine and the pool go by, so that a
diagram cannot differ from what is allowed.

Must not know logs, moments or live views. Imports `widgets.drawing` and `widgets.words`.

Read ``picture.py``.
"""

from widgets.states.picture import picture_block_states, picture_states

__all__ = ["picture_block_states", "picture_states"]
