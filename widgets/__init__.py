"""Live views and pictures of an engine, fed only by its log.

    from widgets import LabView, RaceConsole, picture_timeline

`LabView` shows an engine while it works, `RaceConsole` adds the controls of a race, the ``picture_…`` functions draw
still pictures that show without a kernel, and the ``…_text`` functions say the same in words. The package imports
`minivllm`; nothing in `minivllm` knows of it.

One folder a part, each with what it has of Python, page script and style. A part imports only parts further left:
``words``, ``drawing``; ``fold``; ``looks``; the views ``pool``, ``tables``, ``chain``, ``timeline``, ``flights``,
``counters``, ``story``, ``result``, ``states``; ``live``; ``console``. ``lab.js`` is the entry of the page's modules,
and ``python -m widgets.bundle`` writes them as the one file that a notebook loads, ``static/lab.js``.
"""

from widgets.chain import picture_chain
from widgets.console import RaceConsole
from widgets.drawing import Picture
from widgets.live import LabView
from widgets.pool import picture_pool
from widgets.states import picture_block_states, picture_states
from widgets.tables import picture_tables, tables_text
from widgets.timeline import compare_timelines, picture_timeline, timeline_text

__all__ = [
    "LabView",
    "Picture",
    "RaceConsole",
    "compare_timelines",
    "picture_block_states",
    "picture_chain",
    "picture_pool",
    "picture_states",
    "picture_tables",
    "picture_timeline",
    "tables_text",
    "timeline_text",
]
