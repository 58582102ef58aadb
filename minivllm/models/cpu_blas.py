"""Make MLX's CPU backend fast on Linux.

MLX's Linux wheel is linked against the reference BLAS, which multiplies fp32 matrices at a few GFLOP/s. The
dynamic linker gives a symbol to the library that offered it first, so a fast BLAS that is loaded for the
whole process *before* the first ``import mlx.core`` takes the place of ``cblas_sgemm`` (some hundred
GFLOP/s). Only fp32 gains by it; that is why models are dequantized to fp32 on the CPU.

Knows: names of BLAS libraries and how Linux loads them. Must not know: models or the engine. It imports no
MLX, prints nothing, and leaves the ``OPENBLAS_*`` and ``MKL_*`` settings to the user.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

SWITCH = "MINIVLLM_BLAS"
"""Environment variable: the path of a BLAS library to load, or ``off``."""

WHAT_TO_INSTALL = (
    "install one with `sudo apt-get install libopenblas0-pthread` (Debian, Ubuntu) or "
    "`sudo dnf install openblas-threads` (Fedora), then start Python again"
)

# Threaded builds first. Only libraries with 32-bit integers (LP64), as MLX calls them: a name with "64" in it
# would take the same symbols and read their arguments wrongly.
_LIBRARY_NAMES = (
    "libopenblasp.so.0",  # Fedora: threads
    "libopenblas.so.0",  # Debian, Ubuntu, Arch, conda
    "libopenblaso.so.0",  # Fedora: OpenMP
    "libmkl_rt.so.2",  # the mkl wheel, conda
    "libmkl_rt.so",
)
_CUDA_BACKENDS = ("mlx-cuda-12", "mlx-cuda-13", "mlx-cuda")


@dataclass(frozen=True, slots=True)
class BlasReport:
    """What ``make_fast`` found.

    ``library``: name of the BLAS that was loaded, or None.
    ``path``: the file it came from, or None.
    ``note``: one sentence for the user, or "" when there is nothing to say.
    """

    library: str | None
    path: str | None
    note: str = ""

    @property
    def is_fast(self) -> bool:
        """Whether a BLAS other than MLX's own is loaded for the whole process."""
        return self.library is not None


def make_fast(
    *, platform: str = sys.platform, environ: Mapping[str, str] = os.environ, prefix: str = sys.prefix
) -> BlasReport:
    """Load a fast BLAS for the whole process; safe to call at any time and again.

    Changes: at most one more shared library is loaded. Call it before the first ``import mlx.core``; later it
    changes nothing that matters, and the report says so. Off Linux, or with a CUDA build of MLX, it does
    nothing. Never raises: a missing library is a note, as the engine works without one.
    """
    if platform != "linux":
        return BlasReport(None, None)
    wish = environ.get(SWITCH, "").strip()
    if wish.lower() == "off":
        return BlasReport(None, None, f"{SWITCH} is off, so MLX computes with its own slow BLAS on this CPU.")
    if not wish and _has_cuda_backend():
        return BlasReport(None, None)

    candidates = [wish] if wish else list(_candidates(Path(prefix), environ))
    if "mlx.core" in sys.modules:
        return _report_after_import(candidates)

    last_error = ""
    for candidate in candidates:
        try:
            library = ctypes.CDLL(candidate, mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            last_error = str(error)
            continue
        if hasattr(library, "cblas_sgemm"):
            return BlasReport(Path(candidate).name, _file_of(candidate))
        last_error = f"{candidate} has no cblas_sgemm"
    if wish:
        return BlasReport(
            None, None, f"{SWITCH} names no BLAS that can be loaded ({last_error}); correct it or unset it."
        )
    return BlasReport(
        None, None, f"MLX computes with its own slow BLAS because no fast one is here; {WHAT_TO_INSTALL}."
    )


def _candidates(prefix: Path, environ: Mapping[str, str]) -> Iterator[str]:
    """Yield what to try, best first: the system's libraries, then those of the Python environment."""
    yield from _LIBRARY_NAMES
    folders = [prefix / "lib"]
    if conda := environ.get("CONDA_PREFIX"):
        folders.append(Path(conda) / "lib")
    for folder in folders:
        for name in _LIBRARY_NAMES:
            if (folder / name).exists():
                yield str(folder / name)


def _report_after_import(candidates: list[str]) -> BlasReport:
    """Say what is loaded, and load nothing: MLX has bound its BLAS already.

    MLX's own BLAS stays private to MLX, so a ``cblas_sgemm`` that the whole process can see is a fast one.
    """
    if hasattr(ctypes.CDLL(None), "cblas_sgemm"):
        for candidate in candidates:
            try:
                # NOLOAD asks whether the library is in the process, and never brings it in.
                ctypes.CDLL(candidate, mode=os.RTLD_NOLOAD)
            except OSError:
                continue
            return BlasReport(Path(candidate).name, _file_of(candidate))
    return BlasReport(
        None,
        None,
        "MLX was imported before a fast BLAS was loaded, so it computes with its own slow one; "
        "start Python again and import minivllm's engine before mlx.",
    )


def _has_cuda_backend() -> bool:
    """Whether MLX was installed for CUDA: the CPU's BLAS hardly matters then."""
    for name in _CUDA_BACKENDS:
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return True
    return False


def _file_of(name: str) -> str | None:
    """Return the file behind a loaded library, or None where the system does not say."""
    if "/" in name:
        return name
    stem = name.split(".so")[0]
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    for line in maps.splitlines():
        path = line.split(maxsplit=5)[-1]
        if Path(path).name.startswith(stem):
            return path
    return None
