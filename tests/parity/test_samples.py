"""Several samples of one prompt: each is what a lone request with its seed would be, and a shared block stays whole."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

from tests.parity.direct import Reference, StepDriver, prompt, small_model  # before mlx: it loads the fast BLAS

import mlx.core as mx  # isort: skip
import numpy as np
import pytest

from minivllm import EngineConfig, EngineCore, Sampling, replay
from minivllm.errors import InvariantError
from minivllm.log import events as ev
from minivllm.models.folder import LoadedModel
from minivllm.models.load import load_model
from minivllm.request import Request, RequestState
from minivllm.runners.mlx import MLXRunner
from minivllm.runners.paged_cache import BlockPoolArrays
from minivllm.step import BlockCopy

N = 3
TEXT = list(b"Once upon a time there was a small engine that could not stop talking.")


def real(*values: object) -> Any:
    """A case of a test with the default model."""
    return pytest.param("smollm2", *values, marks=pytest.mark.model)


@pytest.fixture(scope="module")
def models() -> dict[str, LoadedModel]:
    """The models that were loaded so far."""
    return {}


@pytest.fixture
def loaded(request: pytest.FixtureRequest, models: dict[str, LoadedModel]) -> LoadedModel:
    """The model of a test's parameter; each is loaded once."""
    if request.param not in models:
        models[request.param] = load_model(request.param)
    return models[request.param]


# -- In the engine -------------------------------------------------------------------------------------------


def build(loaded: LoadedModel, **settings: Any) -> EngineCore:
    return EngineCore(EngineConfig(**{"block_size": 16, "num_blocks": 64, **settings}), MLXRunner(loaded))


def run_checked(core: EngineCore) -> None:
    while core.step():
        core.check_invariants()
        assert core.state() == replay(core.log)


def lone_outputs(loaded: LoadedModel, tokens: Sequence[int], sampling: Sampling, **settings: Any) -> list[list[int]]:
    """Run one request for each sample, each in an engine of its own."""
    outputs = []
    for number in range(sampling.n):
        core = build(loaded, **settings)
        request = core.submit(list(tokens), sampling.of_sample(number))
        run_checked(core)
        outputs.append(request.output_token_ids)
        core.close()
    return outputs


@pytest.mark.parametrize(
    ("loaded", "num_tokens", "budget"),
    [
        *(("tiny", count, budget) for count in (1, 15, 16, 17, 32, 39, 64) for budget in (11, 64)),
        *(real(count, budget) for count, budget in ((32, 64), (39, 64), (39, 20))),
    ],
    indirect=["loaded"],
)
def test_each_sample_is_what_a_lone_request_with_its_seed_would_be(
    loaded: LoadedModel, num_tokens: int, budget: int
) -> None:
    """Whether the prompt ends in mid-block or at a block's border, and computed in one piece or in chunks."""
    tokens = TEXT[:num_tokens]
    sampling = Sampling(max_tokens=10, temperature=1.2, top_p=0.95, seed=40, ignore_eos=True, n=N)
    core = build(loaded, max_num_batched_tokens=budget)
    first = core.submit(tokens, sampling, request_id="r")
    run_checked(core)
    samples = [core.requests[name] for name in ("r", "r.1", "r.2")]
    assert samples[0] is first
    outputs = [sample.output_token_ids for sample in samples]
    assert outputs == lone_outputs(loaded, tokens, sampling)
    assert len({tuple(output) for output in outputs}) == N
    assert [sample.state for sample in samples] == [RequestState.FINISHED] * N
    computed = sum(event.num_tokens for event in core.log if isinstance(event, ev.ChunkComputed))
    assert computed == num_tokens + N * 9, "the prompt is computed once, and the last token of each sample never"
    copied = [event for event in core.log if isinstance(event, ev.BlockCopied)]
    assert len(copied) == (0 if num_tokens % 16 == 0 else N - 1)
    assert core.manager.pool.num_free == 64
    core.close()


@pytest.mark.parametrize(("loaded", "num_tokens"), [("tiny", 32), ("tiny", 39), real(39)], indirect=["loaded"])
def test_the_pool_holds_for_each_sample_what_it_holds_for_a_lone_request(loaded: LoadedModel, num_tokens: int) -> None:
    sampling = Sampling(max_tokens=12, temperature=1.2, seed=40, ignore_eos=True, n=N)

    def contents(core: EngineCore, names: list[str]) -> list[np.ndarray]:
        """Run until 5 tokens are out, and read the pool: [array, heads, tokens, dim] of each request."""
        while len(core.requests[names[-1]].output_token_ids) < 5:
            assert core.step()
        state, runner = core.state(), core.runner
        assert isinstance(runner, MLXRunner) and runner._pool is not None
        found = []
        for name in names:
            table = mx.array(state.requests[name].block_ids)
            halves = [np.array(half[table]) for half in (*runner._pool._keys, *runner._pool._values)]
            by_token = [half.transpose(1, 0, 2, 3).reshape(half.shape[1], -1, half.shape[3]) for half in halves]
            found.append(np.stack(by_token)[:, :, : core.requests[name].num_computed_tokens])
        core.close()
        return found

    core = build(loaded)
    core.submit(TEXT[:num_tokens], sampling, request_id="r")
    together = contents(core, ["r", "r.1", "r.2"])
    for number, mine in enumerate(together):
        lone = build(loaded)
        lone.submit(TEXT[:num_tokens], sampling.of_sample(number), request_id="r")
        (alone,) = contents(lone, ["r"])
        assert mine.shape == alone.shape and mine.shape[2] == num_tokens + 4
        np.testing.assert_allclose(mine, alone, rtol=1e-3, atol=1e-3)
    assert not np.allclose(together[0][:, :, num_tokens:], together[1][:, :, num_tokens:], atol=1e-2)


@pytest.mark.parametrize("loaded", ["tiny"], indirect=True)
def test_samples_without_room_for_all_are_preempted_and_still_equal_lone_requests(loaded: LoadedModel) -> None:
    sampling = Sampling(max_tokens=24, temperature=1.2, seed=3, ignore_eos=True, n=N)
    core = build(loaded, block_size=4, num_blocks=14)
    core.submit(TEXT[:10], sampling, request_id="r")
    run_checked(core)
    assert sum(core.requests[name].num_preemptions for name in ("r", "r.1", "r.2")) > 0
    outputs = [core.requests[name].output_token_ids for name in ("r", "r.1", "r.2")]
    assert outputs == lone_outputs(loaded, TEXT[:10], sampling, block_size=4)
    core.close()


@pytest.mark.parametrize("loaded", ["tiny"], indirect=True)
def test_greedy_samples_are_all_the_same(loaded: LoadedModel) -> None:
    core = build(loaded, block_size=4)
    core.submit(TEXT[:10], Sampling(max_tokens=8, ignore_eos=True, n=N), request_id="r")
    run_checked(core)
    assert len({tuple(core.requests[name].output_token_ids) for name in ("r", "r.1", "r.2")}) == 1
    core.close()


# -- The runner alone ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small() -> LoadedModel:
    """One small model, where the family does not matter."""
    return small_model("llama")


def fork(driver: StepDriver, first: Request, *samples: Request) -> list[BlockCopy]:
    """Give each sample the first one's table, its partly filled last block copied, as the engine would."""
    table = driver.tables[first.request_id]
    copies = []
    for sample in samples:
        sample.num_computed_tokens = first.num_prompt_tokens
        own = list(table[: -(-first.num_prompt_tokens // driver.block_size)])
        if first.num_prompt_tokens % driver.block_size:
            copies.append(BlockCopy(own[-1], driver.free.pop(0)))
            own[-1] = copies[-1].target
        driver.tables[sample.request_id] = own
    return copies


@pytest.mark.parametrize("length", [8, 10, 11, 12])
def test_samples_draw_from_the_same_logits_by_their_own_seed_and_index(small: LoadedModel, length: int) -> None:
    sampling = Sampling(temperature=1.5)
    driver, alone = StepDriver.over(small), StepDriver.over(small)
    first, *others = (driver.request(f"r{n}", prompt(length), sampling, seed=5 + n) for n in range(N))
    other = driver.request("other", prompt(5))
    driver.prefill(other)
    drawn = driver.step((other, 1), (first, length), samples={"r0": tuple(others)})
    assert list(drawn) == ["other", "r0", "r1", "r2"]
    copies = fork(driver, first, *others)
    driver.step(*((request, 1) for request in (other, first, *others)), copies=copies)
    driver.decode(first, other, *others, steps=6)
    for number, request in enumerate((first, *others)):
        lone = alone.request(f"r{number}", prompt(length), sampling, seed=5 + number)
        alone.prefill(lone)
        alone.decode(lone, steps=7)
        assert request.output_token_ids == lone.output_token_ids
        np.testing.assert_allclose(driver.contents(request), alone.contents(lone), rtol=2e-3, atol=2e-3)


def test_samples_of_one_last_token_in_a_batch_draw_from_their_own_row(small: LoadedModel) -> None:
    """The last token of two prompts is computed in one call with a decode; both have samples."""
    sampling = Sampling(temperature=1.5)
    driver, alone = StepDriver.over(small), StepDriver.over(small)
    other = driver.request("other", prompt(5))
    driver.prefill(other)
    groups = []
    for letter, length in (("a", 9), ("b", 13)):
        group = [driver.request(f"{letter}{n}", prompt(length), sampling, seed=5 + n) for n in range(N)]
        driver.step((group[0], length - 1))
        groups.append(group)
    driver.step(
        (groups[0][0], 1),
        (other, 1),
        (groups[1][0], 1),
        samples={group[0].request_id: tuple(group[1:]) for group in groups},
    )
    for group in groups:
        for number, request in enumerate(group):
            lone = alone.request(f"{request.request_id}", request.prompt_token_ids, sampling, seed=5 + number)
            alone.prefill(lone)
            assert request.output_token_ids == lone.output_token_ids
    driver.check(other, Reference.of(small, other.prompt_token_ids, 2))


def test_two_samples_in_a_call_of_two_rows_draw_from_their_own_row(small: LoadedModel) -> None:
    """The other row, which comes first, does not sample: there are as many draws as rows, but not one for each."""
    driver, alone = StepDriver.over(small), StepDriver.over(small)
    part = driver.request("part", prompt(9, seed=3))
    pair = [driver.request(name, prompt(6)) for name in ("a", "b")]
    driver.step((part, 4), (pair[0], 5))
    assert driver.step((part, 1), (pair[0], 1), samples={"a": (pair[1],)}).keys() == {"a", "b"}
    lone = alone.request("a", prompt(6))
    alone.prefill(lone)
    assert [request.output_token_ids for request in pair] == [lone.output_token_ids] * 2


def test_a_request_that_was_withdrawn_is_not_computed_and_the_others_are(small: LoadedModel) -> None:
    driver = StepDriver.over(small)
    gone, one, chunk, kept = (driver.request(name, prompt(9, seed=7)) for name in ("gone", "one", "chunk", "kept"))
    for request in (gone, one, kept):
        driver.prefill(request)
    before = driver.contents(gone)
    for request in (gone, chunk):
        request.move_to(RequestState.ABORTED)
    drawn = driver.step((gone, 1), (kept, 1), (chunk, 9), (one, 1))
    assert list(drawn) == ["kept", "one"]
    np.testing.assert_array_equal(driver.contents(gone), before)
    pool = driver.runner._pool
    assert pool is not None
    for block in driver.tables["chunk"]:
        assert not np.array(pool._keys[0][block]).any()
    driver.check(kept, Reference.of(small, kept.prompt_token_ids, 2))
    for request in (one, kept):
        request.move_to(RequestState.ABORTED)
    assert driver.step((one, 1), (kept, 1)) == {}


# -- Copies --------------------------------------------------------------------------------------------------


def filled_pool(num_blocks: int = 9) -> tuple[BlockPoolArrays, list[np.ndarray]]:
    """A pool of three layers with other numbers in each slot of each, and what it holds."""
    pool = BlockPoolArrays(3, num_blocks, 2, 4, 8, mx.float32)
    held = []
    for seed, half in enumerate((*pool._keys, *pool._values)):
        held.append(np.random.default_rng(seed).standard_normal(half.shape).astype(np.float32))
        half[:] = mx.array(held[-1])
    pool.evaluate()
    return pool, held


@pytest.mark.parametrize(
    "pairs",
    [[(1, 2)], [(1, 2), (1, 3), (1, 4)], [(1, 2), (2, 3), (3, 1)], [(5, 6), (6, 5)], [(7, 7)], [(9, 1)]],
    ids=["one", "to several", "in a ring", "swapped", "onto itself", "ends"],
)
def test_all_sources_are_read_before_any_target_is_written(pairs: list[tuple[int, int]]) -> None:
    pool, held = filled_pool()
    pool.copy_blocks([BlockCopy(source, target) for source, target in pairs])
    for half, before in zip((*pool._keys, *pool._values), held, strict=True):
        expected = before.copy()
        for source, target in pairs:
            expected[target] = before[source]
        np.testing.assert_array_equal(np.array(half), expected)


@pytest.mark.parametrize("pair", [(0, 1), (1, 0), (-1, 2), (10, 1), (1, 10)])
def test_a_copy_from_or_to_a_block_that_the_pool_has_not_is_refused(pair: tuple[int, int]) -> None:
    pool, held = filled_pool()
    with pytest.raises(InvariantError, match="1 to 9"):
        pool.copy_blocks([BlockCopy(2, 3), BlockCopy(*pair)])
    for half, before in zip((*pool._keys, *pool._values), held, strict=True):
        np.testing.assert_array_equal(np.array(half), before)


def test_copies_are_done_in_place(small: LoadedModel) -> None:
    driver = StepDriver.over(small, block_size=16, num_blocks=4000)
    first = driver.request("first", prompt(40))
    driver.prefill(first)
    sample = driver.request("sample", prompt(40))
    sample.append_output(first.output_token_ids[0])
    copies = fork(driver, first, sample)
    driver.decode(first, steps=1)
    pool = driver.runner._pool
    assert pool is not None
    gc.collect()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    driver.step((first, 1), (sample, 1), copies=copies)
    assert mx.get_peak_memory() - before < pool._keys[0].nbytes / 4


def test_copies_are_done_even_if_every_row_was_withdrawn(small: LoadedModel) -> None:
    """The block that was copied may be shared by others, who will not ask for the copy again."""
    driver = StepDriver.over(small)
    first = driver.request("first", prompt(10))
    driver.prefill(first)
    sample = driver.request("sample", prompt(10))
    copies = fork(driver, first, sample)
    first.move_to(RequestState.ABORTED)
    assert driver.step((first, 1), copies=copies) == {}
    np.testing.assert_array_equal(driver.contents(sample), driver.contents(first)[:, :, :, :10])
