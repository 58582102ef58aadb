"""Several samples of one prompt: it is computed once, its blocks are shared, and the last one is copied on write."""

from __future__ import annotations

from typing import Any

import pytest

from minivllm import EngineConfig, EngineCore, VirtualRunner
from minivllm.errors import RowError
from minivllm.log import events as ev
from minivllm.request import Request, RequestState
from minivllm.step import ScheduledStep
from tests.unit.small import FULL_PROMPT, check, events_of, run, small_core, step


def samples_of(core: EngineCore, request: Request) -> list[Request]:
    return [core.requests[name] for name in core.samples_of(request.request_id)]


def alone(prompt: list[int], seed: int, max_tokens: int) -> list[int]:
    """Return the tokens of a lone request with this seed."""
    core = EngineCore(EngineConfig(), VirtualRunner())
    request = core.submit(prompt, temperature=0.8, seed=seed, max_tokens=max_tokens)
    core.run()
    return request.output_token_ids


@pytest.mark.parametrize("length", [1, 4, 8, 9, 11])
def test_each_samples_tokens_are_those_of_a_lone_request_with_its_seed(length: int) -> None:
    core = small_core(num_blocks=32)
    prompt = list(range(10, 10 + length))
    first = core.submit(prompt, temperature=0.8, seed=5, n=3, max_tokens=6)
    run(core)
    outputs = [sample.output_token_ids for sample in samples_of(core, first)]
    assert outputs == [alone(prompt, seed, 6) for seed in (5, 6, 7)]
    assert len({tuple(output) for output in outputs}) == 3


def test_the_prompt_is_computed_once_and_its_blocks_are_shared() -> None:
    core = small_core(num_blocks=32)
    first = core.submit(FULL_PROMPT, temperature=0.8, n=3, max_tokens=6)
    step(core)
    assert [(e.request_id, e.num_tokens) for e in events_of(core, ev.ChunkComputed)] == [("r0", 9)]
    forked = events_of(core, ev.SamplesForked)
    assert [(e.request_id, e.sample_ids, e.block_ids) for e in forked] == [("r0", ("r0.1", "r0.2"), (1, 2, 3))]
    assert {block.block_id: block.ref_count for block in core.manager.pool.blocks[:3]} == {1: 3, 2: 3, 3: 3}
    assert [len(sample.output_token_ids) for sample in samples_of(core, first)] == [1, 1, 1]
    run(core)


def test_a_partly_filled_last_block_is_copied_by_all_but_the_last_that_writes_into_it() -> None:
    core = small_core(num_blocks=32)
    core.submit(FULL_PROMPT, n=3, max_tokens=6)
    step(core, 2)
    copies = events_of(core, ev.BlockCopied)
    assert [(e.request_id, e.source_block_id, e.block_id, e.num_tokens) for e in copies] == [
        ("r0", 3, 4, 1),
        ("r0.1", 3, 5, 1),
    ]
    assert [core.manager.block_ids(name) for name in ("r0", "r0.1", "r0.2")] == [(1, 2, 4), (1, 2, 5), (1, 2, 3)]
    run(core)
    assert len(events_of(core, ev.BlockCopied)) == 2


def test_a_copy_stands_in_the_step_before_the_rows_that_need_it() -> None:
    steps: list[ScheduledStep] = []
    core = small_core(num_blocks=32, on_step=steps.append)
    core.submit(FULL_PROMPT, n=2, max_tokens=3)
    run(core)
    assert [[(copy.source, copy.target) for copy in step.copies] for step in steps] == [[], [(3, 4)], []]
    assert [[request.request_id for row in step.rows for request in row.sampled] for step in steps] == [
        ["r0", "r0.1"]
    ] * 3


def test_a_prompt_of_whole_blocks_is_never_copied() -> None:
    core = small_core(num_blocks=32)
    core.submit(FULL_PROMPT[:8], n=3, max_tokens=6)
    run(core)
    assert events_of(core, ev.BlockCopied) == []


def test_a_sample_alone_writes_in_place() -> None:
    core = small_core(num_blocks=32)
    core.submit(FULL_PROMPT, n=2, max_tokens=6)
    step(core)
    core.abort("r0.1")
    run(core)
    assert events_of(core, ev.BlockCopied) == []


def test_with_one_output_token_each_no_sample_needs_a_block_of_its_own() -> None:
    core = small_core(num_blocks=3)
    first = core.submit(FULL_PROMPT, n=4, max_tokens=1)
    run(core)
    assert [sample.state for sample in samples_of(core, first)] == [RequestState.FINISHED] * 4


def test_rows_are_kept_for_the_samples_that_are_to_come() -> None:
    core = small_core(num_blocks=32, max_num_seqs=4)
    core.submit(FULL_PROMPT, n=3, max_tokens=3)
    core.submit([50, 51], n=2, max_tokens=1)
    core.submit([60, 61], max_tokens=1)
    while core.step():
        check(core)
        assert len(core.scheduler.running) <= 4
    assert all(request.state is RequestState.FINISHED for request in core.requests.values())


def test_when_the_first_ends_before_its_prompt_is_computed_the_next_takes_its_place() -> None:
    core = small_core(num_blocks=32, long_prefill_token_threshold=4)
    first = core.submit(FULL_PROMPT, temperature=0.8, seed=5, n=3, max_tokens=4)
    step(core)
    core.abort("r0")
    check(core)
    assert [(e.from_id, e.to_id) for e in events_of(core, ev.SampleLeads)] == [("r0", "r0.1")]
    assert core.state().samples == {"r0.1": ["r0.2"]}
    run(core)
    assert [sample.output_token_ids for sample in samples_of(core, first)[1:]] == [
        alone(FULL_PROMPT, seed, 4) for seed in (6, 7)
    ]


def test_a_sample_that_is_aborted_while_it_waits_is_expected_no_more() -> None:
    core = small_core(num_blocks=32, long_prefill_token_threshold=4)
    core.submit(FULL_PROMPT, n=3, max_tokens=2)
    step(core)
    for name in ("r0.1", "r0.2"):
        core.abort(name)
        check(core)
    run(core)
    assert events_of(core, ev.SamplesForked) == []


def test_samples_of_a_request_that_has_not_arrived_come_with_it_or_with_the_next() -> None:
    core = small_core(num_blocks=32)
    core.submit([1, 2, 3], max_tokens=3, request_id="before")
    core.submit(FULL_PROMPT, n=3, max_tokens=2, request_id="late", after=("before", 2))
    core.abort("late")
    check(core)
    run(core)
    states = [core.requests[name].state for name in core.samples_of("late")]
    assert states == [RequestState.ABORTED, RequestState.FINISHED, RequestState.FINISHED]
    assert len(events_of(core, ev.SamplesForked)) == 1


def test_a_preempted_sample_computes_again_alone_and_draws_the_same() -> None:
    core = small_core(num_blocks=7)
    first = core.submit(FULL_PROMPT, temperature=0.8, seed=5, n=3, max_tokens=8)
    run(core)
    assert len(events_of(core, ev.RequestPreempted)) > 0
    outputs = [sample.output_token_ids for sample in samples_of(core, first)]
    assert outputs == [alone(FULL_PROMPT, seed, 8) for seed in (5, 6, 7)]


def test_the_first_preempted_before_the_fork_still_brings_its_samples_along() -> None:
    core = small_core(num_blocks=5, long_prefill_token_threshold=4)
    core.submit(list(range(50, 58)), max_tokens=10, request_id="old")
    first = core.submit(FULL_PROMPT, n=2, max_tokens=2)
    run(core)
    assert first.num_preemptions > 0
    assert [sample.state for sample in samples_of(core, first)] == [RequestState.FINISHED] * 2


@pytest.mark.parametrize("coordination", ["single-flight", "shared-prefix", "wait-or-recompute"])
@pytest.mark.parametrize("abort_first", [False, True])
def test_samples_and_followers_go_together(coordination: str, abort_first: bool) -> None:
    core = small_core(num_blocks=64, coordination=coordination, long_prefill_token_threshold=4)
    requests = [core.submit(FULL_PROMPT, temperature=0.8, seed=seed, n=2, max_tokens=3) for seed in (5, 10, 20)]
    step(core)
    if abort_first:
        core.abort("r0")
        check(core)
    run(core)
    for request, seed in zip(requests, (5, 10, 20), strict=True):
        for number, sample in enumerate(samples_of(core, request)):
            if not (abort_first and sample.request_id == "r0"):
                assert sample.output_token_ids == alone(FULL_PROMPT, seed + number, 3)


def test_a_prompt_that_many_samples_share_is_published_once_and_duplicated_once() -> None:
    core = small_core(num_blocks=64)
    for _ in range(2):
        core.submit(FULL_PROMPT, n=3, max_tokens=1)
    run(core)
    assert [e.block_ids for e in events_of(core, ev.BlocksPublished)] == [(1, 2)]
    assert [(e.block_ids, e.twin_block_ids) for e in events_of(core, ev.BlocksDuplicated)] == [((4, 5), (1, 2))]


def test_the_last_sample_publishes_the_prompt_if_the_others_were_aborted() -> None:
    core = small_core(num_blocks=32)
    core.submit(FULL_PROMPT, n=3, max_tokens=4)
    step(core, 2)
    core.abort("r0")
    core.abort("r0.1")
    run(core)
    assert [(e.request_id, e.block_ids[:2]) for e in events_of(core, ev.BlocksPublished)] == [("r0.2", (1, 2))]


class BadRow(VirtualRunner):
    """Gives no number for one request at one step."""

    def __init__(self, name: str, number: int) -> None:
        super().__init__()
        self.bad, self.number = name, number

    def execute(self, step: ScheduledStep) -> dict[str, int | RowError]:
        drawn = super().execute(step)
        if step.number == self.number:
            for row in step.rows:
                if row.request_id == self.bad:
                    drawn.update(dict.fromkeys((r.request_id for r in row.sampled), RowError("NaN")))
                    drawn[self.bad] = RowError("NaN")
        return drawn


def bad_core(name: str, number: int, **settings: Any) -> EngineCore:
    return EngineCore(EngineConfig(**{"block_size": 4, "num_blocks": 32, **settings}), BadRow(name, number))


def test_a_prompt_that_gives_no_number_fails_all_its_samples_and_nobody_else() -> None:
    core = bad_core("r0", 1)
    core.submit(FULL_PROMPT, n=3, max_tokens=3)
    other = core.submit([1, 2, 3], max_tokens=3)
    run(core)
    assert [core.requests[name].state for name in core.samples_of("r0")] == [RequestState.FAILED] * 3
    assert other.state is RequestState.FINISHED
    assert events_of(core, ev.SampleLeads) == []
    assert [e.request_id for e in events_of(core, ev.BlocksPublished)] == [other.request_id]


def test_a_sample_that_gives_no_number_later_fails_alone() -> None:
    core = bad_core("r0.1", 2)
    core.submit(FULL_PROMPT, n=3, max_tokens=3)
    run(core)
    states = [core.requests[name].state for name in core.samples_of("r0")]
    assert states == [RequestState.FINISHED, RequestState.FAILED, RequestState.FINISHED]
