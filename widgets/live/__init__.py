"""What makes the views live: the log goes to the page, the page keeps it as a recording and draws all views of it.

Owns, in Python, the source of events, the publisher's thread, checkpoints for a page that comes late, and `LabView`.
Owns, in the page, the recording, the player and its bar, the layout of the views, the highlight, and mounting.

Must not know what a view draws (it makes the views and asks them to draw), or the race console, which builds on this.

Read ``source.py``, ``checkpoint.py``, ``publisher.py``, ``panels.py``, ``widget.py``, ``view.py``; in the page
``recording.js``, ``player.js``, ``player_bar.js``, ``highlight.js``, ``page.js``, ``mount.js``, ``widget.js``.
"""

from widgets.live.checkpoint import make_checkpoint
from widgets.live.panels import PANELS, chosen_panels
from widgets.live.publisher import Publisher
from widgets.live.source import Source, runner_name, source_of
from widgets.live.view import LabView, Which
from widgets.live.widget import LogWidget, views_of_cells

__all__ = [
    "PANELS",
    "LabView",
    "LogWidget",
    "Publisher",
    "Source",
    "Which",
    "chosen_panels",
    "make_checkpoint",
    "runner_name",
    "source_of",
    "views_of_cells",
]
