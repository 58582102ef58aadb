"""Requests that end while a step runs, or whose row gives no number: nothing of them counts, and the others go on.

A view or a caller may abort between scheduling and computing. Whoever it is (a plain row, the first sample of a
prompt, one that is held, a leader), the step's other rows must come out as if nothing had happened, every block must
come back, and who waited for the one that is gone must be heard of again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from minivllm import EngineConfig, EngineCore, Sampling, Submission, VirtualRunner
from minivllm.errors import RowError
from minivllm.log import events as ev
from minivllm.models.load import load_model
from minivllm.request import Request, RequestState
from minivllm.runners.mlx import MLXRunner
from minivllm.step import ScheduledStep
from tests.unit.small import FULL_PROMPT, events_of, recovered, run, small_core, step

FINISHED, ABORTED, FAILED = RequestState.FINISHED, RequestState.ABORTED, RequestState.FAILED

Act = Callable[[EngineCore], None]


def aborting(*names: str) -> Act:
    """Return what a caller does who takes these requests back."""

    def act(core: EngineCore) -> None:
        for name in names:
            assert core.abort(name)

    return act


def failing(*names: str) -> Act:
    """Return what a part of the engine does that gives these requests up."""

    def act(core: EngineCore) -> None:
        for name in names:
            assert core.fail(name, ValueError("told to"))

    return act


def interrupted(number: int, act: Act, **settings: Any) -> EngineCore:
    """Return an engine in whose step ``number`` something happens between scheduling and computing."""

    def on_step(scheduled: ScheduledStep) -> None:
        if scheduled.number == number:
            act(core)

    core = small_core(on_step=on_step, **{"num_blocks": 64, **settings})
    return core


def alone(request: Request) -> list[int]:
    """Return the tokens that a lone request like this one, with its seed, generates."""
    core = EngineCore(EngineConfig(), VirtualRunner())
    sampling = dataclasses.replace(request.sampling, seed=request.seed)
    same = core.submit(request.prompt_token_ids, sampling, adapter=request.adapter)
    core.run()
    return same.output_token_ids


def others_are_right(core: EngineCore, *gone: str) -> None:
    """Check that all but these requests have finished with the tokens of a lone request."""
    for name, request in core.requests.items():
        if name not in gone:
            assert (name, request.state, request.output_token_ids) == (name, FINISHED, alone(request))


def nothing_counts(core: EngineCore, name: str, number: int) -> None:
    """Check that step ``number`` computed, published and drew nothing for a request."""
    kinds = (ev.ChunkComputed, ev.TokenOut, ev.BlocksPublished, ev.PrefillFinished, ev.SamplesForked)
    assert [e for e in core.log if isinstance(e, kinds) and e.step == number and e.request_id == name] == []


def published_tokens(core: EngineCore, name: str) -> int:
    """Return up to which token a request has published."""
    ends = [4 * (e.indices[-1] + 1) for e in events_of(core, ev.BlocksPublished) if e.request_id == name]
    return max(ends, default=0)


def computed_tokens(core: EngineCore, name: str) -> int:
    """Return how many tokens of a request were computed."""
    return sum(e.num_tokens for e in events_of(core, ev.ChunkComputed) if e.request_id == name)


# -- A row -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("publication", ["on-completion", "incremental"])
@pytest.mark.parametrize("number", [1, 2, 3, 5], ids=["first chunk", "second chunk", "end of the prompt", "decode"])
@pytest.mark.parametrize(("act", "end"), [(aborting("gone"), ABORTED), (failing("gone"), FAILED)])
def test_a_row_that_is_withdrawn_counts_for_nothing_and_the_others_are_right(
    publication: str, number: int, act: Act, end: RequestState
) -> None:
    core = interrupted(number, act, publication=publication, long_prefill_token_threshold=4)
    before = core.submit([5, 6, 7], max_tokens=6, request_id="before", temperature=0.8)
    gone = core.submit(FULL_PROMPT, max_tokens=6, request_id="gone")
    core.submit([*FULL_PROMPT, 19], max_tokens=6, request_id="after")
    step(core, number)
    assert (gone.state, core.manager.block_ids("gone")) == (end, ())
    nothing_counts(core, "gone", number)
    assert published_tokens(core, "gone") == (4 * min(number - 1, 2) if publication == "incremental" else 0)
    assert before.state is RequestState.RUNNING
    run(core)
    others_are_right(core, "gone")


def test_a_step_of_which_every_row_is_withdrawn_computes_nothing_and_the_next_goes_on() -> None:
    core = interrupted(2, aborting("a", "b"), max_num_seqs=2)
    for name in "abc":
        core.submit(FULL_PROMPT, max_tokens=4, request_id=name)
    step(core, 2)
    assert [event for event in events_of(core, ev.ChunkComputed) if event.step == 2] == []
    assert core.requests["c"].state is RequestState.WAITING
    run(core)
    others_are_right(core, "a", "b")


def test_the_last_request_may_be_withdrawn_and_the_engine_is_idle_then() -> None:
    core = interrupted(2, aborting("a"))
    core.submit(FULL_PROMPT, max_tokens=4, request_id="a")
    step(core, 2)
    assert not core.has_work
    assert core.step() is False
    again = core.submit(FULL_PROMPT, max_tokens=2)
    run(core)
    assert again.output_token_ids == alone(again)


def test_requests_that_are_no_rows_may_end_in_mid_step_too() -> None:
    names = ("waiting", "held", "deferred")
    core = interrupted(2, aborting(*names), max_num_seqs=1, coordination="single-flight", release="on-completion")
    core.submit(FULL_PROMPT, max_tokens=4, request_id="row")
    core.submit(FULL_PROMPT, max_tokens=4, request_id="held")
    core.submit([1, 2], max_tokens=4, request_id="waiting")
    core.submit([3, 4], max_tokens=4, request_id="deferred", after=("row", 3))
    core.submit([5, 6], max_tokens=4, request_id="behind", after=("deferred", 1))
    step(core)
    states = [core.requests[name].state.value for name in names]
    assert states == list(names)
    step(core)
    assert {core.requests[name].state for name in names} == {ABORTED}
    run(core)
    others_are_right(core, *names)


def test_a_request_may_be_withdrawn_in_the_step_in_which_it_adopts() -> None:
    limits = {"max_num_batched_tokens": 20, "long_prefill_token_threshold": 8}
    core = interrupted(2, aborting("late"), adoption=True, publication="incremental", **limits)
    core.submit(list(range(20)), max_tokens=4, request_id="first")
    core.submit(list(range(50, 58)), max_tokens=2, request_id="between")
    core.submit(list(range(20)), max_tokens=4, request_id="late")
    step(core, 2)
    assert [(e.step, e.request_id) for e in events_of(core, ev.BlocksAdopted)] == [(2, "late")]
    run(core)
    others_are_right(core, "late")


def test_preempted_and_withdrawn_in_one_step() -> None:
    """The step takes a victim's blocks; a caller then takes back the row that they were taken for."""
    preempted: list[int] = []

    def on_step(scheduled: ScheduledStep) -> None:
        if not preempted and events_of(core, ev.RequestPreempted):
            preempted.append(scheduled.number)
            for row in scheduled.rows:
                core.abort(row.request_id)

    core = small_core(num_blocks=5, on_step=on_step)
    core.submit(list(range(8)), max_tokens=9, request_id="old")
    core.submit(list(range(50, 58)), max_tokens=9, request_id="young")
    run(core)
    assert preempted
    assert core.requests["old"].state is ABORTED
    others_are_right(core, "old")


# -- Samples -----------------------------------------------------------------------------------------------


def sampled_core(number: int, act: Act, **settings: Any) -> EngineCore:
    """Return an engine with three samples ``a`` of a prompt in three chunks, and a request beside them."""
    core = interrupted(number, act, long_prefill_token_threshold=4, **settings)
    core.submit(FULL_PROMPT, max_tokens=5, request_id="a", n=3, temperature=0.8, seed=5)
    core.submit([1, 2, 3], max_tokens=9, request_id="beside")
    return core


@pytest.mark.parametrize("publication", ["on-completion", "incremental"])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_when_the_first_sample_is_withdrawn_before_the_prompt_is_computed_the_next_one_computes_it(
    publication: str, number: int
) -> None:
    core = sampled_core(number, aborting("a"), publication=publication)
    step(core, number)
    nothing_counts(core, "a", number)
    assert [(e.step, e.from_id, e.to_id) for e in events_of(core, ev.SampleLeads)] == [(number, "a", "a.1")]
    assert core.state().samples == {"a.1": ["a.2"]}
    run(core)
    others_are_right(core, "a")
    assert recovered([core.requests["a.1"]]) == [4 * (number - 1) if publication == "incremental" else 0]


@pytest.mark.parametrize("names", [("a.1",), ("a.2",), ("a.1", "a.2")])
@pytest.mark.parametrize("number", [1, 3], ids=["early", "in the step that computes the prompt"])
def test_held_samples_that_end_in_mid_step_get_no_token_and_no_block(names: tuple[str, ...], number: int) -> None:
    core = sampled_core(number, aborting(*names))
    step(core, 3)
    assert {e.request_id for e in events_of(core, ev.TokenOut)}.isdisjoint(names)
    forked = [name for event in events_of(core, ev.SamplesForked) for name in event.sample_ids]
    assert forked == [name for name in ("a.1", "a.2") if name not in names]
    run(core)
    others_are_right(core, *names)


@pytest.mark.parametrize("names", [("a", "a.1"), ("a.1", "a"), ("a", "a.1", "a.2"), ("a.2", "a.1", "a")])
def test_several_or_all_samples_may_be_withdrawn_in_the_step_that_computes_the_prompt(names: tuple[str, ...]) -> None:
    core = sampled_core(3, aborting(*names))
    step(core, 3)
    assert events_of(core, ev.SamplesForked) == []
    run(core)
    others_are_right(core, *names)


@pytest.mark.parametrize("name", ["a", "a.1", "a.2"])
@pytest.mark.parametrize("number", [4, 5])
def test_a_sample_may_be_withdrawn_in_the_step_in_which_the_shared_block_is_copied_or_later(
    name: str, number: int
) -> None:
    core = sampled_core(number, aborting(name))
    step(core, 3)
    assert core.manager.pool.blocks[core.manager.block_ids("a")[-1] - 1].ref_count == 3
    step(core)
    assert {e.step for e in events_of(core, ev.BlockCopied)} == {4}
    run(core)
    others_are_right(core, name)


# -- Leaders -----------------------------------------------------------------------------------------------

COORDINATIONS: dict[str, dict[str, str]] = {
    "independent": {},
    "single-flight, after-prefill": {"coordination": "single-flight", "release": "after-prefill"},
    "single-flight, on-completion": {"coordination": "single-flight", "release": "on-completion"},
    "shared-prefix": {"coordination": "shared-prefix"},
    "wait-or-recompute": {"coordination": "wait-or-recompute"},
}

under_each_coordination = pytest.mark.parametrize("coordination", COORDINATIONS)


def led_core(number: int, act: Act, coordination: str, runner: VirtualRunner | None = None) -> EngineCore:
    """Return an engine with a leader of 17 tokens in chunks of 8, two requests behind it, and one apart."""
    settings = {"long_prefill_token_threshold": 8, **COORDINATIONS[coordination]}
    if runner is None:
        core = interrupted(number, act, **settings)
    else:
        core = EngineCore(EngineConfig(block_size=4, num_blocks=64, **settings), runner)  # type: ignore[arg-type]
    prompt = list(range(100, 117))
    batch = [Submission(prompt, Sampling(max_tokens=4, temperature=0.8, seed=i), f"r{i}") for i in range(3)]
    core.submit_batch([*batch, Submission([1, 2, 3], Sampling(max_tokens=4), "apart")])
    return core


@under_each_coordination
@pytest.mark.parametrize("number", [1, 2, 3, 4], ids=["first chunk", "second chunk", "end of the prompt", "decode"])
@pytest.mark.parametrize(("act", "end"), [(aborting("r0"), ABORTED), (failing("r0"), FAILED)])
def test_when_a_leader_is_withdrawn_its_followers_go_on_and_read_only_what_was_computed(
    coordination: str, number: int, act: Act, end: RequestState
) -> None:
    core = led_core(number, act, coordination)
    step(core, number)
    assert core.requests["r0"].state is end
    nothing_counts(core, "r0", number)
    assert published_tokens(core, "r0") <= computed_tokens(core, "r0")
    run(core)
    others_are_right(core, "r0")
    found = recovered([core.requests["r1"], core.requests["r2"]])
    if coordination == "independent":
        assert found == [0, 0]
    else:
        assert found[1] == 16, "only the heir computes again what was lost"


@pytest.mark.parametrize("names", [("r1",), ("r2",), ("r1", "r2"), ("r0", "r1"), ("r0", "r1", "r2")])
@pytest.mark.parametrize("number", [1, 3])
@under_each_coordination
def test_leader_and_followers_may_end_in_one_step(coordination: str, number: int, names: tuple[str, ...]) -> None:
    core = led_core(number, aborting(*names), coordination)
    run(core)
    others_are_right(core, *names)
    assert core.coordinator.awaiting == {}
    assert core.coordinator.flights == {}


# -- A reset in mid-step -----------------------------------------------------------------------------------


@pytest.mark.parametrize("publication", ["on-completion", "incremental", "at-allocation"])
@under_each_coordination
def test_a_reset_in_mid_step_withdraws_every_row_and_the_others_start_from_nothing(
    coordination: str, publication: str
) -> None:
    answers: list[bool] = []
    settings = {"publication": publication, "max_num_seqs": 2, **COORDINATIONS[coordination]}
    core = interrupted(3, lambda core: answers.append(core.reset_cache(abort_running=True)), **settings)
    for number in range(4):
        core.submit(FULL_PROMPT, max_tokens=9, request_id=f"r{number}", temperature=0.8, seed=number)
    step(core, 3)
    assert answers == [True]
    assert len(core.manager.index) == 0
    gone = [name for name, request in core.requests.items() if request.state is ABORTED]
    assert 0 < len(gone) < 4
    run(core)
    others_are_right(core, *gone)
    assert core.requests[f"r{len(gone)}"].num_recovered_tokens == 0


# -- Rows that give no number ------------------------------------------------------------------------------


class NoNumber(VirtualRunner):
    """A runner whose row of one request comes out as NaN in one step."""

    def __init__(self, name: str, number: int, *, only: str = "") -> None:
        super().__init__()
        self.bad, self.number, self.only = name, number, only

    def execute(self, step: ScheduledStep) -> dict[str, int | RowError]:
        drawn = super().execute(step)
        for row in step.rows:
            if step.number == self.number and row.request_id == self.bad:
                failed = [self.only] if self.only else [self.bad, *[r.request_id for r in row.sampled]]
                drawn.update({name: RowError(f"the numbers of {name} are NaN") for name in failed})
        return drawn


def core_without_number(name: str, number: int, *, only: str = "", **settings: Any) -> EngineCore:
    config = EngineConfig(**{"block_size": 4, "num_blocks": 64, "long_prefill_token_threshold": 4, **settings})
    return EngineCore(config, NoNumber(name, number, only=only))


@pytest.mark.parametrize("publication", ["on-completion", "incremental"])
@pytest.mark.parametrize("number", [1, 2, 3, 5], ids=["first chunk", "second chunk", "end of the prompt", "decode"])
def test_a_row_that_gives_no_number_fails_its_request_alone_and_the_others_are_right(
    publication: str, number: int
) -> None:
    core = core_without_number("bad", number, publication=publication)
    core.submit([5, 6, 7], max_tokens=6, request_id="before", temperature=0.8)
    bad = core.submit(FULL_PROMPT, max_tokens=6, request_id="bad")
    core.submit([*FULL_PROMPT, 19], max_tokens=6, request_id="after")
    core.submit([1], max_tokens=1, request_id="trigger", after=("bad", 6))
    step(core, number)
    assert (bad.state, bad.finish_reason, core.manager.block_ids("bad")) == (FAILED, "error", ())
    assert [e.error for e in events_of(core, ev.RequestFailed)] == ["RowError: the numbers of bad are NaN"]
    nothing_counts(core, "bad", number)
    assert published_tokens(core, "bad") == (4 * min(number - 1, 2) if publication == "incremental" else 0)
    run(core)
    others_are_right(core, "bad")


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_prompt_that_gives_no_number_fails_each_of_its_samples_and_nobody_takes_its_place(number: int) -> None:
    core = core_without_number("a", number)
    core.submit(FULL_PROMPT, max_tokens=5, request_id="a", n=3, temperature=0.8)
    core.submit([1, 2, 3], max_tokens=9, request_id="beside")
    step(core, number)
    assert [core.requests[name].state for name in core.samples_of("a")] == [FAILED] * 3
    assert (events_of(core, ev.SampleLeads), events_of(core, ev.SamplesForked)) == ([], [])
    run(core)
    others_are_right(core, *core.samples_of("a"))


@pytest.mark.parametrize("name", ["a", "a.1", "a.2"])
def test_a_sample_that_gives_no_number_after_the_fork_fails_alone(name: str) -> None:
    core = core_without_number(name, 4)
    core.submit(FULL_PROMPT, max_tokens=5, request_id="a", n=3, temperature=0.8)
    run(core)
    assert core.requests[name].state is FAILED
    others_are_right(core, name)


@pytest.mark.parametrize("only", ["a.1", "a.2"])
def test_if_the_prompts_row_gives_a_number_for_all_but_one_sample_only_that_one_fails(only: str) -> None:
    core = core_without_number("a", 3, only=only)
    core.submit(FULL_PROMPT, max_tokens=5, request_id="a", n=3, temperature=0.8)
    core.submit([1, 2, 3], max_tokens=9, request_id="beside")
    step(core, 3)
    assert (core.requests[only].state, core.manager.block_ids(only)) == (FAILED, ())
    run(core)
    others_are_right(core, only)


@under_each_coordination
@pytest.mark.parametrize("number", [1, 2, 3, 4], ids=["first chunk", "second chunk", "end of the prompt", "decode"])
def test_when_a_leader_gives_no_number_its_followers_go_on(coordination: str, number: int) -> None:
    core = led_core(number, aborting(), coordination, NoNumber("r0", number))
    run(core)
    assert core.requests["r0"].state is FAILED
    assert published_tokens(core, "r0") <= computed_tokens(core, "r0")
    others_are_right(core, "r0")


# -- On a real model ---------------------------------------------------------------------------------------


class InterruptibleRunner(MLXRunner):
    """The real runner, with the virtual one's moment between scheduling and computing."""

    on_step: Callable[[ScheduledStep], None] | None = None

    def execute(self, step: ScheduledStep) -> dict[str, int | RowError]:
        """Let the interruption come, then compute what is left."""
        if self.on_step is not None:
            self.on_step(step)
        return super().execute(step)


REAL_BATCH = [
    Submission(FULL_PROMPT, Sampling(max_tokens=4, n=3, temperature=0.8, seed=5), "a"),
    Submission([*FULL_PROMPT[:8], 50, 51], Sampling(max_tokens=6), "b"),
    Submission([60, 61, 62], Sampling(max_tokens=6), "c"),
]


def real_outputs(number: int = 0, names: Sequence[str] = (), **settings: Any) -> dict[str, list[int]]:
    """Run the batch on the tiny model, with requests aborted in step ``number``; return the tokens of the others."""
    runner = InterruptibleRunner(load_model("tiny"))
    config = EngineConfig(**{"block_size": 4, "num_blocks": 64, "long_prefill_token_threshold": 4, **settings})
    core = EngineCore(config, runner)

    def on_step(scheduled: ScheduledStep) -> None:
        if scheduled.number == number:
            aborting(*names)(core)

    runner.on_step = on_step
    core.submit_batch(REAL_BATCH)
    run(core)
    outputs = {name: request.output_token_ids for name, request in core.requests.items() if name not in names}
    assert {core.requests[name].state for name in outputs} == {FINISHED}
    core.close()
    return outputs


@pytest.fixture(scope="module")
def undisturbed() -> Iterator[dict[str, list[int]]]:
    """What the tiny model answers if nobody ends early and nothing is shared."""
    yield real_outputs(enable_prefix_caching=False)


@pytest.mark.parametrize(
    ("number", "names"),
    [(1, ["a"]), (3, ["a"]), (3, ["a.1"]), (3, ["a.2", "a"]), (4, ["a"]), (4, ["a.2"]), (2, ["b"]), (4, ["c", "b"])],
)
@pytest.mark.parametrize("coordination", ["independent", "shared-prefix"])
def test_on_a_real_model_the_other_rows_come_out_as_if_nothing_had_happened(
    undisturbed: dict[str, list[int]], number: int, names: list[str], coordination: str
) -> None:
    outputs = real_outputs(number, names, coordination=coordination, publication="incremental")
    assert outputs == {name: tokens for name, tokens in undisturbed.items() if name not in names}
