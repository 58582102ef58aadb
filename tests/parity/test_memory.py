"""How much memory is free is asked before a pool is made: too large a pool must be a sentence, not a dead kernel."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from minivllm.runners.memory import linux_free_bytes, mib

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30


def machine(root: Path, files: dict[str, str]) -> Path:
    """Lay out what the system reports, in files."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMINFO = {"proc/meminfo": f"MemTotal: 9999999 kB\nMemAvailable: {8 * GIB // 1024} kB\n"}
GROUP = "sys/fs/cgroup"


def test_without_limits_the_machines_free_memory_counts(tmp_path: Path) -> None:
    group = {f"{GROUP}/memory.max": "max\n", f"{GROUP}/memory.current": "5\n", f"{GROUP}/memory.stat": "anon 5\n"}
    assert linux_free_bytes(machine(tmp_path, MEMINFO | group)) == 8 * GIB


def test_a_containers_limit_counts_without_the_files_it_could_drop(tmp_path: Path) -> None:
    group = {
        f"{GROUP}/memory.max": f"{2 * GIB}\n",
        f"{GROUP}/memory.current": f"{GIB}\n",
        f"{GROUP}/memory.stat": f"anon 7\ninactive_file {GIB // 2}\n",
    }
    assert linux_free_bytes(machine(tmp_path, MEMINFO | group)) == GIB + GIB // 2


def test_a_container_of_the_older_kind_counts_too(tmp_path: Path) -> None:
    group = {
        f"{GROUP}/memory/memory.limit_in_bytes": f"{2 * GIB}\n",
        f"{GROUP}/memory/memory.usage_in_bytes": f"{GIB}\n",
        f"{GROUP}/memory/memory.stat": "inactive_file 1\ntotal_inactive_file 4096\n",
    }
    assert linux_free_bytes(machine(tmp_path, MEMINFO | group)) == GIB + 4096


if sys.platform == "linux":  # elsewhere the system does not enforce such a limit

    def test_a_pool_above_the_processs_own_limit_is_a_sentence_and_a_smaller_one_works() -> None:
        """In a process of its own, as MLX crashes when it is given less memory than it asks for."""
        code = (
            "import resource\n"
            "from minivllm.runners.mlx import MLXRunner\n"
            "from minivllm.errors import ConfigError\n"
            "runner = MLXRunner.load('tiny')\n"
            "resource.setrlimit(resource.RLIMIT_AS, (3 * 2**30, resource.RLIM_INFINITY))\n"
            "try:\n"
            "    runner.allocate(300_000, 16)\n"
            "except ConfigError as error:\n"
            "    print(error)\n"
            "runner.allocate(32, 16)\n"
            "print(runner.pool_bytes)\n"
        )
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        sentence, size = done.stdout.splitlines()
        assert "blocks would fit" in sentence
        assert int(size) > 0


def test_sizes_are_told_in_mebibytes() -> None:
    assert mib(3 * GIB) == "3,072 MiB"
