"""Live views and pictures of an engine, fed only by its log.

    from widgets import LabView, RaceConsole, picture_timeline

`LabView` shows an engine while it works, `RaceConsole` adds the controls of a race, the ``picture_…`` functions draw
still pictures that show without a kernel, and the ``…_text`` functions say the same in words. The package imports
`minivllm`; nothing in `minivllm` knows of it.
"""

from widgets.console import RaceConsole
from widgets.lab import LabView
from widgets.pictures import (
    picture_block_states,
    picture_chain,
    picture_pool,
    picture_states,
    picture_tables,
    tables_text,
)
from widgets.svg import Picture
from widgets.timelines import compare_timelines, picture_timeline, timeline_text

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
