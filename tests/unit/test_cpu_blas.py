"""A fast BLAS is loaded before MLX, is never forced on anyone, and its absence is said in one sentence.

What the process has loaded can't be undone, so each case runs in a fresh Python. The reference BLAS that comes with
MLX serves as "a BLAS": it is there wherever MLX for Linux is.
"""

from __future__ import annotations

import ctypes.util
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from minivllm.models.cpu_blas import SWITCH, BlasReport, make_fast

ON_LINUX = sys.platform == "linux"


def bundled_blas() -> str:
    """Return the path of the BLAS inside the installed MLX package."""
    spec = importlib.util.find_spec("mlx")
    assert spec is not None and spec.submodule_search_locations is not None
    (found,) = Path(next(iter(spec.submodule_search_locations))).parent.glob("mlx_cpu.libs/libblas-*.so*")
    return str(found)


def in_fresh_python(code: str, **environ: str) -> Any:
    """Run ``code`` and return what it prints, read as JSON. The first line makes ``make_fast`` known."""
    result = subprocess.run(
        [sys.executable, "-c", "import json, os, sys\nfrom minivllm.models.cpu_blas import make_fast\n" + code],
        env={**{key: value for key, value in os.environ.items() if key != SWITCH}, **environ},
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_nothing_is_done_on_macos() -> None:
    assert make_fast(platform="darwin") == BlasReport(None, None)


def test_off_means_off_and_is_said() -> None:
    report = make_fast(platform="linux", environ={SWITCH: "OFF"})
    assert not report.is_fast
    assert "off" in report.note


@pytest.mark.parametrize("name", ["/no/such/library.so", ctypes.util.find_library("m") or "libm.so.6"])
def test_a_named_library_that_is_no_blas_is_a_note_and_no_error(name: str) -> None:
    code = "r = make_fast(platform='linux'); print(json.dumps([r.is_fast, r.note]))"
    is_fast, note = in_fresh_python(code, **{SWITCH: name})
    assert not is_fast
    assert SWITCH in note and "unset it" in note


def test_a_missing_library_is_one_sentence_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minivllm.models.cpu_blas._LIBRARY_NAMES", ("libno_such_blas.so.7",))
    monkeypatch.setattr("minivllm.models.cpu_blas._has_cuda_backend", lambda: False)
    monkeypatch.delitem(sys.modules, "mlx.core", raising=False)
    report = make_fast(platform="linux", environ={})
    assert not report.is_fast
    assert "apt-get install libopenblas0-pthread" in report.note
    assert report.note.count(". ") == 0 and report.note.endswith(".")


def test_the_report_after_a_late_call_says_that_it_was_late() -> None:
    code = "import mlx.core; r = make_fast(platform='linux'); print(json.dumps([r.is_fast, r.note]))"
    is_fast, note = in_fresh_python(code)
    assert not is_fast
    assert "before" in note and "start Python again" in note


def test_the_call_brings_in_no_mlx_and_changes_no_setting() -> None:
    code = (
        "before = dict(os.environ); make_fast()\n"
        "print(json.dumps(['mlx.core' in sys.modules, before == dict(os.environ)]))"
    )
    assert in_fresh_python(code, OPENBLAS_NUM_THREADS="3") == [False, True]


if ON_LINUX:

    def test_a_named_blas_is_loaded_for_the_whole_process_and_found_again_later() -> None:
        code = (
            "import ctypes; visible = lambda: hasattr(ctypes.CDLL(None), 'cblas_sgemm')\n"
            "before = visible(); first = make_fast(); after = visible()\n"
            "import mlx.core as mx\n"
            "a = mx.arange(12.0).reshape(3, 4); product = (a @ a.T).tolist()\n"
            "print(json.dumps([before, after, first.path, make_fast() == first, product]))"
        )
        before, after, path, same_again, product = in_fresh_python(code, **{SWITCH: bundled_blas()})
        assert (before, after, path, same_again) == (False, True, bundled_blas(), True)
        assert product == [[14.0, 38.0, 62.0], [38.0, 126.0, 214.0], [62.0, 214.0, 366.0]]

    def test_a_blas_in_the_python_environment_is_found(tmp_path: Path) -> None:
        (tmp_path / "lib").mkdir()
        (tmp_path / "lib" / "libmkl_rt.so.2").symlink_to(bundled_blas())
        code = (
            "import minivllm.models.cpu_blas as m\n"
            "m._LIBRARY_NAMES = ('libmkl_rt.so.2',)\n"
            "print(json.dumps(make_fast(prefix=sys.argv[1] if sys.argv[1:] else os.environ['PREFIX']).path))"
        )
        path = in_fresh_python(code, PREFIX=str(tmp_path))
        assert path == str(tmp_path / "lib" / "libmkl_rt.so.2")
