"""Loads a model from a folder: checks its files, loads them with mlx-lm, and measures the shape of its K/V.

Knows weight files, mlx-lm's loader and which models the engine can run. Must not know where a model's name or files
come from.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.errors import ModelError
from minivllm.models.hub import one_line

if TYPE_CHECKING:
    import mlx.core as mx
    from mlx.nn.layers.base import Module
    from mlx_lm.tokenizer_utils import TokenizerWrapper


_UNKNOWN_MAX_MODEL_LEN = 2048


@dataclass
class LoadedModel:
    """A model that is ready to run, on the thread that loaded it.

    ``vocab_size``: width of the logits; every token id below it is valid.
    ``max_model_len``: context length, the most tokens of prompt and output together.
    ``num_layers``, ``num_kv_heads``, ``head_dim``, ``dtype``: shape and type of the K/V of one token.
    """

    name: str
    model: Module = field(repr=False)
    tokenizer: TokenizerWrapper = field(repr=False)
    vocab_size: int
    max_model_len: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: mx.Dtype

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of the keys and values of one token, over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.size


def load_folder(name: str, folder: Path) -> LoadedModel:
    """Load the model in ``folder``; ``name`` is for messages. On the CPU its weights become fp32.

    Raises ModelError if the files are damaged, mlx-lm cannot load them, or the engine cannot run the model.
    """
    import mlx.core as mx
    import mlx_lm

    check_files(name, folder)
    try:
        # lazy: the weights of a refused model are never read, and `to_fp32` can unpack them one module at a time.
        model, tokenizer, config = mlx_lm.load(
            str(folder), lazy=True, return_config=True, tokenizer_config={"trust_remote_code": False}
        )
    except Exception as error:  # mlx-lm, transformers and the file raise many kinds
        raise ModelError(f"mlx-lm cannot load model {name!r} ({one_line(error)}); choose another model.") from error
    _refuse_unshareable_kv(name, model)
    try:
        if on_cpu():
            to_fp32(model)
        mx.eval(model.parameters())
    except (RuntimeError, ValueError) as error:
        raise ModelError(
            f"the weights of model {name!r} cannot be read ({one_line(error)}); fetch the model again."
        ) from error
    return measure(name, model, tokenizer, max_model_len(config))


def check_files(name: str, folder: Path) -> None:
    """Raise ModelError unless the folder has a config and complete weight files, judged by their headers."""
    config = folder / "config.json"
    if not config.is_file():
        raise ModelError(f"{folder} holds no config.json; give the folder of a model in mlx-lm's format.")
    try:
        json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{config} cannot be read ({one_line(error)}); fetch model {name!r} again.") from error
    weight_files = {path.name for path in folder.glob("model*.safetensors")}
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            weight_files |= set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise ModelError(f"{index} cannot be read ({one_line(error)}); fetch model {name!r} again.") from error
    if not weight_files:
        raise ModelError(f"{folder} holds no model*.safetensors; give a model in mlx-lm's format.")
    for file_name in sorted(weight_files):
        check_safetensors(folder / file_name)


def check_safetensors(path: Path, what: str = "the model") -> None:
    """Raise ModelError if the file is no safetensors file, or is shorter than its header says."""
    try:
        size_bytes = path.stat().st_size
        with path.open("rb") as file:
            (header_bytes,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(header_bytes, size_bytes)))
        ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
        expected_bytes = 8 + header_bytes + max(ends, default=0)
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror}); fetch {what} again.") from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, struct.error) as error:
        raise ModelError(f"{path} is not a whole safetensors file; fetch {what} again.") from error
    if size_bytes < expected_bytes:
        raise ModelError(f"{path} is cut off ({size_bytes} of {expected_bytes} bytes are there); fetch {what} again.")


def _refuse_unshareable_kv(name: str, model: Module) -> None:
    """Raise ModelError for a model whose K/V cannot be kept in blocks and shared: it must have full attention."""
    from mlx_lm.models.cache import KVCache, make_prompt_cache

    kinds = {type(cache).__name__ for cache in make_prompt_cache(model) if type(cache) is not KVCache}
    if kinds:
        raise ModelError(
            f"model {name!r} is not dense: it keeps {', '.join(sorted(kinds))} where this engine needs plain "
            "K/V for every token (no sliding window, no recurrent state); choose a model with full attention."
        )
    # This rotation depends on the total length, so the keys of a cached block would be wrong in a longer prompt.
    if any(type(module).__name__ == "DynamicNTKScalingRoPE" for module in model.modules()):
        raise ModelError(
            f"model {name!r} uses dynamic-NTK rope, whose keys change with the length of the text and so "
            "cannot be shared; choose a model with another rope."
        )


def to_fp32(model: Module) -> None:
    """Dequantize and cast all weights to fp32 in place, one module at a time, so that peak memory stays low."""
    import mlx.core as mx
    from mlx.nn.layers.embedding import Embedding
    from mlx.nn.layers.linear import Linear
    from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear
    from mlx.utils import tree_unflatten
    from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

    plain_classes: dict[type, type] = {
        QuantizedLinear: Linear,
        QuantizedEmbedding: Embedding,
        QuantizedSwitchLinear: SwitchLinear,
    }
    for name, module in list(model.named_modules()):
        plain_class = plain_classes.get(type(module))
        if plain_class is not None:
            scales, biases = module.scales, module.get("biases")
            if mx.issubdtype(scales.dtype, mx.floating):
                scales = scales.astype(mx.float32)
                biases = None if biases is None else biases.astype(mx.float32)
            weight = mx.dequantize(
                module.weight, scales, biases, module.group_size, module.bits, module.mode, dtype=mx.float32
            )
            has_bias = {} if plain_class is Embedding else {"bias": "bias" in module}
            plain = plain_class(*weight.shape[::-1], **has_bias)
            plain.weight = weight
            if "bias" in module:
                plain.bias = module.bias
            model.update_modules(tree_unflatten([(name, plain)]))
            module.clear()  # the list above still references the quantized module: release its arrays
            module = plain
        if not module.children():
            module.set_dtype(mx.float32)
            mx.eval(module.parameters())
    model.set_dtype(mx.float32)  # parameters of modules that also have submodules
    mx.clear_cache()


def max_model_len(config: dict[str, Any]) -> int:
    """Return the model's context length in tokens, from the first known config key; 2,048 without one."""
    places = [config, config["text_config"]] if isinstance(config.get("text_config"), dict) else [config]
    for place in places:
        for key in ("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length", "seq_length"):
            if isinstance(place.get(key), int):
                return int(place[key])
    return _UNKNOWN_MAX_MODEL_LEN


def measure(name: str, model: Module, tokenizer: TokenizerWrapper, max_model_len: int) -> LoadedModel:
    """Run one token and read the shapes from its K/V and logits, because configs name them in many ways.

    This also evaluates arrays that are not weights, such as rope frequencies: a lazy array must not be evaluated on
    another thread. Raises ModelError if the model fails, or if its layers have K/V of different shapes.
    """
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    # Suppress the length warning of transformers on standard error: the engine checks lengths itself.
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    mx.eval(model.parameters())
    caches = make_prompt_cache(model)
    try:
        logits = model(mx.array([[0]]), cache=caches)
        mx.eval(logits)
        shapes = {(tuple(half.shape), half.dtype) for cache in caches for half in (cache.keys, cache.values)}
    except Exception as error:  # the model's own code may raise anything
        raise ModelError(f"model {name!r} fails on one token ({one_line(error)}); choose another model.") from error
    if len(shapes) != 1:
        raise ModelError(
            f"model {name!r} has keys and values of {len(shapes)} different shapes where this engine's K/V "
            "pool holds one; choose another model."
        )
    ((shape, dtype),) = shapes
    _, num_kv_heads, _, head_dim = shape
    loaded = LoadedModel(
        name=name,
        model=model,
        tokenizer=tokenizer,
        vocab_size=logits.shape[-1],
        max_model_len=max_model_len,
        num_layers=len(caches),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
    )
    del caches, logits
    mx.clear_cache()
    return loaded


def on_cpu() -> bool:
    """Whether MLX computes on the CPU, where this engine uses fp32 weights."""
    import mlx.core as mx

    return mx.default_device().type == mx.DeviceType.cpu
