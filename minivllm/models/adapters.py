"""LoRA adapters: small changes to a model's linear layers, in force for the calls that ask for them.

An adapter is a folder in mlx-lm's own format: ``adapter_config.json`` says which layers it changes and how strongly,
``adapters.safetensors`` holds two thin matrices for each. The layer then computes base(x) + scale * (x A) B. Keys and
values come out of such layers, so the K/V of the same tokens differ from adapter to adapter, and no block may be
shared between them.

All adapters of a model stand on the one set of base weights: of each module that an adapter changes there is a
second one, which holds the base's own inside. `Adapters.applied` hangs these into the model and takes them out again.

Knows: mlx-lm's adapter format and how a model's modules hang together. Must not know: rows, requests, blocks or
engines. Load on the thread that will compute. Importing this module does not import MLX.
"""

from __future__ import annotations

import array
import contextlib
import json
import math
import os
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.errors import ConfigError, InvariantError, ModelError
from minivllm.models.folder import LoadedModel, check_safetensors, on_cpu
from minivllm.models.hub import one_line
from minivllm.models.load import load_model

if TYPE_CHECKING:
    import mlx.core as mx
    from mlx.nn.layers.base import Module

__all__ = ["Adapters", "make_adapter"]

CONFIG = "adapter_config.json"
WEIGHTS = "adapters.safetensors"

_KINDS = ("lora", "dora")
"""Values of ``fine_tune_type`` that change layers. The third one, "full", is a whole second set of weights."""

_LEAVES = ("lora_a", "lora_b", "m")
"""What an adapter adds to a layer: two matrices, and for DoRA a magnitude of each output."""


class Adapters:
    """The adapters of one loaded model, by name. Between two calls of `applied` the model is the base."""

    def __init__(self, loaded: LoadedModel, folders: Mapping[str, str | os.PathLike[str]] | None = None) -> None:
        """Read every folder, and evaluate its weights on the calling thread; on the CPU they become fp32.

        The model's own weights are neither copied nor changed. Raises ConfigError for a name that is none, and
        ModelError for a folder that is missing, broken, or made for another model.
        """
        self._swaps: dict[str, list[_Swap]] = {}
        for name, folder in (folders or {}).items():
            if not isinstance(name, str) or not name:
                raise ConfigError(f"an adapter's name is {name!r}; give each folder a name of one character or more")
            if not isinstance(folder, (str, os.PathLike)):
                raise ConfigError(f"adapter {name!r} is {folder!r}; give the folder that holds {CONFIG}")
            self._swaps[name] = _load(name, Path(folder).expanduser(), loaded)

    @property
    def names(self) -> frozenset[str]:
        """The names that `applied` takes, beside None."""
        return frozenset(self._swaps)

    def num_bytes(self, name: str) -> int:
        """Return the bytes of one adapter's own weights."""
        return sum(leaf.nbytes for swap in self._swaps[name] for leaf in _leaves(swap.module).values())

    @contextlib.contextmanager
    def applied(self, name: str | None) -> Iterator[None]:
        """Let the model compute with this adapter for a while; None is the base.

        Whatever is built in the meantime keeps its modules: a call may be evaluated afterwards. Raises
        InvariantError for a name that was not loaded.
        """
        if name is None:
            yield
            return
        if name not in self._swaps:
            raise InvariantError(
                f"adapter {name!r} is not loaded; a request for it should have been refused at submission"
            )
        swaps = self._swaps[name]
        try:
            for swap in swaps:
                swap.parent[swap.key] = swap.module
            yield
        finally:
            for swap in swaps:
                swap.parent[swap.key] = swap.base


def make_adapter(
    folder: str | os.PathLike[str], model: str = "tiny", *, seed: int, rank: int = 8, scale: float = 1.0
) -> Path:
    """Make a random adapter for ``model`` in ``folder`` and return the folder.

    It changes every linear layer of every block. The same seed gives the same numbers on every machine. ``scale`` is
    its strength: in the tiny model 1.0 adds to each layer's output as much again as the layer gives, so that keys
    and values come out clearly different. Files that are there are replaced. Raises ModelError if the model cannot
    be loaded or the folder not be written, ConfigError for a rank or scale that makes no sense.
    """
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise ConfigError(f"rank is {rank!r}; it must be a whole number of 1 or more")
    if not isinstance(scale, (int, float)) or not math.isfinite(scale):
        raise ConfigError(f"scale is {scale!r}; it must be a finite number, such as 1.0")
    loaded = load_model(model)
    import mlx.core as mx

    config = {
        "fine_tune_type": "lora",
        "num_layers": loaded.num_layers,
        "lora_parameters": {"rank": rank, "scale": float(scale), "dropout": 0.0},
    }
    source = random.Random(seed)
    weights: dict[str, mx.array] = {}
    for swap in _swaps(loaded.model, config):
        for leaf, old in _leaves(swap.module).items():
            # Variance 1 / inputs in both, so that what goes in comes out as strong as it was. A matrix of a
            # mixture of experts has its inputs last.
            inputs = rank if leaf == "lora_b" else old.shape[0] if old.ndim == 2 else old.shape[-1]
            reach = math.sqrt(3 / inputs)
            numbers = array.array("f", (source.uniform(-reach, reach) for _ in range(old.size)))
            weights[f"{swap.path}.{leaf}"] = mx.array(memoryview(numbers)).reshape(old.shape)  # type: ignore[arg-type]
    path = Path(folder).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
        mx.save_safetensors(str(path / WEIGHTS), weights)
        (path / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    except (OSError, RuntimeError) as error:
        raise ModelError(
            f"the adapter cannot be written to {path} ({one_line(error)}); name a folder that can be written to."
        ) from error
    return path


# -- Reading a folder ----------------------------------------------------------------------------------------


def _load(name: str, folder: Path, loaded: LoadedModel) -> list[_Swap]:
    """Return what one adapter changes in the model, with all its weights evaluated. Raises ModelError."""
    import mlx.core as mx

    config = _read_config(name, folder)
    weights = _read_weights(name, folder)
    try:
        swaps = _swaps(loaded.model, config)
    except Exception as error:  # mlx-lm's own code over numbers and names of somebody's file
        raise ModelError(
            f"{folder / CONFIG} of adapter {name!r} cannot be followed on model {loaded.name!r} ({one_line(error)}); "
            "give an adapter in mlx-lm's format that was made for this model."
        ) from error

    expected = {f"{swap.path}.{leaf}": old.shape for swap in swaps for leaf, old in _leaves(swap.module).items()}
    found = {key: new.shape for key, new in weights.items()}
    if found != expected or not expected:
        differ = sorted(key for key in found.keys() | expected.keys() if found.get(key) != expected.get(key))
        key = differ[0] if differ else "every layer"
        raise ModelError(
            f"adapter {name!r} in {folder} does not fit model {loaded.name!r}: {key} is {_shape(found.get(key))} in "
            f"its file and {_shape(expected.get(key))} by its config; give an adapter that was made for this model."
        )
    for swap in swaps:
        for leaf in _leaves(swap.module):
            new = weights[f"{swap.path}.{leaf}"]
            swap.module[leaf] = new.astype(mx.float32) if on_cpu() else new
        swap.module.eval()  # fresh modules are in training, where dropout drops
    added = {f"{swap.path}.{leaf}": new for swap in swaps for leaf, new in _leaves(swap.module).items()}
    finite = [mx.isfinite(new).all() for new in added.values()]
    try:
        mx.eval(list(added.values()), finite)
    except (RuntimeError, ValueError) as error:
        raise ModelError(
            f"{folder / WEIGHTS} of adapter {name!r} cannot be read ({one_line(error)}); make or fetch it again."
        ) from error
    bad = [key for key, is_finite in zip(added, finite, strict=True) if not bool(is_finite.item())]
    if bad:
        raise ModelError(f"adapter {name!r} in {folder} holds NaN or infinity in {bad[0]}; make or fetch it again.")
    return swaps


def _shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else f"of shape {shape}"


def _read_config(name: str, folder: Path) -> dict[str, Any]:
    """Return the adapter's config with the entries that are needed. Raises ModelError."""
    path = folder / CONFIG
    if not folder.is_dir():
        raise ModelError(
            f"there is no folder {str(folder)!r} for adapter {name!r}; give the folder that holds {CONFIG}."
        )
    if not path.is_file():
        raise ModelError(f"{folder} of adapter {name!r} holds no {CONFIG}; give an adapter in mlx-lm's format.")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        kind = config.get("fine_tune_type", "lora")
        if kind not in _KINDS:
            raise ValueError(f"fine_tune_type is {kind!r}, and this engine takes {' or '.join(_KINDS)}")
        numbers = config["lora_parameters"]
        if not isinstance(config["num_layers"], int) or not isinstance(numbers["rank"], int) or numbers["rank"] < 1:
            raise ValueError("num_layers and rank must be whole numbers")
        if not isinstance(numbers["scale"], (int, float)) or not math.isfinite(numbers["scale"]):
            raise ValueError("scale must be a finite number")
        numbers.setdefault("dropout", 0.0)
    except KeyError as error:
        raise ModelError(
            f"{path} of adapter {name!r} lacks {error.args[0]!r}; give an adapter in mlx-lm's format."
        ) from error
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{path} of adapter {name!r} cannot be used ({one_line(error)}); give an adapter in mlx-lm's format."
        ) from error
    result: dict[str, Any] = config
    return result


def _read_weights(name: str, folder: Path) -> dict[str, mx.array]:
    """Return the adapter's tensors, still lazy. Raises ModelError."""
    import mlx.core as mx

    path = folder / WEIGHTS
    if not path.is_file():
        raise ModelError(f"{folder} of adapter {name!r} holds no {WEIGHTS}; give an adapter in mlx-lm's format.")
    check_safetensors(path, "the adapter")
    try:
        weights: Any = mx.load(str(path))
        strange = sorted(key for key, value in weights.items() if not mx.issubdtype(value.dtype, mx.floating))
    except (RuntimeError, ValueError) as error:
        raise ModelError(f"{path} of adapter {name!r} cannot be read ({one_line(error)}); make it again.") from error
    if strange:
        raise ModelError(f"{path} of adapter {name!r} holds no real numbers in {strange[0]}; make it again.")
    result: dict[str, mx.array] = weights
    return result


# -- Modules in a model --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Swap:
    """A module of the base and the adapter's one around it, and where the two hang: ``parent[key]``."""

    path: str
    parent: Any
    key: str | int
    base: Module
    module: Module


def _swaps(model: Module, config: Mapping[str, Any]) -> list[_Swap]:
    """Let mlx-lm build the modules that ``config`` asks for, around the model's own, and take them out again."""
    from mlx_lm.tuner.utils import linear_to_lora_layers

    before = dict(model.named_modules())
    swaps: list[_Swap] = []
    try:
        linear_to_lora_layers(
            model, config["num_layers"], config["lora_parameters"], use_dora=config.get("fine_tune_type") == "dora"
        )
    finally:
        for path, module in sorted(dict(model.named_modules()).items()):
            # A new module stands at an old path. The base's one is inside it, at a path that is new.
            if path in before and module is not before[path]:
                parent, key = _place(model, path)
                swaps.append(_Swap(path, parent, key, before[path], module))
        for swap in swaps:
            swap.parent[swap.key] = swap.base
    return swaps


def _place(model: Module, path: str) -> tuple[Any, str | int]:
    """Return the dictionary (a module is one) or the list in which a module hangs, and its key there."""
    parent: Any = model
    *parts, last = (int(part) if part.isdigit() else part for part in path.split("."))
    for part in parts:
        parent = parent[part]
    return parent, last


def _leaves(module: Module) -> dict[str, mx.array]:
    """Return what the adapter adds in this module."""
    return {leaf: module[leaf] for leaf in _LEAVES if leaf in module}
