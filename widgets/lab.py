"""A live view of an engine, in the page of a notebook.

Knows an engine (its log, its listeners, whether it is alive), a synchronous core, or a finished log. Must not know
how the page draws: that is ``static/lab.js``, which folds the same events. Commands of a page arrive on whichever
thread the kernel chooses, so a handler only passes them on.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import anywidget
import traitlets

from minivllm.engine.notebook_cells import MadeByCell
from minivllm.errors import ConfigError, UnknownNameError, nearest
from minivllm.log.event import Event
from minivllm.log.event_log import EventLog
from minivllm.log.events import EngineStarted, RequestArrived
from widgets.pictures import picture_chain, picture_pool, picture_tables
from widgets.publisher import Publisher, Source
from widgets.svg import Picture
from widgets.timelines import picture_timeline

STATIC = Path(__file__).parent / "static"

PANELS = ("counters", "timeline", "pool", "tables", "chain", "story", "flights", "result")
"""Every panel, in the order in which they stand on the page."""

_DEFAULT_PANELS = ("pool", "tables", "chain", "timeline", "flights", "counters", "story")

Which = Literal["pool", "tables", "chain", "timeline"]
_PICTURES: dict[str, Callable[[Iterable[Event]], Picture]] = {
    "pool": picture_pool,
    "tables": picture_tables,
    "chain": picture_chain,
    "timeline": picture_timeline,
}


def source_of(shown: Any) -> Source:
    """Return what the publisher needs of an engine, of a synchronous core, or of a log.

    Raises ConfigError for anything else.
    """
    if isinstance(shown, EventLog):
        return Source(shown)
    log = getattr(shown, "log", None)
    if not isinstance(log, EventLog):
        raise ConfigError(
            f"a view cannot show a {type(shown).__name__}; give it an Engine, an EngineCore or an event log"
        )
    if hasattr(shown, "add_listener"):
        return Source(log, shown.add_listener, lambda: bool(shown.is_alive))
    # A core has nobody to call us: it is looked at while it may still step. Not held: a core that only a view
    # knows can step no more, and a notebook makes a new one each time its cell is run.
    core = weakref.ref(shown)
    return Source(log, None, lambda: _may_step(core()), poll_seconds=0.1)


def _may_step(core: Any) -> bool:
    """Whether a synchronous core is there, open and in order."""
    return core is not None and bool(getattr(core, "is_open", True))


def runner_name(log: EventLog) -> str:
    """Return the name of what computes, as the log's first event says ("" for an empty log)."""
    first = log[0] if len(log) else None
    return first.runner if isinstance(first, EngineStarted) else ""


class LogWidget(anywidget.AnyWidget):
    """One anywidget over one publisher: what `LabView` and the race console share."""

    _esm = (STATIC / "lab.js").read_text(encoding="utf-8")
    _css = (STATIC / "lab.css").read_text(encoding="utf-8")
    show = traitlets.List(traitlets.Unicode()).tag(sync=True)
    title = traitlets.Unicode("").tag(sync=True)
    per_race = traitlets.Bool(False).tag(sync=True)
    paced = traitlets.Bool(False).tag(sync=True)
    controls = traitlets.Dict().tag(sync=True)  # empty: no console

    def __init__(self, **traits: Any) -> None:
        super().__init__(**traits)
        self.publisher = Publisher(self.send)
        self.on_msg(self._on_message)
        self._is_closed = False
        self._heard: dict[str, int] = {}
        # The page sends its messages to a subshell of the kernel, which is free while a cell runs. ipykernel 7.4
        # would redirect them to whoever wrote to the page last, mostly the main thread; other versions do not ask.
        self.comm._reply_subshell_for = lambda data, subshell_id: subshell_id

    def _on_message(self, _widget: Any, content: Any, _buffers: Any) -> None:
        """Take a message of the page; on the main thread or on another, at once or after the running cell."""
        if not isinstance(content, dict) or "want" not in content:
            return
        page, asked = str(content.get("page")), content.get("asked")
        # A page asks again until it is heard; what lay in a busy kernel's queue meanwhile is answered already.
        if isinstance(asked, int) and asked <= self._heard.get(page, 0):
            return
        self._heard[page] = asked if isinstance(asked, int) else 0
        self.publisher.want(content["want"])

    @property
    def error(self) -> BaseException | None:
        """What ended the sending, or None. A page that went away is the usual reason."""
        return self.publisher.error

    def close(self) -> None:
        """Stop sending and take the view off the page. Calling it again does nothing."""
        if not getattr(self, "_is_closed", True):
            self._is_closed = True
            self.publisher.close()
        super().close()


_on_show: weakref.WeakKeyDictionary[Any, LabView] = weakref.WeakKeyDictionary()
"""The open view of each engine, so that a cell that is run again closes the view of the time before."""

views_of_cells = MadeByCell()
"""The views and consoles that each notebook cell made when it ran last."""


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
        wanted = [show] if isinstance(show, str) else list(show)
        for name in wanted:
            if name not in PANELS:
                raise UnknownNameError(f"no panel is called {name!r}; {nearest(name, PANELS)}")
        runner = runner_name(source.log)
        super().__init__(
            show=[name for name in PANELS if name in wanted],
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
