"""Read a llama model and its tokenizer out of one GGUF file.

A GGUF file holds everything: tensors (often packed in 4 or 8 bits, in groups of 32), the sizes of the model,
the byte-pair vocabulary with its merges, and the chat template. This module turns it into mlx-lm's own
``llama`` model, unchanged, and mlx-lm's own tokenizer wrapper.

Knows: GGUF's names and what they mean to mlx-lm. Must not know: where the file came from, whether it is the
right one (``models.py`` checks that), or anything of the engine.

Importing this module does not import MLX.

Source of the names and of the order of Q and K: the GGUF specification and llama.cpp's conversion script,
which stores the rows of Q and K so that a pair to be rotated lies side by side (mlx-lm:
``rope_traditional=True``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.errors import ModelError

if TYPE_CHECKING:
    import mlx.core as mx
    from mlx.nn.layers.base import Module
    from mlx_lm.tokenizer_utils import TokenizerWrapper

GROUP_SIZE = 32
"""Weights that share one scale and one bias, in every packing that MLX reads from GGUF."""

# GGUF's names -> mlx-lm's, for what stands once in a model and for what each layer has.
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class TokenType(IntEnum):
    """What ``tokenizer.ggml.token_type`` says of a token (GGUF specification)."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class GGUFModel:
    """A model and its tokenizer, ready to run. ``max_model_len`` is in tokens."""

    model: Module = field(repr=False)
    tokenizer: TokenizerWrapper = field(repr=False)
    max_model_len: int


def load_gguf(path: Path, *, dtype: mx.Dtype) -> GGUFModel:
    """Load ``path``; all weights are unpacked to ``dtype`` and evaluated when this returns.

    ``dtype``: fp32 on the CPU, where only fp32 is fast, and fp16 on GPUs. Not bf16: SmolLM2 answers nonsense in it.
    Weights do not stay packed: with fp16 activations, which reach 25,000 in SmolLM2, the packed product of the CPU
    answers nonsense too.

    Memory: unpacking goes module by module and drops what it has unpacked, so the peak stays near the
    result's size.

    Raises ModelError when the file cannot be read, or holds another architecture or tokenizer.
    """
    import mlx.core as mx

    try:
        loaded: Any = mx.load(str(path), format="gguf", return_metadata=True)
    except (RuntimeError, ValueError, OSError) as error:
        raise ModelError(f"{path} cannot be read as a GGUF file ({error}); replace it with a whole one.") from error

    tensors, metadata = loaded
    del loaded
    try:
        sizes = _model_args(path, metadata, tied="output.weight" not in tensors)
        tokenizer = _tokenizer(path, metadata)
    except KeyError as error:
        raise ModelError(
            f"{path} lacks the GGUF entry {error.args[0]!r} that a llama model needs; use a complete file."
        ) from error
    metadata.clear()  # 100,000 strings that nobody needs from here on

    model = _build(path, sizes, tensors, dtype)
    return GGUFModel(model, tokenizer, max_model_len=sizes["max_position_embeddings"])


def _model_args(path: Path, metadata: Mapping[str, Any], *, tied: bool) -> dict[str, Any]:
    """Return the fields of mlx-lm's ``llama.ModelArgs``. Raises KeyError (a missing entry) or ModelError."""
    architecture = metadata["general.architecture"]
    if architecture != "llama":
        raise ModelError(f"{path} holds a {architecture!r} model, and only 'llama' is read from GGUF; use another.")
    scaling = metadata.get("llama.rope.scaling.type", "none")
    if scaling != "none":
        raise ModelError(
            f"{path} scales its rope ({scaling!r}), which is not read from GGUF; load the model by its hub name."
        )

    def number(key: str) -> int:
        return int(metadata[f"llama.{key}"].item())

    hidden_size, num_heads = number("embedding_length"), number("attention.head_count")
    rope_theta = metadata.get("llama.rope.freq_base")
    head_dim = metadata.get("llama.attention.key_length")
    return {
        "model_type": "llama",
        "hidden_size": hidden_size,
        "num_hidden_layers": number("block_count"),
        "intermediate_size": number("feed_forward_length"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": number("attention.head_count_kv"),
        "head_dim": hidden_size // num_heads if head_dim is None else int(head_dim.item()),
        "rms_norm_eps": float(metadata["llama.attention.layer_norm_rms_epsilon"].item()),
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "max_position_embeddings": number("context_length"),
        "rope_theta": 10_000.0 if rope_theta is None else float(rope_theta.item()),
        "rope_traditional": True,
        "tie_word_embeddings": tied,
    }


def mlx_name(gguf_name: str) -> str | None:
    """Translate a tensor's name: ``blk.3.attn_q.scales`` -> ``model.layers.3.self_attn.q_proj.scales``.

    Returns None for a name that a plain llama model does not have.
    """
    parts = gguf_name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"
    if len(parts) == 2 and parts[0] in _TOP_NAMES:
        return f"{_TOP_NAMES[parts[0]]}.{parts[1]}"
    return None


def _build(path: Path, sizes: dict[str, Any], tensors: dict[str, mx.array], dtype: mx.Dtype) -> Module:
    """Make the model and move ``tensors`` into it; ``tensors`` is empty afterwards."""
    import mlx.core as mx
    import mlx_lm.models.llama as llama
    from mlx.utils import tree_flatten

    groups = _by_module(path, tensors)
    tensors.clear()
    model = llama.Model(llama.ModelArgs(**sizes))  # its random weights are lazy: they are never computed
    parameters: Any = tree_flatten(model.parameters())
    missing = {name: value.shape for name, value in parameters}
    del parameters
    # The embedding is the largest tensor. It comes first, while little else is unpacked.
    for module_name in sorted(groups, key=lambda name: name != "model.embed_tokens"):
        ready = _unpack(groups.pop(module_name), dtype)
        named = [(f"{module_name}.{leaf}", value) for leaf, value in ready.items()]
        for name, value in named:
            if missing.pop(name, None) != value.shape:
                raise ModelError(f"{path} holds {name} in an unexpected shape {value.shape}; use a plain llama model.")
        mx.eval(list(ready.values()))
        model.load_weights(named, strict=False)
        mx.clear_cache()
    if missing:
        raise ModelError(f"{path} lacks {len(missing)} weights, first {min(missing)}; use a complete file.")
    model.eval()
    return model


def _by_module(path: Path, tensors: Mapping[str, mx.array]) -> dict[str, dict[str, mx.array]]:
    """Group tensors by the module they belong to: module name -> {"weight": …, "scales": …, "biases": …}."""
    groups: dict[str, dict[str, mx.array]] = {}
    for gguf_name, tensor in tensors.items():
        name = mlx_name(gguf_name)
        if name is None:
            raise ModelError(f"{path} holds {gguf_name}, which a plain llama model does not have; use another file.")
        module, leaf = name.rsplit(".", 1)
        groups.setdefault(module, {})[leaf] = tensor
    return groups


def _unpack(packed: Mapping[str, mx.array], dtype: mx.Dtype) -> dict[str, mx.array]:
    """Return one module's tensors in ``dtype``: {"weight": …} and what else it has, without scales."""
    import mlx.core as mx

    if "scales" not in packed:
        return {leaf: value.astype(dtype) for leaf, value in packed.items()}
    words, scales = packed["weight"], packed["scales"]
    weight = mx.dequantize(
        words,
        scales.astype(dtype),  # widened before the product, so that fp32 loses no digit
        packed["biases"].astype(dtype),
        group_size=GROUP_SIZE,
        # Bits of one weight: a row of 32-bit words against the weights that its scales stand for.
        bits=words.shape[-1] * 32 // (scales.shape[-1] * GROUP_SIZE),
    )
    return {"weight": weight}


def _tokenizer(path: Path, metadata: Mapping[str, Any]) -> TokenizerWrapper:
    """Build the tokenizer from the metadata. Raises KeyError (a missing entry) or ModelError."""
    kind = (metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.pre"])
    if kind != ("gpt2", "smollm"):
        raise ModelError(
            f"{path} has a tokenizer of kind {kind[0]}/{kind[1]}, and only gpt2/smollm is read from GGUF; "
            "load the model by its hub name."
        )
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types: list[int] = metadata["tokenizer.ggml.token_type"].tolist()
    special = (TokenType.CONTROL, TokenType.USER_DEFINED)
    return build_bpe_tokenizer(
        tokens=tokens,
        merges=[_pair(merge) for merge in metadata["tokenizer.ggml.merges"]],
        special_tokens=[token for token, kind_of_token in zip(tokens, types, strict=True) if kind_of_token in special],
        bos_token=tokens[int(metadata["tokenizer.ggml.bos_token_id"].item())],
        eos_token=tokens[int(metadata["tokenizer.ggml.eos_token_id"].item())],
        chat_template=metadata.get("tokenizer.chat_template"),
        max_model_len=int(metadata["llama.context_length"].item()),
    )


def _pair(merge: str) -> tuple[str, str]:
    """Split a merge as GGUF writes it, ``"Ġ t"``, into its two halves."""
    left, right = merge.split(" ")
    return left, right


def build_bpe_tokenizer(
    *,
    tokens: Sequence[str],
    merges: Iterable[tuple[str, str]],
    special_tokens: Sequence[str],
    bos_token: str,
    eos_token: str,
    chat_template: str | None,
    max_model_len: int,
) -> TokenizerWrapper:
    """Return a byte-level BPE tokenizer; a token's id is its place in ``tokens``.

    Text is cut as SmolLM2 cuts it: every digit stands alone, the rest as GPT-2. Decoding gives the same text
    back. A byte that has no token of its own is left out: SmolLM2 lacks six control characters and the planes
    from U+40000 on. Special tokens are recognised in the text, and nothing is added to a prompt.

    mlx-lm's wrapper brings the streaming detokenizer: a new one each time ``tokenizer.detokenizer`` is read.
    """
    # mlx_lm goes first: it asks transformers not to warn that PyTorch is missing.
    from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper  # isort: skip
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=list(merges)))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special_tokens])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=bos_token,
        eos_token=eos_token,
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
        model_max_length=max_model_len,
    )
    return TokenizerWrapper(fast, BPEStreamingDetokenizer)
