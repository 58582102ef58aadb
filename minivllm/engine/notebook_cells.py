"""What each notebook cell made when it ran last, so that running it again closes that.

Knows how to ask IPython which cell runs now. Must not know what is made: anything with ``close()`` will do.
"""

from __future__ import annotations

import sys
import threading
import weakref
from typing import Protocol


class Closable(Protocol):
    """Something that a cell makes and that holds a thread, memory or a place on the page until it is closed."""

    def close(self) -> None:
        """Release everything."""
        ...


class MadeByCell:
    """Things of one sort by the cell that made them. None is held: what nobody else knows is forgotten."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[int, list[weakref.ref[Closable]]]] = {}

    def close_earlier(self) -> None:
        """In a notebook, close what an earlier run of the running cell made. Elsewhere, do nothing."""
        cell = current_cell()
        if cell is None:
            return
        name, execution = cell
        earlier, things = self._made.get(name, (execution, []))
        if earlier != execution:
            del self._made[name]
            for reference in things:
                old = reference()
                if old is not None:
                    old.close()

    def remember(self, thing: Closable) -> None:
        """In a notebook, note that the running cell made this. Elsewhere, do nothing."""
        cell = current_cell()
        if cell is not None:
            name, execution = cell
            self._made.setdefault(name, (execution, []))[1].append(weakref.ref(thing))


def current_cell() -> tuple[str, int] | None:
    """Return the running cell's name (its id, or its text where the front end gives no id) and its number.

    None outside a notebook, and on any thread but the one that runs cells.
    """
    if "IPython" not in sys.modules:
        return None
    from IPython import get_ipython

    shell = get_ipython()
    kernel = getattr(shell, "kernel", None)
    if kernel is None or threading.current_thread() is not threading.main_thread():
        return None
    try:
        cell_id = kernel.get_parent().get("metadata", {}).get("cellId")
    except LookupError:
        cell_id = None
    return str(cell_id or shell.user_ns["In"][-1]), int(shell.execution_count)
