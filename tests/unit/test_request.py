"""A request's states and tokens, and the sampling that makes sense."""

from __future__ import annotations

import math
from typing import Any

import pytest

from minivllm.errors import InvalidRequestError, InvariantError
from minivllm.request import TRANSITIONS, MultimodalItem, Request, RequestState, Sampling, make_extra_keys

ENDS = {RequestState.FINISHED, RequestState.ABORTED, RequestState.FAILED}


@pytest.mark.parametrize("state", RequestState)
@pytest.mark.parametrize("target", RequestState)
def test_a_request_moves_as_the_table_says_and_not_otherwise(state: RequestState, target: RequestState) -> None:
    request = Request("a", (1,), state=state)
    if target in TRANSITIONS[state]:
        request.move_to(target)
        assert request.state is target
    else:
        with pytest.raises(InvariantError, match=f"cannot go from {state.value} to {target.value}"):
            request.move_to(target)
        assert request.state is state


def test_the_table_has_every_state_and_exactly_the_ends_end() -> None:
    assert TRANSITIONS.keys() == set(RequestState)
    assert {state for state in RequestState if state.is_ended} == ENDS


def test_every_state_can_be_aborted_and_fail_until_it_has_ended() -> None:
    for state in set(RequestState) - ENDS:
        assert TRANSITIONS[state] >= {RequestState.ABORTED, RequestState.FAILED}


def test_only_a_running_request_finishes_or_is_preempted() -> None:
    for target in (RequestState.FINISHED, RequestState.PREEMPTED):
        assert [state for state in RequestState if target in TRANSITIONS[state]] == [RequestState.RUNNING]


def test_a_held_request_waits_again_or_as_a_sample_runs_at_once() -> None:
    assert TRANSITIONS[RequestState.HELD] - ENDS == {RequestState.WAITING, RequestState.RUNNING}
    assert [state for state in RequestState if RequestState.HELD in TRANSITIONS[state]] == [RequestState.WAITING]


def test_a_preempted_request_is_never_held() -> None:
    assert TRANSITIONS[RequestState.PREEMPTED] - ENDS == {RequestState.RUNNING}


def test_tokens_are_prompt_then_output() -> None:
    request = Request("a", (1, 2, 3))
    request.append_output(7)
    assert request.token_ids == [1, 2, 3, 7]
    assert request.output_token_ids == [7]
    assert (request.num_prompt_tokens, request.num_tokens, request.num_uncomputed_tokens) == (3, 4, 4)


def test_a_request_decodes_when_only_its_newest_token_is_left_to_compute() -> None:
    request = Request("a", (1, 2, 3))
    assert not request.is_decoding
    request.num_computed_tokens = 2
    assert not request.is_decoding  # one token left, but of the prompt
    request.num_computed_tokens = 3
    request.append_output(7)
    assert request.is_decoding
    request.num_computed_tokens = 2
    assert not request.is_decoding


def test_requests_share_no_list() -> None:
    first, second = Request("a", (1,)), Request("b", (1,))
    first.append_output(2)
    assert second.token_ids == [1]
    assert second.output_token_ids == []


def test_sampling_is_greedy_by_default() -> None:
    sampling = Sampling()
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.0, 1.0, 0, None)
    assert sampling.stop == ()
    assert not sampling.ignore_eos


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("max_tokens", value) for value in (0, -1, 1.0, True, None, "8", math.nan)),
        *(("temperature", value) for value in (-0.1, math.nan, math.inf, -math.inf, True, None, "hot")),
        *(("top_p", value) for value in (0, -1, 1.01, math.nan, True, None)),
        *(("top_k", value) for value in (-1, 1.5, True, None)),
        *(("seed", value) for value in (-1, 2**64, 1.0, True, "7")),
        *(("stop", value) for value in ("", [""], ["ok", ""], [7], [None])),
        *(("n", value) for value in (0, -1, 129, 1.0, True, None, "2")),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{field} (is|holds) .*; it must "):
        Sampling(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 1),
        ("temperature", 0),
        ("temperature", 2),
        ("top_p", 1),
        ("top_p", 0.001),
        ("top_k", 0),
        ("top_k", 50),
        ("seed", 0),
        ("seed", 2**64 - 1),
        ("n", 1),
        ("n", 128),
    ],
)
def test_the_limits_themselves_are_fine(field: str, value: Any) -> None:
    assert getattr(Sampling(**{field: value}), field) == value


def test_one_stop_string_is_as_good_as_a_list_of_one() -> None:
    assert Sampling(stop="end").stop == Sampling(stop=["end"]).stop == ("end",)  # type: ignore[arg-type]


@pytest.mark.parametrize("stop", [None, 7])
def test_stop_that_is_no_string_and_no_list_is_refused_in_a_sentence(stop: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"^stop is .*; it must be a string or a list of strings"):
        Sampling(stop=stop)


# -- Samples, adapters and priorities ----------------------------------------------------------------------


def test_every_sample_has_a_seed_of_its_own_and_the_last_one_must_fit() -> None:
    with pytest.raises(
        InvalidRequestError, match=r"so the last sample's seed would be above 2\*\*64 - 1; lower the seed"
    ):
        Sampling(seed=2**64 - 2, n=3)
    last = Sampling(seed=2**64 - 3, n=3).of_sample(2)
    assert (last.seed, last.n) == (2**64 - 1, 1)


def test_the_sampling_of_a_sample_is_what_a_lone_request_needs_to_draw_the_same() -> None:
    asked = Sampling(max_tokens=5, temperature=0.7, top_p=0.9, top_k=4, seed=10, stop=("end",), ignore_eos=True, n=3)
    alone = Sampling(max_tokens=5, temperature=0.7, top_p=0.9, top_k=4, seed=12, stop=("end",), ignore_eos=True)
    assert asked.of_sample(2) == alone
    assert Sampling(n=3).of_sample(2) == Sampling(), "without a seed the engine gives each its own"


def test_a_request_has_one_sample_and_the_usual_priority_unless_told_otherwise() -> None:
    request = Request("a", (1,))
    assert (request.sampling.n, request.priority, request.num_adopted_tokens, request.adapter) == (1, 0, 0, None)


def test_the_adapter_is_read_from_the_keys_and_not_mistaken_for_a_salt() -> None:
    assert Request("a", (1,), extra_keys=make_extra_keys(cache_salt="law")).adapter is None
    keys = make_extra_keys(adapter="law", cache_salt="s", multimodal=[MultimodalItem("cat", 0, 1)])
    assert Request("a", (1,), extra_keys=keys).adapter == "law"
