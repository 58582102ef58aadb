"""Adapters: what is read from a folder, what they compute, and that no two of them ever share a block."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.parity.direct import StepDriver, prompt, small_model  # before mlx: it loads the fast BLAS

import mlx.core as mx  # isort: skip
import numpy as np
import pytest
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.lora import LoRALinear
from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters

from minivllm import Engine, EngineConfig, EngineCore, Sampling, Submission, replay
from minivllm.errors import ConfigError, InvalidRequestError, InvariantError, ModelError
from minivllm.log import events as ev
from minivllm.models.adapters import CONFIG, WEIGHTS, Adapters, make_adapter
from minivllm.models.folder import LoadedModel
from minivllm.models.load import load_model
from minivllm.request import Request
from minivllm.runners.mlx import MLXRunner

PROMPT = list(b"the same forty tokens, whoever asks them")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two adapters for the tiny model."""
    root = tmp_path_factory.mktemp("adapters")
    return {name: make_adapter(root / name, seed=seed) for seed, name in enumerate(("left", "right"))}


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    """The tiny model, which every test leaves as it found it."""
    return load_model("tiny")


@pytest.fixture
def driver(tiny: LoadedModel, folders: dict[str, Path]) -> Iterator[StepDriver]:
    """A runner over the tiny model with both adapters."""
    made = StepDriver.over(tiny, adapters=Adapters(tiny, folders))
    yield made
    made.runner.close()


def mlx_lms_logits(loaded: LoadedModel, folder: Path | None, tokens: list[int], steps: int) -> np.ndarray:
    """Let mlx-lm load the adapter into a fresh copy of the model, and decode ``tokens`` greedily by itself."""
    if folder is not None:
        load_adapters(loaded.model, str(folder))
    loaded.model.eval()
    cache = make_prompt_cache(loaded.model)
    logits, new = [], tokens
    for _ in range(steps):
        logits.append(np.array(loaded.model(mx.array([new]), cache=cache)[0, -1].astype(mx.float32)))
        new = [int(np.argmax(logits[-1]))]
    return np.stack(logits)


def write_as_mlx_lm_does(folder: Path, loaded: LoadedModel, kind: str = "lora", **parameters: Any) -> Path:
    """Write an adapter for a fresh copy of a model, by mlx-lm's own functions, with random weights in it."""
    config = {"rank": 4, "scale": 2.0, "dropout": 0.0, **parameters}
    loaded.model.freeze()
    linear_to_lora_layers(loaded.model, loaded.num_layers, config, use_dora=kind == "dora")
    draw = np.random.default_rng(8)
    trainable: Any = tree_flatten(loaded.model.trainable_parameters())
    weights = {
        name: old if name.endswith(".m") else mx.array(draw.standard_normal(old.shape) * 0.1, mx.float32)
        for name, old in trainable
    }
    folder.mkdir()
    mx.save_safetensors(str(folder / WEIGHTS), weights)
    described = {"fine_tune_type": kind, "num_layers": loaded.num_layers, "lora_parameters": config}
    (folder / CONFIG).write_text(json.dumps(described))
    return folder


def quantized(loaded: LoadedModel) -> LoadedModel:
    quantize(loaded.model, group_size=32, bits=4)
    mx.eval(loaded.model.parameters())
    return loaded


def base_modules(loaded: LoadedModel) -> dict[str, int]:
    return {path: id(module) for path, module in loaded.model.named_modules()}


# -- What is made --------------------------------------------------------------------------------------------


def test_a_seed_makes_the_same_adapter_on_every_machine(tmp_path: Path) -> None:
    weights: Any = mx.load(str(make_adapter(tmp_path / "a", seed=7, rank=2) / WEIGHTS))
    digest = hashlib.sha256()
    for name, value in sorted(weights.items()):
        digest.update(name.encode() + np.array(value).tobytes())
    assert digest.hexdigest() == "a4b2badb7d9facb977773051a673204d47a2d7ab937a8bec14d7100514491d0d"


def test_another_seed_makes_another_adapter(folders: dict[str, Path]) -> None:
    left, right = ((folders[name] / WEIGHTS).read_bytes() for name in ("left", "right"))
    assert len(left) == len(right) and left != right


@pytest.mark.parametrize(("wrong", "says"), [({"rank": 0}, "rank is 0"), ({"scale": float("nan")}, "scale is nan")])
def test_a_strength_that_makes_no_sense_is_refused(tmp_path: Path, wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make_adapter(tmp_path / "a", seed=0, **wrong)
    assert not (tmp_path / "a").exists()


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a file")
    with pytest.raises(ModelError, match="cannot be written"):
        make_adapter(tmp_path / "a", seed=0)


def test_importing_the_module_does_not_import_mlx() -> None:
    code = "import sys, minivllm.models.adapters; sys.exit(any(name.split('.')[0] == 'mlx' for name in sys.modules))"
    assert (
        subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}, check=False).returncode
        == 0
    )


# -- What is read --------------------------------------------------------------------------------------------


def test_an_adapter_holds_the_bases_own_layers_and_copies_none(tiny: LoadedModel, folders: dict[str, Path]) -> None:
    before = base_modules(tiny)
    mx.clear_cache()
    active = mx.get_active_memory()
    adapters = Adapters(tiny, folders)
    added = mx.get_active_memory() - active
    assert added <= adapters.num_bytes("left") + adapters.num_bytes("right") + 4096
    assert base_modules(tiny) == before
    linear = tiny.model.layers[0].self_attn.k_proj
    for name in ("left", "right"):
        with adapters.applied(name):
            changed = tiny.model.layers[0].self_attn.k_proj
            assert isinstance(changed, LoRALinear) and changed.linear is linear
    with adapters.applied(None):
        assert base_modules(tiny) == before
    assert base_modules(tiny) == before


def test_on_the_cpu_an_adapter_in_half_precision_becomes_fp32(
    tiny: LoadedModel, folders: dict[str, Path], tmp_path: Path
) -> None:
    weights: Any = mx.load(str(folders["left"] / WEIGHTS))
    mx.save_safetensors(str(tmp_path / WEIGHTS), {key: value.astype(mx.float16) for key, value in weights.items()})
    (tmp_path / CONFIG).write_bytes((folders["left"] / CONFIG).read_bytes())
    half, whole = Adapters(tiny, {"a": tmp_path}), Adapters(tiny, {"a": folders["left"]})
    expected = whole.num_bytes("a") // (1 if mx.default_device() == mx.cpu else 2)
    assert half.num_bytes("a") == expected


def change_config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / CONFIG).read_text())
        for name, value in changes.items():
            place = config["lora_parameters"] if name in ("rank", "scale", "keys") else config
            place[name] = value
            if value is None:
                del place[name]
        (folder / CONFIG).write_text(json.dumps(config))

    return change


def change_weights(change: Callable[[dict[str, mx.array], str], object]) -> Callable[[Path], None]:
    def run(folder: Path) -> None:
        weights: Any = mx.load(str(folder / WEIGHTS))
        mx.eval(list(weights.values()))
        change(weights, sorted(weights)[0])
        mx.save_safetensors(str(folder / WEIGHTS), weights)

    return run


def cut(folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[: len(data) // 2])


def change_nothing(folder: Path) -> None:
    """Leave an adapter that is whole, for no layer."""
    change_config(keys=["self_attn.none"])(folder)
    change_weights(lambda weights, key: weights.clear())(folder)


BREAKS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (lambda folder: folder.rename(folder.with_name("elsewhere")), "there is no folder"),
    "no config": (lambda folder: (folder / CONFIG).unlink(), f"holds no {CONFIG}"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), f"holds no {WEIGHTS}"),
    "config cut": (lambda folder: (folder / CONFIG).write_text('{"num_layers'), "cannot be used"),
    "config no object": (lambda folder: (folder / CONFIG).write_text("[1]"), "cannot be used"),
    "config binary": (lambda folder: (folder / CONFIG).write_bytes(b"\xff\xfe"), "cannot be used"),
    "weights cut": (cut, "is cut off"),
    "weights no safetensors": (lambda folder: (folder / WEIGHTS).write_bytes(b"hello"), "fetch the adapter again"),
    "no rank": (change_config(rank=None), "lacks 'rank'"),
    "no scale": (change_config(scale=None), "lacks 'scale'"),
    "no parameters": (change_config(lora_parameters=None), "lacks 'lora_parameters'"),
    "no layers": (change_config(num_layers=None), "lacks 'num_layers'"),
    "scale a text": (change_config(scale="2"), "scale must be a finite number"),
    "another rank": (change_config(rank=3), "does not fit"),
    "rank no number": (change_config(rank=0), "whole numbers"),
    "fewer layers": (change_config(num_layers=3), "does not fit"),
    "keys of nothing": (change_config(keys=["self_attn.none"]), "does not fit"),
    "nothing at all": (change_nothing, "every layer is missing"),
    "keys no list": (change_config(keys=5), "cannot be followed"),
    "a whole model": (change_config(fine_tune_type="full"), "lora or dora"),
    "a tensor too few": (change_weights(lambda weights, key: weights.pop(key)), "does not fit"),
    "a tensor too many": (change_weights(lambda weights, key: weights.update(more=mx.zeros(3))), "more is of shape"),
    "another shape": (change_weights(lambda weights, key: weights.update({key: mx.zeros(3)})), "does not fit"),
    "whole numbers": (
        change_weights(lambda weights, key: weights.update({key: weights[key].astype(mx.int32)})),
        "no real numbers",
    ),
    "NaN": (change_weights(lambda weights, key: weights.update({key: weights[key] * mx.nan})), "NaN or infinity"),
}


@pytest.mark.parametrize("kind", BREAKS)
def test_a_broken_folder_is_one_sentence_and_leaves_the_model_alone(
    kind: str, tiny: LoadedModel, folders: dict[str, Path], tmp_path: Path
) -> None:
    break_it, says = BREAKS[kind]
    folder = tmp_path / "broken"
    folder.mkdir()
    for name in (CONFIG, WEIGHTS):
        (folder / name).write_bytes((folders["left"] / name).read_bytes())
    break_it(folder)
    before = base_modules(tiny)
    with pytest.raises(ModelError, match=says) as raised:
        Adapters(tiny, {"good": folders["left"], "broken": folder})
    assert "\n" not in str(raised.value)
    assert base_modules(tiny) == before


def test_an_adapter_of_another_model_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(ModelError, match="does not fit model 'small-qwen2'"):
        Adapters(small_model("qwen2"), folders)


@pytest.mark.parametrize("wrong", [{"": "x"}, {3: "x"}, {"a": 3}])
def test_a_name_or_folder_that_is_none_is_refused(tiny: LoadedModel, wrong: dict[Any, Any]) -> None:
    with pytest.raises(ConfigError, match="adapter"):
        Adapters(tiny, wrong)


# -- What is computed ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("make", "kind", "parameters"),
    [
        (small_model, "lora", {}),
        (small_model, "lora", {"dropout": 0.9, "keys": ["self_attn.k_proj", "self_attn.v_proj"]}),
        (small_model, "dora", {}),
        (lambda family: quantized(small_model(family)), "lora", {}),
        (lambda family: quantized(small_model(family)), "lora", {"keys": ["self_attn.q_proj", "model.embed_tokens"]}),
        (small_model, "lora", {"keys": ["mlp.up_proj", "model.embed_tokens"]}),
    ],
    ids=["all", "dropout", "dora", "quantized", "quantized-embedding", "embedding"],
)
def test_logits_are_those_of_mlx_lms_own_loading(
    family: str, make: Callable[[str], LoadedModel], kind: str, parameters: dict[str, Any], tmp_path: Path
) -> None:
    """Also where the vocabulary product itself is changed, through an embedding that is tied to it."""
    folder = write_as_mlx_lm_does(tmp_path / "a", make(family), kind, **parameters)
    loaded = make(family)
    driver = StepDriver.over(loaded, adapters=Adapters(loaded, {"a": folder}))
    requests = {name: driver.request(str(name), prompt(21), adapter=name) for name in ("a", None)}
    for request in requests.values():
        driver.prefill(request, chunk=8)
        driver.decode(request, steps=3)
    for name in requests:
        expected = mlx_lms_logits(make(family), folder if name else None, prompt(21), 4)
        np.testing.assert_allclose(np.stack(driver.logits[str(name)]), expected, rtol=2e-3, atol=2e-3)
    assert not np.allclose(driver.logits["a"][0], driver.logits["None"][0], atol=0.1)


def test_a_changed_vocabulary_product_counts_for_its_own_rows_only(tmp_path: Path) -> None:
    folder = write_as_mlx_lm_does(tmp_path / "a", small_model("qwen2"), keys=["lm_head"])
    loaded = small_model("qwen2")
    driver = StepDriver.over(loaded, adapters=Adapters(loaded, {"a": folder}))
    requests = [driver.request(str(name), prompt(9), adapter=name) for name in ("a", None)]
    driver.step(*((request, 9) for request in requests))
    for request in requests:
        expected = mlx_lms_logits(small_model("qwen2"), folder if request.adapter else None, prompt(9), 1)
        np.testing.assert_allclose(driver.logits[request.request_id], expected, rtol=2e-3, atol=2e-3)
    assert not np.allclose(driver.logits["a"], driver.logits["None"], atol=0.1)


def test_the_same_tokens_have_other_keys_and_values_under_each_adapter(driver: StepDriver) -> None:
    """In every layer, read from the pool itself."""
    names = ("left", "right", None)
    for name in names:
        driver.prefill(driver.request(str(name), PROMPT, adapter=name), chunk=16)
    requests = {str(name): Request(str(name), tuple(PROMPT), num_computed_tokens=len(PROMPT)) for name in names}
    contents = {name: driver.contents(request) for name, request in requests.items()}
    for one, two in (("left", "right"), ("left", "None"), ("right", "None")):
        difference = np.abs(contents[one] - contents[two]).max(axis=(2, 4))  # of each token, in each layer, K and V
        assert difference.min() > 0.1 * np.abs(contents["None"]).mean()


def test_a_batch_of_rows_of_both_adapters_and_the_base_equals_each_alone(
    driver: StepDriver, tiny: LoadedModel, folders: dict[str, Path]
) -> None:
    sampling = Sampling(temperature=0.9)
    chosen = [None, "left", "right", "left", None, "right"]

    def make(on: StepDriver, number: int) -> Request:
        return on.request(f"r{number}", PROMPT[: 7 + 5 * number], sampling, seed=number, adapter=chosen[number])

    together = [make(driver, number) for number in range(6)]
    driver.step(*((request, request.num_tokens) for request in together[:3]))
    # Decodes of three kinds, a chunk, a prompt in one piece and one token of a prompt, in one step.
    driver.step(*((request, 1) for request in together[:3]), (together[3], 6), (together[4], 27), (together[5], 1))
    driver.step(*((request, 1) for request in together[:3]), (together[3], 16), (together[4], 1), (together[5], 31))
    driver.decode(*together, steps=3)

    alone = StepDriver.over(tiny, adapters=Adapters(tiny, folders))
    for number, request in enumerate(together):
        lone = make(alone, number)
        alone.prefill(lone)
        alone.decode(lone, steps=len(request.output_token_ids) - 1)
        assert lone.output_token_ids == request.output_token_ids
        np.testing.assert_allclose(driver.logits[f"r{number}"], alone.logits[f"r{number}"], rtol=2e-3, atol=2e-3)
        np.testing.assert_allclose(driver.contents(request), alone.contents(lone), rtol=2e-3, atol=2e-3)


def test_rows_of_one_adapter_decode_in_one_call_and_those_of_others_in_others(
    driver: StepDriver, tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [
        driver.request(f"r{n}", PROMPT[:5], adapter=name)
        for n, name in enumerate(["left", "right", None, "left", None])
    ]
    driver.step(*((request, 5) for request in requests))
    forward = driver.runner._forward
    assert forward is not None
    calls: list[tuple[int, bool]] = []
    original = forward.last_logits

    def noted(tokens: mx.array, cache: Any) -> mx.array:
        calls.append((len(tokens), isinstance(tiny.model.layers[0].self_attn.k_proj, LoRALinear)))
        return original(tokens, cache)

    monkeypatch.setattr(forward, "last_logits", noted)
    driver.decode(*requests, steps=1)
    assert calls == [(2, True), (1, True), (2, False)]


def test_an_error_in_a_call_leaves_the_base_in_place(driver: StepDriver, tiny: LoadedModel) -> None:
    before = base_modules(tiny)
    request = driver.request("r", PROMPT, adapter="left")
    forward = driver.runner._forward
    assert forward is not None

    def broken(tokens: mx.array, cache: Any) -> mx.array:
        assert base_modules(tiny) != before
        raise RuntimeError("the device broke")

    forward.last_logits = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="the device broke"):
        driver.prefill(request)
    assert base_modules(tiny) == before


def test_two_runners_with_other_adapters_may_share_a_model(tiny: LoadedModel, folders: dict[str, Path]) -> None:
    one = StepDriver.over(tiny, adapters=Adapters(tiny, folders))
    two, three = StepDriver.over(tiny, adapters=Adapters(tiny, {"left": folders["right"]})), StepDriver.over(tiny)
    a, b, c = (
        driver.request("r", PROMPT, adapter=name) for driver, name in ((one, "left"), (two, "left"), (three, None))
    )
    for driver, request in ((one, a), (two, b), (three, c)):
        driver.prefill(request)
    for _ in range(3):
        for driver, request in ((one, a), (two, b), (three, c)):
            driver.decode(request, steps=1)
    for driver, folder in ((one, folders["left"]), (two, folders["right"]), (three, None)):
        expected = mlx_lms_logits(load_model("tiny"), folder, PROMPT, 4)
        np.testing.assert_allclose(driver.logits["r"], expected, rtol=2e-3, atol=2e-3)


def test_a_row_of_an_adapter_that_was_not_loaded_is_a_bug_and_said_so(tiny: LoadedModel) -> None:
    driver = StepDriver.over(tiny)
    with pytest.raises(InvariantError, match="'left' is not loaded"):
        driver.prefill(driver.request("r", PROMPT, adapter="left"))


# -- In the engine -------------------------------------------------------------------------------------------


def build(tiny: LoadedModel, folders: dict[str, Path], **settings: Any) -> EngineCore:
    config = EngineConfig(**{"block_size": 4, "num_blocks": 64, "publication": "incremental", **settings})
    return EngineCore(config, MLXRunner(tiny, Adapters(tiny, folders)))


def run_checked(core: EngineCore) -> None:
    while core.step():
        core.check_invariants()
        assert core.state() == replay(core.log)


def full_prompt_blocks(core: EngineCore) -> dict[str, list[int]]:
    """Return the blocks that each request's table had for the full blocks of the prompt."""
    found: dict[str, list[int]] = {}
    for event in core.log:
        if isinstance(event, (ev.BlocksHit, ev.BlocksAllocated)):
            found.setdefault(event.request_id, []).extend(event.block_ids)
    return {name: ids[: len(PROMPT) // core.config.block_size] for name, ids in found.items()}


@pytest.mark.parametrize("coordination", ["independent", "single-flight", "shared-prefix"])
def test_adapters_share_no_block_with_each_other_or_the_base_and_the_same_one_does(
    tiny: LoadedModel, folders: dict[str, Path], coordination: str
) -> None:
    core = build(tiny, folders, coordination=coordination)
    sampling = Sampling(max_tokens=4, ignore_eos=True)
    names = ("left", "right", None)
    for turn in range(2):
        core.submit_batch(
            [Submission(PROMPT, sampling, f"{name}-{number}", adapter=name) for name in names for number in (turn,)]
        )
        run_checked(core)
    for name in names:
        first, second = core.requests[f"{name}-0"], core.requests[f"{name}-1"]
        assert (first.num_recovered_tokens, second.num_recovered_tokens) == (0, 36)  # the last token's block is its own
        assert first.output_token_ids == second.output_token_ids
    used = full_prompt_blocks(core)
    for one in names:
        for two in names:
            shared = set(used[f"{one}-0"]) & set(used[f"{two}-1"][:9])
            assert shared == (set(used[f"{one}-0"][:9]) if one == two else set())
    outputs = {tuple(core.requests[f"{name}-0"].output_token_ids) for name in names}
    assert len(outputs) == 3
    core.close()


def test_requests_that_arrive_together_share_within_their_adapter_only(
    tiny: LoadedModel, folders: dict[str, Path]
) -> None:
    core = build(tiny, folders, coordination="single-flight", release="after-prefill")
    sampling = Sampling(max_tokens=4, ignore_eos=True)
    names = ("left", "right", None)
    core.submit_batch([Submission(PROMPT, sampling, f"{name}-{n}", adapter=name) for n in (0, 1) for name in names])
    run_checked(core)
    assert [core.requests[f"{name}-1"].num_recovered_tokens for name in names] == [36] * 3
    used = full_prompt_blocks(core)
    assert [used[f"{name}-1"][:9] for name in names] == [used[f"{name}-0"][:9] for name in names]
    assert len({block for name in names for block in used[f"{name}-0"]}) == 3 * 10
    core.close()


def test_an_engine_takes_adapters_by_folder_and_its_pool_holds_other_keys_for_each(folders: dict[str, Path]) -> None:
    with Engine("tiny", adapters=folders, num_blocks=64, block_size=4) as engine:
        handles = {
            name: engine.submit(PROMPT, request_id=str(name), adapter=name, max_tokens=1)
            for name in ("left", "right", None)
        }
        for handle in handles.values():
            handle.result()

        def keys_of(core: EngineCore, name: str) -> np.ndarray:
            """The whole prompt's keys in the first layer, and a copy: the array stays on this thread."""
            pool = core.runner._pool  # type: ignore[attr-defined]
            return np.array(pool._keys[0][mx.array(full_prompt_blocks(core)[name])])

        keys = engine.call(lambda core: {name: keys_of(core, name) for name in ("left", "right", "None")})
        assert np.abs(keys["left"] - keys["right"]).max() > 0.1
        assert np.abs(keys["left"] - keys["None"]).max() > 0.1


def test_an_unknown_adapter_is_refused_at_the_door(folders: dict[str, Path]) -> None:
    with Engine("tiny", adapters=folders, num_blocks=16, block_size=4) as engine:
        with pytest.raises(InvalidRequestError, match=r"no adapter 'lefd'; did you mean 'left'\?"):
            engine.submit(PROMPT, adapter="lefd", max_tokens=2)
        assert engine.submit(PROMPT, adapter="left", max_tokens=2).result().finish_reason == "length"


def test_the_virtual_model_takes_the_names_and_reads_no_folder() -> None:
    with Engine("virtual", adapters={"left": "nowhere"}, num_blocks=16, block_size=4) as engine:
        engine.submit(PROMPT, adapter="left", max_tokens=1).result()
        with pytest.raises(InvalidRequestError, match="no adapter 'right'"):
            engine.submit(PROMPT, adapter="right", max_tokens=1)
    with Engine("virtual", num_blocks=16, block_size=4) as engine:
        engine.submit(PROMPT, adapter="any", max_tokens=1).result()


def test_an_engine_with_a_broken_adapter_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no folder"):
        Engine("tiny", adapters={"left": tmp_path / "none"}, num_blocks=16)
    with pytest.raises(ConfigError, match="adapters is 'left'"):
        Engine("tiny", adapters="left", num_blocks=16)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="beside a runner"):
        Engine("tiny", adapters={"left": tmp_path}, runner=lambda: MLXRunner.load("tiny"), num_blocks=16)
