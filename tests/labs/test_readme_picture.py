"""The picture in README is what the engine's own log gives, to the byte.

    python -m tests.labs.test_readme_picture

draws it anew, when the drawing or the cost model has changed.
"""

from __future__ import annotations

from pathlib import Path

from minivllm import EngineConfig, EngineCore, VirtualRunner
from minivllm.bench.workloads import Race, race_submissions
from minivllm.log.event_log import EventLog
from widgets import compare_timelines
from widgets.drawing import Picture

PICTURE = Path(__file__).resolve().parents[2] / "labs" / "images" / "race.svg"


def race_log(**settings: str) -> EventLog:
    """Fire four identical requests at a cold cache, on the virtual clock."""
    core = EngineCore(EngineConfig(**settings), VirtualRunner())  # type: ignore[arg-type]
    core.submit_batch(race_submissions(Race(num_requests=4, max_tokens=32), core.runner.tokenizer))
    core.run()
    return core.log


def draw() -> Picture:
    """Return README's picture: the same race three ways, on one axis."""
    return compare_timelines(
        {
            "independent": race_log(),
            "single flight, released on completion": race_log(coordination="single-flight", release="on-completion"),
            "single flight, released after prefill": race_log(coordination="single-flight", release="after-prefill"),
        }
    )


def test_the_picture_in_readme_is_what_the_log_gives() -> None:
    assert PICTURE.read_text() == draw().svg, "draw it anew: python -m tests.labs.test_readme_picture"


if __name__ == "__main__":
    draw().save(PICTURE)
