"""Help teaches: what a command shows, examples, and every flag with its default."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys

import pytest

from minivllm.cli.main import build_parser
from tests.cli.command import ROOT, environment, in_process, minivllm, one_sentence


def parsers(parser: argparse.ArgumentParser | None = None) -> list[argparse.ArgumentParser]:
    """Return the parser of every command."""
    parser = parser or build_parser()
    found = [parser]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                found += parsers(each)
    return found


COMMANDS = [parser.prog.split()[1:] for parser in parsers()]


def test_the_commands_are_those_of_the_documentation() -> None:
    assert [" ".join(command) for command in COMMANDS] == [
        "",
        "generate",
        "race",
        "bench",
        "bench manager",
        "model",
        "model list",
        "model get",
    ]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_goes_to_standard_output_and_is_no_failure(command: list[str]) -> None:
    done = minivllm(*command, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: {' '.join(['minivllm', *command])}")
    assert in_process(*command, "-h").stdout == done.stdout


@pytest.mark.parametrize("parser", parsers()[1:], ids=lambda parser: parser.prog)
def test_each_command_says_what_it_shows_and_gives_examples(parser: argparse.ArgumentParser) -> None:
    assert parser.description and len(parser.description) > 40
    assert "examples:" in (parser.epilog or "")
    assert re.search(rf"^  {parser.prog.split(' list')[0].split(' get')[0]} ", parser.epilog or "", re.MULTILINE)


@pytest.mark.parametrize("parser", parsers(), ids=lambda parser: parser.prog)
def test_each_flag_says_what_it_does_and_its_default(parser: argparse.ArgumentParser) -> None:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            continue
        assert action.help, action.option_strings
        if action.option_strings and action.nargs is None and action.dest != "json":
            assert "default" in action.help, action.option_strings


@pytest.mark.parametrize("parser", parsers()[1:], ids=lambda parser: parser.prog)
def test_the_examples_can_be_parsed(parser: argparse.ArgumentParser) -> None:
    import shlex

    from minivllm.cli.main import parse

    lines = [line.strip() for line in (parser.epilog or "").splitlines() if line.startswith("  minivllm ")]
    assert lines
    for line in lines:
        words = shlex.split(line.split("|")[0].split("<")[0])
        assert hasattr(parse(words[1:]), "run")


def test_help_and_the_package_do_without_mlx() -> None:
    program = (
        "import sys\n"
        "from minivllm.__main__ import main\n"
        "assert main(['race', '--help']) == 0\n"
        "heavy = {'mlx', 'mlx_lm', 'numpy', 'transformers', 'rich', 'IPython'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment(), cwd=ROOT, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_version_is_the_projects() -> None:
    done = minivllm("--version")
    assert done.returncode == 0
    assert re.fullmatch(r"minivllm \d+\.\d+\.\d+\n", done.stdout)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "no command is given; choose one of generate, race, bench, model"),
        (["model"], "no command is given; choose one of list, get"),
        (["bench"], "no command is given; choose manager"),
        (["bench", "manger"], "there is no command 'manger'; did you mean 'manager'?"),
        (["bench", "manager", "--runs", "few"], "--runs: 'few' is no whole number"),
        (["rce"], "there is no command 'rce'; did you mean 'race'?"),
        (["model", "lst"], "there is no command 'lst'; did you mean 'list'?"),
        (["--vrsion"], "`minivllm` has no flag '--vrsion'; did you mean '--version'?"),
        (["race", "--reqests", "4"], "`minivllm race` has no flag '--reqests'; did you mean '--requests'?"),
        (["race", "--request", "4"], "`minivllm race` has no flag '--request'; did you mean '--requests'?"),
        (["race", "-x"], "`minivllm race` has no flag '-x'"),
        (["generate", "hi", "--max-token=3"], "did you mean '--max-tokens'?"),
        (["generate"], "the following arguments are required: PROMPT"),
        (["generate", "two", "words"], "'words' is more than the command takes; put a prompt of several words"),
        (["model", "get"], "the following arguments are required: NAME"),
        (["race", "--blocks"], "--blocks needs a value"),
        (["race", "--blocks", "--rows", "3"], "--blocks needs a value"),
        (["race", "--virtual=yes"], "ignored explicit argument 'yes'"),
        (["race", "--requests", "four"], "--requests: 'four' is no whole number"),
        (["race", "--requests", "1.5"], "--requests: '1.5' is no whole number"),
        (["race", "--temperature", "warm"], "--temperature: 'warm' is no number"),
        (["race", "--requests", "0"], "--requests is 0; it must be a whole number from 1 to 128"),
        (["race", "--requests", "-1"], "--requests is -1"),
        (["race", "--requests", "129"], "--requests is 129"),
        (["race", "--prompt-tokens", "0"], "--prompt-tokens is 0"),
        (["race", "--shared-tokens", "533"], "--shared-tokens is 533; it must be from 0"),
        (["race", "--max-tokens", "0"], "--max-tokens is 0"),
        (["race", "--max-tokens", "-5"], "--max-tokens is -5"),
        (["race", "--blocks", "0"], "--blocks is 0; it must be a whole number from 1"),
        (["race", "--block-size", "0"], "--block-size is 0"),
        (["race", "--budget", "0"], "--budget is 0"),
        (["race", "--rows", "0"], "--rows is 0"),
        (["race", "--temperature", "nan"], "temperature is nan; it must be a number of 0 (greedy) or more"),
        (["race", "--temperature", "-1"], "temperature is -1.0"),
        (["race", "--temperature", "-1e-3"], "temperature is -0.001"),
        (["race", "--temperature", "-inf"], "temperature is -inf"),
        (["race", "--seed", "-1"], "seed is -1"),
        (["race", "--publication", "incrementl"], "no publication policy is called 'incrementl'; did you mean"),
        (["race", "--coordination", "singel-flight"], "no coordination is called 'singel-flight'; did you mean"),
        (["race", "--coordination", "shared-prefixes"], "no coordination is called 'shared-prefixes'; did you mean"),
        (["race", "--coordination", "wait"], "choose one of independent, single-flight, shared-prefix, wait-or-recomp"),
        (["race", "--publication", "at-alocation"], "is called 'at-alocation'; did you mean 'at-allocation'?"),
        (["race", "--samples", "0"], "--samples is 0; it must be a whole number from 1 to 128"),
        (["race", "--samples", "129"], "--samples is 129"),
        (["race", "--samples", "two"], "--samples: 'two' is no whole number"),
        (["race", "--virtual", "--samples", "9"], "n is 9 samples, which decode side by side, and --rows is 8"),
        (["race", "--sample", "2"], "`minivllm race` has no flag '--sample'; did you mean '--samples'?"),
        (["race", "--adoption=yes"], "ignored explicit argument 'yes'"),
        (["race", "--ttft-target", "soon"], "--ttft-target: 'soon' is no number"),
        (["race", "--ttft-target", "-1"], "--ttft-target is -1.0; it must be a number from 0 to 1e+09 (milliseconds"),
        (["race", "--ttft-target", "nan"], "--ttft-target is nan"),
        (["race", "--ttft-target"], "--ttft-target needs a value"),
        (["race", "--allow-unsafe", "yes"], "--allow-unsafe is 'yes'; it names an unsafe publication policy: at-alloc"),
        (["race", "--publication", "at-allocation", "--model", "tiny"], "lets requests read K/V that was"),
        (["race", "--publication", "at-allocation", "--model", "tiny"], "--allow-unsafe=\"at-allocation\" on 'tin"),
        (["race", "--release", "prefill"], "no release policy is called 'prefill'; did you mean 'after-prefill'?"),
        (["race", "--model", "smolm2"], "there is no model 'smolm2'; did you mean 'smollm2'?"),
        (["race", "--virtual", "--prompt-tokens", "9000"], "shorten the prompt, lower --max-tokens or raise --blocks"),
        (["generate", ""], "the prompt is empty"),
        (["generate", "", "--raw"], "the prompt is empty"),
        (["generate", "-"], "the prompt is empty"),
        (["generate", "hi", "--model", "tinny"], "there is no model 'tinny'; did you mean 'tiny'?"),
        (["generate", "hi", "--max-tokens", "0"], "--max-tokens is 0; it must be a whole number of 1 or more"),
        (["generate", "hi", "--max-tokens", "-2"], "--max-tokens is -2"),
        (["generate", "hi", "--temperature", "NaN"], "temperature is nan"),
        (["generate", "hi", "--temperature", "-0.5"], "temperature is -0.5"),
        (["generate", "hi", "--top-p", "1.5"], "--top-p is 1.5"),
        (["generate", "hi", "--top-k", "-1"], "--top-k is -1"),
        (["generate", "hi", "--stop", ""], "stop holds ''"),
        (["model", "get", "smolm"], "there is no model 'smolm'; did you mean 'smollm2'?"),
    ],
)  # fmt: skip
def test_wrong_use_gets_one_sentence_with_the_limit_or_the_nearest_name(words: list[str], sentence: str) -> None:
    """In this process, as fifty of them take long to start; the next test does it as a user does."""
    assert sentence in one_sentence(in_process(*words), 2)


@pytest.mark.parametrize(
    "words",
    [["rce"], ["race", "--reqests", "4"], ["race", "--virtual", "--rows", "0"], ["generate", "hi", "--model", "x"]],
)
def test_wrong_use_is_exit_status_2_and_nothing_on_standard_output(words: list[str]) -> None:
    done = minivllm(*words)
    one_sentence(done, 2)
    assert done.stdout == ""
