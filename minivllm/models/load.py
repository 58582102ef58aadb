"""Models by name: the default one, a tiny random one, and any dense mlx-lm model from the hub or a folder.

Whatever the name, the caller gets the same: mlx-lm's own model, unchanged, with all weights evaluated, a
tokenizer, and the few sizes that the K/V pool needs.

Knows: names, mlx-lm's loader, and which models the engine can run. Must not know: the engine, its pool or
its threads. Load on the thread that will compute: MLX arrays belong to the thread that made them.

Importing this module does not import MLX.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from minivllm.errors import ModelError, UnknownNameError, nearest
from minivllm.models.cpu_blas import make_fast
from minivllm.models.downloads import SMOLLM2, cache_dir, checked_path, fetch_packaged
from minivllm.models.folder import LoadedModel, load_folder, measure, on_cpu
from minivllm.models.gguf import load_gguf
from minivllm.models.hub import fetch_from_hub, hub_folder_here
from minivllm.models.progress import Progress
from minivllm.models.tiny import load_tiny

if TYPE_CHECKING:
    pass

__all__ = ["DEFAULT_MODEL", "LoadedModel", "ModelInfo", "cache_dir", "fetch", "list_models", "load_model"]

DEFAULT_MODEL = "smollm2"
OTHER_MODELS = "OWNER/NAME or FOLDER"
"""How ``list_models`` names what has no fixed name."""

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class ModelInfo:
    """One line of the list of models. ``size_bytes`` is the space on disk; 0 means no file, or unknown."""

    name: str
    title: str
    source: str
    license: str
    size_bytes: int
    is_here: bool
    note: str


def list_models() -> list[ModelInfo]:
    """Return what can be loaded. Reads no file but looks whether it is there."""
    return [
        ModelInfo(
            name="smollm2",
            title="SmolLM2-135M-Instruct, 4-bit",
            source=f"Python package {SMOLLM2.package} {SMOLLM2.version}",
            license="Apache-2.0",
            size_bytes=SMOLLM2.file_bytes,
            is_here=SMOLLM2.is_here(),
            note="the default: real, small, answers in English",
        ),
        ModelInfo(
            name="tiny",
            title="random weights, 4 layers, one token per byte",
            source="made from a seed",
            license="Apache-2.0",
            size_bytes=0,
            is_here=True,
            note="instant, needs no file; its text means nothing",
        ),
        ModelInfo(
            name=OTHER_MODELS,
            title="any dense model that mlx-lm can load",
            source="Hugging Face hub, or a folder on this machine",
            license="as its authors say",
            size_bytes=0,
            is_here=False,
            note="for example mlx-community/Qwen2.5-0.5B-Instruct-4bit",
        ),
    ]


def fetch(name: str, progress: Progress | None = None) -> Path:
    """Bring the files of ``name`` to this machine and return where they are.

    Changes: the cache. A whole copy is left alone; a cut or corrupt one is replaced. Raises UnknownNameError
    or ModelError (no network, no room, not found). ``tiny`` has no file: its path is the cache folder.
    """
    match _kind_of(name):
        case "smollm2":
            return fetch_packaged(SMOLLM2, progress)
        case "tiny":
            return cache_dir()
        case "folder":
            return Path(name).expanduser()
    return fetch_from_hub(name, progress)


def load_model(name_or_path: str, *, progress: Progress | None = None) -> LoadedModel:
    """Load a model by its name, hub name or folder; fetch it first if it is not on this machine.

    All arrays are evaluated on the calling thread. On the CPU all weights become fp32, the one type that is
    fast there. Raises UnknownNameError, or ModelError if the model cannot be fetched, read, or run by this
    engine.
    """
    kind = _kind_of(name_or_path)
    make_fast()  # works only before MLX comes in; the caller asks again if it wants the report

    if kind == "smollm2":
        path = checked_path(SMOLLM2) if SMOLLM2.path.exists() else fetch_packaged(SMOLLM2, progress)
        return _load_smollm2(path)
    if kind == "tiny":
        return load_tiny()
    if kind == "folder":
        folder = Path(name_or_path).expanduser()
    else:
        folder = hub_folder_here(name_or_path) or fetch_from_hub(name_or_path, progress)
    return load_folder(name_or_path, folder)


def _kind_of(name: str) -> str:
    """Return ``smollm2``, ``tiny``, ``folder`` or ``hub``; raises UnknownNameError or ModelError."""
    if name in ("smollm2", "tiny"):
        return name
    path = Path(name).expanduser() if name else None
    if path is not None and path.is_dir():
        return "folder"
    if path is not None and path.exists():
        raise ModelError(f"{name!r} is a file; give the folder that holds config.json and the weights.")
    if _HUB_NAME.fullmatch(name) and not name.startswith("."):
        return "hub"
    if "/" in name:
        raise ModelError(f"there is no model folder {name!r}; give an existing folder, or a hub name like owner/name.")
    raise UnknownNameError(
        f"there is no model {name!r}; {nearest(name, ['smollm2', 'tiny', 'virtual'])} "
        "(a hub name like owner/name or a folder does as well)"
    )


# -- The two models with a name ------------------------------------------------------------------------------


def _load_smollm2(path: Path) -> LoadedModel:
    import mlx.core as mx

    loaded = load_gguf(path, dtype=mx.float32 if on_cpu() else mx.float16)
    return measure("smollm2", loaded.model, loaded.tokenizer, loaded.max_model_len)


# -- Any other model -----------------------------------------------------------------------------------------


# -- The hub -------------------------------------------------------------------------------------------------
