"""From the log to the page: batches of events, at most 20 a second.

Knows a source of events and a function that sends a message. Must not know what a view draws. The page asks for what it
misses (``{"want": seq}``), so nothing is sent before a page is there, a page that was loaded again gets all from the
start, and nothing is lost.

The thread lives only while there may be something to send. It never prints; what goes wrong is kept in ``error``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from widgets.live.checkpoint import IdlePlace, make_checkpoint
from widgets.live.source import Source

MAX_HZ = 20.0
MAX_EVENTS_PER_MESSAGE = 2_000
MAX_BACKLOG = 20_000
"""A page that misses more events than this gets a checkpoint and what came after it."""

Send = Callable[[dict[str, Any]], None]


class Publisher:
    """Sends the events of one source to the pages of one view.

    Messages: ``{"type": "events", "epoch", "from", "events"}`` and ``{"type": "checkpoint", "epoch", "seq", …}``.
    ``epoch`` counts the sources: a page forgets the last one's events when it changes.
    """

    def __init__(self, send: Send, *, max_hz: float = MAX_HZ, max_events: int = MAX_EVENTS_PER_MESSAGE) -> None:
        self.error: BaseException | None = None
        self.num_messages = 0
        self._send = send
        self._pause = 1.0 / max_hz
        self._max_events = max_events
        self._lock = threading.Lock()
        self._news = threading.Event()
        self._thread: threading.Thread | None = None
        self._source: Source | None = None
        self._unsubscribe: Callable[[], None] | None = None
        self._epoch = 0
        self._next: int | None = None  # number of the event to send next; None until a page asks
        self._idle: IdlePlace | None = None
        self._closed = False

    # -- From any thread -----------------------------------------------------------------------------------

    def attach(self, source: Source) -> None:
        """Send this source from now on, from its first event. Does nothing after `close`."""
        self._drop_source()
        with self._lock:
            if self._closed:
                return
            self._source = source
            self._idle = IdlePlace(source.log)
            self._epoch += 1
            if self._next is not None:
                self._next = 0
            self._ensure_thread()
        # Outside of the lock: the source may hold one of its own while it calls `_news.set`.
        if source.subscribe is not None:
            self._unsubscribe = source.subscribe(self._news.set)
        self._news.set()

    def want(self, seq: int) -> None:
        """A page misses the events from number ``seq`` on. Takes what is no number of an event as 0."""
        start = seq if isinstance(seq, int) and not isinstance(seq, bool) and seq > 0 else 0
        with self._lock:
            self._next = start if self._next is None else min(self._next, start)
            self._ensure_thread()
        self._news.set()

    def close(self, timeout: float | None = 5.0) -> None:
        """Stop, and wait for the thread unless it is the caller. Calling it again does nothing."""
        with self._lock:
            self._closed = True
            thread = self._thread
        self._drop_source()
        self._news.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    @property
    def is_running(self) -> bool:
        """Whether a thread is there (it ends by itself when nothing can come any more)."""
        with self._lock:
            return self._thread is not None

    # -- Inside --------------------------------------------------------------------------------------------

    def _drop_source(self) -> None:
        unsubscribe, self._unsubscribe = self._unsubscribe, None
        with self._lock:
            self._source = self._idle = None
        if unsubscribe is not None:
            unsubscribe()

    def _ensure_thread(self) -> None:
        """With the lock held."""
        if self._thread is None and not self._closed and self._source is not None and self._next is not None:
            self._thread = threading.Thread(target=self._run, name="view-publisher", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        try:
            while True:
                with self._lock:
                    source = self._source
                    if self._closed or source is None:
                        self._thread = None
                        return
                    # Asked before the look at the log: what a dying engine writes last is seen after it.
                    is_alive = source.is_alive()
                    self._news.clear()
                    message = self._next_message(source)
                    if message is None and not is_alive:
                        self._thread = None
                        return
                if message is None:
                    self._news.wait(source.poll_seconds)  # not for ever: an engine may die without a word
                    continue
                self._send(message)
                self.num_messages += 1
                time.sleep(self._pause)
        except BaseException as error:  # a page that went away, or a kernel that shuts down
            self.error = error
            with self._lock:
                self._thread = None
                self._closed = True
            self._drop_source()

    def _next_message(self, source: Source) -> dict[str, Any] | None:
        """Return what to send now and move on, or None. With the lock held."""
        first = self._next
        assert first is not None and self._idle is not None
        end = len(source.log)
        if first >= end:
            self._next = end
            return None
        if end - first > MAX_BACKLOG:
            place = self._idle.before(end - MAX_EVENTS_PER_MESSAGE)
            if place > first:
                self._next = place
                return {"type": "checkpoint", "epoch": self._epoch, **make_checkpoint(source.log, place)}
        events = source.log[first : min(end, first + self._max_events)]
        self._next = first + len(events)
        return {
            "type": "events",
            "epoch": self._epoch,
            "from": first,
            "events": [event.as_dict() for event in events],
        }
