"""Two clocks: one that passes by itself, one that stands still until it is advanced."""

from __future__ import annotations

import math

import pytest

from minivllm.clock import VirtualClock, WallClock


def test_virtual_time_stands_still_until_it_is_advanced() -> None:
    clock = VirtualClock()
    assert clock.now_ms() == clock.now_ms() == 0.0
    clock.advance(2.5)
    clock.advance(0)
    clock.advance(1.0)
    assert clock.now_ms() == 3.5


@pytest.mark.parametrize("ms", [-1, -0.001, -math.inf])
def test_virtual_time_does_not_go_back(ms: float) -> None:
    clock = VirtualClock()
    clock.advance(4.0)
    with pytest.raises(ValueError, match="time does not go back"):
        clock.advance(ms)
    assert clock.now_ms() == 4.0


def test_real_time_begins_near_0_counts_milliseconds_and_never_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([100.0, 100.0, 100.25, 101.5])
    monkeypatch.setattr("minivllm.clock.time.perf_counter", lambda: next(seconds))
    clock = WallClock()
    assert [clock.now_ms() for _ in range(3)] == [0.0, 250.0, 1500.0]


def test_real_time_passes_by_itself() -> None:
    clock = WallClock()
    first = clock.now_ms()
    while clock.now_ms() == first:
        pass
    assert clock.now_ms() > first >= 0.0
