"""Publication at allocation: what it gives, what it breaks, and the rule that the other policies keep.

A block that is found before it is computed is a promise. It is kept if the step is computed as planned and each row
sees what the others write in it. It is broken by whatever comes between scheduling and computing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from minivllm.config import EngineConfig
from minivllm.engine.core import EngineCore
from minivllm.errors import ConfigError, EngineDeadError, InvariantError, RowError, UnknownNameError
from minivllm.log import events as ev
from minivllm.log.kv_contents import KVContents, kv_contents
from minivllm.models.load import load_model
from minivllm.request import Request
from minivllm.runners.mlx import MLXRunner
from minivllm.runners.virtual import VirtualRunner
from minivllm.step import ScheduledStep
from tests.unit.small import FULL_PROMPT, check, events_of, recovered, run, small_core, step

SAFE = ["on-completion", "incremental"]
OTHER_PROMPT = [*range(20, 32)]
"""Three full blocks, with nothing in common with the full prompt."""


class Interruption:
    """Does one thing, once, between the scheduling and the computing of a step in which ``request_id`` has a row."""

    def __init__(self, request_id: str, act: Callable[[EngineCore, Request], object]) -> None:
        self.core: EngineCore | None = None
        self.came = False
        self._request_id = request_id
        self._act = act

    def __call__(self, step: ScheduledStep) -> None:
        rows = [row for row in step.rows if row.request_id == self._request_id]
        if rows and not self.came:
            self.came = True
            assert self.core is not None
            self._act(self.core, rows[0].request)


def abort(core: EngineCore, request: Request) -> None:
    """Take the request back."""
    core.abort(request.request_id)


def fail(core: EngineCore, request: Request) -> None:
    """End the request on an error of its own."""
    core.fail(request.request_id, RuntimeError("told to"))


def interrupted_core(interruption: Interruption, publication: str, num_blocks: int = 8) -> EngineCore:
    """Return a small virtual engine in which the interruption happens."""
    core = small_core(on_step=interruption, publication=publication, num_blocks=num_blocks)
    interruption.core = core
    return core


def withdrawn_core(publication: str, act: Callable[[EngineCore, Request], None] = abort) -> EngineCore:
    """Return an engine in which request ``a`` was withdrawn after it was scheduled, before it was computed."""
    core = interrupted_core(Interruption("a", act), publication)
    core.submit(FULL_PROMPT, request_id="a", max_tokens=2)
    core.step()
    check(core)
    return core


def ask_again(core: EngineCore) -> KVContents:
    """Let a request with the same prompt and one token more run, alone, and return what it has read."""
    core.submit([*FULL_PROMPT, 19], request_id="b", max_tokens=2)
    run(core)
    return kv_contents(core.log)


# -- What it gives -----------------------------------------------------------------------------------------


def test_identical_prompts_in_one_step_share_at_once_and_read_no_wrong_slot() -> None:
    core = small_core(publication="at-allocation")
    requests = [core.submit(FULL_PROMPT, request_id=name, max_tokens=1) for name in "abc"]
    step(core)
    assert recovered(requests) == [0, 8, 8]
    contents = kv_contents(core.log)
    assert (contents.wrong_reads, contents.published_unwritten) == ((), ())


@pytest.mark.parametrize("publication", SAFE)
def test_with_publication_after_the_forward_pass_all_three_compute(publication: str) -> None:
    core = small_core(publication=publication, num_blocks=9)
    requests = [core.submit(FULL_PROMPT, request_id=name, max_tokens=1) for name in "abc"]
    step(core)
    assert recovered(requests) == [0, 0, 0]
    assert kv_contents(core.log, rows_see_each_other=False).wrong_reads == ()


def test_sharing_at_once_is_wrong_as_soon_as_rows_do_not_see_what_others_write_in_the_step() -> None:
    """No request was withdrawn here: the promise also needs layers that write the whole batch before they attend."""
    core = small_core(publication="at-allocation")
    for name in "abc":
        core.submit(FULL_PROMPT, request_id=name, max_tokens=1)
    step(core)
    wrong = kv_contents(core.log, rows_see_each_other=False).wrong_reads
    assert [(read.request_id, read.position) for read in wrong] == [(name, p) for name in "bc" for p in range(8)]
    assert all(read.found is None for read in wrong)


# -- What it breaks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("act", [abort, fail])
def test_a_request_withdrawn_before_it_is_computed_leaves_blocks_that_are_found_and_were_never_written(
    act: Callable[[EngineCore, Request], None],
) -> None:
    core = withdrawn_core("at-allocation", act)
    blocks = kv_contents(core.log).published_unwritten
    assert [(block.block_id, block.request_id, block.index, block.num_wrong) for block in blocks] == [
        (1, "a", 0, 4),
        (2, "a", 1, 4),
    ]
    assert blocks[0].describe().endswith("for tokens 10 11 12 13 of a, but nothing was ever written there.")


def test_the_next_request_recovers_them_and_reads_what_was_never_written() -> None:
    core = withdrawn_core("at-allocation")
    contents = ask_again(core)
    assert core.requests["b"].num_recovered_tokens == 8
    assert contents.describe().splitlines()[:2] == [
        "Step 2: b reads positions 0 to 3 (tokens 10 11 12 13) in block 1, and nothing was ever written there.",
        "Step 2: b reads positions 4 to 7 (tokens 14 15 16 17) in block 2, and nothing was ever written there.",
    ]


def test_in_a_used_pool_the_next_request_reads_the_tokens_of_a_stranger() -> None:
    """Three blocks: what ``x`` has computed is evicted for ``a``, which never writes its own."""
    core = interrupted_core(Interruption("a", abort), "at-allocation", num_blocks=3)
    core.submit(OTHER_PROMPT, request_id="x", max_tokens=1)
    run(core)
    core.submit(FULL_PROMPT, request_id="a", max_tokens=1)
    run(core)
    contents = ask_again(core)
    assert core.requests["b"].num_recovered_tokens == 8
    found = [(read.position, read.found.request_id) for read in contents.wrong_reads[:8] if read.found is not None]
    assert found == [(position, "x") for position in range(8)]
    assert contents.describe().startswith(
        "Step 3: b reads positions 0 to 3 (tokens 10 11 12 13) in block 3, and it holds the K/V of tokens "
        "28 29 30 31 at positions 8 to 11, which x wrote in step 1."
    )


def test_those_that_share_with_a_withdrawn_request_in_the_same_step_read_wrong_too() -> None:
    core = interrupted_core(Interruption("a", abort), "at-allocation")
    for name in "ab":
        core.submit(FULL_PROMPT, request_id=name, max_tokens=1)
    run(core)
    assert {read.request_id for read in kv_contents(core.log).wrong_reads} == {"b"}


def test_the_blocks_stay_until_they_are_evicted_or_the_cache_is_reset() -> None:
    core = withdrawn_core("at-allocation")
    core.submit(OTHER_PROMPT, request_id="x", max_tokens=1)
    run(core)
    assert len(kv_contents(core.log).published_unwritten) == 2
    assert core.reset_cache()
    contents = ask_again(core)
    assert core.requests["b"].num_recovered_tokens == 0
    assert (contents.wrong_reads, contents.published_unwritten) == ((), ())


def preempted_core(publication: str) -> EngineCore:
    """Return an engine in which a planned row of ``a`` was taken back by preemption, before it was computed.

    In step 3 ``a`` gets blocks for its last six tokens, the first of which it fills. Then ``b``, which is more
    important, finds the pool empty, and takes the other one.
    """
    core = small_core(
        publication=publication,
        scheduling="priority",
        num_blocks=7,
        max_num_batched_tokens=16,
        long_prefill_token_threshold=6,
    )
    core.submit([*range(10, 28)], request_id="a", max_tokens=1, priority=1)
    step(core)
    core.submit([*range(50, 62)], request_id="b", max_tokens=1, priority=0)
    step(core, 2)
    assert [event.request_id for event in events_of(core, ev.RequestPreempted)] == ["a"]
    return core


def test_a_row_taken_back_by_preemption_leaves_such_a_block_and_reads_it_itself_when_it_resumes() -> None:
    core = preempted_core("at-allocation")
    (block,) = kv_contents(core.log).published_unwritten
    assert (block.request_id, block.index, block.num_wrong) == ("a", 3, 4)
    run(core)
    wrong = kv_contents(core.log).wrong_reads
    assert [(read.request_id, read.position) for read in wrong] == [("a", position) for position in range(12, 16)]


# -- The rule ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("publication", SAFE)
def test_under_the_other_policies_a_withdrawn_request_leaves_nothing_that_is_found(publication: str) -> None:
    core = withdrawn_core(publication)
    assert not list(core.manager.index.items())
    contents = ask_again(core)
    assert core.requests["b"].num_recovered_tokens == 0
    assert (contents.wrong_reads, contents.published_unwritten) == ((), ())


@pytest.mark.parametrize("publication", SAFE)
def test_under_the_other_policies_a_row_taken_back_by_preemption_leaves_nothing_either(publication: str) -> None:
    core = preempted_core(publication)
    assert kv_contents(core.log).published_unwritten == ()
    run(core)
    contents = kv_contents(core.log, rows_see_each_other=False)
    assert (contents.wrong_reads, contents.published_unwritten) == ((), ())


def test_the_rule_is_that_the_manager_refuses_to_publish_what_is_not_computed() -> None:
    def publish(core: EngineCore, request: Request) -> None:
        core.manager.publish(request, 8)

    core = interrupted_core(Interruption("a", publish), "incremental")
    core.submit(FULL_PROMPT, request_id="a", max_tokens=1)
    with pytest.raises(EngineDeadError, match="would publish 8 tokens and has computed 0") as caught:
        core.step()
    assert isinstance(caught.value.__cause__, InvariantError)
    assert kv_contents(core.log).published_unwritten == ()


# -- On a real model ---------------------------------------------------------------------------------------


class InterruptibleRunner(MLXRunner):
    """The real runner, with the virtual one's moment between scheduling and computing."""

    on_step: Callable[[ScheduledStep], None] | None = None

    def execute(self, step: ScheduledStep) -> dict[str, int | RowError]:
        """Let the interruption come, then compute what is left."""
        if self.on_step is not None:
            self.on_step(step)
        return super().execute(step)


@pytest.fixture
def runner() -> Iterator[InterruptibleRunner]:
    """A runner over the tiny model, whose answers depend on every token of the prompt."""
    made = InterruptibleRunner(load_model("tiny"))
    yield made
    made.close()


def real_core(runner: MLXRunner, publication: str, *, num_blocks: int = 16) -> EngineCore:
    """Return an engine over the tiny model, with the consent that the unsafe policy needs."""
    consent = "at-allocation" if publication == "at-allocation" else ""
    config = EngineConfig(block_size=4, num_blocks=num_blocks, publication=publication, allow_unsafe=consent)
    return EngineCore(config, runner)


def answer_of_b(core: EngineCore) -> list[int]:
    """Let the request that asks again run, and return its tokens."""
    request = core.submit([*FULL_PROMPT, 19], request_id="b", max_tokens=8)
    run(core)
    return request.output_token_ids


@pytest.fixture(scope="module")
def lone_answer() -> list[int]:
    """What the tiny model answers to ``b`` in an engine of its own."""
    runner = InterruptibleRunner(load_model("tiny"))
    tokens = answer_of_b(real_core(runner, "incremental"))
    runner.close()
    return tokens


def test_a_real_model_refuses_it_in_one_sentence_that_names_the_way_out(runner: InterruptibleRunner) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineCore(EngineConfig(publication="at-allocation"), runner)
    assert str(caught.value) == (
        "publication 'at-allocation' lets requests read K/V that was never computed; it is for teaching, on the "
        "virtual model, or with allow_unsafe=\"at-allocation\" on 'tiny'"
    )


def test_a_real_engine_cannot_change_to_it_on_the_way(runner: InterruptibleRunner) -> None:
    core = EngineCore(EngineConfig(num_blocks=16), runner)
    with pytest.raises(ConfigError, match="never computed"):
        core.set_policies(publication="at-allocation")
    assert core.config.publication == "on-completion"


def test_consent_to_something_else_is_refused_by_name() -> None:
    with pytest.raises(UnknownNameError, match="'incremental'; it names an unsafe publication policy: at-allocation"):
        EngineConfig(publication="at-allocation", allow_unsafe="incremental")


def test_the_virtual_model_needs_no_consent() -> None:
    assert EngineCore(EngineConfig(publication="at-allocation"), VirtualRunner()).is_open


@pytest.mark.parametrize("used", [False, True], ids=["zero K/V", "a stranger's K/V"])
def test_after_a_withdrawn_request_the_tiny_model_answers_something_else(
    runner: InterruptibleRunner, lone_answer: list[int], used: bool
) -> None:
    core = real_core(runner, "at-allocation", num_blocks=5)
    if used:  # every block holds K/V of these, and is evicted for ``a``
        core.submit([*range(20, 40)], request_id="x", max_tokens=1)
        run(core)
    interruption = Interruption("a", abort)
    interruption.core, runner.on_step = core, interruption
    core.submit(FULL_PROMPT, request_id="a", max_tokens=2)
    core.step()
    answer = answer_of_b(core)
    assert core.requests["b"].num_recovered_tokens == 8
    assert answer != lone_answer
    found = {read.found.request_id if read.found else None for read in kv_contents(core.log).wrong_reads}
    assert found == ({"x"} if used else {None})


@pytest.mark.parametrize("publication", SAFE)
def test_under_the_other_policies_the_tiny_model_answers_as_if_nothing_had_happened(
    runner: InterruptibleRunner, lone_answer: list[int], publication: str
) -> None:
    core = real_core(runner, publication, num_blocks=5)
    core.submit([*range(20, 40)], request_id="x", max_tokens=1)
    run(core)
    interruption = Interruption("a", abort)
    interruption.core, runner.on_step = core, interruption
    core.submit(FULL_PROMPT, request_id="a", max_tokens=2)
    core.step()
    assert interruption.came
    assert answer_of_b(core) == lone_answer


def test_on_the_real_model_sharing_within_a_step_is_wrong_without_any_withdrawal(runner: InterruptibleRunner) -> None:
    """Its rows of one token go first: ``b`` and ``c`` read the blocks that ``a`` writes later in the same step."""
    core = real_core(runner, "at-allocation")
    a, b, c = (core.submit(FULL_PROMPT, request_id=name, max_tokens=4) for name in "abc")
    run(core)
    assert b.output_token_ids == c.output_token_ids != a.output_token_ids
    assert kv_contents(core.log).wrong_reads == ()
    assert {r.request_id for r in kv_contents(core.log, rows_see_each_other=False).wrong_reads} == {"b", "c"}
