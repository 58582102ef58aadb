"""How many bytes are free for a K/V pool on this machine, and how to say so.

Linux would grant more memory than there is and then kill the process, so one must ask before. Must not know
what the bytes are for.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import mlx.core as mx


def free_bytes() -> int:
    """Return the bytes that MLX could still allocate: of the GPU if it computes there, else of the machine."""
    device = mx.device_info()
    for key in ("free_memory", "max_recommended_working_set_size"):  # CUDA, Metal
        if key in device:
            used = 0 if key == "free_memory" else mx.get_active_memory()
            return max(int(device[key]) - used, 0)
    if sys.platform == "linux":
        return linux_free_bytes()
    return sys.maxsize  # unknown: the allocation itself will show


def linux_free_bytes(root: Path = Path("/")) -> int:
    """Return the least of what machine, container and process (``ulimit -v``) leave free on Linux.

    All three count: MLX does not look whether it got the memory that it asked for, and would crash. ``root`` is for
    tests.
    """
    return min([_meminfo(root), *_container(root), _address_space(root)])


def mib(num_bytes: int) -> str:
    """Return the size in MiB, for a message."""
    return f"{num_bytes / 2**20:,.0f} MiB"


def _meminfo(root: Path) -> int:
    """Free memory of the machine, file cache that can be dropped included."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return sys.maxsize


def _container(root: Path) -> list[int]:
    """What is left below the limit of the control group, version 2 or 1, if there is one."""
    found = []
    for limit_file, used_file, dropped in (
        ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current", "sys/fs/cgroup/memory.stat"),
        (
            "sys/fs/cgroup/memory/memory.limit_in_bytes",
            "sys/fs/cgroup/memory/memory.usage_in_bytes",
            "sys/fs/cgroup/memory/memory.stat",
        ),
    ):
        try:
            limit, used = int((root / limit_file).read_text()), int((root / used_file).read_text())
            stat = dict(line.split() for line in (root / dropped).read_text().splitlines())
        except (OSError, ValueError):
            continue  # no such version, or "max": no limit
        droppable = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
        found.append(max(limit - used + droppable, 0))
    return found


def _address_space(root: Path) -> int:
    """What is left below the process's own limit of address space."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return sys.maxsize
    try:
        pages = int((root / "proc/self/statm").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return sys.maxsize
    return max(limit - pages * resource.getpagesize(), 0)
