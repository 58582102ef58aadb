"""The runner computes what mlx-lm computes with its own cache, whatever way the tokens reach the pool."""

from __future__ import annotations

import gc
import threading
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minivllm.cache.block_pool import SCRATCH_BLOCK_ID
from minivllm.errors import ConfigError, InvariantError, ModelError
from minivllm.models.folder import LoadedModel
from minivllm.request import Request, Sampling
from minivllm.runners import forward as forward_module
from minivllm.runners import mlx as runner_module
from minivllm.runners.mlx import MLXRunner
from minivllm.runners.paged_cache import BlockPoolArrays, Call, LayerView
from minivllm.step import Phase, ScheduledRow, ScheduledStep
from tests.parity.direct import VOCAB, Reference, StepDriver, prompt, small_model

LENGTHS = (5, 37, 16, 90)


# Tokens and logits


def test_requests_one_by_one_equal_mlx_lm(driver: StepDriver, loaded: LoadedModel) -> None:
    for number, length in enumerate(LENGTHS):
        request = driver.request(f"r{number}", prompt(length, seed=number))
        driver.prefill(request)
        driver.decode(request, steps=6)
        driver.check(request, Reference.of(loaded, request.prompt_token_ids, 7))


def test_a_ragged_batch_equals_mlx_lm(driver: StepDriver, loaded: LoadedModel) -> None:
    requests = [driver.request(f"r{number}", prompt(length, seed=number)) for number, length in enumerate(LENGTHS)]
    driver.step(*((request, request.num_tokens) for request in requests))
    driver.decode(*requests, steps=10)
    for request in requests:
        driver.check(request, Reference.of(loaded, request.prompt_token_ids, 11))


@pytest.mark.parametrize("chunk", [1, 3, 4, 16, 25])
def test_a_prompt_in_chunks_equals_the_prompt_in_one_piece(driver: StepDriver, loaded: LoadedModel, chunk: int) -> None:
    request = driver.request("r", prompt(53))
    driver.prefill(request, chunk)
    driver.decode(request, steps=3)
    driver.check(request, Reference.of(loaded, request.prompt_token_ids, 4))


def test_rows_in_decode_and_chunks_of_others_in_one_step_equal_mlx_lm(driver: StepDriver, loaded: LoadedModel) -> None:
    early, late, later = (driver.request(name, prompt(length)) for name, length in (("a", 9), ("b", 50), ("c", 31)))
    driver.prefill(early)
    while late.num_uncomputed_tokens > 1 or later.num_uncomputed_tokens > 1:
        parts = [(r, min(r.num_uncomputed_tokens, 13)) for r in (early, late, later)]
        driver.step(*parts)
    driver.decode(early, late, later, steps=3)
    for request in (early, late, later):
        driver.check(request, Reference.of(loaded, request.prompt_token_ids, len(request.output_token_ids)))


def test_a_shared_prefix_is_read_from_the_donors_blocks(driver: StepDriver, loaded: LoadedModel) -> None:
    first = prompt(70)
    donor = driver.request("donor", first)
    driver.prefill(donor)
    tail_only = driver.request("tail", first[:64] + prompt(9, seed=2))
    driver.share(donor, tail_only, 64)
    driver.prefill(tail_only, chunk=4)
    driver.decode(donor, tail_only, steps=5)
    for request in (donor, tail_only):
        count = len(request.output_token_ids)
        driver.check(request, Reference.of(loaded, request.prompt_token_ids, count))


def test_a_full_hit_computes_one_token_and_equals_mlx_lm(driver: StepDriver, loaded: LoadedModel) -> None:
    """Only the last token of the prompt is computed again, beside a row in decode."""
    donor = driver.request("donor", prompt(65))
    driver.prefill(donor)
    twin = driver.request("twin", donor.prompt_token_ids)
    driver.share(donor, twin, 64)
    driver.step((donor, 1), (twin, 1))
    driver.decode(donor, twin, steps=4)
    assert twin.output_token_ids == donor.output_token_ids[:5]
    for request in (donor, twin):
        reference = Reference.of(loaded, request.prompt_token_ids, len(request.output_token_ids))
        driver.check(request, reference)


def test_a_preempted_request_is_computed_again_into_other_blocks(driver: StepDriver, loaded: LoadedModel) -> None:
    kept, victim = driver.request("kept", prompt(20)), driver.request("victim", prompt(33, seed=3))
    driver.prefill(kept)
    driver.prefill(victim)
    driver.decode(kept, victim, steps=4)
    before = list(driver.tables["victim"])
    driver.preempt(victim)
    driver.decode(kept, steps=3)
    driver.prefill(victim, chunk=16)
    assert not set(before) & set(driver.tables["victim"])
    driver.decode(kept, victim, steps=3)
    for request in (kept, victim):
        count = len(request.output_token_ids)
        driver.check(request, Reference.of(loaded, request.prompt_token_ids, count))


def test_blocks_that_held_another_request_leave_no_trace(llama_model: LoadedModel) -> None:
    driver = StepDriver.over(llama_model, num_blocks=6)
    for number in range(5):
        request = driver.request(f"r{number}", prompt(19, seed=number))
        driver.prefill(request)
        driver.decode(request, steps=4)
        driver.check(request, Reference.of(llama_model, request.prompt_token_ids, 5))
        driver.preempt(request)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_order_of_chunks_and_decodes_equals_mlx_lm(llama_model: LoadedModel, data: st.DataObject) -> None:
    driver = StepDriver.over(llama_model, block_size=data.draw(st.sampled_from([1, 3, 4, 16])), num_blocks=200)
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    requests = [driver.request(f"r{n}", prompt(length, seed=n)) for n, length in enumerate(lengths)]
    for _ in range(8):
        chosen = data.draw(st.lists(st.sampled_from(range(len(requests))), min_size=1, unique=True))
        driver.step(
            *((requests[n], data.draw(st.integers(1, requests[n].num_uncomputed_tokens))) for n in sorted(chosen))
        )
    for request in requests:
        if request.output_token_ids:
            count = len(request.output_token_ids)
            driver.check(request, Reference.of(llama_model, request.prompt_token_ids, count))
    driver.runner.close()


# Positions. Logits do not show it: rotary positions are relative, so an error that is the same for all tokens of
# a request hardly changes them.


class RecordingRope:
    """Stands where a layer's rope stood and notes the positions that it was asked for, per row."""

    def __init__(self, rope: Any) -> None:
        self._rope = rope
        self.positions: list[list[int]] = []

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        batch, _, length, _ = x.shape
        assert isinstance(offset, int) == (batch == 1), "a batch must have an offset for each row"
        starts = [offset] if isinstance(offset, int) else [int(start) for start in np.array(offset)]
        assert len(starts) == batch
        self.positions += [[start + i for i in range(length)] for start in starts]
        return self._rope(x, offset=offset)


def record_positions(loaded: LoadedModel) -> list[RecordingRope]:
    ropes = []
    for layer in loaded.model.layers:
        layer.self_attn.rope = RecordingRope(layer.self_attn.rope)
        ropes.append(layer.self_attn.rope)
    return ropes


def run_three_steps(loaded: LoadedModel) -> list[list[int]]:
    """Run chunks, a chunk beside a decode, and two decodes; return the positions of each row's queries."""
    driver = StepDriver.over(loaded)
    ropes = record_positions(loaded)
    long, short = driver.request("long", prompt(11)), driver.request("short", prompt(3))
    driver.step((short, 3), (long, 6))
    driver.step((short, 1), (long, 5))
    driver.step((short, 1), (long, 1))
    for rope in ropes:
        assert rope.positions == ropes[0].positions
    # Each call ropes its queries, then its keys; a call of step 3 has two rows.
    calls = ropes[0].positions
    queries, keys = [*calls[0:8:2], *calls[8:10]], [*calls[1:8:2], *calls[10:12]]
    assert queries == keys
    return queries


EXPECTED = [[0, 1, 2], [0, 1, 2, 3, 4, 5], [3], [6, 7, 8, 9, 10], [4], [11]]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_every_token_has_its_own_position(family: str) -> None:
    assert run_three_steps(small_model(family)) == EXPECTED


def test_a_uniform_error_of_positions_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = LayerView.offset
    assert isinstance(right, property) and right.fget is not None
    read = right.fget
    monkeypatch.setattr(LayerView, "offset", property(lambda view: read(view) + 1))
    assert run_three_steps(small_model()) == [[position + 1 for position in row] for row in EXPECTED]


def test_the_slots_written_are_those_of_the_block_table(llama_model: LoadedModel) -> None:
    """Positions 6 to 9 with blocks 5, 2, 7 of 4 tokens: slots 2 and 3 of block 2, 0 and 1 of block 7."""
    pool = BlockPoolArrays(1, 8, 2, 4, 16, mx.float32)
    request = Request("r", tuple(prompt(10)))
    call = Call.of_chunk(ScheduledRow(request, 6, 4, (5, 2, 7), Phase.PREFILL), pool)
    assert call.offset == 6
    assert call.length == 10
    assert call.write_blocks.tolist() == [2, 2, 7, 7]
    assert call.write_offsets.tolist() == [2, 3, 0, 1]
    assert call.read_parts.tolist() == [[[10, 4, 14], [11, 5, 15]]]


def test_each_row_of_a_batch_sees_its_own_tokens_only() -> None:
    pool = BlockPoolArrays(1, 8, 1, 4, 16, mx.float32)
    rows = [
        ScheduledRow(Request(name, tuple(prompt(start + 1))), start, 1, table, Phase.DECODE)
        for name, start, table in (("a", 2, (3,)), ("b", 4, (1, 2)))
    ]
    call = Call.of_single_tokens(rows, pool)
    assert isinstance(call.offset, mx.array) and call.offset.tolist() == [2, 4]
    assert call.read_parts.tolist() == [[[3, SCRATCH_BLOCK_ID]], [[1, 2]]]
    assert call.mask is not None and call.mask.shape == (2, 1, 1, 8)
    assert call.mask[:, 0, 0].tolist() == [[True] * 3 + [False] * 5, [True] * 5 + [False] * 3]


def test_blocks_hold_the_keys_of_mlx_lms_cache_in_order() -> None:
    """The pool itself, not only what comes out of it: each position's keys and values are in its slot."""
    from mlx_lm.models.cache import make_prompt_cache

    loaded = small_model()
    driver = StepDriver.over(loaded)
    request = driver.request("r", prompt(14))
    driver.prefill(request, chunk=5)
    cache = make_prompt_cache(loaded.model)
    mx.eval(loaded.model(mx.array([request.prompt_token_ids]), cache=cache))
    pool = driver.runner._pool
    assert pool is not None
    for layer, own in enumerate(cache):
        for mine, theirs in ((pool._keys[layer], own.keys), (pool._values[layer], own.values)):
            blocks = np.array(mine)[driver.tables["r"]]
            by_position = blocks.transpose(1, 0, 2, 3).reshape(2, -1, 16)[:, :14]
            np.testing.assert_allclose(by_position, np.array(theirs)[0, :, :14], atol=1e-4)


# The pool


def test_the_scratch_block_stays_zero_and_the_pool_finite(driver: StepDriver) -> None:
    requests = [driver.request(f"r{n}", prompt(length, seed=n)) for n, length in enumerate(LENGTHS)]
    driver.step(*((request, request.num_tokens) for request in requests))
    driver.decode(*requests, steps=8)
    pool = driver.runner._pool
    assert pool is not None
    for array in (*pool._keys, *pool._values):
        assert not np.array(array[SCRATCH_BLOCK_ID]).any()
        assert np.isfinite(np.array(array)).all()
        assert np.array(array).any()


def test_pool_bytes_are_constant_over_500_requests() -> None:
    driver = StepDriver.over(small_model(num_hidden_layers=1), num_blocks=16)
    bytes_at_first = driver.runner.pool_bytes
    assert bytes_at_first == 17 * driver.runner.block_bytes(4) == 17 * 2 * 1 * 2 * 4 * 16 * 4
    seen = set()
    active = []
    gc.collect()  # what earlier tests left would be freed in between
    for number in range(500):
        request = driver.request(f"r{number}", prompt(7, seed=number))
        driver.prefill(request)
        driver.decode(request, steps=1)
        driver.preempt(request)
        driver.runner.forget(request.request_id)
        driver.logits.clear()
        driver._seen.clear()
        seen.add(driver.runner.pool_bytes)
        active.append(mx.get_active_memory())
    assert seen == {bytes_at_first}
    assert max(active[1:]) - min(active[1:]) < 4096
    driver.runner.close()
    assert driver.runner.pool_bytes == 0


def peak_of_a_step(driver: StepDriver, request: Request) -> int:
    """Return the bytes that a decode step needs beyond those held before it, at its peak."""
    gc.collect()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    driver.decode(request, steps=1)
    return mx.get_peak_memory() - before


def test_a_step_writes_in_place(llama_model: LoadedModel) -> None:
    driver = StepDriver.over(llama_model, block_size=16, num_blocks=4000)
    request, other = driver.request("r", prompt(40)), driver.request("s", prompt(30))
    driver.step((request, 40), (other, 30))
    pool = driver.runner._pool
    assert pool is not None
    one_array = pool._keys[0].nbytes
    driver.decode(request, other, steps=1)
    assert peak_of_a_step(driver, request) < one_array / 4
    # A reference that somebody keeps makes the same step copy: the limit above is one that can be missed.
    held = pool._keys[0].reshape(-1)
    mx.eval(held)
    assert peak_of_a_step(driver, request) >= one_array
    del held
    assert peak_of_a_step(driver, request) < one_array / 4


def test_a_step_with_decodes_and_chunks_writes_in_place(llama_model: LoadedModel) -> None:
    driver = StepDriver.over(llama_model, block_size=16, num_blocks=4000)
    early, late = driver.request("early", prompt(20)), driver.request("late", prompt(60))
    driver.prefill(early)
    pool = driver.runner._pool
    assert pool is not None
    gc.collect()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    driver.step((early, 1), (late, 20))
    driver.step((early, 1), (late, 40))
    assert mx.get_peak_memory() - before < pool._keys[0].nbytes / 4


def test_closing_frees_the_pool(llama_model: LoadedModel) -> None:
    gc.collect()
    before = mx.get_active_memory()
    runner = MLXRunner(llama_model)
    runner.allocate(2000, 16)
    assert mx.get_active_memory() - before >= runner.pool_bytes > 0
    runner.close()
    assert mx.get_active_memory() - before < 4096
    runner.close()


def test_a_pool_that_does_not_fit_says_how_many_blocks_would(
    llama_model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = MLXRunner(llama_model)
    monkeypatch.setattr(runner_module, "free_bytes", lambda: 100 * runner.block_bytes(16))
    with pytest.raises(ConfigError, match=r"89 blocks would fit"):
        runner.allocate(90, 16)
    assert runner.pool_bytes == 0
    runner.allocate(89, 16)
    assert runner.pool_bytes == 90 * runner.block_bytes(16)


def test_a_pool_far_above_the_machine_is_refused(llama_model: LoadedModel) -> None:
    with pytest.raises(ConfigError, match="blocks"):
        MLXRunner(llama_model).allocate(10**10, 16)


# The order of calls, and errors


def test_a_chunk_before_the_last_skips_the_vocabulary_product(
    llama_model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = StepDriver.over(llama_model)
    forward = driver.runner._forward
    assert forward is not None and forward.splits and forward._head is not None
    shapes: list[tuple[int, ...]] = []
    head = forward._head

    def counted(hidden: mx.array) -> mx.array:
        shapes.append(hidden.shape)
        return head(hidden)

    monkeypatch.setattr(forward, "_head", counted)
    request = driver.request("r", prompt(30))
    assert driver.step((request, 12)) == {}
    assert driver.step((request, 12)) == {}
    assert shapes == []
    assert list(driver.step((request, 6))) == ["r"]
    assert shapes == [(1, 64)]


class Scaled:
    """A model whose logits are more than the vocabulary product of its body, as some real ones are."""

    def __init__(self, model: Any) -> None:
        self.model = model.model
        self.layers = model.layers
        self.args = model.args
        self._whole = model

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        return self._whole(tokens, cache=cache) * 0.25


def test_a_model_that_scales_its_logits_is_called_as_a_whole(llama_model: LoadedModel) -> None:
    scaled = forward_module.Forward(Scaled(llama_model.model))
    assert not scaled.splits
    tokens = mx.array([prompt(6)])
    cache = [None] * 3
    np.testing.assert_allclose(
        np.array(scaled.last_logits(tokens, cache)),
        np.array(llama_model.model(tokens)[:, -1] * 0.25),
        atol=1e-5,
    )


@pytest.mark.parametrize(
    ("start", "count", "table", "says"),
    [
        (0, 5, (1,), "needs 1 token or more and 2 blocks"),
        (8, 1, (1, 2), "3 blocks"),
        (0, 0, (1,), "1 token or more"),
        (0, 5, (1, 0), "1 to 8"),
        (0, 5, (1, 9), "1 to 8"),
    ],
)
def test_a_block_table_that_does_not_fit_is_refused_before_anything_is_written(
    llama_model: LoadedModel, start: int, count: int, table: tuple[int, ...], says: str
) -> None:
    runner = MLXRunner(llama_model)
    runner.allocate(8, 4)
    request = Request("r", tuple(prompt(9)))
    with pytest.raises(InvariantError, match=says):
        runner.execute(ScheduledStep(1, (ScheduledRow(request, start, count, table, Phase.PREFILL),)))
    assert runner._pool is not None
    assert not np.array(runner._pool._keys[0]).any()


def test_a_layer_that_wants_a_sliding_window_is_refused() -> None:
    pool = BlockPoolArrays(1, 8, 2, 4, 16, mx.float32)
    row = ScheduledRow(Request("r", tuple(prompt(9))), 0, 9, (1, 2, 3), Phase.PREFILL)
    view = LayerView(pool, 0, Call.of_chunk(row, pool))
    with pytest.raises(ModelError, match="sliding window of 4"):
        view.make_mask(9, window_size=4)
    mask = view.make_mask(9, return_array=True)
    assert isinstance(mask, mx.array) and mask.tolist() == np.tril(np.ones((9, 9), bool)).tolist()


def test_keys_of_another_shape_are_refused() -> None:
    pool = BlockPoolArrays(1, 8, 2, 4, 16, mx.float32)
    row = ScheduledRow(Request("r", tuple(prompt(9))), 0, 9, (1, 2, 3), Phase.PREFILL)
    view = LayerView(pool, 0, Call.of_chunk(row, pool))
    with pytest.raises(ModelError, match="layer 0 made keys"):
        view.update_and_fetch(mx.zeros((1, 2, 9, 8)), mx.zeros((1, 2, 9, 8)))


def test_a_view_is_what_models_take_for_a_plain_cache() -> None:
    pool = BlockPoolArrays(1, 8, 2, 4, 16, mx.float32)
    row = ScheduledRow(Request("r", (1,)), 0, 1, (1,), Phase.PREFILL)
    view = LayerView(pool, 0, Call.of_chunk(row, pool))
    assert view
    assert not hasattr(view, "bits")
    assert not hasattr(view, "__len__")


def test_an_error_in_mid_step_leaves_the_runner_closable(llama_model: LoadedModel) -> None:
    loaded = small_model()
    driver = StepDriver.over(loaded)
    request = driver.request("r", prompt(9))
    driver.prefill(request)
    mlp = loaded.model.layers[1].mlp

    class Broken:
        def __call__(self, x: mx.array) -> mx.array:
            raise RuntimeError("the layer broke")

    loaded.model.layers[1].mlp = Broken()
    with pytest.raises(RuntimeError, match="the layer broke"):
        driver.decode(request, steps=1)
    driver.runner.close()
    assert driver.runner.pool_bytes == 0
    loaded.model.layers[1].mlp = mlp
    again = StepDriver.over(loaded)
    request = again.request("r", prompt(9))
    again.prefill(request)
    again.check(request, Reference.of(loaded, request.prompt_token_ids, 1))


def test_a_closed_runner_says_so(llama_model: LoadedModel) -> None:
    runner = MLXRunner(llama_model)
    runner.allocate(8, 4)
    with pytest.raises(InvariantError, match="allocates once"):
        runner.allocate(8, 4)
    runner.close()
    row = ScheduledRow(Request("r", (1,)), 0, 1, (1,), Phase.PREFILL)
    with pytest.raises(InvariantError, match="closed"):
        runner.execute(ScheduledStep(1, (row,)))


def test_two_runners_share_a_model_and_nothing_else(llama_model: LoadedModel) -> None:
    one, two = StepDriver.over(llama_model), StepDriver.over(llama_model)
    a, b = one.request("r", prompt(21)), two.request("r", prompt(34, seed=4))
    one.prefill(a)
    two.prefill(b)
    for _ in range(3):
        one.decode(a, steps=1)
        two.decode(b, steps=1)
    one.check(a, Reference.of(llama_model, a.prompt_token_ids, 4))
    two.check(b, Reference.of(llama_model, b.prompt_token_ids, 4))


def test_a_thread_of_its_own_gives_the_same_tokens(llama_model: LoadedModel) -> None:
    """Load, allocate, run and close in another thread, as the engine does; the thread changes no draw."""
    sampling = Sampling(temperature=0.8)
    results: list[list[int]] = []

    def work() -> None:
        driver = StepDriver.over(small_model())
        request = driver.request("r", prompt(12), sampling, seed=9)
        driver.prefill(request)
        driver.decode(request, steps=8)
        results.append(request.output_token_ids)
        driver.runner.close()
        runner_module.leave_thread()

    for _ in range(2):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    driver = StepDriver.over(llama_model)
    request = driver.request("r", prompt(12), sampling, seed=9)
    driver.prefill(request)
    driver.decode(request, steps=8)
    assert results == [request.output_token_ids] * 2


# Draws


def test_draws_depend_on_the_seed_and_the_index_only(llama_model: LoadedModel) -> None:
    """Alone, in a batch, in chunks and after preemption: a request that draws gets the same tokens."""
    sampling = Sampling(temperature=1.5, top_p=0.95, top_k=50)

    def alone() -> list[int]:
        driver = StepDriver.over(llama_model)
        request = driver.request("r", prompt(23), sampling, seed=7)
        driver.prefill(request)
        driver.decode(request, steps=9)
        return request.output_token_ids

    def in_a_batch() -> list[int]:
        driver = StepDriver.over(llama_model)
        others = [driver.request(f"o{n}", prompt(11, seed=n), Sampling(temperature=n / 2), seed=n) for n in range(3)]
        request = driver.request("r", prompt(23), sampling, seed=7)
        for other in others:
            driver.prefill(other)
        driver.step(*((other, 1) for other in others), (request, 23))
        driver.decode(*others[:2], request, others[2], steps=9)
        return request.output_token_ids

    def in_chunks_and_preempted() -> list[int]:
        driver = StepDriver.over(llama_model)
        request = driver.request("r", prompt(23), sampling, seed=7)
        driver.prefill(request, chunk=5)
        driver.decode(request, steps=4)
        driver.preempt(request)
        driver.prefill(request, chunk=9)
        driver.decode(request, steps=4)
        return request.output_token_ids

    assert alone() == alone() == in_a_batch() == in_chunks_and_preempted()


def test_another_seed_draws_other_tokens(llama_model: LoadedModel) -> None:
    outputs = set()
    for seed in range(6):
        driver = StepDriver.over(llama_model)
        request = driver.request("r", prompt(23), Sampling(temperature=1.5), seed=seed)
        driver.prefill(request)
        driver.decode(request, steps=5)
        outputs.add(tuple(request.output_token_ids))
        assert all(0 <= token < VOCAB for token in request.output_token_ids)
    assert len(outputs) == 6


def test_a_greedy_row_beside_rows_that_draw_stays_greedy(llama_model: LoadedModel) -> None:
    driver = StepDriver.over(llama_model)
    greedy = driver.request("g", prompt(15))
    drawn = driver.request("d", prompt(15), Sampling(temperature=2.0), seed=3)
    driver.prefill(greedy)
    driver.prefill(drawn)
    driver.decode(drawn, greedy, steps=6)
    driver.check(greedy, Reference.of(llama_model, greedy.prompt_token_ids, 7))
    assert drawn.output_token_ids != greedy.output_token_ids
