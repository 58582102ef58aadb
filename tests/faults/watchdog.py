"""Something that must come to an end is given a time; if it does not, every thread's stack is shown.

Knows threads and stacks. Must not know what is run.
"""

from __future__ import annotations

import faulthandler
import tempfile
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Hang(AssertionError):
    """Something did not end; the message holds the stacks of all threads."""


def within(seconds: float, function: Callable[[], T], what: str) -> T:
    """Run ``function`` on a thread of its own and return its value, or raise what it raises.

    Raises Hang after ``seconds``. The time is a guard against waiting for ever, far above what is needed.
    """
    values: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            values.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name=f"watched: {what}", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise Hang(f"{what} has not ended after {seconds:g} s\n{stacks()}")
    if errors:
        raise errors[0]
    return values[0]


def stacks() -> str:
    """Return the stacks of all threads."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()
