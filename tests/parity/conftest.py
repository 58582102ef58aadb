"""Fixtures of the parity tests: each small model, and a runner over it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from minivllm.models.folder import LoadedModel
from tests.parity.direct import FAMILIES, StepDriver, small_model


@pytest.fixture(scope="session", params=FAMILIES)
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    """Each small model in turn."""
    return small_model(request.param)


@pytest.fixture(scope="session")
def llama_model() -> LoadedModel:
    """One small model, where the family does not matter."""
    return small_model("llama")


@pytest.fixture(params=[4, 16])
def driver(request: pytest.FixtureRequest, loaded: LoadedModel) -> Iterator[StepDriver]:
    """A runner over each small model, with blocks of 4 and of 16."""
    made = StepDriver.over(loaded, block_size=request.param)
    yield made
    made.runner.close()
