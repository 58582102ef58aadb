"""A race is the same workload on every tokenizer: as many tokens, shared exactly as far as was asked."""

from __future__ import annotations

import pytest

from minivllm.bench.workloads import MAX_REQUESTS, Race, document_tokens, race_submissions
from minivllm.errors import ConfigError, InvalidRequestError, UnknownNameError
from minivllm.models.tiny import _byte_tokenizer
from minivllm.runners.virtual import VirtualTokenizer
from minivllm.step import Tokenizer


@pytest.fixture(params=["virtual", "tiny"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return VirtualTokenizer() if request.param == "virtual" else _byte_tokenizer()


def prompts_of(race: Race, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    return [tuple(submission.prompt) for submission in race_submissions(race, tokenizer)]  # type: ignore[arg-type]


def test_prompts_are_identical_and_exactly_as_long_as_asked(tokenizer: Tokenizer) -> None:
    prompts = prompts_of(Race(num_requests=4, prompt_tokens=532), tokenizer)
    assert [len(prompt) for prompt in prompts] == [532] * 4
    assert len(set(prompts)) == 1


@pytest.mark.parametrize("shared", [0, 1, 99, 100])
def test_prompts_part_right_after_the_shared_tokens(tokenizer: Tokenizer, shared: int) -> None:
    prompts = prompts_of(Race(num_requests=12, prompt_tokens=100, shared_tokens=shared), tokenizer)
    assert len({prompt[:shared] for prompt in prompts}) == 1
    if shared < 100:
        assert len({prompt[: shared + 1] for prompt in prompts}) == 12
    assert {len(prompt) for prompt in prompts} == {100}


def test_the_largest_race_still_has_different_prompts_of_one_token(tokenizer: Tokenizer) -> None:
    race = Race(num_requests=MAX_REQUESTS, prompt_tokens=1, shared_tokens=0, max_tokens=1)
    assert len(set(prompts_of(race, tokenizer))) == MAX_REQUESTS


def test_the_seed_decides_the_prompts(tokenizer: Tokenizer) -> None:
    first = document_tokens(tokenizer, 64, 0)
    assert first == document_tokens(tokenizer, 64, 0)
    assert first != document_tokens(tokenizer, 64, 1)
    assert document_tokens(tokenizer, 0, 0) == []
    assert document_tokens(tokenizer, 5000, 0)[:64] == first


def test_each_request_draws_with_its_own_seed_and_ignores_the_end_of_sequence(tokenizer: Tokenizer) -> None:
    submissions = race_submissions(Race(num_requests=3, temperature=0.9, seed=7, max_tokens=5), tokenizer)
    assert [s.sampling.seed for s in submissions] == [7, 8, 9]
    assert {s.sampling.temperature for s in submissions} == {0.9}
    assert {s.sampling.max_tokens for s in submissions} == {5}
    assert all(s.sampling.ignore_eos for s in submissions)


@pytest.mark.parametrize(("num_requests", "samples"), [(3, 4), (1, 8), (8, 1), (5, 2)])
def test_no_two_samples_of_any_request_draw_with_the_same_seed(num_requests: int, samples: int) -> None:
    race = Race(num_requests=num_requests, samples=samples, temperature=0.9, seed=7, prompt_tokens=5)
    submissions = race_submissions(race, VirtualTokenizer())
    assert {s.sampling.n for s in submissions} == {samples}
    seeds = [s.sampling.of_sample(number).seed for s in submissions for number in range(samples)]
    assert seeds == list(range(7, 7 + num_requests * samples))


def test_samples_change_neither_the_prompts_nor_the_ids() -> None:
    one, many = (
        race_submissions(Race(num_requests=3, samples=n, prompt_tokens=40), VirtualTokenizer()) for n in (1, 4)
    )
    assert [s.prompt for s in one] == [s.prompt for s in many]
    assert [s.request_id for s in one] == [s.request_id for s in many] == ["r0", "r1", "r2"]
    assert Race(samples=4).as_dict()["samples"] == 4


def test_the_last_seed_of_a_race_may_be_the_largest() -> None:
    race = Race(num_requests=3, samples=4, seed=2**64 - 12)
    last = race_submissions(race, VirtualTokenizer())[-1].sampling
    assert last.of_sample(3).seed == 2**64 - 1


def test_together_waits_for_nobody_and_staggered_for_the_first_token_of_the_one_before() -> None:
    together = race_submissions(Race(num_requests=3), VirtualTokenizer())
    assert [s.after for s in together] == [None, None, None]
    staggered = race_submissions(Race(num_requests=3, arrival="staggered"), VirtualTokenizer(), prefix="x")
    assert [s.request_id for s in staggered] == ["x0", "x1", "x2"]
    assert [s.after for s in staggered] == [None, ("x0", 1), ("x1", 1)]


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"num_requests": 0}, ConfigError, "num_requests is 0; it must be a whole number from 1 to 128"),
        ({"num_requests": 129}, ConfigError, "from 1 to 128"),
        ({"num_requests": True}, ConfigError, "num_requests is True"),
        ({"prompt_tokens": 0}, ConfigError, "prompt_tokens is 0"),
        ({"prompt_tokens": 2.5}, ConfigError, "prompt_tokens is 2.5"),
        ({"max_tokens": -1}, ConfigError, "max_tokens is -1"),
        ({"shared_tokens": -1}, ConfigError, "shared_tokens is -1"),
        ({"shared_tokens": 533}, ConfigError, "to prompt_tokens, 532"),
        ({"temperature": float("nan")}, InvalidRequestError, "temperature is nan"),
        ({"temperature": -0.1}, InvalidRequestError, "temperature is -0.1"),
        ({"seed": -1}, InvalidRequestError, "seed is -1"),
        ({"seed": 2**64 - 3}, InvalidRequestError, "seed is"),
        ({"seed": "one"}, InvalidRequestError, "seed is 'one'"),
        ({"num_requests": 3, "samples": 4, "seed": 2**64 - 11}, InvalidRequestError, "seed is .* and n is 4"),
        ({"samples": 0}, ConfigError, "samples is 0; it must be a whole number from 1 to 128"),
        ({"samples": 129}, ConfigError, "samples is 129"),
        ({"samples": 1.0}, ConfigError, "samples is 1.0"),
        ({"samples": True}, ConfigError, "samples is True"),
        ({"arrival": "stagered"}, UnknownNameError, "did you mean 'staggered'"),
    ],
)
def test_a_race_that_makes_no_sense_is_refused_with_the_limit(
    settings: dict[str, object], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        Race(**settings)  # type: ignore[arg-type]
