"""How far a download is: reported to whoever asks, or on standard error.

Knows numbers of bytes. Must not know what is downloaded, or by whom.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Progress = Callable[[str, int, int | None], None]
"""Gets what is downloaded, the bytes that are there, and the bytes in all (None: not known)."""

T = TypeVar("T")


class ProgressOnStderr:
    """Writes on standard error how far a download is, from the thread that waits for it."""

    def __init__(self) -> None:
        self._latest: tuple[str, int, int | None] | None = None

    def __call__(self, what: str, done: int, total: int | None) -> None:
        self._latest = (what, done, total)

    def wait(self, started: Future[T]) -> T:
        """Wait for the value, and report meanwhile. Raises what the future raises."""
        reported = False
        while True:
            try:
                value = started.result(timeout=0.25)
            except TimeoutError:
                if started.done():
                    raise
                if self._latest is not None:
                    what, done, total = self._latest
                    of = f" of {total / 1e6:.0f}" if total else ""
                    sys.stderr.write(f"\r{what}: {done / 1e6:.0f}{of} MB")
                    sys.stderr.flush()
                    reported = True
                continue
            finally:
                if reported and started.done():
                    sys.stderr.write("\n")
            return value
