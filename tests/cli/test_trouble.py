"""What the world does to a command: Ctrl-C, kill, full disks, closed pipes. Never a traceback, nothing left half."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.command import in_shell, is_gone, minivllm, one_sentence, read_until, started

# --- Ctrl-C -------------------------------------------------------------------------------------------------


@pytest.fixture
def silent_index() -> Iterator[str]:
    """The address of a package index that takes the call and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/simple"


def stop(process: subprocess.Popen[bytes], number: int) -> tuple[str, str]:
    """Send a signal to the whole group, as a terminal does, and return what the command still wrote."""
    os.killpg(process.pid, number)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 128 + number, stderr
    assert is_gone(process.pid)
    text = stderr.decode()
    assert "Traceback" not in text
    return stdout.decode(), text


SAID = {signal.SIGINT: "minivllm: stopped by Ctrl-C\n", signal.SIGTERM: "minivllm: stopped by SIGTERM\n"}
SIGNALS = pytest.mark.parametrize("number", SAID, ids=lambda number: number.name)


@SIGNALS
def test_generate_stops_in_the_middle_of_its_answer(number: signal.Signals) -> None:
    with started("generate", "hello", "--model", "tiny", "--max-tokens", "4000", "--seed", "3") as process:
        first = read_until(process.stdout, b"t")
        stdout, stderr = stop(process, number)
    assert stderr == SAID[number]
    assert (first.decode(errors="replace") + stdout).endswith("\n")


@SIGNALS
def test_generate_stops_while_it_reads_the_prompt(number: signal.Signals) -> None:
    with started("generate", "-", "--model", "tiny") as process:
        assert process.stdin is not None
        process.stdin.write(b"half a prom")
        process.stdin.flush()
        wait_until_it_reads(process)
        os.killpg(process.pid, number)
        assert process.wait(60) == 128 + number
        assert process.stderr is not None
        assert process.stderr.read().decode() == SAID[number]


def wait_until_it_reads(process: subprocess.Popen[bytes]) -> None:
    """Wait until the command has taken what was written: then it waits for more."""
    import fcntl
    import struct
    import termios

    assert process.stdin is not None
    for _ in range(6000):
        left = struct.unpack("i", fcntl.ioctl(process.stdin, termios.FIONREAD, b"\0" * 4))[0]
        if left == 0:
            return
        time.sleep(0.01)
    raise AssertionError("the prompt was never read")


@SIGNALS
@pytest.mark.parametrize("model", ["tiny", "virtual"])
def test_a_race_stops_and_leaves_no_half_file(tmp_path: Path, number: signal.Signals, model: str) -> None:
    path = tmp_path / "race.json"
    path.write_text("old")
    large = ("--requests", "64", "--rows", "64", "--blocks", "100000", "--prompt-tokens", "200", "--max-tokens", "3000")
    with started("race", "--model", model, *large, "--json", str(path)) as process:
        read_until(process.stdout, b"admitted")
        _, stderr = stop(process, number)
    assert stderr == SAID[number]
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["race.json"]


@SIGNALS
def test_a_download_stops_with_its_helpers_and_leaves_nothing(
    tmp_path: Path, number: signal.Signals, silent_index: str
) -> None:
    with started("model", "get", "smollm2", MINIVLLM_CACHE=str(tmp_path), PIP_INDEX_URL=silent_index) as process:
        first = read_until(process.stderr, b"downloading smollm2")
        _, stderr = stop(process, number)
    assert (first.decode() + stderr).splitlines()[-1] + "\n" == SAID[number]
    assert [entry.name for entry in (tmp_path / "smollm2").iterdir()] == [".lock"]


def test_a_download_that_only_the_command_is_told_of_stops_too(tmp_path: Path, silent_index: str) -> None:
    """SIGTERM of a service manager goes to one process; its helpers must not live on."""
    with started("generate", "hi", MINIVLLM_CACHE=str(tmp_path), PIP_INDEX_URL=silent_index) as process:
        read_until(process.stderr, b"downloading smollm2")
        process.terminate()
        process.communicate(timeout=60)
        assert process.returncode == 143
        assert is_gone(process.pid)


@pytest.mark.model
@pytest.mark.parametrize("delay", [0.0, 0.4, 0.8])
def test_generate_stops_at_whatever_moment_of_loading(delay: float) -> None:
    """The note on the BLAS comes right before the model is loaded."""
    story = ("generate", "Tell me a long story.", "--max-tokens", "500")
    with started(*story, MINIVLLM_BLAS="off") as process:
        read_until(process.stderr, b"own slow BLAS on this CPU.\n")
        time.sleep(delay)
        _, stderr = stop(process, signal.SIGINT)
    assert stderr == SAID[signal.SIGINT]


def test_a_second_ctrl_c_ends_it_at_once(tmp_path: Path) -> None:
    with started("race", "--model", "tiny", "--max-tokens", "3000", "--requests", "2") as process:
        read_until(process.stdout, b"admitted")
        os.killpg(process.pid, signal.SIGINT)
        os.killpg(process.pid, signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert set(stderr.decode().splitlines()) == {"minivllm: stopped by Ctrl-C"}


def test_a_command_that_was_told_to_ignore_ctrl_c_goes_on() -> None:
    done = in_shell("trap '' INT; minivllm race --virtual & wait $!; kill -INT $$; echo $?")
    assert "of 3,724 prompt tokens" in " ".join(done.stdout.split())
    assert done.stdout.endswith("\n0\n")


def test_after_a_kill_a_fresh_start_works(tmp_path: Path) -> None:
    path = tmp_path / "race.json"
    arguments = ("race", "--model", "tiny", "--requests", "2", "--prompt-tokens", "100", "--json", str(path))
    with started(*arguments, "--max-tokens", "3000") as process:
        read_until(process.stdout, b"admitted")
        process.kill()
        process.communicate(timeout=60)
    assert list(tmp_path.iterdir()) == []
    done = minivllm(*arguments, "--max-tokens", "2")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(path.read_text())["requests"][1]["output_tokens"] == 2


# --- Full disks ---------------------------------------------------------------------------------------------


def at_most_1000_bytes() -> None:
    """Let no file of the process grow beyond 1,000 bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("to", ["file", "standard output"])
def test_a_file_size_limit_gets_one_sentence_and_leaves_the_old_file(tmp_path: Path, to: str, unbuffered: str) -> None:
    path = tmp_path / "race.json"
    path.write_text("old")
    if to == "file":
        done = minivllm(
            "race", "--virtual", "--json", str(path), before=at_most_1000_bytes, PYTHONUNBUFFERED=unbuffered
        )
        assert f"cannot write {path} (File too large)" in one_sentence(done, 1)
        assert path.read_text() == "old"
    else:
        command = f"minivllm race --virtual --json - 2>{tmp_path}/err >{tmp_path}/out"
        done = in_shell(f"ulimit -f 1; {command}", PYTHONUNBUFFERED=unbuffered)
        assert done.returncode == 1
        assert (tmp_path / "out").stat().st_size <= 1024
        assert "Traceback" not in (tmp_path / "err").read_text()
    assert not list(tmp_path.glob(".*"))


FULL = [place for place in ("/dev/full",) if Path(place).exists()]
"""A device that is always full: Linux has one. Elsewhere the size limit above stands for it."""


@pytest.mark.parametrize("place", FULL or ["size limit"])
@pytest.mark.parametrize(
    "command",
    [
        "race --virtual",
        "race --virtual --json -",
        "generate hi --model virtual",
        "generate hi --model virtual --json",
        "model list",
        "--help",
        "race --help",
        "--version",
    ],
)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_behind_standard_output_gets_one_sentence(
    place: str, command: str, unbuffered: str, tmp_path: Path
) -> None:
    if place == "size limit":
        done = in_shell(f"ulimit -f 0; minivllm {command} >{tmp_path}/out", PYTHONUNBUFFERED=unbuffered)
    else:
        done = in_shell(f"minivllm {command} >{place}", PYTHONUNBUFFERED=unbuffered)
    *notes, sentence = done.stderr.splitlines()
    assert done.returncode == 1
    assert sentence.startswith("minivllm: cannot write to standard output (")
    assert not any("Traceback" in line or "Exception" in line for line in notes)
    if "--json -" not in command:
        assert notes == []


@pytest.mark.parametrize("place", FULL or ["/dev/null/x"])
def test_a_full_disk_behind_the_json_gets_one_sentence(place: str) -> None:
    done = minivllm("race", "--virtual", "--json", place)
    assert place in one_sentence(done, 1)


def test_what_stands_beside_the_result_may_fail_to_be_written() -> None:
    done = in_shell("minivllm race --virtual --json - 2>&-")
    assert done.returncode == 0
    assert json.loads(done.stdout)["config"]["requests"] == 8
    done = in_shell("minivllm race --nonsense 2>&-")
    assert (done.returncode, done.stdout) == (2, "")


def test_a_closed_standard_output_gets_one_sentence() -> None:
    done = in_shell("minivllm race --virtual >&-")
    assert one_sentence(done, 1) == "standard output is closed; run the command with it open"


# --- Pipes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        "race --virtual --requests 100 --rows 100 --blocks 9999",
        "race --virtual --json - 2>/dev/null",
        "generate hi --model virtual --max-tokens 8000",
        "race --help",
    ],
)
def test_a_reader_that_goes_away_is_no_error(command: str) -> None:
    done = in_shell(f"set -o pipefail; minivllm {command} | head -c 1 >/dev/null")
    assert done.stderr == ""
    assert done.returncode in (0, 141)  # 0: it had written all before the reader left


def test_a_pipe_can_be_written_as_a_file(tmp_path: Path) -> None:
    done = in_shell(
        f"mkfifo {tmp_path}/pipe; cat {tmp_path}/pipe & minivllm race --virtual --json {tmp_path}/pipe >/dev/null; wait"
    )
    assert done.returncode == 0
    assert json.loads(done.stdout)["config"]["requests"] == 8


# --- At the same time ---------------------------------------------------------------------------------------


def test_two_races_at_the_same_time_do_not_disturb_each_other(tmp_path: Path) -> None:
    race = "minivllm race --model tiny --requests 4 --max-tokens 8 --coordination single-flight"
    done = in_shell(f"{race} --json {tmp_path}/a >/dev/null & {race} --json {tmp_path}/b >/dev/null; wait")
    assert (done.returncode, done.stderr) == (0, "")
    found = [json.loads((tmp_path / name).read_text()) for name in "ab"]
    assert [[r["recovered_tokens"] for r in data["requests"]] for data in found] == [[0, 528, 528, 528]] * 2
