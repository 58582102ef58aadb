"""What `LabView` and the race console share: one anywidget over one publisher, and which cell made it.

Knows the bundle of the page and the page's messages. Must not know engines, or how the page draws. Messages of a page
arrive on whichever thread the kernel chooses, so a handler only passes them on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anywidget
import traitlets

from minivllm.engine import MadeByCell
from widgets.live.publisher import Publisher

STATIC = Path(__file__).parents[1] / "static"

views_of_cells = MadeByCell()
"""The views and consoles that each notebook cell made when it ran last."""


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
