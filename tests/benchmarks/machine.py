"""What a figure was measured on, and how a paired measurement is summed up."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from minivllm.models.cpu_blas import BlasReport


def describe(blas: BlasReport) -> str:
    """Return one line: processor, cores, MLX's device and version, and the BLAS if the CPU computes."""
    import mlx.core as mx

    where = f"{_processor()}, {_cores()} cores, {platform.system()}, MLX {importlib.metadata.version('mlx')}"
    if mx.default_device().type != mx.DeviceType.cpu:
        return f"{where} on {mx.device_info().get('device_name', 'its GPU')}"
    core = os.environ.get("OPENBLAS_CORETYPE")
    kind = f" as {core}" if blas.is_fast and core else ""
    return f"{where} on the CPU with {blas.library or 'its own BLAS'}{kind}"


def _cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, least and most of several measurements in ms."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values_ms: Sequence[float]) -> Spread:
        """Sum up; raises ValueError for no values."""
        return cls(statistics.median(values_ms), min(values_ms), max(values_ms))

    def __str__(self) -> str:
        return f"{self.median:9.2f} ms   ({self.least:.2f} to {self.most:.2f})"
