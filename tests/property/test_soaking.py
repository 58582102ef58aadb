"""The command tests/soak: what it prints, how it is stopped, and what it does with a fault."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from minivllm.engine import core as engine
from tests.property.soaking import NUM_COMBINATIONS, Tally, live_one, plan_of, report_failure
from tests.property.test_shrinking import HeadFirst

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "tests.soaking"]
PATIENCE = 120
"""Seconds after which a command that ends at once is taken to hang."""


def test_it_prints_its_seed_first_and_at_the_end_what_was_done() -> None:
    done = subprocess.run(
        [*COMMAND, "--actions", "4000", "--seed", "5"], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "seed 5"
    assert lines[-1] == "nothing found"
    actions = re.search(r"([\d,]+) actions in", done.stdout)
    assert actions is not None
    assert int(actions[1].replace(",", "")) >= 4_000
    for what in ("steps", "preemptions", "aborts", "failures", "hand-overs", "evicted blocks", "forks", "prefix waits"):
        count = re.search(rf"\b{what} ([\d,]+)", done.stdout)
        assert count is not None, what
        assert int(count[1].replace(",", "")) > 0, what


def test_ctrl_c_prints_what_is_done_so_far() -> None:
    started = subprocess.Popen([*COMMAND, "--seed", "6"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    assert started.stdout.readline() == "seed 6\n"
    assert "a second" in started.stdout.readline()
    started.send_signal(signal.SIGINT)
    rest, _ = started.communicate(timeout=PATIENCE)
    assert started.returncode == 130
    assert "actions in" in rest
    assert "stopped by Ctrl-C" in rest


def test_a_fault_is_printed_as_a_cell_with_the_command_that_shows_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "KVCacheManager", HeadFirst)
    number = next(n for n in range(50) if live_one(4, n, Tally()) is not None)
    said: list[str] = []
    assert not report_failure(4, number, said.append)
    text = "\n".join(said)
    assert f"tests/soak --seed 4 --life {number}" in text
    assert "core = EngineCore(config, runner)" in text
    assert "core.submit(" in text
    assert "assert " in text


def test_a_life_that_goes_well_says_so() -> None:
    said: list[str] = []
    assert report_failure(4, 0, said.append)
    assert "goes well" in said[0]


def test_so_many_lives_as_there_are_combinations_go_through_all_of_them() -> None:
    setups = set()
    for number in range(NUM_COMBINATIONS):
        setup, _, _ = plan_of(7, number)
        names = (
            "publication",
            "coordination",
            "release",
            "eviction",
            "scheduling",
            "admission",
            "watermark",
            "adoption",
        )
        setups.add((*(setup[name] for name in names), setup["enable_prefix_caching"]))
    assert len(setups) == 3 * 5 * 2 * 2 * 2 * 2 * 2 * 2


def test_a_life_is_the_same_each_time_it_is_lived() -> None:
    once, again = Tally(), Tally()
    for number in range(5):
        assert live_one(8, number, once) is None
        assert live_one(8, number, again) is None
    assert once == again
