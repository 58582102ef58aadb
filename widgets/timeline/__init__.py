"""The timeline: a lane for each request, with what it did when, and what tied it to others.

Owns the timeline in words (``text.py``), the still picture and the comparison of several logs (``picture.py``), and the
live view (``timeline.js``, ``timeline.css``).

Draws from the fold with the shared looks. Must not know other views, engines, or how events arrive.

Read ``text.py``, ``picture.py``, then ``timeline.js``. The lanes themselves are in ``fold/lanes.py`` and
``fold/lanes.js``.
"""

from widgets.timeline.picture import compare_timelines, picture_timeline
from widgets.timeline.text import timeline_text

__all__ = ["compare_timelines", "picture_timeline", "timeline_text"]
