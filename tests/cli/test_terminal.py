"""Progress and files, one by one."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from minivllm.cli.terminal import Channel, Notes, PipeClosed, ProgressLine, WholeFile, WriteError


class Terminal(io.StringIO):
    """A stream that says that a person looks at it."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_without_a_terminal_progress_is_a_line_every_tenth() -> None:
    stream = io.StringIO()
    line = ProgressLine(Notes(stream, "standard error"))
    assert not line.was_used
    for done in range(1001):
        line("downloading x", done * 100_000, 100_000_000)
    line("unpacking x", 0, None)
    line.close()
    assert line.was_used
    lines = stream.getvalue().splitlines()
    assert len(lines) == 12
    assert lines[0] == "downloading x:   0% 0 of 100 MB"
    assert lines[10] == "downloading x: 100% 100 of 100 MB"
    assert lines[11] == "unpacking x:"


@pytest.mark.parametrize(("encoding", "mark"), [("utf-8", "█"), ("ascii", "#")])
def test_on_a_terminal_progress_is_a_bar_in_one_line(encoding: str, mark: str) -> None:
    stream = Terminal()
    stream.encoding = encoding
    line = ProgressLine(Notes(stream, "standard error"))
    for done in (0, 50, 100):
        line("downloading x", done * 1_000_000, 100_000_000)
    line.close()
    line.close()
    text = stream.getvalue()
    assert text.count("\n") == 1
    assert text.endswith("\n")
    last = text.rstrip("\n").split("\r")[-1]
    assert mark * 24 in last
    assert "100%" in last


def test_a_file_that_is_left_before_it_is_written_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), WholeFile(str(tmp_path / "x")):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_is_interrupted_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    path.write_text("old")

    def interrupted(handle: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt), WholeFile(str(path)) as file:
        file.write("new")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]


def test_a_stream_that_is_closed_says_so_and_notes_do_without() -> None:
    with pytest.raises(WriteError, match="standard output is closed; run the command with it open"):
        Channel(None, "standard output").write("x")
    Notes(None, "standard error").line("x")


def test_a_pipe_without_a_reader_is_told_apart() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        channel = Channel(stream, "standard output")
        with pytest.raises(PipeClosed):
            channel.write("x")
        with pytest.raises(WriteError):
            channel.write("again")
