"""The panels of a page, by name.

Knows the names alone; ``page.js`` knows what they are.
"""

from __future__ import annotations

from collections.abc import Iterable

from minivllm.errors import UnknownNameError, nearest

PANELS = ("counters", "timeline", "pool", "tables", "chain", "story", "flights", "result")
"""Every panel, in the order in which they stand on the page."""


def chosen_panels(show: Iterable[str]) -> list[str]:
    """Return the names that ``show`` holds (one name may stand alone), in the order of the page.

    Raises UnknownNameError for a panel that does not exist.
    """
    wanted = [show] if isinstance(show, str) else list(show)
    for name in wanted:
        if name not in PANELS:
            raise UnknownNameError(f"no panel is called {name!r}; {nearest(name, PANELS)}")
    return [name for name in PANELS if name in wanted]
