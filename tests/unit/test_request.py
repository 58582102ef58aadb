"""A request's states and tokens, and the sampling that makes sense."""

from __future__ import annotations

import math
from typing import Any

import pytest

from minivllm.errors import InvalidRequestError, InvariantError
from minivllm.request import TRANSITIONS, Request, RequestState, Sampling

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
