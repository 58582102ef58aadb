"""Draws follow the logits, and nothing but seed and index decides among them."""

from __future__ import annotations

import threading
from collections import Counter

import mlx.core as mx
import numpy as np
import pytest

from minivllm.request import Sampling
from minivllm.runners.mlx import leave_thread
from minivllm.runners.sampler import draw, draw_each, draw_key

PROBABILITIES = np.array([0.05, 0.4, 0.1, 0.25, 0.2])
LOGITS = mx.array(np.log(PROBABILITIES).astype(np.float32) + 3.0)
DRAWS = 2000


def counts(sampling: Sampling, seed: int = 0) -> Counter[int]:
    """Draw output tokens 0, 1, 2 ... of one request."""
    drawn = mx.stack([draw(LOGITS, sampling, seed, index) for index in range(DRAWS)])
    return Counter(int(token) for token in np.array(drawn))


def assert_follows(found: Counter[int], probabilities: np.ndarray) -> None:
    """Each token came as often as its probability says, within five standard deviations."""
    for token, probability in enumerate(probabilities):
        spread = (DRAWS * probability * (1 - probability)) ** 0.5
        assert abs(found[token] - DRAWS * probability) <= 5 * spread


def test_temperature_zero_takes_the_likeliest() -> None:
    assert counts(Sampling()) == {1: DRAWS}


def test_temperature_one_draws_by_the_models_probabilities() -> None:
    assert_follows(counts(Sampling(temperature=1.0)), PROBABILITIES)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature_sharpens_and_flattens(temperature: float) -> None:
    expected = PROBABILITIES ** (1 / temperature)
    assert_follows(counts(Sampling(temperature=temperature)), expected / expected.sum())


@pytest.mark.parametrize("temperature", [1e-300, 1e-9, 1e-3])
def test_a_very_low_temperature_is_greedy_and_finite(temperature: float) -> None:
    assert counts(Sampling(temperature=temperature)) == {1: DRAWS}


def test_top_k_keeps_the_k_likeliest_at_their_ratio() -> None:
    expected = np.where(PROBABILITIES >= 0.25, PROBABILITIES, 0)
    found = counts(Sampling(temperature=1.0, top_k=2))
    assert set(found) == {1, 3}
    assert_follows(found, expected / expected.sum())


@pytest.mark.parametrize("top_k", [5, 1000])
def test_top_k_of_the_whole_vocabulary_or_more_keeps_all(top_k: int) -> None:
    assert counts(Sampling(temperature=1.0, top_k=top_k)) == counts(Sampling(temperature=1.0))


@pytest.mark.parametrize(
    ("top_p", "kept"), [(1e-9, {1}), (0.39, {1}), (0.41, {1, 3}), (0.66, {1, 3, 4}), (0.94, {1, 2, 3, 4})]
)
def test_top_p_keeps_the_fewest_that_reach_it(top_p: float, kept: set[int]) -> None:
    assert set(counts(Sampling(temperature=1.0, top_p=top_p))) == kept


def test_top_p_counts_within_what_top_k_left() -> None:
    """Of 0.4 and 0.25 alone, the first has 0.62: it reaches 0.6, though not of the whole."""
    assert set(counts(Sampling(temperature=1.0, top_k=2, top_p=0.6))) == {1}


def test_a_draw_repeats_and_another_seed_or_index_is_another_draw() -> None:
    keys = {tuple(np.array(draw_key(seed, index)).tolist()) for seed in range(50) for index in range(50)}
    assert len(keys) == 2500
    last = 2**64 - 1
    assert np.array(draw_key(last, 7)).tolist() == np.array(draw_key(last, 7)).tolist()


def test_neighbouring_seeds_do_not_repeat_each_other_shifted() -> None:
    flat = mx.zeros(1000)
    sampling = Sampling(temperature=1.0)
    outputs = [[int(draw(flat, sampling, seed, index).item()) for index in range(20)] for seed in (7, 8)]  # type: ignore[arg-type]
    assert outputs[0][1:] != outputs[1][:-1]
    assert outputs[0][:-1] != outputs[1][1:]


def test_rows_of_a_batch_draw_as_they_would_alone() -> None:
    logits = mx.stack([LOGITS, LOGITS * 0.5, LOGITS])
    samplings = [Sampling(temperature=1.0), Sampling(), Sampling(temperature=0.7, top_p=0.9)]
    for index in range(20):
        together = np.array(draw_each(logits, samplings, [1, 2, 3], [index] * 3))
        alone = [draw(logits[row], samplings[row], row + 1, index) for row in range(3)]
        assert together.tolist() == np.array(mx.stack(alone)).tolist()


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=1.0, top_p=0.9),
        Sampling(temperature=1.0, top_k=900),
        Sampling(temperature=1.0, top_k=900, top_p=0.9),
    ],
)
def test_a_rounding_error_of_the_logits_changes_hardly_any_draw(sampling: Sampling) -> None:
    """A batch's logits differ from a lone row's by so much. Many unlikely tokens then change their rank."""
    source = np.random.default_rng(0)
    logits = (source.standard_normal(1000) * 0.1).astype(np.float32)
    moved = logits + source.uniform(-1e-4, 1e-4, 1000).astype(np.float32)
    assert (np.argsort(logits) != np.argsort(moved)).sum() > 50
    pairs = [
        mx.stack([draw(mx.array(given), sampling, 0, index) for given in (logits, moved)]) for index in range(DRAWS)
    ]
    drawn = np.array(mx.stack(pairs))
    # Where two tokens are as good as even, or one stands at the border of what is kept, a rounding error may decide.
    assert (drawn[:, 0] != drawn[:, 1]).mean() < 0.01


def test_half_precision_logits_draw_within_the_vocabulary() -> None:
    half = LOGITS.astype(mx.float16)
    sampling = Sampling(temperature=1.0, top_p=0.9)
    drawn = mx.stack([draw(half, sampling, 0, index) for index in range(200)])
    assert set(np.array(drawn).tolist()) == {1, 2, 3, 4}


def test_other_random_numbers_and_threads_change_no_draw() -> None:
    sampling = Sampling(temperature=1.0)
    expected = counts(sampling, seed=4)
    mx.random.seed(99)
    mx.eval(mx.random.uniform(shape=(5,)))
    assert counts(sampling, seed=4) == expected
    found: list[Counter[int]] = []

    def work() -> None:
        found.append(counts_of_own_logits())
        leave_thread()

    def counts_of_own_logits() -> Counter[int]:
        own = mx.array(np.array(LOGITS))
        drawn = mx.stack([draw(own, sampling, 4, index) for index in range(DRAWS)])
        return Counter(int(token) for token in np.array(drawn))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [expected]


def test_the_likeliest_token_always_stays_however_small_top_p_is() -> None:
    logits = mx.array([0.0, 3.0, 1.0, 2.9])
    for top_p in (1e-46, 1e-30, 1e-9):
        sampling = Sampling(temperature=1.0, top_p=top_p)
        assert {draw(logits, sampling, 7, index).item() for index in range(8)} == {1}


@pytest.mark.parametrize("top_k", [2**31, 2**40, 5])
def test_a_top_k_beyond_the_vocabulary_keeps_all(top_k: int) -> None:
    logits = mx.array([0.0, 3.0, 1.0, 2.9])
    for index in range(8):
        wide = Sampling(temperature=1.0, top_p=0.9, top_k=top_k)
        all_of_them = Sampling(temperature=1.0, top_p=0.9)
        assert draw(logits, wide, 7, index).item() == draw(logits, all_of_them, 7, index).item()
