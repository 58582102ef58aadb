"""`minivllm race`: the table, the timeline, the JSON, and the same bytes each time on the virtual clock."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import ROOT, environment, in_process, minivllm, one_sentence

SMALL = ("race", "--requests", "4", "--prompt-tokens", "532", "--max-tokens", "8")
SINGLE_FLIGHT = ("--coordination", "single-flight", "--release", "after-prefill")


def race_json(*arguments: str) -> dict[str, Any]:
    done = in_process(*arguments, "--json", "-")
    assert done.returncode == 0, done.stderr
    data: dict[str, Any] = json.loads(done.stdout)
    return data


def recovered(data: dict[str, Any]) -> list[int]:
    return [request["recovered_tokens"] for request in data["requests"]]


def test_the_defaults_are_those_of_the_documentation() -> None:
    data = race_json("race", "--virtual")
    config = data["config"]
    asked = {name: config[name] for name in ("requests", "prompt_tokens", "shared_tokens", "max_tokens")}
    assert asked == {"requests": 8, "prompt_tokens": 532, "shared_tokens": 532, "max_tokens": 128}
    engine = ("num_blocks", "block_size", "max_num_batched_tokens", "max_num_seqs")
    assert [config[name] for name in engine] == [512, 16, 2048, 8]
    policies = ("publication", "coordination", "release")
    assert [config[name] for name in policies] == ["on-completion", "independent", "after-prefill"]
    more = ("samples", "adoption", "ttft_target_ms", "allow_unsafe", "scheduling", "admission", "block_hash")
    assert [config[name] for name in more] == [1, False, None, "", "fcfs", "by-chunk", "sha256"]
    assert recovered(data) == [0] * 8
    assert data["blocks"] == {"capacity": 512, "free": 512, "published": 41, "duplicates": 287}


@pytest.mark.parametrize("model", ["--virtual", "--model=tiny"])
def test_single_flight_lets_each_follower_recover_528_behind_one_leader(model: str) -> None:
    data = race_json(*SMALL, *SINGLE_FLIGHT, model)
    assert recovered(data) == [0, 528, 528, 528]
    assert [request["role"] for request in data["requests"]] == ["leader", "follower", "follower", "follower"]
    assert recovered(race_json(*SMALL, model)) == [0, 0, 0, 0]


@pytest.mark.model
def test_the_default_model_recovers_what_the_virtual_clock_predicts() -> None:
    race = ("race", "--requests", "4", "--prompt-tokens", "532", "--max-tokens", "4")
    real, virtual = race_json(*race, *SINGLE_FLIGHT), race_json(*race, *SINGLE_FLIGHT, "--virtual")
    assert recovered(real) == recovered(virtual) == [0, 528, 528, 528]
    assert real["blocks"] == virtual["blocks"]
    assert [request["role"] for request in real["requests"]].count("leader") == 1
    assert [event["kind"] for event in real["events"]] == [event["kind"] for event in virtual["events"]]


@pytest.mark.model
def test_the_default_model_recovers_nothing_when_nobody_waits() -> None:
    data = race_json("race", "--requests", "4", "--prompt-tokens", "532", "--max-tokens", "4")
    assert data["config"]["model"] == "smollm2"
    assert recovered(data) == [0, 0, 0, 0]


@pytest.mark.model
def test_the_default_model_draws_different_outputs_that_repeat_with_the_seed() -> None:
    race = ("race", "--requests", "4", "--prompt-tokens", "64", "--max-tokens", "8", "--coordination", "single-flight")
    drawn = (*race, "--temperature", "0.9", "--seed")
    first, again, other = (race_json(*drawn, seed) for seed in ("7", "7", "8"))
    outputs = [[tuple(request["output_token_ids"]) for request in data["requests"]] for data in (first, again, other)]
    greedy = race_json(*race, "--seed", "7")
    assert recovered(first) == recovered(again) == recovered(greedy) == [0, 48, 48, 48]
    assert len(set(outputs[0])) > 1
    assert outputs[0] == outputs[1] != outputs[2]


# --- A shared prefix, and not an identical prompt ------------------------------------------------------------

SHARED = ("race", "--shared-tokens", "512", "--prompt-tokens", "532", "--max-tokens", "2")


def held_by_512(data: dict[str, Any]) -> None:
    """Check that of eight requests one computed the 512 shared tokens, for which the others were held."""
    assert recovered(data) == [0] + [512] * 7
    assert [request["role"] for request in data["requests"]] == ["leader"] + ["held"] * 7
    assert [request["adopted_tokens"] for request in data["requests"]] == [0] * 8
    assert data["blocks"]["duplicates"] == 0
    assert data["blocks"]["free"] == data["blocks"]["capacity"]


@pytest.mark.parametrize("coordination", ["shared-prefix", "wait-or-recompute"])
def test_behind_a_shared_prefix_each_but_the_first_recovers_512_on_a_clock_and_on_a_model(coordination: str) -> None:
    tiny, virtual = (race_json(*SHARED, "--coordination", coordination, on) for on in ("--model=tiny", "--virtual"))
    held_by_512(tiny)
    held_by_512(virtual)
    assert [event["kind"] for event in tiny["events"]] == [event["kind"] for event in virtual["events"]]
    assert tiny["blocks"] == virtual["blocks"]
    assert recovered(race_json(*SHARED, "--virtual")) == [0] * 8


@pytest.mark.model
@pytest.mark.parametrize("coordination", ["shared-prefix", "wait-or-recompute"])
def test_behind_a_shared_prefix_the_default_model_does_what_the_virtual_clock_does(coordination: str) -> None:
    real, virtual = (race_json(*SHARED, "--coordination", coordination, *on) for on in ((), ("--virtual",)))
    assert real["config"]["model"] == "smollm2"
    held_by_512(real)
    held_by_512(virtual)
    assert [event["kind"] for event in real["events"]] == [event["kind"] for event in virtual["events"]]
    assert real["blocks"] == virtual["blocks"]


SMALL_SHARE = (
    *("race", "--requests", "2", "--prompt-tokens", "64", "--shared-tokens", "8", "--max-tokens", "2"),
    *("--block-size", "8", "--coordination", "wait-or-recompute"),
)


def choices(data: dict[str, Any]) -> list[str]:
    """Return what was chosen, in the order of the events."""
    return [event["kind"] for event in data["events"] if event["kind"] in ("prefix_awaited", "recompute_chosen")]


@pytest.mark.parametrize(
    "model", ["--virtual", "--model=tiny", pytest.param("--model=smollm2", marks=pytest.mark.model)]
)
def test_a_small_share_is_recomputed_because_that_is_sooner_and_a_target_for_the_first_token_flips_it(
    model: str,
) -> None:
    sooner, soon_enough = race_json(*SMALL_SHARE, model), race_json(*SMALL_SHARE, model, "--ttft-target", "1000")
    assert (choices(sooner), recovered(sooner), sooner["blocks"]["duplicates"]) == (["recompute_chosen"], [0, 0], 1)
    assert (choices(soon_enough), recovered(soon_enough)) == (["prefix_awaited"], [0, 8])
    assert [request["role"] for request in soon_enough["requests"]] == ["leader", "held"]
    assert soon_enough["config"]["ttft_target_ms"] == 1000
    chosen = next(event for event in sooner["events"] if event["kind"] == "recompute_chosen")
    assert chosen["wait_ms"] > chosen["recompute_ms"]


def test_a_target_is_met_exactly_from_the_predicted_time_on() -> None:
    data = race_json(*SMALL_SHARE, "--virtual")
    wait_ms = next(event["wait_ms"] for event in data["events"] if event["kind"] == "recompute_chosen")
    for target, chosen in ((wait_ms - 0.5, "recompute_chosen"), (wait_ms + 0.5, "prefix_awaited")):
        assert choices(race_json(*SMALL_SHARE, "--virtual", "--ttft-target", str(target))) == [chosen]


def test_what_is_printed_says_who_was_held_and_why_or_why_nobody_was() -> None:
    held = " ".join(in_process(*SHARED, "--coordination", "shared-prefix", "--virtual").stdout.split())
    assert "published on-completion, shared-prefix" in held
    assert "r7 held 532 512" in held
    assert "7 of them were held while another was computing the next missing block, until it was published" in held
    computed = " ".join(in_process(*SMALL_SHARE, "--virtual").stdout.split())
    assert "1 of them computed what another request was computing at the same time, because that was sooner" in computed


# --- Publication at allocation, adoption, samples ------------------------------------------------------------

AT_ALLOCATION = (*SMALL, "--publication", "at-allocation")


def test_publication_at_allocation_runs_on_the_virtual_clock_and_says_that_it_is_not_safe() -> None:
    done = in_process(*AT_ALLOCATION, "--virtual")
    assert (done.returncode, done.stderr) == (0, "")
    assert "a block is published before it is computed, which is not safe" in " ".join(done.stdout.split())
    assert recovered(race_json(*AT_ALLOCATION, "--virtual")) == [0, 528, 528, 528]


def test_publication_at_allocation_on_a_real_model_needs_consent_by_name(tmp_path: Path) -> None:
    refused = in_process(*AT_ALLOCATION, "--model", "tiny", "--json", str(tmp_path / "race.json"))
    assert one_sentence(refused, 2) == (
        "publication 'at-allocation' lets requests read K/V that was never computed; it is for teaching, on the "
        "virtual model, or with --allow-unsafe=\"at-allocation\" on 'tiny'"
    )
    assert list(tmp_path.iterdir()) == []
    data = race_json(*AT_ALLOCATION, "--model", "tiny", "--allow-unsafe", "at-allocation")
    assert recovered(data) == [0, 528, 528, 528]
    assert data["config"]["allow_unsafe"] == "at-allocation"
    assert [request["output_tokens"] for request in data["requests"]] == [8] * 4


@pytest.mark.parametrize("model", ["--virtual", "--model=tiny"])
def test_with_adoption_a_request_that_lags_behind_takes_what_was_published_meanwhile(model: str) -> None:
    race = ("race", "--requests", "2", "--max-tokens", "2", "--publication", "incremental", "--budget", "700", model)
    without, adopting = race_json(*race), race_json(*race, "--adoption")
    adopted = [[request["adopted_tokens"] for request in data["requests"]] for data in (without, adopting)]
    assert adopted == [[0, 0], [0, 368]]
    assert recovered(without) == recovered(adopting) == [0, 0]
    assert (without["config"]["adoption"], adopting["config"]["adoption"]) == (False, True)
    assert "blocks_adopted" in {event["kind"] for event in adopting["events"]}


SAMPLES = ("race", "--requests", "2", "--prompt-tokens", "50", "--max-tokens", "6", "--samples", "3")


@pytest.mark.parametrize("model", ["--virtual", "--model=tiny"])
def test_samples_of_a_prompt_are_computed_once_and_draw_each_with_the_next_seed(model: str) -> None:
    data = race_json(*SAMPLES, *SINGLE_FLIGHT, "--temperature", "0.9", "--seed", "4", model)
    assert [request["id"] for request in data["requests"]] == ["r0", "r0.1", "r0.2", "r1", "r1.1", "r1.2"]
    roles = [request["role"] for request in data["requests"]]
    assert roles == ["leader", "sample", "sample", "follower", "sample", "sample"]
    assert recovered(data) == [0, 0, 0, 48, 0, 0]
    outputs = [request["output_token_ids"] for request in data["requests"]]
    assert len({tuple(output) for output in outputs}) == 6
    assert (data["config"]["samples"], data["config"]["requests"]) == (3, 2)
    kinds = [event["kind"] for event in data["events"]]
    assert (kinds.count("samples_forked"), kinds.count("sample_held"), kinds.count("block_copied")) == (2, 4, 4)
    lone = race_json(*SAMPLES[:-1], "6", "--requests", "1", "--temperature", "0.9", "--seed", "4", model)
    assert [request["output_token_ids"] for request in lone["requests"]] == outputs


def test_what_is_printed_has_a_row_and_a_line_for_each_sample() -> None:
    done = in_process(*SAMPLES, "--virtual", "--temperature", "0.9")
    assert (done.returncode, done.stderr) == (0, "")
    words = " ".join(done.stdout.split())
    assert "2 identical requests of 50 tokens, 3 samples of each, 6 output tokens each" in words
    assert "r1.2 sample 50 0" in words
    assert "4 further samples took their prompt's blocks from the first one, which computed it for all" in words
    assert "\nr0.2 " in done.stdout


@pytest.mark.parametrize("model", ["--virtual", "--model=tiny"])
def test_with_a_temperature_outputs_differ_and_repeat_with_the_seed(model: str) -> None:
    race = (*SMALL, *SINGLE_FLIGHT, model, "--temperature", "0.9")
    first, again, other = (race_json(*race, "--seed", seed) for seed in ("4", "4", "5"))
    outputs = [[request["output_token_ids"] for request in data["requests"]] for data in (first, again, other)]
    assert recovered(first) == recovered(other) == [0, 528, 528, 528]
    assert len({tuple(output) for output in outputs[0]}) == 4
    assert outputs[0] == outputs[1] != outputs[2]


@pytest.mark.parametrize("way", [(), ("--json", "-")], ids=["table", "json"])
@pytest.mark.parametrize(
    "setting",
    [SINGLE_FLIGHT, ("--coordination", "shared-prefix", "--shared-tokens", "512", "--samples", "2")],
    ids=["single flight", "shared prefix and samples"],
)
def test_a_virtual_race_prints_the_same_bytes_each_time(way: tuple[str, ...], setting: tuple[str, ...]) -> None:
    runs = [minivllm(*SMALL, *setting, "--virtual", *way, PYTHONHASHSEED=seed) for seed in ("1", "2")]
    assert runs[0].returncode == 0
    assert (runs[0].stdout, runs[0].stderr) == (runs[1].stdout, runs[1].stderr)


def test_a_virtual_race_needs_neither_mlx_nor_a_model_nor_numpy(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "for name in ('mlx', 'mlx.core', 'mlx_lm', 'numpy', 'transformers'):\n"
        "    sys.modules[name] = None\n"
        "from minivllm.__main__ import main\n"
        "sys.exit(main(['race', '--virtual', '--json', '-']))\n"
    )
    changes = environment(MINIVLLM_CACHE=str(tmp_path / "none"), HOME=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, cwd=ROOT, env=changes, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode() == minivllm("race", "--virtual", "--json", "-").stdout
    assert list(tmp_path.iterdir()) == []


def test_what_is_printed_is_the_figures_a_timeline_and_what_they_mean() -> None:
    done = in_process(*SMALL, *SINGLE_FLIGHT, "--virtual")
    assert (done.returncode, done.stderr) == (0, "")
    assert "r1, r2, r3: held behind r0\n" in done.stdout
    assert "r1       follower     532        528       8" in done.stdout
    assert "\nr3 follower  ░░░░" in done.stdout
    assert "░ held behind its leader  █ prefill  ━ decode  ● done" in done.stdout
    words = " ".join(done.stdout.split())
    assert "1,584 of 1,596 prompt tokens of the 3 later requests were recovered: 3 followers were held" in words


def test_without_unicode_the_drawing_is_ascii() -> None:
    done = minivllm(*SMALL, *SINGLE_FLIGHT, "--virtual", PYTHONIOENCODING="ascii")
    assert done.stdout.isascii()
    assert ": held behind its leader  # prefill  - decode  O done" in done.stdout
    assert "?" not in done.stdout


def test_json_on_standard_output_stands_alone_and_the_table_goes_beside_it() -> None:
    done = minivllm(*SMALL, "--virtual", "--json", "-")
    data = json.loads(done.stdout)
    assert list(data) == ["config", "requests", "blocks", "events"]
    assert "r0       independent     532" in done.stderr
    assert "r0       independent" not in done.stdout


def test_json_in_a_file_is_the_same_and_the_table_stays_on_standard_output(tmp_path: Path) -> None:
    path = tmp_path / "race.json"
    path.write_text("old")
    path.chmod(0o640)
    done = in_process(*SMALL, "--virtual", "--json", str(path))
    assert (done.returncode, done.stderr) == (0, "")
    assert path.read_text() == in_process(*SMALL, "--virtual", "--json", "-").stdout
    assert "r0       independent     532" in done.stdout
    assert [entry.name for entry in tmp_path.iterdir()] == ["race.json"]
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_link_stays_a_link_and_what_it_points_to_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "real.json").write_text("old")
    (tmp_path / "link.json").symlink_to("real.json")
    assert in_process(*SMALL, "--virtual", "--json", str(tmp_path / "link.json")).returncode == 0
    assert (tmp_path / "link.json").is_symlink()
    assert json.loads((tmp_path / "real.json").read_text())["config"]["requests"] == 4


@pytest.mark.parametrize(("place", "words"), [("no/such/folder.json", "No such file"), ("", "Is a directory")])
def test_a_place_that_cannot_be_written_is_told_before_the_race(tmp_path: Path, place: str, words: str) -> None:
    done = in_process(*SMALL, "--virtual", "--json", str(tmp_path / place))
    assert words in one_sentence(done, 1)
    assert done.stdout == ""


def test_prompts_may_share_only_a_prefix_and_incremental_publication_pays(tmp_path: Path) -> None:
    race = ("race", "--virtual", "--requests", "12", "--shared-tokens", "500", "--publication", "incremental")
    data = race_json(*race)
    assert set(recovered(data)) == {0, 496}
    assert recovered(data)[0] == 0
    assert recovered(data)[-1] == 496


def test_on_a_terminal_a_table_moves_and_the_cursor_comes_back() -> None:
    text = on_a_terminal("race", "--model", "tiny", "--requests", "3", "--max-tokens", "60", *SINGLE_FLIGHT)
    assert "held behind r0" in text
    assert "decode" in text
    assert "528" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    after = text[text.rindex("\x1b[?25h") :]
    assert "r2 follower  ░" in after
    assert "2 followers were held" in after


def on_a_terminal(*arguments: str) -> str:
    """Run a command with a terminal as its streams, and return what it wrote there."""
    controller, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "minivllm", *arguments],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env=environment(TERM="xterm-256color", COLUMNS="100", LINES="40"),
        start_new_session=True,
    )
    os.close(terminal)
    text = b""
    while True:
        try:
            piece = os.read(controller, 4096)
        except OSError:  # Linux says this when the last writer has gone
            break
        if not piece:
            break
        text += piece
    os.close(controller)
    assert process.wait(60) == 0
    return text.decode()
