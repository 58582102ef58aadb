"""The fold of the log: what views and pictures draw from.

Owns, in the page, the engine's state (``state.js``, with ``dict.js`` for its way through JSON) and the scene: what
views add to the state, cut into a clock, lanes, blocks, counters and story. Owns, in Python, the lanes, the moment
after a step, and the published blocks that nobody has computed. Where both fold the same, a test holds them together.

Must not know how anything is drawn or put into sentences. Imports `widgets.words` alone.

Read ``state.js``, ``dict.js``; then ``scene.js`` and its parts in the order in which it folds them: ``clock.js``,
``lanes.js``, ``blocks.js``, ``totals.js``, ``story.js``. In Python: ``lanes.py``, ``uncomputed.py``, ``moment.py``.
"""

from widgets.fold.lanes import Arrow, Axis, Lane, Lanes, Mark, Phase, Place, Span, lanes_of
from widgets.fold.moment import Moment, Published, moment_of
from widgets.fold.uncomputed import Uncomputed

__all__ = [
    "Arrow",
    "Axis",
    "Lane",
    "Lanes",
    "Mark",
    "Moment",
    "Phase",
    "Place",
    "Published",
    "Span",
    "Uncomputed",
    "lanes_of",
    "moment_of",
]
