"""A live view of an engine, in the page of a notebook.

Knows where events come from, and the still pictures that stand in for the page without a kernel. Must not know how the
page draws: that is the page's script (``page.js``), which folds the same events.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Literal

from minivllm.errors import UnknownNameError, nearest
from minivllm.log import Event, RequestArrived
from widgets.chain import picture_chain
from widgets.drawing import Picture
from widgets.live.panels import chosen_panels
from widgets.live.source import runner_name, source_of
from widgets.live.widget import LogWidget, views_of_cells
from widgets.pool import picture_pool
from widgets.tables import picture_tables
from widgets.timeline import picture_timeline

_DEFAULT_PANELS = ("pool", "tables", "chain", "timeline", "flights", "counters", "story")

Which = Literal["pool", "tables", "chain", "timeline"]
_PICTURES: dict[str, Callable[[Iterable[Event]], Picture]] = {
    "pool": picture_pool,
    "tables": picture_tables,
    "chain": picture_chain,
    "timeline": picture_timeline,
}

_on_show: weakref.WeakKeyDictionary[Any, LabView] = weakref.WeakKeyDictionary()
"""The open view of each engine, so that a cell that is run again closes the view of the time before."""


class LabView(LogWidget):
    """Block pool, block tables, hash chain, timeline, flights, counters and story of one engine.

    ``shown`` is an `Engine`, an `EngineCore`, or a finished log (a recording). ``show`` names the panels; all
    follow the log and highlight the same block or request together. ``paced`` plays a log that comes faster
    than the eye instead of jumping to its end (by default: for a virtual clock). Works while a cell runs.

    Showing an engine again closes the view that showed it before, and so does running its notebook cell again.
    Raises ConfigError for something that has no log, UnknownNameError for a panel that does not exist.
    """

    def __init__(
        self, shown: Any, show: Iterable[str] = _DEFAULT_PANELS, *, title: str = "", paced: bool | None = None
    ) -> None:
        source = source_of(shown)
        panels = chosen_panels(show)
        runner = runner_name(source.log)
        super().__init__(
            show=panels,
            title=title,
            paced=runner == "virtual" if paced is None else paced,
        )
        self._events = source.log
        self._is_of_a_thread = source.subscribe is not None
        self._name = runner or "empty log"
        before = _on_show.get(shown)
        if before is not None:
            before.close()
        _on_show[shown] = self
        views_of_cells.close_earlier()
        views_of_cells.remember(self)
        self.publisher.attach(source)

    def picture(self, which: Which = "timeline") -> Picture:
        """Return a still picture of this moment that shows without a kernel.

        Raises UnknownNameError for a picture that does not exist.
        """
        draw = _PICTURES.get(which)
        if draw is None:
            raise UnknownNameError(f"no picture is called {which!r}; {nearest(which, _PICTURES)}")
        return draw(self._events)

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """Return the view and, beside it, a picture of this moment, for a page that cannot show the view.

        A page with a kernel takes the view. No picture while no request has arrived, and none of an engine with a
        thread of its own: its log grows meanwhile, and the picture would be another one each time.
        """
        bundle = super()._repr_mimebundle_(**kwargs)
        if bundle is None or self._is_of_a_thread:
            return bundle
        if any(isinstance(event, RequestArrived) for event in self._events):
            bundle[0]["text/html"] = self.picture("timeline")._repr_html_()
        return bundle

    def __repr__(self) -> str:
        return f"LabView({self._name}: {', '.join(self.show)})"
