"""The cold-cache race gives the same blocks on a clock and on a model, and says what its figures mean."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from minivllm import events as ev
from minivllm.config import EngineConfig
from minivllm.engine_thread import Engine
from minivllm.errors import ConfigError, EngineClosedError, EngineDeadError, InvalidRequestError
from minivllm.race import RaceResult, run_race
from minivllm.replay import replay
from minivllm.runners.virtual import VirtualRunner
from minivllm.step import ScheduledStep
from minivllm.workloads import Race

COLD = Race(num_requests=4, prompt_tokens=532, max_tokens=8)
LONG = Race(num_requests=4, prompt_tokens=532, max_tokens=24)
SINGLE_FLIGHT = EngineConfig(coordination="single-flight", release="after-prefill")
SETTINGS = {
    "on-completion": EngineConfig(),
    "incremental": EngineConfig(publication="incremental"),
    "released-after-prefill": SINGLE_FLIGHT,
    "released-on-completion": EngineConfig(coordination="single-flight", release="on-completion"),
    "few-blocks": EngineConfig(coordination="single-flight", num_blocks=39, publication="incremental"),
    "few-rows": EngineConfig(max_num_seqs=2, max_num_batched_tokens=300),
}


def recovered(result: RaceResult) -> list[int]:
    return [request.recovered_tokens for request in result.requests]


def what_happened(result: RaceResult) -> list[dict[str, Any]]:
    """Return the log without what belongs to the model or the clock: times, tokens, text, hashes, names."""
    apart = ("ms", "token_id", "text", "prompt_token_ids", "block_hashes", "parent_hashes", "runner", "block_size")
    events = [event.as_dict() for event in result.log]
    return [{name: value for name, value in event.items() if name not in apart} for event in events]


# --- What is recovered --------------------------------------------------------------------------------------


def test_four_identical_cold_requests_recover_nothing_when_blocks_are_published_on_completion() -> None:
    result = run_race(COLD, model="virtual")
    assert recovered(result) == [0, 0, 0, 0]
    assert {request.role for request in result.requests} == {"independent"}
    assert result.blocks.duplicates == 3 * 33


@pytest.mark.parametrize("release", ["after-prefill", "on-completion"])
def test_under_single_flight_each_follower_recovers_528_of_532(release: str) -> None:
    result = run_race(COLD, EngineConfig(coordination="single-flight", release=release), "virtual")
    assert recovered(result) == [0, 528, 528, 528]
    assert [request.role for request in result.requests] == ["leader", "follower", "follower", "follower"]


def test_a_shared_prefix_is_no_flight_each_prompt_leads_its_own() -> None:
    result = run_race(Race(num_requests=3, shared_tokens=500, max_tokens=2), SINGLE_FLIGHT, "virtual")
    assert {request.role for request in result.requests} == {"leader"}
    assert recovered(result) == [0, 0, 0]


def test_staggered_requests_recover_what_an_incremental_policy_has_published() -> None:
    race = Race(num_requests=3, shared_tokens=500, max_tokens=4, arrival="staggered")
    assert recovered(run_race(race, EngineConfig(publication="incremental"), "virtual")) == [0, 496, 496]
    assert recovered(run_race(race, EngineConfig(), "virtual")) == [0, 0, 0]


# --- Real and virtual ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_model_and_the_virtual_clock_do_the_same_block_for_block(setting: str) -> None:
    real = run_race(LONG, SETTINGS[setting], "tiny")
    virtual = run_race(LONG, SETTINGS[setting], "virtual")
    assert what_happened(real) == what_happened(virtual)
    assert recovered(real) == recovered(virtual)
    assert real.blocks == virtual.blocks
    if setting == "few-blocks":
        assert sum(request.num_preemptions for request in real.requests) > 0


@pytest.mark.model
@pytest.mark.parametrize(("config", "expected"), [(EngineConfig(), [0, 0, 0]), (SINGLE_FLIGHT, [0, 96, 96])])
def test_the_default_model_does_the_same_as_the_virtual_clock_block_for_block(
    config: EngineConfig, expected: list[int]
) -> None:
    race = Race(num_requests=3, prompt_tokens=100, max_tokens=3)
    real, virtual = run_race(race, config, "smollm2"), run_race(race, config, "virtual")
    assert what_happened(real) == what_happened(virtual)
    assert recovered(real) == expected


@pytest.mark.parametrize("model", ["tiny", "virtual"])
def test_with_a_temperature_followers_recover_the_same_and_draw_differently_and_repeat(model: str) -> None:
    race = Race(num_requests=4, prompt_tokens=100, max_tokens=12, temperature=0.9, seed=3)
    first, again = run_race(race, SINGLE_FLIGHT, model), run_race(race, SINGLE_FLIGHT, model)
    outputs = [tuple(request.output_token_ids) for request in first.requests]
    assert recovered(first) == [0, 96, 96, 96]
    assert len(set(outputs)) == 4
    assert [tuple(request.output_token_ids) for request in again.requests] == outputs
    other = run_race(Race(num_requests=4, prompt_tokens=100, max_tokens=12, temperature=0.9), SINGLE_FLIGHT, model)
    assert [tuple(request.output_token_ids) for request in other.requests] != outputs


@pytest.mark.parametrize("model", ["tiny", "virtual"])
def test_greedy_requests_with_the_same_prompt_put_out_the_same(model: str) -> None:
    result = run_race(COLD, SINGLE_FLIGHT, model)
    assert len({tuple(request.output_token_ids) for request in result.requests}) == 1
    assert {request.output_tokens for request in result.requests} == {8}


def test_a_virtual_race_gives_the_same_bytes_each_time() -> None:
    first, again = run_race(COLD, SINGLE_FLIGHT, "virtual"), run_race(COLD, SINGLE_FLIGHT, "virtual")
    assert json.dumps(first.as_dict()) == json.dumps(again.as_dict())
    assert repr(first) == repr(again)
    assert first.timeline() == again.timeline()


# --- What is handed out -------------------------------------------------------------------------------------


def test_the_json_has_what_it_promises_and_nothing_else() -> None:
    result = run_race(COLD, SINGLE_FLIGHT, "virtual")
    data = json.loads(json.dumps(result.as_dict()))
    assert list(data) == ["config", "requests", "blocks", "events"]
    assert {list(request) == list(data["requests"][0]) for request in data["requests"]} == {True}
    assert list(data["requests"][0]) == [
        "id", "role", "prompt_tokens", "recovered_tokens", "output_tokens", "output_token_ids", "ttft_ms",
        "completion_ms",
    ]  # fmt: skip
    assert [request["id"] for request in data["requests"]] == ["r0", "r1", "r2", "r3"]
    assert all(len(request["output_token_ids"]) == request["output_tokens"] == 8 for request in data["requests"])
    assert list(data["blocks"]) == ["capacity", "free", "published", "duplicates"]
    assert data["config"]["model"] == "virtual"
    assert data["config"]["coordination"] == "single-flight"
    assert [event["seq"] for event in data["events"]] == list(range(len(result.log)))


def test_the_events_of_the_json_replay_to_the_blocks_that_it_counts() -> None:
    result = run_race(COLD, SINGLE_FLIGHT, "virtual")
    state = replay(ev.event_from_dict(event) for event in result.as_dict()["events"])
    assert len(state.free_queue) == result.blocks.free == result.blocks.capacity == 512
    assert len(state.prefix_index) == result.blocks.published == 33
    assert {r.state.value for r in state.requests.values()} == {"finished"}


def test_the_table_of_a_small_race() -> None:
    race = Race(num_requests=2, prompt_tokens=10, max_tokens=2)
    result = run_race(race, EngineConfig(block_size=4, num_blocks=8, coordination="single-flight"), "virtual")
    heading, *table, words = repr(result).splitlines()
    assert heading == (
        "2 identical requests of 10 tokens, 2 output tokens each, on a cold cache of virtual: "
        "published on-completion, single-flight, released after-prefill"
    )
    assert [line.split()[:5] for line in table[1:3]] == [
        ["r0", "leader", "10", "0", "2"],
        ["r1", "follower", "10", "8", "2"],
    ]
    assert words.startswith("8 of 10 prompt tokens of the later request were recovered: ")


@pytest.mark.parametrize(
    ("race", "config", "words"),
    [
        (COLD, EngineConfig(), "0 of 1,596 prompt tokens of the 3 later requests were recovered: nothing was published "
         "before r0 ended"),
        (COLD, EngineConfig(publication="incremental"), "after the step that computed it, and all were"),
        (COLD, SINGLE_FLIGHT, "3 followers were held until their leader, r0, had computed and published its prompt"),
        (COLD, SETTINGS["released-on-completion"], "3 followers were held until their leader, r0, had ended"),
        (COLD, SINGLE_FLIGHT, "More than 528 each is not possible"),
        (COLD, SETTINGS["few-rows"], "a block is published when its request ends, and 2 of them were admitted after"),
        (LONG, SETTINGS["few-blocks"], "Blocks ran out, so requests were preempted"),
        (COLD, EngineConfig(enable_prefix_caching=False), "prefix caching is off"),
        (Race(num_requests=2, shared_tokens=15), EngineConfig(), "share less than one full block of 16 tokens"),
        (Race(num_requests=1), EngineConfig(), "nothing to recover"),
    ],
)  # fmt: skip
def test_the_figures_are_explained_in_words(race: Race, config: EngineConfig, words: str) -> None:
    assert words in run_race(race, config, "virtual").explanation()


def test_a_caller_hears_every_event_once_and_in_order() -> None:
    heard: list[ev.Event] = []
    result = run_race(COLD, SINGLE_FLIGHT, "virtual", on_change=heard.extend)
    assert heard == list(result.log)
    heard.clear()
    result = run_race(COLD, SINGLE_FLIGHT, "tiny", on_change=heard.extend)
    assert heard == list(result.log)


# --- On an engine that is there -----------------------------------------------------------------------------


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine("virtual", coordination="single-flight") as made:
        yield made


def test_an_engine_races_again_and_again_each_time_cold_and_stays_open(engine: Engine) -> None:
    first, second = run_race(COLD, engine=engine), run_race(COLD, engine=engine)
    assert recovered(first) == recovered(second) == [0, 528, 528, 528]
    assert [request.request_id for request in second.requests] == ["race2-r0", "race2-r1", "race2-r2", "race2-r3"]
    assert second.metrics.num_steps == first.metrics.num_steps
    state = replay(second.log)
    assert list(state.requests) == [request.request_id for request in second.requests]
    assert len(state.prefix_index) == second.blocks.published == 33
    assert engine.is_alive
    assert engine.submit([1, 2, 3], max_tokens=1).result(10).finish_reason == "length"


def test_an_engine_and_a_config_together_are_refused(engine: Engine) -> None:
    for settings in ({"config": EngineConfig()}, {"model": "tiny"}):
        with pytest.raises(ConfigError, match="either engine= or a config and a model"):
            run_race(COLD, engine=engine, **settings)


def gated(gate: threading.Event, entered: threading.Event) -> VirtualRunner:
    """Return a runner that waits in its first step until the gate opens."""

    def wait(step: ScheduledStep) -> None:
        entered.set()
        assert gate.wait(30)

    return VirtualRunner(on_step=wait)


def test_a_second_race_while_one_runs_gets_one_sentence_and_the_first_goes_on() -> None:
    gate, entered = threading.Event(), threading.Event()
    results: list[RaceResult] = []
    with Engine(runner=lambda: gated(gate, entered)) as engine:
        first = threading.Thread(target=lambda: results.append(run_race(COLD, engine=engine)))
        first.start()
        assert entered.wait(30)

        def open_when_asked() -> None:
            while not engine._worker.commands.qsize():
                time.sleep(0.001)
            gate.set()  # the second race's question is there, and is answered between two steps

        second = threading.Thread(target=open_when_asked)
        second.start()
        with pytest.raises(ConfigError, match="the engine is busy: 4 requests are in it; wait for them or abort"):
            run_race(COLD, engine=engine)
        first.join(30)
        second.join(30)
    assert recovered(results[0]) == [0, 0, 0, 0]


def test_a_race_that_can_never_run_leaves_the_cache_as_it_was(engine: Engine) -> None:
    engine.submit(list(range(40)), max_tokens=1).result(10)
    before = engine.state()
    with pytest.raises(InvalidRequestError, match="100,000 tokens and max_tokens is 128"):
        run_race(Race(prompt_tokens=100_000), engine=engine)
    assert engine.state() == before
    assert len(before.prefix_index) == 2


def test_a_runner_that_fails_in_the_race_is_the_cause_of_its_error() -> None:
    def fail(step: ScheduledStep) -> None:
        if step.number == 3:
            raise RuntimeError("the device is gone")

    with Engine(runner=lambda: VirtualRunner(on_step=fail)) as engine:
        with pytest.raises(EngineDeadError, match="the device is gone") as caught:
            run_race(COLD, engine=engine)
        assert isinstance(engine.error, RuntimeError)
        assert caught.value.__cause__ is engine.error
        with pytest.raises(EngineDeadError, match="make a new engine"):
            run_race(COLD, engine=engine)


def test_closing_the_engine_in_the_race_ends_the_race() -> None:
    gate, entered = threading.Event(), threading.Event()
    engine = Engine(runner=lambda: gated(gate, entered))

    def stop_in_the_first_step() -> None:
        assert entered.wait(30)
        engine._worker.stop()
        gate.set()

    stopper = threading.Thread(target=stop_in_the_first_step)
    stopper.start()
    with pytest.raises(EngineClosedError, match="closed"):
        run_race(Race(num_requests=2, prompt_tokens=40, max_tokens=400), engine=engine)
    stopper.join(30)
    engine.close()


def test_an_interrupted_race_takes_its_requests_back(engine: Engine) -> None:
    def interrupt(events: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_race(Race(num_requests=2, max_tokens=5000, prompt_tokens=100), engine=engine, on_change=interrupt)
    assert {request.state.is_ended for request in engine.state().requests.values()} == {True}
    engine.check_invariants()
    assert recovered(run_race(COLD, engine=engine)) == [0, 528, 528, 528]
