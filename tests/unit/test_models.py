"""Models by name, folder and hub name: what comes back runs, and what can't run is refused in one sentence."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from minivllm.errors import ModelError, UnknownNameError
from minivllm.models.downloads import SMOLLM2, checked_path
from minivllm.models.folder import LoadedModel
from minivllm.models.load import OTHER_MODELS, fetch, list_models, load_model

ROOT = Path(__file__).parents[2]

QWEN2 = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "vocab_size": 259,
    "max_position_embeddings": 300,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 258,
}
QUANTIZATION = {"affine": (64, 4), "mxfp4": (32, 4)}


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return load_model("tiny")


def write_folder(folder: Path, config: dict[str, Any], *, mode: str | None = None) -> Path:
    """Write a small random model in mlx-lm's format, with tiny's tokenizer; ``mode`` quantizes it."""
    import mlx.nn as nn
    from mlx_lm.utils import _get_classes

    folder.mkdir(parents=True, exist_ok=True)
    mx.random.seed(0)
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(config))
    if mode is not None:
        group_size, bits = QUANTIZATION[mode]
        nn.quantize(model, group_size=group_size, bits=bits, mode=mode)  # type: ignore[attr-defined]
        config = {**config, "quantization": {"group_size": group_size, "bits": bits, "mode": mode}}
    weights: Any = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    load_model("tiny").tokenizer.save_pretrained(str(folder))
    return folder


def parameters(loaded: LoadedModel) -> dict[str, mx.array]:
    found: Any = tree_flatten(loaded.model.parameters())
    return dict(found)


def argmax(logits: mx.array) -> int:
    number: Any = mx.argmax(logits).item()
    return int(number)


def greedy(loaded: LoadedModel, prompt: list[int], max_tokens: int) -> list[int]:
    cache = make_prompt_cache(loaded.model)
    tokens: list[int] = []
    step = prompt
    for _ in range(max_tokens):
        tokens.append(argmax(loaded.model(mx.array([step]), cache=cache)[0, -1]))
        step = tokens[-1:]
    return tokens


# -- Names ---------------------------------------------------------------------------------------------------


def test_the_list_names_the_two_models_and_says_that_others_work() -> None:
    infos = list_models()
    assert [info.name for info in infos] == ["smollm2", "tiny", OTHER_MODELS]
    assert infos[0].size_bytes == 98_362_432 and infos[0].license == "Apache-2.0"
    assert infos[1].is_here


def test_the_list_says_whether_the_default_model_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIVLLM_CACHE", str(tmp_path))
    assert not list_models()[0].is_here
    SMOLLM2.folder.mkdir()
    with SMOLLM2.path.open("wb") as file:
        file.truncate(SMOLLM2.file_bytes)  # the right size is enough for a list
    assert list_models()[0].is_here


@pytest.mark.parametrize(("name", "hint"), [("smolm2", "smollm2"), ("tinny", "tiny"), ("SmolLM2", "smollm2")])
def test_an_unknown_name_gets_the_nearest_one(name: str, hint: str) -> None:
    for call in (load_model, fetch):
        with pytest.raises(UnknownNameError, match=f"no model '{name}'; did you mean '{hint}'"):
            call(name)


def test_an_empty_name_gets_all_names() -> None:
    with pytest.raises(UnknownNameError, match="choose one of smollm2, tiny, virtual"):
        load_model("")


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder", "~/no/such/folder", "a/b/c", "../x"])
def test_a_folder_that_is_not_there_is_named(name: str) -> None:
    with pytest.raises(ModelError, match="there is no model folder"):
        load_model(name)


def test_a_file_is_not_taken_for_a_folder(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ModelError, match="is a file; give the folder"):
        load_model(str(tmp_path / "model.gguf"))


def test_importing_brings_in_no_mlx() -> None:
    heavy = ("mlx.core", "mlx_lm", "transformers")
    code = f"import sys, minivllm.models.load; print([m for m in {heavy} if m in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


# -- tiny ----------------------------------------------------------------------------------------------------


def test_tiny_has_the_sizes_it_promises(tiny: LoadedModel) -> None:
    assert (tiny.num_layers, tiny.num_kv_heads, tiny.head_dim) == (4, 2, 16)
    assert (tiny.vocab_size, tiny.max_model_len, tiny.dtype) == (259, 4096, mx.float32)
    assert tiny.kv_bytes_per_token == 2 * 4 * 2 * 16 * 4


def test_tiny_has_the_same_weights_on_every_machine(tiny: LoadedModel) -> None:
    digest = hashlib.sha256()
    for name, value in sorted(parameters(tiny).items()):
        digest.update(name.encode())
        numbers: Any = value.flatten().tolist()
        digest.update(struct.pack(f"<{value.size}f", *numbers))
    assert digest.hexdigest() == "3dd313fd200ed7bb26af40989e74444dc37b2fb7025bd00c4e2960d07b7a26cb"


def test_tinys_answer_depends_on_the_first_token_of_a_long_prompt(tiny: LoadedModel) -> None:
    prompt = [(37 * number + 11) % 256 for number in range(100)]
    answer = greedy(tiny, prompt, 32)
    assert greedy(tiny, prompt, 32) == answer
    assert greedy(tiny, [prompt[0] + 1, *prompt[1:]], 32) != answer
    assert len(set(answer)) >= 8


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=60))
def test_tinys_tokens_are_the_bytes_of_the_text(tiny: LoadedModel, text: str) -> None:
    tokens = tiny.tokenizer.encode(text)
    assert tokens == list(text.encode())
    assert tiny.tokenizer.decode(tokens) == text


def test_tinys_special_tokens_and_chat_template(tiny: LoadedModel) -> None:
    tokenizer = tiny.tokenizer
    assert tokenizer.encode("a<|im_end|>b") == [97, 258, 98]
    assert tokenizer.eos_token_ids == {258}
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_every_token_of_tiny_can_be_streamed(tiny: LoadedModel) -> None:
    detokenizer = tiny.tokenizer.detokenizer
    for token in [*range(tiny.vocab_size), *"é".encode()]:
        detokenizer.add_token(token)
    detokenizer.finalize()
    assert detokenizer.text.endswith("<|endoftext|><|im_start|><|im_end|>é")


# -- The default model ---------------------------------------------------------------------------------------


@pytest.mark.model
def test_smollm2_loads_ready_to_run_on_its_thread() -> None:
    loaded: list[LoadedModel] = []
    answers: list[list[int]] = []

    def engine_thread() -> None:
        loaded.append(load_model("smollm2"))
        answers.append(greedy(loaded[0], loaded[0].tokenizer.encode("The capital of France is"), 1))

    thread = threading.Thread(target=engine_thread)
    thread.start()
    thread.join()
    smollm2 = loaded[0]
    assert (smollm2.num_layers, smollm2.num_kv_heads, smollm2.head_dim) == (30, 3, 64)
    assert (smollm2.vocab_size, smollm2.max_model_len) == (49_152, 8192)
    assert smollm2.dtype == (mx.float32 if mx.default_device() == mx.Device(mx.cpu) else mx.float16)
    assert smollm2.tokenizer.decode(answers[0]) == " Paris"


@pytest.mark.model
def test_a_damaged_default_model_says_how_to_replace_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = checked_path(SMOLLM2)
    monkeypatch.setenv("MINIVLLM_CACHE", str(tmp_path))
    SMOLLM2.folder.mkdir()
    SMOLLM2.path.write_bytes(whole.read_bytes()[:-1])
    with pytest.raises(ModelError, match=r"has 98362431 bytes instead of 98362432; run `minivllm model get smollm2`"):
        load_model("smollm2")


# -- Folders -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [None, "affine", "mxfp4"])
def test_a_folder_loads_in_fp32_on_the_cpu_and_computes_what_mlx_lm_computes(tmp_path: Path, mode: str | None) -> None:
    import mlx_lm

    folder = write_folder(tmp_path / "m", QWEN2, mode=mode)
    loaded = load_model(str(folder))
    assert (loaded.name, loaded.vocab_size, loaded.max_model_len) == (str(folder), 259, 300)
    assert (loaded.num_layers, loaded.num_kv_heads, loaded.head_dim) == (2, 2, 16)
    if mx.default_device() == mx.Device(mx.cpu):
        assert {value.dtype for value in parameters(loaded).values()} == {mx.float32}
    expected, _ = mlx_lm.load(str(folder))
    prompt = mx.array([[1, 2, 3, 200, 100]])
    assert mx.allclose(loaded.model(prompt), expected(prompt).astype(mx.float32), atol=1e-3).item()
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("héllo 1")) == "héllo 1"
    assert loaded.tokenizer.eos_token_ids == {258}


def test_bfloat16_weights_become_fp32_on_the_cpu(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", QWEN2)
    weights: Any = mx.load(str(folder / "model.safetensors"))
    half = {name: value.astype(mx.bfloat16) for name, value in weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), half)
    loaded = load_model(str(folder))
    assert loaded.dtype == (mx.float32 if mx.default_device() == mx.Device(mx.cpu) else mx.bfloat16)


def test_a_folder_model_has_no_lazy_array_left_for_another_thread(tmp_path: Path) -> None:
    """A rope with frequencies of its own is no parameter, and must be evaluated all the same."""
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = {
        **QWEN2,
        "model_type": "llama",
        "rope_scaling": {**rope, "original_max_position_embeddings": 100},
    }
    folder = write_folder(tmp_path / "m", config)
    loaded: list[LoadedModel] = []
    thread = threading.Thread(target=lambda: loaded.append(load_model(str(folder))))
    thread.start()
    thread.join()
    frequencies = [module["_freqs"] for module in loaded[0].model.modules() if "_freqs" in module]
    assert len(frequencies) == 2
    for value in frequencies:
        value.tolist()  # raises "no Stream in current thread" for an array that is still lazy


SLIDING = {
    "gemma3_text": {
        **QWEN2,
        "model_type": "gemma3_text",
        "head_dim": 16,
        "sliding_window": 8,
        "sliding_window_pattern": 2,
    },
    "llama": {
        **QWEN2,
        "model_type": "llama",
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}


@pytest.mark.parametrize("kind", sorted(SLIDING))
def test_a_model_with_a_sliding_window_is_refused(tmp_path: Path, kind: str) -> None:
    folder = write_folder(tmp_path / "m", SLIDING[kind])
    with pytest.raises(ModelError, match=r"is not dense: it keeps RotatingKVCache .*choose a model") as caught:
        load_model(str(folder))
    assert "\n" not in str(caught.value)


def test_a_recurrent_model_is_refused(tmp_path: Path) -> None:
    config = {
        "model_type": "mamba",
        "vocab_size": 259,
        "hidden_size": 32,
        "intermediate_size": 64,
        "state_size": 8,
        "num_hidden_layers": 2,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 4,
    }
    with pytest.raises(ModelError, match="is not dense: it keeps ArraysCache"):
        load_model(str(write_folder(tmp_path / "m", config)))


def test_dynamic_ntk_rope_is_refused(tmp_path: Path) -> None:
    config = {**QWEN2, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    with pytest.raises(ModelError, match="dynamic-NTK rope"):
        load_model(str(write_folder(tmp_path / "m", config)))


def test_a_folder_without_a_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        load_model(str(tmp_path))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model_type": "no_such_type"}', '{"model_type": "qwen2"}'])
def test_a_config_that_describes_no_model_is_refused(tmp_path: Path, text: str) -> None:
    folder = write_folder(tmp_path / "m", QWEN2)
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelError) as caught:
        load_model(str(folder))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kept_bytes", [0, 4, 100, -1])
def test_a_cut_weight_file_is_named(tmp_path: Path, kept_bytes: int) -> None:
    folder = write_folder(tmp_path / "m", QWEN2)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:kept_bytes])
    with pytest.raises(ModelError, match=r"model\.safetensors is (cut off|not a whole)"):
        load_model(str(folder))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", QWEN2)
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors cannot be read"):
        load_model(str(folder))


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", QWEN2)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"holds no model\*\.safetensors"):
        load_model(str(folder))


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", QWEN2)
    (folder / "config.json").write_text(json.dumps({**QWEN2, "num_hidden_layers": 3}))
    with pytest.raises(ModelError, match="mlx-lm cannot load model"):
        load_model(str(folder))


def test_code_that_comes_with_a_model_is_not_run(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", QWEN2)
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    (folder / "config.json").write_text(json.dumps({**QWEN2, "model_file": "evil.py"}))
    with pytest.raises(ModelError, match="mlx-lm cannot load"):
        load_model(str(folder))
    assert not (tmp_path / "ran").exists()


# -- The hub -------------------------------------------------------------------------------------------------


class SmallHub(BaseHTTPRequestHandler):
    """As much of a model hub as fetching ``lab/small`` takes; any other model is not found or gated."""

    folder: Path
    commit = "0123456789abcdef0123456789abcdef01234567"

    def log_message(self, format: str, *args: object) -> None:
        """A test's output stays clean."""

    def _answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        files = sorted(self.folder.iterdir())
        if "lab/gated" in path:
            self._answer(403, b"{}", X_Error_Code="GatedRepo")
        elif "lab/small" not in path:
            self._answer(404, b"{}", X_Error_Code="RepoNotFound")
        elif path.startswith("/api/") and "/tree/" in path:
            tree = [
                {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": file.name} for file in files
            ]
            self._answer(200, json.dumps(tree).encode(), Content_Type="application/json")
        elif path.startswith("/api/"):
            info = {"id": "lab/small", "sha": self.commit, "siblings": [{"rfilename": file.name} for file in files]}
            self._answer(200, json.dumps(info).encode(), Content_Type="application/json")
        else:
            body = (self.folder / path.rsplit("/", 1)[-1]).read_bytes()
            etag = hashlib.sha256(body).hexdigest()
            self._answer(200, body, ETag=f'"{etag}"', X_Repo_Commit=self.commit)

    do_HEAD = do_GET


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[str]:
    """Serve a small model as a hub does; give its address."""
    handler = type("Hub", (SmallHub,), {"folder": write_folder(tmp_path / "served", QWEN2)})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def load_from_hub(name: str, address: str, home: Path, **environ: str) -> tuple[Any, str]:
    """Load ``name`` in a fresh Python, where the hub's address can be set; give its answer and its stderr."""
    code = (
        "import json, sys\n"
        "from minivllm.errors import ModelError\n"
        "from minivllm.models.load import fetch, load_model\n"
        "reports = []\n"
        "try:\n"
        "    m = load_model(sys.argv[1], progress=lambda *report: reports.append(report))\n"
        "    print(json.dumps([m.vocab_size, m.max_model_len, reports]))\n"
        "except ModelError as error: print(json.dumps(str(error)))\n"
    )
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    result = subprocess.run(
        [sys.executable, "-c", code, name],
        cwd=ROOT,
        env={**kept, "HF_ENDPOINT": address, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", **environ},
        capture_output=True,
        text=True,
    )
    assert result.stdout, result.stderr
    return json.loads(result.stdout), result.stderr


NOBODY = "http://127.0.0.1:9"
"""The discard port: nobody listens."""


def test_a_hub_model_is_fetched_once_with_progress_and_then_loads_without_a_network(tmp_path: Path, hub: str) -> None:
    (vocab_size, max_model_len, reports), stderr = load_from_hub("lab/small", hub, tmp_path / "home")
    assert (vocab_size, max_model_len) == (259, 300)
    assert reports[0] == ["downloading lab/small", 0, None]
    weight_bytes = (tmp_path / "served" / "model.safetensors").stat().st_size
    assert max(done for _, done, _ in reports) >= weight_bytes
    assert "%|" not in stderr  # no progress bar of the hub's own
    (vocab_size, _, reports), _ = load_from_hub("lab/small", NOBODY, tmp_path / "home")
    assert (vocab_size, reports) == (259, [])


@pytest.mark.parametrize(
    ("name", "message"),
    [("lab/missing", "the hub has no model 'lab/missing'"), ("lab/gated", "model 'lab/gated' is gated")],
)
def test_a_hub_model_that_cannot_be_had_is_told_apart(tmp_path: Path, hub: str, name: str, message: str) -> None:
    answer, _ = load_from_hub(name, hub, tmp_path / "home")
    assert answer.startswith(message) and "\n" not in answer


def test_without_a_network_a_hub_model_is_said_to_be_out_of_reach(tmp_path: Path) -> None:
    answer, _ = load_from_hub("lab/small", NOBODY, tmp_path / "home")
    assert "the hub cannot be reached; check the network" in answer
    answer, _ = load_from_hub("lab/small", NOBODY, tmp_path / "home", HF_HUB_OFFLINE="1")
    assert "the hub cannot be reached" in answer
