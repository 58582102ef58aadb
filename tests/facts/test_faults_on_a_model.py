"""Faults that only K/V can show, on the tiny model with real attention: what comes out is what a lone request gets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from minivllm.runners.mlx import MLXRunner  # before mlx: it loads the fast BLAS

import mlx.core as mx  # isort: skip
import numpy as np

from minivllm.cache.block_pool import SCRATCH_BLOCK_ID
from minivllm.engine.core import EngineCore
from minivllm.errors import ConfigError, RowError
from minivllm.log import events as ev
from minivllm.models.adapters import Adapters, make_adapter
from minivllm.models.folder import LoadedModel
from minivllm.models.load import load_model
from minivllm.request import RequestState
from minivllm.step import ScheduledStep
from tests.facts.engines import MOST_STEPS, config, events_of, finish, numbers, step, table

fact = pytest.mark.fact

PROMPT = [101, 7, 33, 250, 12, 90, 55, 61, 140, 9]


class Interrupted(MLXRunner):
    """The real runner, with a call before each step is computed."""

    on_step: Callable[[ScheduledStep], None] = staticmethod(lambda scheduled: None)

    def execute(self, step: ScheduledStep) -> dict[str, int | RowError]:
        """Call, then compute."""
        self.on_step(step)
        return super().execute(step)

    def parts(self) -> list[np.ndarray]:
        """Return the keys and values of all layers, each ``[1 + num_blocks, heads, block_size, head_dim]``."""
        assert self._pool is not None
        return [np.array(part) for part in (*self._pool._keys, *self._pool._values)]


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    """The tiny model with real attention."""
    return load_model("tiny")


@contextmanager
def real(loaded: LoadedModel, adapters: Adapters | None = None, **settings: Any) -> Iterator[EngineCore]:
    core = EngineCore(config(**{"num_blocks": 32, **settings}), Interrupted(loaded, adapters))
    yield core
    core.close()


def runner_of(core: EngineCore) -> Interrupted:
    assert isinstance(core.runner, Interrupted)
    return core.runner


def served(core: EngineCore, prompt: list[int], **fields: Any) -> list[int]:
    request = core.submit(prompt, **{"max_tokens": 4, "ignore_eos": True, **fields})
    finish(core)
    assert request.state is RequestState.FINISHED
    return request.output_token_ids


@pytest.fixture(scope="module")
def lone(tiny: LoadedModel) -> Callable[..., list[int]]:
    """Return what a request with an engine for itself generates."""

    def compute(prompt: list[int], **fields: Any) -> list[int]:
        with real(tiny, enable_prefix_caching=False) as core:
            return served(core, prompt, **fields)

    return compute


@fact("fault-zombie")
def test_after_a_withdrawn_request_the_same_prompt_answers_as_if_alone(
    tiny: LoadedModel, lone: Callable[..., list[int]]
) -> None:
    with real(tiny) as core:
        served(core, numbers(200, 11))  # what is withdrawn gets blocks that hold something

        def withdraw(scheduled: ScheduledStep) -> None:
            if "gone" in core.requests:
                core.abort("gone")

        runner_of(core).on_step = withdraw
        core.submit(PROMPT, max_tokens=4, request_id="gone")
        core.run(MOST_STEPS)
        assert served(core, PROMPT) == lone(PROMPT)


@fact("fault-zombie")
def test_a_real_model_refuses_to_publish_what_is_not_computed(tiny: LoadedModel) -> None:
    with pytest.raises(ConfigError, match="never computed"), real(tiny, publication="at-allocation"):
        pass


@fact("fault-cancel-corrupts")
def test_a_request_cancelled_after_any_step_leaves_k_v_that_the_next_one_can_use(
    tiny: LoadedModel, lone: Callable[..., list[int]]
) -> None:
    right = lone(PROMPT)
    for num_steps in range(1, 6):
        with real(tiny, max_num_batched_tokens=6) as core:
            cancelled = core.submit(PROMPT, max_tokens=8, ignore_eos=True)
            step(core, num_steps)
            core.abort(cancelled.request_id)
            assert served(core, PROMPT) == right
            assert len(events_of(core, ev.BlocksHit)) == 1


@fact("fault-shallow-copies")
def test_samples_that_part_in_a_shared_block_answer_as_if_alone(
    tiny: LoadedModel, lone: Callable[..., list[int]]
) -> None:
    with real(tiny) as core:
        first = core.submit(PROMPT, max_tokens=6, n=3, temperature=1.0, seed=4, ignore_eos=True)
        finish(core)
        assert len(events_of(core, ev.BlockCopied)) == 2
        outputs = [core.requests[name].output_token_ids for name in core.samples_of(first.request_id)]
    assert len({tuple(output) for output in outputs}) > 1
    assert outputs == [lone(PROMPT, max_tokens=6, temperature=1.0, seed=4 + number) for number in range(3)]


@fact("fault-shallow-copies")
def test_requests_that_share_a_beginning_change_nothing_in_each_other(
    tiny: LoadedModel, lone: Callable[..., list[int]]
) -> None:
    with real(tiny, coordination="shared-prefix") as core:
        prompts = [[*PROMPT, place, place + 1] for place in range(3)]
        requests = [core.submit(prompt, max_tokens=5, ignore_eos=True) for prompt in prompts]
        step(core)
        held = table(core, requests[0])[:2]
        before = [part[held].copy() for part in runner_of(core).parts()]
        finish(core)
        assert [request.num_recovered_tokens for request in requests] == [0, 8, 8]
        for part, earlier in zip(runner_of(core).parts(), before, strict=True):
            np.testing.assert_array_equal(part[held], earlier)
    assert [r.output_token_ids for r in requests] == [lone(prompt, max_tokens=5) for prompt in prompts]


@fact("fault-nan")
def test_the_scratch_block_that_pads_ragged_batches_stays_zero(
    tiny: LoadedModel, lone: Callable[..., list[int]]
) -> None:
    prompts = [PROMPT[:3], [*PROMPT, *PROMPT, 5], PROMPT[:6]]
    with real(tiny) as core:
        requests = [core.submit(prompt, max_tokens=6, ignore_eos=True) for prompt in prompts]
        finish(core)
        assert all(not part[SCRATCH_BLOCK_ID].any() for part in runner_of(core).parts())
    assert [request.output_token_ids for request in requests] == [lone(prompt, max_tokens=6) for prompt in prompts]


BROKEN = 99
"""A token whose embedding is no number in the broken model."""


@fact("fault-nan")
def test_a_row_without_numbers_fails_alone_and_its_blocks_harm_nobody_who_gets_them_next(
    lone: Callable[..., list[int]],
) -> None:
    broken = load_model("tiny")
    weight = broken.model.model.embed_tokens.weight
    weight[BROKEN] = mx.array(float("nan"))
    mx.eval(weight)
    with real(broken, num_blocks=10) as core:
        good = core.submit(PROMPT, max_tokens=8, ignore_eos=True)
        step(core, 2)
        bad = core.submit([1, BROKEN, *numbers(2, 8)], max_tokens=8)
        step(core)
        assert bad.state is RequestState.FAILED
        assert all(np.isfinite(part).all() for part in runner_of(core).parts())
        lost = set(events_of(core, ev.BlocksAllocated)[-1].block_ids)
        # Short rows beside a long one: their blocks are those of the row that failed, and filled in part.
        seq = len(core.log)
        others = [core.submit(prompt, max_tokens=4, ignore_eos=True) for prompt in ([7, 8], [9])]
        finish(core)
        taken = {i for e in core.log.since(seq) if isinstance(e, ev.BlocksAllocated) for i in e.block_ids}
        assert lost <= taken
    assert good.output_token_ids == lone(PROMPT, max_tokens=8)
    assert [request.output_token_ids for request in others] == [lone([7, 8]), lone([9])]


@fact("fault-salt-lost", "fault-key-collisions")
def test_two_adapters_have_other_k_v_for_the_same_tokens_and_share_no_block(tiny: LoadedModel, tmp_path: Path) -> None:
    folders = {name: make_adapter(tmp_path / name, "tiny", seed=seed) for seed, name in enumerate(("one", "two"), 1)}
    adapters = Adapters(tiny, folders)
    answers: dict[str | None, list[int]] = {}
    for adapter in (None, "one", "two"):
        with real(tiny, adapters, enable_prefix_caching=False) as core:
            answers[adapter] = served(core, PROMPT, adapter=adapter)
    assert len({tuple(answer) for answer in answers.values()}) == 3
    with real(tiny, adapters) as core:
        together = {adapter: core.submit(PROMPT, max_tokens=4, ignore_eos=True, adapter=adapter) for adapter in answers}
        finish(core)
        assert {adapter: request.output_token_ids for adapter, request in together.items()} == answers
    with real(tiny, adapters) as core:
        order = [None, "one", "two", "one", "two", None]
        assert [served(core, PROMPT, adapter=adapter) for adapter in order] == [answers[adapter] for adapter in order]
        assert [r.num_recovered_tokens for r in core.requests.values()] == [0, 0, 0, 8, 8, 8]
        keys = runner_of(core).parts()[0]
        first_blocks = {e.request_id: e.block_ids[0] for e in reversed(events_of(core, ev.BlocksPublished))}
        own = [keys[first_blocks[name]] for name in ("r0", "r1", "r2")]
        assert all(np.abs(own[i] - own[j]).max() > 1e-3 for i, j in ((0, 1), (0, 2), (1, 2)))


@fact("fault-memory-pinned")
def test_the_pools_bytes_are_known_and_stay_the_same_and_nothing_piles_up_beside_it(tiny: LoadedModel) -> None:
    with real(tiny, max_num_batched_tokens=32, num_blocks=64) as core:
        runner = runner_of(core)
        assert runner.pool_bytes == (1 + 64) * runner.block_bytes(4) > 0
        size = runner.pool_bytes
        active = []
        for turn in range(4):
            for place in range(3):
                core.submit([*PROMPT[:9], turn, place], max_tokens=6, n=1 + place % 2, temperature=1.0, ignore_eos=True)
            core.run(MOST_STEPS)
            assert runner.pool_bytes == size
            active.append(mx.get_active_memory())
        # After the first turn, which makes what is made once, less than one block of K/V may be new.
        assert active[-1] - active[1] < runner.block_bytes(4)
    assert runner.pool_bytes == 0
