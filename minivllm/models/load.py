"""Models by name: the default one, a tiny random one, and any dense mlx-lm model from the hub or a folder.

Whatever the name, the caller gets the same: mlx-lm's own model, unchanged, with all weights evaluated, a
tokenizer, and the few sizes that the K/V pool needs.

Knows: names, mlx-lm's loader, and which models the engine can run. Must not know: the engine, its pool or
its threads. Load on the thread that will compute: MLX arrays belong to the thread that made them.

Importing this module does not import MLX.
"""

from __future__ import annotations

import array
import json
import math
import random
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.errors import ModelError, UnknownNameError, nearest
from minivllm.models.cpu_blas import make_fast
from minivllm.models.downloads import SMOLLM2, cache_dir, checked_path, fetch_packaged
from minivllm.models.gguf import build_bpe_tokenizer, load_gguf
from minivllm.models.progress import Progress

if TYPE_CHECKING:
    import mlx.core as mx
    from mlx.nn.layers.base import Module
    from mlx_lm.tokenizer_utils import TokenizerWrapper

__all__ = ["DEFAULT_MODEL", "LoadedModel", "ModelInfo", "cache_dir", "fetch", "list_models", "load_model"]

DEFAULT_MODEL = "smollm2"
OTHER_MODELS = "OWNER/NAME or FOLDER"
"""How ``list_models`` names what has no fixed name."""

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_TINY_MAX_MODEL_LEN = 4096
_UNKNOWN_MAX_MODEL_LEN = 2048


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


@dataclass
class LoadedModel:
    """A model that is ready to run, on the thread that loaded it.

    ``vocab_size``: width of the logits; every token id below it is valid.
    ``max_model_len``: the most tokens (prompt and output together) the model was made for.
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
        """Bytes that the keys and values of one token take in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.size


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
    return _fetch_from_hub(name, progress)


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
        return _load_tiny()
    if kind == "folder":
        folder = Path(name_or_path).expanduser()
    else:
        folder = _hub_folder_here(name_or_path) or _fetch_from_hub(name_or_path, progress)
    return _load_folder(name_or_path, folder)


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
    return _measure("smollm2", loaded.model, loaded.tokenizer, loaded.max_model_len)


def _load_tiny() -> LoadedModel:
    """Make a random qwen2 model. The same seed gives the same weights on every machine.

    Python's own generator promises the same numbers for ever, MLX's does not. Weights are uniform with
    variance 1 / inputs, so signals neither die nor explode. Queries and keys are twice as large: attention is
    then sharp, and what comes out depends on every token of the prompt, as a test of caching needs it.
    """
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.models import qwen2

    tokenizer = _byte_tokenizer()
    args = qwen2.ModelArgs(
        model_type="qwen2",
        hidden_size=64,
        num_hidden_layers=4,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-6,
        vocab_size=len(tokenizer),
        max_position_embeddings=_TINY_MAX_MODEL_LEN,
        rope_theta=10_000.0,
        tie_word_embeddings=False,
    )
    model = qwen2.Model(args)
    source = random.Random(0)
    weights: list[tuple[str, mx.array]] = []
    parameters: Any = tree_flatten(model.parameters())
    for name, old in sorted(parameters):
        if "norm" in name:
            continue  # ones already
        # An embedding row is picked, not summed over: its inputs count as one.
        inputs = 1 if "embed" in name or old.ndim == 1 else old.shape[-1]
        reach = math.sqrt(3 / inputs) * (2 if "q_proj" in name or "k_proj" in name else 1)
        numbers = array.array("f", (source.uniform(-reach, reach) for _ in range(old.size)))
        weights.append((name, mx.array(memoryview(numbers)).reshape(old.shape)))  # type: ignore[arg-type]
    model.load_weights(weights, strict=False)
    model.eval()
    return _measure("tiny", model, tokenizer, _TINY_MAX_MODEL_LEN)


def _byte_tokenizer() -> TokenizerWrapper:
    """Return a tokenizer with one token a byte: its id is the byte's value. Three special ones follow."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    return build_bpe_tokenizer(
        tokens=[*_byte_letters(), *special],
        merges=[],
        special_tokens=special,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        chat_template=(
            "{% for message in messages %}"
            "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
            "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        ),
        max_model_len=_TINY_MAX_MODEL_LEN,
    )


def _byte_letters() -> Iterator[str]:
    """Yield the letter that stands for each byte 0…255 in a byte-level vocabulary.

    Source: GPT-2's tokenizer. Printable bytes stand for themselves, the others for letters from U+0100 on.
    """
    printable = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    moved = 0
    for byte in range(256):
        if byte in printable:
            yield chr(byte)
        else:
            yield chr(256 + moved)
            moved += 1


# -- Any other model -----------------------------------------------------------------------------------------


def _load_folder(name: str, folder: Path) -> LoadedModel:
    """Load what mlx-lm can load, refuse what the engine cannot run, and evaluate the rest."""
    import mlx.core as mx
    import mlx_lm

    _check_files(name, folder)
    try:
        # lazy: a model that is refused is never read, and weights can be unpacked one by one.
        model, tokenizer, config = mlx_lm.load(
            str(folder), lazy=True, return_config=True, tokenizer_config={"trust_remote_code": False}
        )
    except Exception as error:  # whatever mlx-lm, transformers or the file raise, the caller gets one kind
        raise ModelError(f"mlx-lm cannot load model {name!r} ({one_line(error)}); choose another model.") from error
    _refuse_unless_dense(name, model)
    try:
        if on_cpu():
            _to_fp32(model)
        mx.eval(model.parameters())
    except (RuntimeError, ValueError) as error:
        raise ModelError(
            f"the weights of model {name!r} cannot be read ({one_line(error)}); fetch the model again."
        ) from error
    return _measure(name, model, tokenizer, _max_model_len(config))


def _check_files(name: str, folder: Path) -> None:
    """Raise ModelError unless the folder has a config and whole weight files, as their headers tell."""
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
    """Raise ModelError if the file is shorter than its own header says (format: huggingface/safetensors)."""
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


def _refuse_unless_dense(name: str, model: Module) -> None:
    """Raise ModelError for a model whose K/V cannot live in plain blocks."""
    from mlx_lm.models.cache import KVCache, make_prompt_cache

    kinds = {type(cache).__name__ for cache in make_prompt_cache(model) if type(cache) is not KVCache}
    if kinds:
        raise ModelError(
            f"model {name!r} is not dense: it keeps {', '.join(sorted(kinds))} where this engine needs plain "
            "K/V for every token (no sliding window, no recurrent state); choose a model with full attention."
        )
    # Its rotation depends on the length of the whole text, so a cached block would be wrong for a longer one.
    if any(type(module).__name__ == "DynamicNTKScalingRoPE" for module in model.modules()):
        raise ModelError(
            f"model {name!r} uses dynamic-NTK rope, whose keys change with the length of the text and so "
            "cannot be shared; choose a model with another rope."
        )


def _to_fp32(model: Module) -> None:
    """Unpack and widen all weights in place, one module at a time, so that the peak stays near the result."""
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
            module.clear()  # the list above still holds the packed module: let its arrays go
            module = plain
        if not module.children():
            module.set_dtype(mx.float32)
            mx.eval(module.parameters())
    model.set_dtype(mx.float32)  # parameters that stand beside submodules
    mx.clear_cache()


def _max_model_len(config: dict[str, Any]) -> int:
    """Return the longest text the model was made for, in tokens, from the many names configs give it."""
    places = [config, config["text_config"]] if isinstance(config.get("text_config"), dict) else [config]
    for place in places:
        for key in ("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length", "seq_length"):
            if isinstance(place.get(key), int):
                return int(place[key])
    return _UNKNOWN_MAX_MODEL_LEN


def _measure(name: str, model: Module, tokenizer: TokenizerWrapper, max_model_len: int) -> LoadedModel:
    """Run one token and read the shapes off what comes out: configs name them in too many ways.

    The token also evaluates what is no weight, like the frequencies of a rope: a lazy array must not meet another
    thread.
    """
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    # The engine checks lengths itself and says so in one sentence; transformers would warn on standard error before.
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    mx.eval(model.parameters())
    caches = make_prompt_cache(model)
    try:
        logits = model(mx.array([[0]]), cache=caches)
        mx.eval(logits)
        shapes = {(tuple(half.shape), half.dtype) for cache in caches for half in (cache.keys, cache.values)}
    except Exception as error:  # the model's own code: anything can come out of it
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
    """Whether MLX computes on the CPU, where all weights are fp32."""
    import mlx.core as mx

    return mx.default_device().type == mx.DeviceType.cpu


# -- The hub -------------------------------------------------------------------------------------------------


def _hub_folder_here(name: str) -> Path | None:
    """Return the folder of a hub model that was fetched before, without asking the network."""
    from huggingface_hub.errors import LocalEntryNotFoundError
    from mlx_lm.utils import hf_repo_to_path

    try:
        return Path(hf_repo_to_path(name))
    except (LocalEntryNotFoundError, ValueError):
        return None


def _fetch_from_hub(name: str, progress: Progress | None) -> Path:
    """Fetch a hub model's files into the hub's own cache. Raises ModelError: a sentence for each failure."""
    import mlx_lm.utils as mlx_lm_utils  # before huggingface_hub: it quietens it
    from huggingface_hub import errors, snapshot_download
    from huggingface_hub.utils.tqdm import tqdm

    what = f"downloading {name}"

    class SilentBar(tqdm):
        """The hub's progress bar, drawn nowhere; the one that counts bytes reports them."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._counts_bytes = kwargs.get("name") == "huggingface_hub.snapshot_download"
            super().__init__(*args, **{**kwargs, "file": _Nowhere()})

        def update(self, n: float | None = 1) -> bool | None:
            shown = super().update(n)
            if progress is not None and self._counts_bytes:
                progress(what, int(self.n), int(self.total) if self.total else None)
            return shown

    if progress is not None:
        progress(what, 0, None)
    try:
        folder = snapshot_download(name, allow_patterns=mlx_lm_utils.DEFAULT_ALLOW_PATTERNS, tqdm_class=SilentBar)
    except errors.GatedRepoError as error:
        raise ModelError(
            f"model {name!r} is gated: accept its license on its page at the hub, log in with "
            "`hf auth login`, and try again."
        ) from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise ModelError(f"the hub has no model {name!r} that you may see; check how it is spelled.") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise ModelError(
            f"model {name!r} is not on this machine and the hub cannot be reached; check the network, "
            "or use smollm2 or tiny."
        ) from error
    except Exception as error:  # many kinds of HTTP and disk errors
        raise ModelError(
            f"model {name!r} cannot be fetched from the hub ({one_line(error)}); try again, or use smollm2 or tiny."
        ) from error
    return Path(folder)


class _Nowhere:
    """A text stream that keeps nothing."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        """Nothing is kept, so nothing is flushed."""


def one_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its class where it has none."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
