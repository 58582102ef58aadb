"""The cost of a step: what counts, and what is no cost."""

from __future__ import annotations

import math
from typing import Any

import pytest

from minivllm import CostModel
from minivllm.errors import ConfigError


def test_a_step_costs_its_fixed_part_its_prefilled_tokens_and_its_rows() -> None:
    cost = CostModel(step_ms=10.0, prefill_ms=2.0, decode_one_ms=1.0, decode_base_ms=4.0, decode_row_ms=3.0)
    assert [cost.step(0, 0), cost.step(5, 0), cost.step(5, 1), cost.step(5, 2)] == [10.0, 20.0, 21.0, 30.0]


@pytest.mark.parametrize("wrong", [-1.0, math.inf, math.nan, "1", None, True])
def test_a_cost_that_is_no_number_of_milliseconds_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"prefill_ms is .*; it must be a number of milliseconds"):
        CostModel(prefill_ms=wrong)
