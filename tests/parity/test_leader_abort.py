"""Aborting the leader, in each of its phases, on the real model: every follower ends, and the invariants hold."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from minivllm import EngineConfig, EngineCore, Sampling, Submission, replay
from minivllm.models.folder import LoadedModel
from minivllm.models.load import load_model
from minivllm.request import Request, RequestState
from minivllm.runners.mlx import MLXRunner

pytestmark = pytest.mark.model

PROMPT = list(range(1000, 1100))
NUM_FOLLOWERS = 2

SMALL_STEPS = {"max_num_batched_tokens": 64, "block_size": 16, "coordination": "single-flight"}


@pytest.fixture(scope="module")
def smollm2() -> LoadedModel:
    """The default model, from the user's cache."""
    return load_model("smollm2")


def run_checked(core: EngineCore, until: Callable[[], bool]) -> None:
    """Step until it is so, with the invariants checked after each step."""
    while not until():
        assert core.step(), "nothing is left to run"
        core.check_invariants()
        assert core.state() == replay(core.log)


def waiting(core: EngineCore, leader: Request) -> None:
    assert leader.state is RequestState.WAITING


def prefilling(core: EngineCore, leader: Request) -> None:
    run_checked(core, lambda: 0 < leader.num_computed_tokens < len(PROMPT))


def decoding(core: EngineCore, leader: Request) -> None:
    run_checked(core, lambda: len(leader.output_token_ids) == 2)


def preempted(core: EngineCore, leader: Request) -> None:
    """An older request takes the pool's last blocks as it grows, and the leader, the newest, gives its own up."""
    run_checked(core, lambda: leader.state is RequestState.PREEMPTED)


@contextlib.contextmanager
def build(loaded: LoadedModel, **settings: object) -> Iterator[EngineCore]:
    core = EngineCore(EngineConfig(**{**SMALL_STEPS, **settings}), MLXRunner(loaded))  # type: ignore[arg-type]
    yield core
    core.close()


@pytest.mark.parametrize(
    ("release", "publication"),
    [("on-completion", "on-completion"), ("on-completion", "incremental"), ("after-prefill", "on-completion")],
)
@pytest.mark.parametrize("reach_phase", [waiting, prefilling, decoding, preempted])
def test_every_follower_ends_when_the_leader_is_aborted(
    smollm2: LoadedModel,
    reach_phase: Callable[[EngineCore, Request], None],
    release: str,
    publication: str,
) -> None:
    tight = reach_phase is preempted
    with build(smollm2, release=release, publication=publication, num_blocks=13 if tight else 64) as core:
        if tight:
            # 94 prompt tokens are 6 blocks; with the leader's 7 the pool is full until the older one grows past 96.
            core.submit_batch([Submission(list(range(94)), Sampling(max_tokens=12, ignore_eos=True), "older")])
            run_checked(core, lambda: core.requests["older"].is_decoding)
        sampling = Sampling(max_tokens=4, ignore_eos=True)
        leader, *followers = core.submit_batch(
            [Submission(PROMPT, sampling, f"r{number}") for number in range(1 + NUM_FOLLOWERS)]
        )
        reach_phase(core, leader)

        assert core.abort("r0")
        core.check_invariants()
        assert core.state() == replay(core.log)
        run_checked(core, lambda: not core.has_work)

        assert leader.state is RequestState.ABORTED
        assert [request.state for request in followers] == [RequestState.FINISHED] * NUM_FOLLOWERS
        assert len({tuple(request.output_token_ids) for request in followers}) == 1
        assert core.manager.pool.num_free == core.config.num_blocks
        assert not core.coordinator.flights and not core.coordinator.released_request_ids
