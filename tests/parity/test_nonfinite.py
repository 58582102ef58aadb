"""NaN and infinity fail the request they come from, and leave nothing behind in the pool.

A token whose embedding is NaN poisons every request that has it. What it wrote must be gone when its blocks are given
to somebody else: a masked slot is read, too, and 0 x NaN is NaN.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.parity.direct import StepDriver, prompt, small_model  # before mlx: it loads the fast BLAS

import mlx.core as mx  # isort: skip
import numpy as np
import pytest

from minivllm import EngineConfig, EngineCore, Sampling, Submission, replay
from minivllm.errors import RowError
from minivllm.models.adapters import CONFIG, WEIGHTS, Adapters
from minivllm.models.folder import LoadedModel
from minivllm.models.load import load_model
from minivllm.request import Request, RequestState
from minivllm.runners.mlx import MLXRunner
from minivllm.runners.paged_cache import BlockPoolArrays
from minivllm.step import BlockCopy

POISON = 96
"""A token id that no prompt of these tests has by chance, and that no model here draws."""


def poison(loaded: LoadedModel, value: float = float("nan")) -> LoadedModel:
    """Make the embedding of one token no number. Its row of the vocabulary product is a logit of 0, never the best."""
    loaded.model.model.embed_tokens.weight[POISON] = value
    loaded.model.lm_head.weight[POISON] = 0.0
    mx.eval(loaded.model.parameters())
    return loaded


def safe(length: int, seed: int = 1) -> list[int]:
    return [token % POISON for token in prompt(length, seed)]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    """One model with the poison in it, which does nothing to those who do not name it."""
    return poison(small_model("qwen2"))


@pytest.fixture
def driver(loaded: LoadedModel) -> Iterator[StepDriver]:
    made = StepDriver.over(loaded, num_blocks=14)
    yield made
    made.runner.close()


def assert_pool_is_finite(runner: MLXRunner) -> None:
    pool = runner._pool
    assert pool is not None
    for half in (*pool._keys, *pool._values):
        assert np.isfinite(np.array(half)).all()


# -- Each way in which a NaN can reach the pool --------------------------------------------------------------
#
# Each takes a token and computes it as request "bad", the last step of which returns what came of it.


def last_of_a_prompt(driver: StepDriver, token: int) -> dict[str, int | RowError]:
    return driver.step((driver.request("bad", [*safe(6), token]), 7))


def in_the_middle_of_a_prompt(driver: StepDriver, token: int) -> dict[str, int | RowError]:
    return driver.step((driver.request("bad", [*safe(3), token, *safe(5)]), 9))


def in_a_chunk_that_does_not_sample(driver: StepDriver, token: int) -> dict[str, int | RowError]:
    return driver.step((driver.request("bad", [*safe(3), token, *safe(9)]), 7))


def in_the_second_chunk(driver: StepDriver, token: int) -> dict[str, int | RowError]:
    bad = driver.request("bad", [*safe(7), token, *safe(4)])
    assert driver.step((bad, 6)) == {}
    return driver.step((bad, 4))


def one_token_of_a_prompt_beside_a_decode(driver: StepDriver, token: int) -> dict[str, int | RowError]:
    bad, other = driver.request("bad", [*safe(5), token, *safe(4)]), driver.request("other", safe(5))
    driver.step((bad, 5), (other, 5))
    return driver.step((other, 1), (bad, 1))


def one_token_of_a_prompt_alone(driver: StepDriver, token: int) -> dict[str, int | RowError]:
    bad = driver.request("bad", [*safe(5), token, *safe(4)])
    driver.step((bad, 5))
    return driver.step((bad, 1))


def in_decode_beside_others(driver: StepDriver, token: int) -> dict[str, int | RowError]:
    bad, other = driver.request("bad", safe(6)), driver.request("other", safe(5))
    driver.step((bad, 6), (other, 5))
    bad.output_token_ids[-1] = bad.token_ids[-1] = token
    return driver.step((other, 1), (bad, 1))


def in_decode_alone(driver: StepDriver, token: int) -> dict[str, int | RowError]:
    bad = driver.request("bad", safe(6))
    driver.prefill(bad)
    bad.output_token_ids[-1] = bad.token_ids[-1] = token
    return driver.step((bad, 1))


WAYS: list[Callable[[StepDriver, int], dict[str, int | RowError]]] = [
    last_of_a_prompt,
    in_the_middle_of_a_prompt,
    in_a_chunk_that_does_not_sample,
    in_the_second_chunk,
    one_token_of_a_prompt_beside_a_decode,
    one_token_of_a_prompt_alone,
    in_decode_beside_others,
    in_decode_alone,
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_no_number_gets_an_error_and_the_pool_stays_finite(
    value: float, way: Callable[[StepDriver, int], dict[str, int | RowError]]
) -> None:
    driver = StepDriver.over(poison(small_model("qwen2"), value), num_blocks=14)
    outcome = way(driver, POISON)
    error = outcome["bad"]
    assert isinstance(error, RowError)
    assert "keys or values" in str(error) and "request 'bad'" in str(error) and "\n" not in str(error)
    assert all(isinstance(outcome[name], int) for name in outcome.keys() - {"bad"})
    assert_pool_is_finite(driver.runner)


def next_owners(driver: StepDriver) -> np.ndarray:
    """Free everything, give all blocks to two requests of unequal lengths, and return what these came to."""
    for name in list(driver.tables):
        driver.free += driver.tables.pop(name)
    driver.free.sort(key=lambda block_id: (block_id * 7) % 15)
    requests = [driver.request("long", safe(26, seed=2)), driver.request("short", safe(18, seed=3))]
    for request in requests:
        driver.prefill(request, chunk=9)
    outcomes = [driver.step(*((request, 1) for request in requests)) for _ in range(2)]
    assert sorted(block for table in driver.tables.values() for block in table) == sorted(
        set(range(1, 15)) - set(driver.free)
    )
    assert len(driver.free) <= 2
    assert all(isinstance(token, int) for outcome in outcomes for token in outcome.values())
    return np.stack([driver.logits[request.request_id] for request in requests])


@pytest.mark.parametrize("way", WAYS)
def test_who_gets_the_blocks_next_computes_as_if_nothing_had_been(
    loaded: LoadedModel, way: Callable[[StepDriver, int], dict[str, int | RowError]]
) -> None:
    """The same steps with a harmless token in place of the poison come to the same logits."""
    after: list[np.ndarray] = []
    for token in (POISON, 5):
        driver = StepDriver.over(loaded, num_blocks=14)
        assert isinstance(way(driver, token).get("bad", 0), RowError) == (token == POISON)
        after.append(next_owners(driver))
    np.testing.assert_allclose(after[0], after[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_without_the_wiping_the_next_owner_would_fail(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, way: Callable[[StepDriver, int], dict[str, int | RowError]]
) -> None:
    """So the test above can fail. Only slots behind a mask are left of the poison: no next owner reads it."""
    driver = StepDriver.over(loaded, num_blocks=14)
    monkeypatch.setattr(BlockPoolArrays, "wipe", lambda pool, call, row: None)
    way(driver, POISON)
    pool = driver.runner._pool
    assert pool is not None
    left = [block for block in driver.tables["bad"] if not np.isfinite(np.array(pool._values[0][block])).all()]
    assert left
    owner, other = driver.request("owner", safe(10, seed=2)), driver.request("other", safe(14, seed=3))
    driver.prefill(other)
    driver.step((owner, 8))
    driver.tables["owner"].append(left[-1])
    outcome = driver.step((other, 1), (owner, 1))  # the first slot of the block; the other three are masked
    assert isinstance(outcome["owner"], RowError)


# -- The others ----------------------------------------------------------------------------------------------


def test_rows_beside_the_bad_one_come_out_as_in_a_clean_run(loaded: LoadedModel) -> None:
    """In the same call and in other calls of the same step, the ones after it included."""
    outputs = []
    for token in (POISON, 5):
        driver = StepDriver.over(loaded, num_blocks=40)
        one, bad, two = (
            driver.request(name, safe(length, seed=length)) for name, length in (("one", 5), ("bad", 9), ("two", 17))
        )
        chunk = driver.request("chunk", safe(20, seed=4))
        driver.step((one, 5), (bad, 9), (two, 17))
        bad.output_token_ids[-1] = bad.token_ids[-1] = token
        driver.step((one, 1), (bad, 1), (two, 1), (chunk, 12))
        driver.step((one, 1), (two, 1), (chunk, 8))
        driver.decode(one, two, chunk, steps=3)
        outputs.append([driver.logits[name] for name in ("one", "two", "chunk")])
    for mine, clean in zip(*outputs, strict=True):
        np.testing.assert_allclose(mine, clean, rtol=1e-5, atol=1e-5)


def test_only_the_slots_of_the_failed_row_in_this_call_are_wiped(driver: StepDriver) -> None:
    bad, other = driver.request("bad", [*safe(6), POISON]), driver.request("other", safe(7))
    driver.step((bad, 6), (other, 7))
    before, others = driver.contents(bad), driver.contents(other)
    driver.step((other, 1), (bad, 1))
    after = driver.contents(bad)
    np.testing.assert_array_equal(after[:, :, :, :6], before)
    assert not after[:, :, :, 6].any()
    np.testing.assert_array_equal(driver.contents(other)[:, :, :, :7], others)
    assert driver.contents(other)[:, :, :, 7].all()


def test_all_samples_of_a_bad_prompt_fail(driver: StepDriver) -> None:
    first = driver.request("first", [*safe(6), POISON], Sampling(temperature=1.0, n=3))
    samples = tuple(driver.request(f"first.{n}", first.prompt_token_ids, Sampling(temperature=1.0)) for n in (1, 2))
    outcome = driver.step((first, 7), samples={"first": samples})
    assert list(outcome) == ["first", "first.1", "first.2"]
    for name, error in outcome.items():
        assert isinstance(error, RowError) and repr(name) in str(error)


def test_a_sample_that_fails_leaves_the_block_that_it_was_copied_from(driver: StepDriver) -> None:
    first = driver.request("first", safe(6), Sampling(n=2))
    sample = driver.request("sample", first.prompt_token_ids)
    driver.step((first, 6), samples={"first": (sample,)})
    target = driver.free.pop(0)
    source = driver.tables["first"][1]
    driver.tables["sample"] = [driver.tables["first"][0], target]
    sample.num_computed_tokens = 6
    sample.output_token_ids[-1] = sample.token_ids[-1] = POISON
    before = driver.contents(first)
    outcome = driver.step((first, 1), (sample, 1), copies=[BlockCopy(source, target)])
    assert isinstance(outcome["sample"], RowError) and isinstance(outcome["first"], int)
    np.testing.assert_array_equal(driver.contents(first)[:, :, :, :6], before)
    assert_pool_is_finite(driver.runner)


def overflowing(folder: Path, loaded: LoadedModel, path: str) -> Adapters:
    """An adapter, "loud", of finite weights whose product on one layer's output is infinite."""
    layer: Any = loaded.model
    for part in path.split("."):
        layer = layer[int(part)] if part.isdigit() else layer[part]
    outputs, inputs = layer.weight.shape
    # Not all inputs may cancel out: a row of one sign, by the first input alone.
    first = mx.zeros((inputs, 2)).at[0].add(1e30)
    mx.save_safetensors(str(folder / WEIGHTS), {f"{path}.lora_a": first, f"{path}.lora_b": mx.full((2, outputs), 1e30)})
    key = path if "layers" not in path else path.split(".", 3)[3]
    parameters = {"rank": 2, "scale": 1.0, "keys": [key]}
    (folder / CONFIG).write_text(json.dumps({"num_layers": 1, "lora_parameters": parameters}))
    return Adapters(loaded, {"loud": folder})


def test_logits_alone_may_be_infinite_and_the_message_says_so(tmp_path: Path) -> None:
    """The K/V are whole then, and so is a row that does not sample, though it has logits beside others that do."""
    loaded = small_model("qwen2")
    driver = StepDriver.over(loaded, adapters=overflowing(tmp_path, loaded, "lm_head"))
    loud, base = driver.request("loud", safe(9), adapter="loud"), driver.request("base", safe(9))
    outcome = driver.step((loud, 9), (base, 9))
    assert isinstance(outcome["base"], int)
    error = outcome["loud"]
    assert isinstance(error, RowError)
    assert str(error).startswith("the logits of request 'loud' at positions 0 to 8 came out as NaN or infinite")
    assert "adapter 'loud'" in str(error)
    early, late = (driver.request(name, safe(9), adapter="loud") for name in ("early", "late"))
    assert driver.step((early, 3), (late, 8)) == {}
    outcome = driver.step((early, 1), (late, 1))
    assert list(outcome) == ["late"] and isinstance(outcome["late"], RowError)


@pytest.mark.parametrize("projection", ["k_proj", "v_proj"])
def test_keys_or_values_that_overflow_in_the_last_layer_alone_are_found(tmp_path: Path, projection: str) -> None:
    """Whether the row samples or not. The layers before it are whole; one of keys and values is, too."""
    loaded = small_model("qwen2")
    adapters = overflowing(tmp_path, loaded, f"model.layers.2.self_attn.{projection}")
    driver = StepDriver.over(loaded, adapters=adapters)
    whole, part = (driver.request(name, safe(9), adapter="loud") for name in ("whole", "part"))
    base = driver.request("base", safe(9))
    outcome = driver.step((whole, 9), (part, 6), (base, 9))
    assert isinstance(outcome["base"], int)
    for name in ("whole", "part"):
        error = outcome[name]
        assert isinstance(error, RowError) and "keys or values" in str(error)
    assert_pool_is_finite(driver.runner)
    assert driver.contents(base).all()
    assert not driver.contents(part).any()


# -- In the engine -------------------------------------------------------------------------------------------


def run_engine(loaded: LoadedModel, prompts: Sequence[Sequence[int]], **settings: Any) -> EngineCore:
    """Run all prompts together to the end, the invariants checked after each step."""
    config = EngineConfig(**{"block_size": 4, "num_blocks": 24, "publication": "incremental", **settings})
    core = EngineCore(config, MLXRunner(loaded))
    sampling = Sampling(max_tokens=5, ignore_eos=True)
    core.submit_batch([Submission(list(tokens), sampling, f"r{number}") for number, tokens in enumerate(prompts)])
    finish(core)
    return core


def finish(core: EngineCore) -> None:
    while core.step():
        core.check_invariants()
        assert core.state() == replay(core.log)
        assert isinstance(core.runner, MLXRunner)
        assert_pool_is_finite(core.runner)


def outputs_of(core: EngineCore, *names: str) -> list[list[int]]:
    requests: list[Request] = [core.requests[name] for name in names]
    assert [request.state for request in requests] == [RequestState.FINISHED] * len(names)
    return [request.output_token_ids for request in requests]


@pytest.mark.parametrize("budget", [5, 64])
@pytest.mark.parametrize("coordination", ["independent", "single-flight", "shared-prefix"])
def test_the_engine_fails_the_request_alone_and_serves_the_next_from_its_blocks(coordination: str, budget: int) -> None:
    loaded = poison(load_model("tiny"))
    begin = safe(12)
    bad, good, other = [*begin, POISON, *safe(9)], [*begin, *safe(7, seed=3)], safe(11, seed=4)
    clean = run_engine(loaded, [good, other])
    core = run_engine(
        loaded, [bad, good, bad, other], coordination=coordination, max_num_batched_tokens=budget, num_blocks=24
    )
    assert [core.requests[name].state for name in ("r0", "r2")] == [RequestState.FAILED] * 2
    assert outputs_of(core, "r1", "r3") == outputs_of(clean, "r0", "r1")
    assert core.manager.pool.num_free == 24
    # The next ones get every block of the pool, the failed one's included; its good beginning may be found.
    sampling = Sampling(max_tokens=5, ignore_eos=True)
    core.submit_batch([Submission(tokens, sampling, f"s{n}") for n, tokens in enumerate((good, other, safe(30)))])
    finish(core)
    assert outputs_of(core, "s0", "s1") == outputs_of(clean, "r0", "r1")
    # And who asks for the bad prompt again fails again: nothing of it was published.
    core.submit_batch([Submission(bad, sampling, "again")])
    finish(core)
    assert core.requests["again"].state is RequestState.FAILED
    assert core.requests["again"].num_recovered_tokens <= 12
    core.close()
    clean.close()
