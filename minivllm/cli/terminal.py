"""What the command line needs of its surroundings: streams, files, signals and a progress line.

Knows the operating system: full disks, closed pipes, Ctrl-C, terminals that are not. Must not know engines,
models or races.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, TextIO

from minivllm.errors import MiniVLLMError

GRACE_SECONDS = 1.0
"""How long a stopped command may clean up before it leaves as it is."""


class WriteError(MiniVLLMError, RuntimeError):
    """Standard output or a file took no more: no space, a limit, no such folder."""


class PipeClosed(Exception):
    """Whoever read standard output has gone away: nothing is wrong, and nothing is left to do."""


class Stopped(KeyboardInterrupt):
    """The command was told to stop by a signal."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    @property
    def exit_status(self) -> int:
        """What a shell expects of a command that a signal ended."""
        return 128 + self.number

    def __str__(self) -> str:
        return "stopped by Ctrl-C" if self.number == signal.SIGINT else "stopped by " + signal.Signals(self.number).name


# --- Streams ------------------------------------------------------------------------------------------------


class Channel:
    """A standard stream. Every write is flushed, so that what fails is known at once."""

    def __init__(self, stream: TextIO | None, name: str) -> None:
        self.stream = stream
        self.name = name
        if stream is not None and hasattr(stream, "reconfigure"):
            # What cannot be shown is shown as "?": never an error for that, whoever writes.
            stream.reconfigure(errors="replace")

    @property
    def is_terminal(self) -> bool:
        """Whether a person looks at it."""
        return self.stream is not None and self.stream.isatty()

    @property
    def width(self) -> int:
        """Columns of the terminal; 80 elsewhere, so that a file looks the same everywhere."""
        return max(shutil.get_terminal_size((80, 24)).columns, 40) if self.is_terminal else 80

    @property
    def encoding(self) -> str | None:
        """What its characters become."""
        return self.stream.encoding if self.stream is not None else None

    def write(self, text: str) -> None:
        """Write and flush. Raises WriteError if it cannot, PipeClosed if nobody reads any more."""
        if self.stream is None:
            raise WriteError(f"{self.name} is closed; run the command with it open")
        try:
            _write_all(self.stream, text)
        except BrokenPipeError:
            self._give_up()
            raise PipeClosed from None
        except OSError as error:
            self._give_up()
            raise WriteError(
                f"cannot write to {self.name} ({error.strerror}); make room or send it somewhere else"
            ) from error

    def line(self, text: str = "") -> None:
        """Write a line. Raises like `write`."""
        self.write(text + "\n")

    def _give_up(self) -> None:
        """Send what is still in the buffer nowhere, or Python would complain about it on its way out."""
        stream, self.stream = self.stream, None
        if stream is None:
            return
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
            stream.flush()


def _write_all(stream: TextIO, text: str) -> None:
    """Write all of the text. Raises OSError.

    Not with the stream's own ``write``: where Python runs unbuffered, that asks the system once, and drops in
    silence what the system did not take.
    """
    stream.flush()
    binary = getattr(stream, "buffer", None)
    if binary is None:
        stream.write(text)
        return
    left = memoryview(text.encode(stream.encoding, "replace"))
    while left:
        left = left[binary.write(left) :]
    binary.flush()


class Notes(Channel):
    """Standard error: what is said beside the result. If it takes nothing, the command goes on without."""

    def write(self, text: str) -> None:
        """Write and flush, if possible."""
        with contextlib.suppress(WriteError, PipeClosed):
            super().write(text)


# --- Files --------------------------------------------------------------------------------------------------


class WholeFile:
    """A file that is written whole or not at all.

    The text goes to a neighbour in the same folder, which takes the file's name when it is complete. Entering
    tries whether that will be possible, so that a folder that does not exist is known before the work is done.
    What is no plain file (a pipe, a device) is written as it is.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(os.path.realpath(path))
        self._shown = path
        self._part = self.path.with_name(f".{self.path.name}.{os.getpid()}.part")
        self._stream: IO[str] | None = None

    def __enter__(self) -> WholeFile:
        try:
            if self.path.exists() and not self.path.is_file():
                self._stream = self.path.open("w", encoding="utf-8")
            else:
                self._part.open("x").close()
                self._part.unlink()  # nothing stays behind if the work is killed
        except OSError as error:
            raise self._failed(error) from error
        return self

    def write(self, text: str) -> None:
        """Write all of the file, and give it its name. Raises WriteError; the old file is then untouched."""
        try:
            if self._stream is not None:
                self._stream.write(text)
                self._stream.flush()
            else:
                self._write_whole(text)
        except BrokenPipeError:
            raise PipeClosed from None
        except OSError as error:
            raise self._failed(error) from error

    def _write_whole(self, text: str) -> None:
        try:
            with self._part.open("x", encoding="utf-8") as part:
                part.write(text)
                part.flush()
                os.fsync(part.fileno())  # the name must not reach the disk before the content
            if self.path.exists():
                shutil.copymode(self.path, self._part)
            os.replace(self._part, self.path)
        except BaseException:
            self._part.unlink(missing_ok=True)
            raise

    def _failed(self, error: OSError) -> WriteError:
        return WriteError(f"cannot write {self._shown} ({error.strerror}); choose another place or make room")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stream is not None:
            with contextlib.suppress(OSError):  # the buffer may hold what there is no room for
                self._stream.close()


# --- Signals ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def stoppable(notes: Channel) -> Iterator[None]:
    """Turn Ctrl-C and SIGTERM into `Stopped`, once; what takes too long after that, or a second one, ends all.

    Handlers stay until the process ends, as cleaning up goes on after this block.
    """

    def leave(number: int) -> None:
        notes.line(f"minivllm: {Stopped(number)}")
        os._exit(Stopped(number).exit_status)

    def on_signal(number: int, frame: FrameType | None) -> None:
        _from_now_on(lambda *_: leave(number))
        signal.setitimer(signal.ITIMER_REAL, GRACE_SECONDS)
        raise Stopped(number)

    for each in (signal.SIGINT, signal.SIGTERM):
        # A command in the background of a script ignores Ctrl-C, and goes on doing so.
        if signal.getsignal(each) is not signal.SIG_IGN:
            signal.signal(each, on_signal)
    yield


def leave_without_a_word(status: int) -> None:
    """It has been said why the command stops: what takes too long now, or another signal, ends it silently."""
    _from_now_on(lambda *_: os._exit(status))


def disarm() -> None:
    """All is cleaned up: no alarm any more, as Python forgets its handlers on its way out and would die of one."""
    signal.setitimer(signal.ITIMER_REAL, 0)


def _from_now_on(handler: Callable[[int, FrameType | None], None]) -> None:
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
        signal.signal(each, handler)


# --- Progress -----------------------------------------------------------------------------------------------


class ProgressLine:
    """Shows how far a download, or other long work, is: a bar that moves on a terminal, elsewhere a line every tenth.

    Call it with what is done, how much so far and how much in all (None: not known); any thread. A download counts
    bytes; other work counts whatever it does, and ``counts_bytes`` is False.
    """

    def __init__(self, notes: Channel, *, counts_bytes: bool = True) -> None:
        self._notes = notes
        self._size = _size if counts_bytes else _count
        self._what = ""
        self._told = -1
        self._drawn_at = 0.0
        self._open = False

    @property
    def was_used(self) -> bool:
        """Whether there was anything to report."""
        return bool(self._what)

    def __call__(self, what: str, done: int, total: int | None) -> None:
        """Take a report."""
        fresh = what != self._what
        if fresh:
            self.close()
            self._what, self._told = what, -1
        share = done / total if total else 0.0
        if self._notes.is_terminal:
            self._draw(what, done, total, share, fresh or done == total)
        elif fresh or int(share * 10) > self._told:
            self._told = int(share * 10)
            percent = f" {self._told * 10:3d}%" if total else ""
            self._notes.line(f"{what}:{percent}{self._size(done, total)}")

    def _draw(self, what: str, done: int, total: int | None, share: float, now: bool) -> None:
        if not now and time.monotonic() - self._drawn_at < 0.1:
            return
        self._drawn_at = time.monotonic()
        text = f"{what}: "
        if total:
            full, empty = ("█", "░") if _is_unicode(self._notes.encoding) else ("#", ".")
            text += full * round(share * 24) + empty * (24 - round(share * 24)) + f" {share:4.0%} "
        text += self._size(done, total)
        self._notes.write("\r" + text[: self._notes.width - 1].ljust(self._notes.width - 1))
        self._open = True

    def close(self) -> None:
        """Leave the line as it is and go to the next."""
        if self._open:
            self._notes.line()
            self._open = False


def _is_unicode(encoding: str | None) -> bool:
    return (encoding or "").lower().replace("-", "").startswith("utf")


def _size(done: int, total: int | None) -> str:
    if total:
        return f" {done / 1e6:.0f} of {total / 1e6:.0f} MB"
    return f" {done / 1e6:.0f} MB" if done else ""


def _count(done: int, total: int | None) -> str:
    return f" {done:,} of {total:,}" if total else f" {done:,}"


def arguments_as_text(arguments: list[str]) -> list[str]:
    """Return the arguments with bytes that are no text replaced: they could not be printed, nor encoded."""
    return [text.encode("utf-8", "surrogateescape").decode("utf-8", "replace") for text in arguments]


def standard_streams() -> tuple[Channel, Notes]:
    """Return standard output and standard error."""
    return Channel(sys.stdout, "standard output"), Notes(sys.stderr, "standard error")
