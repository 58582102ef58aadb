"""`minivllm generate`: the text on standard output, the figures beside it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cli.command import in_process, minivllm, one_sentence


@pytest.mark.model
def test_the_default_model_knows_the_capital_of_france() -> None:
    done = minivllm("generate", "What is the capital of France?")
    assert done.returncode == 0
    assert "Paris" in done.stdout
    assert done.stdout.endswith("\n")
    assert re.fullmatch(
        r"\[37 prompt tokens, \d+ output tokens \(.+\), TTFT [\d,]+ ms, [\d.]+ tokens/s\]\n", done.stderr
    )


def test_the_same_text_comes_as_a_stream_and_as_json() -> None:
    streamed = minivllm("generate", "hello", "--model", "tiny", "--max-tokens", "12")
    as_json = in_process("generate", "hello", "--model", "tiny", "--max-tokens", "12", "--json")
    data = json.loads(as_json.stdout)
    assert (streamed.returncode, as_json.returncode) == (0, 0)
    assert streamed.stdout.rstrip("\n") == data["text"].rstrip("\n")
    assert list(data) == [
        "model", "prompt", "text", "token_ids", "finish_reason", "prompt_tokens", "recovered_tokens", "output_tokens",
        "ttft_ms", "completion_ms",
    ]  # fmt: skip
    assert (data["prompt"], data["output_tokens"], len(data["token_ids"])) == ("hello", 12, 12)
    assert 0 < data["ttft_ms"] < data["completion_ms"]


def test_a_chat_template_is_used_unless_the_prompt_is_raw() -> None:
    settings = ("--model", "tiny", "--max-tokens", "1", "--json")
    raw = json.loads(in_process("generate", "hello", "--raw", *settings).stdout)
    chat = json.loads(in_process("generate", "hello", *settings).stdout)
    assert raw["prompt_tokens"] == 5
    assert chat["prompt_tokens"] > 5


def test_the_prompt_may_come_from_standard_input_and_need_not_be_text() -> None:
    settings = ("--raw", "--model", "tiny", "--max-tokens", "1", "--json")
    assert json.loads(minivllm("generate", "-", *settings, stdin="héllo").stdout)["prompt_tokens"] == 6
    broken = minivllm("generate", "-", *settings, stdin=b"a\xff")
    assert json.loads(broken.stdout)["prompt"] == "a\ufffd"


def test_an_argument_that_is_no_text_is_no_traceback() -> None:
    done = minivllm("generate", "a\udcff", "--raw", "--model", "tiny", "--max-tokens", "1", "--json")
    assert json.loads(done.stdout)["prompt"] == "a\ufffd"


def test_the_same_seed_draws_the_same_and_another_one_differs() -> None:
    def text(*more: str) -> str:
        done = in_process("generate", "hello", "--model", "tiny", "--json", "--temperature", "1", *more)
        return str(json.loads(done.stdout)["token_ids"])

    first = text("--seed", "5")
    assert first == text("--seed", "5") != text("--seed", "6")
    assert text("--seed", "5", "--top-k", "1") == text("--seed", "6", "--top-p", "0.000001") != first


def test_a_stop_text_ends_the_answer_and_is_left_out() -> None:
    settings = ("generate", "hello", "--model", "virtual", "--max-tokens", "20", "--json")
    whole = json.loads(in_process(*settings).stdout)["text"]
    word = whole.split()[2]
    stopped = json.loads(in_process(*settings, "--stop", word, "--stop=---").stdout)
    assert stopped["text"] == whole[: whole.index(word)]
    assert stopped["finish_reason"] == "stop"


def test_a_prompt_that_is_too_long_says_what_would_fit() -> None:
    done = in_process("generate", "-", "--raw", "--model", "tiny", stdin="a" * 5000)
    sentence = one_sentence(done, 2)
    assert "the prompt has 5,000 tokens and --max-tokens is 32" in sentence
    assert "4,096" in sentence


def test_a_pool_that_is_too_small_can_be_made_larger_with_the_flag_that_is_named() -> None:
    settings = ("generate", "a" * 60, "--raw", "--model", "tiny", "--max-tokens", "8", "--json")
    sentence = one_sentence(in_process(*settings, "--blocks", "2"), 2)
    assert "that needs 5 blocks, and the pool has 2" in sentence
    assert sentence.endswith("lower --max-tokens or raise --blocks")
    assert json.loads(in_process(*settings, "--blocks", "5").stdout)["output_tokens"] == 8


def test_every_flag_that_an_error_can_name_is_one_of_the_command() -> None:
    for prompt_tokens, blocks in ((60_000, "512"), (10, "0")):
        settings = ("--raw", "--model", "virtual", "--blocks", blocks)
        done = in_process("generate", "-", *settings, stdin="a " * prompt_tokens)
        flags = re.findall(r"--[a-z-]+", one_sentence(done, 2))
        assert "--blocks" in flags
        for flag in flags:
            assert flag in in_process("generate", "--help").stdout


def test_a_terminal_that_knows_only_ascii_gets_question_marks() -> None:
    done = minivllm("generate", "hello", "--model", "tiny", "--max-tokens", "12", PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert done.stdout.isascii()


@pytest.mark.parametrize("size", ["cut", "corrupt"])
def test_a_damaged_model_file_is_named_with_what_to_run(tmp_path: Path, size: str) -> None:
    from minivllm.models.downloads import SMOLLM2

    path = tmp_path / "smollm2" / Path(SMOLLM2.member).name
    path.parent.mkdir()
    with path.open("wb") as file:
        file.truncate(1000 if size == "cut" else SMOLLM2.file_bytes)
    done = in_process("generate", "hi", MINIVLLM_CACHE=str(tmp_path), PIP_INDEX_URL="http://127.0.0.1:9/simple")
    sentence = one_sentence(done, 1)
    assert str(path) in sentence
    assert "run `minivllm model get smollm2` to replace it" in sentence


def test_a_model_that_is_not_dense_is_refused_in_one_sentence(tmp_path: Path) -> None:
    from tests.unit.test_models import SLIDING, write_folder

    folder = write_folder(tmp_path / "sliding", SLIDING["gemma3_text"])
    sentence = one_sentence(in_process("generate", "hi", "--model", str(folder)), 1)
    assert "is not dense" in sentence
    assert "choose a model with full attention" in sentence


@pytest.mark.parametrize(
    ("make", "words"),
    [("empty folder", "holds no config.json"), ("file", "is a file; give the folder"), ("nothing", "no model folder")],
)
def test_a_place_that_holds_no_model_is_named(tmp_path: Path, make: str, words: str) -> None:
    place = tmp_path / "model"
    if make == "empty folder":
        place.mkdir()
    elif make == "file":
        place.write_text("no model")
    sentence = one_sentence(in_process("generate", "hi", "--model", str(place)), 1)
    assert words in sentence
    assert str(place) in sentence


def test_debug_shows_where_it_failed(tmp_path: Path) -> None:
    done = in_process("generate", "hi", "--model", str(tmp_path), "--debug")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("minivllm: ")
