"""The tiny model: random weights and a tokenizer of bytes, made in an instant, for tests and for looking.

Knows mlx-lm's Llama. Must not know files or the network.
"""

from __future__ import annotations

import array
import math
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from minivllm.models.folder import LoadedModel, measure
from minivllm.models.gguf import build_bpe_tokenizer

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper


_TINY_MAX_MODEL_LEN = 4096


def load_tiny() -> LoadedModel:
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
    return measure("tiny", model, tokenizer, _TINY_MAX_MODEL_LEN)


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
