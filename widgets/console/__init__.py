"""The race console: controls over the live views that fire races at an engine.

Owns what may be chosen and which race follows (``controls.py``), aborting the leader (``leader.py``), the thread that
drives the engine (``console.py``), and the form in the page (``console.js``, ``console.css``).

Builds on `widgets.live`. Must not know what a view draws; no other part imports it.

Read ``controls.py``, ``leader.py``, ``console.py``, then ``console.js``.
"""

from widgets.console.console import RaceConsole
from widgets.console.controls import MAX_REQUESTS

__all__ = ["MAX_REQUESTS", "RaceConsole"]
