"""The cold-cache race gives the same blocks on a clock and on a model, and says what its figures mean."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from minivllm.bench.race import RaceResult, run_race
from minivllm.bench.workloads import Race
from minivllm.config import EngineConfig
from minivllm.engine.engine import Engine
from minivllm.errors import ConfigError, EngineClosedError, EngineDeadError, InvalidRequestError
from minivllm.log import events as ev
from minivllm.log.event import event_from_dict
from minivllm.log.replay import replay
from minivllm.runners.virtual import VirtualRunner
from minivllm.step import ScheduledStep

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
    "shared-prefix": EngineConfig(coordination="shared-prefix", max_num_batched_tokens=300),
    "wait-or-recompute": EngineConfig(coordination="wait-or-recompute", max_num_batched_tokens=300),
    "adoption": EngineConfig(publication="incremental", adoption=True, max_num_batched_tokens=700),
    "few-blocks-shared-prefix": EngineConfig(coordination="shared-prefix", num_blocks=39, publication="incremental"),
}
"""Each of them on the same four requests: what they do must not depend on the model."""


def recovered(result: RaceResult) -> list[int]:
    return [request.recovered_tokens for request in result.requests]


def what_happened(result: RaceResult) -> list[dict[str, Any]]:
    """Return the log without what belongs to the model or the clock: times, tokens, text, hashes, names."""
    apart = ("ms", "token_id", "text", "prompt_token_ids", "block_hashes", "parent_hashes", "block_hash", "runner")
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


@pytest.mark.parametrize("coordination", ["shared-prefix", "wait-or-recompute"])
@pytest.mark.parametrize("publication", ["on-completion", "incremental"])
@pytest.mark.parametrize("model", ["virtual", "tiny"])
def test_behind_a_shared_prefix_each_but_the_first_recovers_it_whole(
    coordination: str, publication: str, model: str
) -> None:
    race = Race(num_requests=8, prompt_tokens=532, shared_tokens=512, max_tokens=2)
    result = run_race(race, EngineConfig(coordination=coordination, publication=publication), model)
    assert recovered(result) == [0] + [512] * 7
    assert [request.role for request in result.requests] == ["leader"] + ["held"] * 7
    assert result.blocks.duplicates == 0


def small_share(**settings: Any) -> RaceResult:
    """Race two requests that share one block of eight tokens, with 56 of their own."""
    race = Race(num_requests=2, prompt_tokens=64, shared_tokens=8, max_tokens=2)
    config = EngineConfig(**{"block_size": 8, "coordination": "wait-or-recompute", **settings})
    return run_race(race, config, "virtual")


def test_a_small_share_is_recomputed_because_that_is_sooner_and_a_target_flips_the_choice() -> None:
    sooner = small_share()
    assert (recovered(sooner), sooner.blocks.duplicates) == ([0, 0], 1)
    chosen = next(event for event in sooner.log if isinstance(event, ev.RecomputeChosen))
    assert chosen.wait_ms > chosen.recompute_ms
    for target, found in ((chosen.wait_ms - 0.01, 0), (chosen.wait_ms + 0.01, 8)):
        assert recovered(small_share(ttft_target_ms=target)) == [0, found]
    waited, computed = small_share(ttft_target_ms=chosen.wait_ms + 0.01).requests[1], sooner.requests[1]
    assert waited.ttft_ms == pytest.approx(chosen.wait_ms)
    assert computed.ttft_ms == pytest.approx(chosen.recompute_ms)
    assert (waited.role, computed.role) == ("held", "independent")


def test_with_adoption_a_running_request_takes_what_another_has_published_since() -> None:
    race = Race(num_requests=2, prompt_tokens=400, max_tokens=2)
    config = EngineConfig(publication="incremental", max_num_batched_tokens=600, long_prefill_token_threshold=368)
    for adoption, adopted in ((False, 0), (True, 144)):
        result = run_race(race, config.replace(adoption=adoption), "virtual")
        assert recovered(result) == [0, 0]
        assert [request.adopted_tokens for request in result.requests] == [0, adopted]


def test_at_allocation_requests_of_one_step_share_at_once() -> None:
    result = run_race(COLD, EngineConfig(publication="at-allocation"), "virtual")
    assert recovered(result) == [0, 528, 528, 528]
    with pytest.raises(ConfigError, match="on 'tiny'"):
        run_race(COLD, EngineConfig(publication="at-allocation"), "tiny")
    consent = EngineConfig(publication="at-allocation", allow_unsafe="at-allocation")
    assert recovered(run_race(COLD, consent, "tiny")) == [0, 528, 528, 528]


@pytest.mark.parametrize("model", ["virtual", "tiny"])
def test_each_sample_is_a_request_of_the_result_and_draws_for_itself(model: str) -> None:
    race = Race(num_requests=2, prompt_tokens=50, max_tokens=8, samples=3, temperature=0.9, seed=4)
    result = run_race(race, SINGLE_FLIGHT, model)
    assert [r.request_id for r in result.requests] == ["r0", "r0.1", "r0.2", "r1", "r1.1", "r1.2"]
    assert [r.role for r in result.requests] == ["leader", "sample", "sample", "follower", "sample", "sample"]
    assert recovered(result) == [0, 0, 0, 48, 0, 0]
    assert [r.output_tokens for r in result.requests] == [8] * 6
    outputs = [tuple(request.output_token_ids) for request in result.requests]
    assert len(set(outputs)) == 6, "seeds 4 to 9"
    shifted = run_race(
        Race(num_requests=1, prompt_tokens=50, max_tokens=8, samples=6, temperature=0.9, seed=4), model=model
    )
    assert [tuple(request.output_token_ids) for request in shifted.requests] == outputs
    prefilled = [e.num_tokens for e in result.log if isinstance(e, ev.ChunkComputed) and e.phase == "prefill"]
    assert prefilled == [50, 2]


def test_more_samples_than_rows_are_refused_before_anything_runs(engine: Engine) -> None:
    before, events = engine.state(), len(engine.log)
    with pytest.raises(InvalidRequestError, match="n is 9 samples, which decode side by side, and max_num_seqs is 8"):
        run_race(Race(num_requests=1, samples=9), engine=engine)
    assert (engine.state(), len(engine.log)) == (before, events)


def test_a_race_with_samples_finds_ids_that_are_free_for_them_too(engine: Engine) -> None:
    engine.submit([1], max_tokens=1, request_id="r1.1").result(30)
    result = run_race(Race(num_requests=2, prompt_tokens=40, samples=2, max_tokens=2), engine=engine)
    assert [r.request_id for r in result.requests] == ["race2-r0", "race2-r0.1", "race2-r1", "race2-r1.1"]


def test_an_interrupted_race_takes_every_sample_back(engine: Engine) -> None:
    def interrupt(events: object) -> None:
        raise KeyboardInterrupt

    race = Race(num_requests=2, max_tokens=3000, prompt_tokens=100, samples=3)
    with pytest.raises(KeyboardInterrupt):
        run_race(race, engine=engine, on_change=interrupt)
    state = engine.state()
    assert len(state.requests) == 6
    assert {request.state.is_ended for request in state.requests.values()} == {True}
    engine.check_invariants()


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
    if setting.startswith("few-blocks"):
        assert sum(request.num_preemptions for request in real.requests) > 0


@pytest.mark.parametrize("setting", ["on-completion", "released-after-prefill", "shared-prefix", "few-blocks"])
def test_samples_too_do_the_same_on_a_model_and_on_the_virtual_clock(setting: str) -> None:
    race = Race(num_requests=3, prompt_tokens=530, shared_tokens=515, max_tokens=20, samples=2, temperature=0.8)
    config = SETTINGS[setting].replace(num_blocks=60) if setting == "few-blocks" else SETTINGS[setting]
    real, virtual = run_race(race, config, "tiny"), run_race(race, config, "virtual")
    assert what_happened(real) == what_happened(virtual)
    assert [request.role for request in real.requests].count("sample") == 3
    assert real.blocks == virtual.blocks


@pytest.mark.model
@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (EngineConfig(), [0, 0, 0]),
        (SINGLE_FLIGHT, [0, 96, 96]),
        (EngineConfig(coordination="shared-prefix"), [0, 96, 96]),
        (EngineConfig(coordination="wait-or-recompute"), [0, 96, 96]),
    ],
)
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
        "id", "role", "prompt_tokens", "recovered_tokens", "adopted_tokens", "output_tokens", "output_token_ids",
        "ttft_ms", "completion_ms",
    ]  # fmt: skip
    assert [request["id"] for request in data["requests"]] == ["r0", "r1", "r2", "r3"]
    assert all(len(request["output_token_ids"]) == request["output_tokens"] == 8 for request in data["requests"])
    assert list(data["blocks"]) == ["capacity", "free", "published", "duplicates"]
    assert data["config"]["model"] == "virtual"
    assert data["config"]["coordination"] == "single-flight"
    assert list(data["config"]) == ["model", *COLD.as_dict(), *EngineConfig().as_dict()]
    assert data["config"]["samples"] == 1
    assert {request["adopted_tokens"] for request in data["requests"]} == {0}
    assert [event["seq"] for event in data["events"]] == list(range(len(result.log)))


@pytest.mark.parametrize(
    ("race", "config", "words"),
    [
        (COLD, SETTINGS["shared-prefix"], "published on-completion, shared-prefix"),
        (COLD, SETTINGS["adoption"], "published incremental, independent, with adoption"),
        (Race(num_requests=2, samples=3, max_tokens=1, prompt_tokens=5), EngineConfig(),
         "2 identical requests of 5 tokens, 3 samples of each, 1 output tokens each"),
    ],
)  # fmt: skip
def test_the_heading_says_what_is_raced(race: Race, config: EngineConfig, words: str) -> None:
    assert words in run_race(race, config, "virtual").heading()


def test_the_events_of_the_json_replay_to_the_blocks_that_it_counts() -> None:
    result = run_race(COLD, SINGLE_FLIGHT, "virtual")
    state = replay(event_from_dict(event) for event in result.as_dict()["events"])
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
        (COLD, SETTINGS["shared-prefix"], "3 of them were held while another was computing the next missing block"),
        (Race(num_requests=2, shared_tokens=512), EngineConfig(coordination="wait-or-recompute"), "1 of them was held"),
        (Race(num_requests=2, prompt_tokens=64, shared_tokens=8, max_tokens=2),
         EngineConfig(coordination="wait-or-recompute", block_size=8),
         "1 of them computed what another request was computing at the same time, because that was sooner"),
        (COLD, EngineConfig(publication="at-allocation"), "published before it is computed, which is not safe, and 3"),
        (Race(num_requests=1, samples=3, prompt_tokens=50, max_tokens=4), EngineConfig(),
         "2 further samples took their prompt's blocks from the first one, which computed it for all; 2 partly filled"),
        (COLD, SETTINGS["adoption"], "tokens more were adopted in mid-prefill, from blocks that others had published"),
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
