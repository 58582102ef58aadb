"""The runner that computes nothing: its costs, its tokens and its text."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from minivllm.config import EngineConfig
from minivllm.cost import CostModel
from minivllm.engine.core import EngineCore
from minivllm.log import events as ev
from minivllm.request import MultimodalItem, Request, RequestState, Sampling
from minivllm.runners.virtual import VirtualRunner, VirtualTokenizer
from minivllm.step import BlockCopy, Phase, Runner, ScheduledRow, ScheduledStep
from tests.unit.small import events_of, run

COST = CostModel(step_ms=10.0, prefill_ms=1.0, decode_one_ms=0.5, decode_base_ms=5.0, decode_row_ms=2.0)

TOKENS = [15492, 40723, 6609, 37229]
HOT_TOKENS = [20407, 15979, 20243, 18858]
"""Four tokens drawn after the prompt [1, 2, 3]: greedy, and with seed 5."""


def row(
    name: str, start: int, count: int, total: int, *, samples: bool = True, phase: Phase = Phase.PREFILL
) -> ScheduledRow:
    request = Request(name, tuple(range(total)))
    return ScheduledRow(request, start, count, (), phase, (request,) if samples else ())


def drawn(prompt: list[int], max_tokens: int = 4, vocab_size: int = 49_152, **sampling: Any) -> list[int]:
    core = EngineCore(EngineConfig(block_size=4, num_blocks=16), VirtualRunner(vocab_size=vocab_size))
    request = core.submit(prompt, max_tokens=max_tokens, **sampling)
    run(core)
    return request.output_token_ids


# -- Costs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_prefill_tokens", "num_decode_rows", "ms"),
    [(0, 0, 10.0), (7, 0, 17.0), (0, 1, 10.5), (0, 2, 19.0), (3, 1, 13.5), (3, 4, 26.0)],
)
def test_a_step_costs_its_parts(num_prefill_tokens: int, num_decode_rows: int, ms: float) -> None:
    assert COST.step(num_prefill_tokens, num_decode_rows) == ms


def test_the_default_costs_are_those_of_the_published_figures() -> None:
    """532 prompt tokens and 32 decode steps of one row: about 1.05 ms a prefilled token, 12.1 ms a decoded one."""
    cost = CostModel()
    assert cost.step(0, 1) == pytest.approx(12.1)
    assert cost.step(532, 0) == pytest.approx(12.0 + 532 * 1.05)
    assert cost.step(0, 2) == pytest.approx(27.8)


def test_the_clock_moves_by_the_cost_of_each_step() -> None:
    runner = VirtualRunner(COST)
    runner.execute(ScheduledStep(1, (row("a", 0, 7, 9, samples=False),)))
    assert runner.clock.now_ms() == 17.0
    runner.execute(ScheduledStep(2, (row("a", 9, 1, 10, phase=Phase.DECODE), row("b", 0, 3, 9, samples=False))))
    assert runner.clock.now_ms() == 17.0 + 13.5


def test_a_row_that_finishes_its_prefill_draws_too_and_costs_as_one_that_decodes_beside_its_tokens() -> None:
    runner = VirtualRunner(COST)
    runner.execute(ScheduledStep(1, (row("a", 0, 7, 7),)))
    assert runner.clock.now_ms() == 10.0 + 7.0 + 0.5
    runner.execute(ScheduledStep(2, (row("a", 7, 1, 8, phase=Phase.DECODE), row("b", 8, 1, 9))))
    assert runner.clock.now_ms() == 17.5 + 10.0 + 1.0 + 5.0 + 2 * 2.0


def test_events_of_a_step_that_was_computed_carry_the_time_of_its_end() -> None:
    core = EngineCore(EngineConfig(block_size=4, num_blocks=8), VirtualRunner(COST))
    core.submit(list(range(7)), max_tokens=2)
    run(core)
    assert [event.ms for event in events_of(core, ev.StepScheduled)] == [0.0, 17.5]
    assert [event.ms for event in events_of(core, ev.TokenOut)] == [17.5, 28.0]


def test_a_hook_that_raises_stops_the_step_before_time_passes() -> None:
    def refuse(step: ScheduledStep) -> None:
        raise OSError("no device")

    runner = VirtualRunner(COST, on_step=refuse)
    with pytest.raises(OSError, match="no device"):
        runner.execute(ScheduledStep(1, (row("a", 0, 7, 7),)))
    assert runner.clock.now_ms() == 0.0


# -- Tokens ------------------------------------------------------------------------------------------------


def test_only_rows_that_sample_get_a_token() -> None:
    runner = VirtualRunner()
    step = ScheduledStep(1, (row("a", 0, 4, 9, samples=False), row("b", 0, 3, 3)))
    assert runner.execute(step).keys() == {"b"}


def test_tokens_are_the_same_on_every_machine() -> None:
    assert drawn([1, 2, 3]) == TOKENS
    assert drawn([1, 2, 3], temperature=0.7, seed=5) == HOT_TOKENS


def test_equal_prompts_draw_equal_tokens_and_other_prompts_others() -> None:
    assert drawn([1, 2, 3]) == drawn([1, 2, 3])
    assert drawn([1, 2, 3]) != drawn([1, 2, 4])
    assert drawn([1, 2, 3], 2) == drawn([1, 2, 3], 4)[:2]


def test_greedy_draws_do_not_depend_on_the_seed_and_hot_ones_do() -> None:
    assert drawn([1, 2], seed=1) == drawn([1, 2], seed=2)
    assert drawn([1, 2], temperature=0.5, seed=1) != drawn([1, 2], temperature=0.5, seed=2)
    assert drawn([1, 2], temperature=0.5, seed=1) == drawn([1, 2], temperature=0.5, seed=1)


def test_tokens_depend_on_the_adapter_and_on_what_stands_behind_multimodal_tokens_and_not_on_the_salt() -> None:
    cat, dog = MultimodalItem("cat", 0, 2), MultimodalItem("dog", 0, 2)
    outputs = [
        drawn([1, 2, 3]),
        drawn([1, 2, 3], adapter="left"),
        drawn([1, 2, 3], adapter="right"),
        drawn([1, 2, 3], multimodal=[cat]),
        drawn([1, 2, 3], multimodal=[dog]),
        drawn([1, 2, 3], multimodal=[MultimodalItem("cat", 1, 2)]),
        drawn([1, 2, 3], multimodal=[cat], adapter="left"),
        drawn([1, 2, 3], multimodal=[MultimodalItem("left", 0, 2)]),
    ]
    assert len({tuple(output) for output in outputs}) == len(outputs)
    assert outputs[0] == drawn([1, 2, 3], cache_salt="left") == TOKENS
    assert outputs[1] == drawn([1, 2, 3], adapter="left", cache_salt="mine")
    assert drawn([1, 2, 3], cache_salt="left", temperature=0.7, seed=5) == HOT_TOKENS
    assert drawn([1, 2, 3], adapter="left", temperature=0.7, seed=5) != HOT_TOKENS


def test_any_adapter_will_do_unless_the_runner_was_given_names() -> None:
    assert VirtualRunner().adapters is None
    assert VirtualRunner(adapters=["left", "right"]).adapters == frozenset({"left", "right"})


def test_samples_of_one_row_draw_what_lone_requests_with_their_seeds_would() -> None:
    samples = tuple(Request(f"a.{n}", (1, 2, 3), Sampling(temperature=0.7), seed=5 + n) for n in range(3))
    runner = VirtualRunner(COST)
    outcome = runner.execute(ScheduledStep(1, (ScheduledRow(samples[0], 0, 3, (), Phase.PREFILL, samples),)))
    assert runner.clock.now_ms() == 10.0 + 3.0 + 5.0 + 3 * 2.0, "each sample counts as a row that draws"
    lone = [drawn([1, 2, 3], 1, temperature=0.7, seed=5 + n)[0] for n in range(3)]
    assert list(outcome.values()) == lone and len(set(lone)) == 3
    assert list(outcome) == ["a.0", "a.1", "a.2"]


def test_a_row_that_was_withdrawn_is_not_computed_and_takes_no_time() -> None:
    kept = row("kept", 0, 7, 7)
    gone = row("gone", 0, 40, 40)
    runner = VirtualRunner(COST, on_step=lambda step: gone.request.move_to(RequestState.ABORTED))
    assert runner.execute(ScheduledStep(1, (kept, gone))).keys() == {"kept"}
    assert runner.clock.now_ms() == 17.5


def test_a_sample_that_was_withdrawn_before_it_drew_leaves_nothing_behind() -> None:
    samples = tuple(Request(f"a.{n}", (1, 2, 3)) for n in range(2))
    runner = VirtualRunner(on_step=lambda step: samples[1].move_to(RequestState.ABORTED))
    runner.execute(ScheduledStep(1, (ScheduledRow(samples[0], 0, 3, (), Phase.PREFILL, samples),)))
    assert runner._digests.keys() == {"a.0"}


def test_copies_cost_nothing_and_change_no_token() -> None:
    plain, copying = VirtualRunner(COST), VirtualRunner(COST)
    rows = (row("a", 7, 1, 8, phase=Phase.DECODE),)
    assert plain.execute(ScheduledStep(1, rows)) == copying.execute(ScheduledStep(1, rows, (BlockCopy(1, 2),)))
    assert plain.clock.now_ms() == copying.clock.now_ms()


@pytest.mark.parametrize("vocab_size", [1, 2, 256, 257, 300, 49_152])
def test_every_token_is_in_the_vocabulary(vocab_size: int) -> None:
    tokens = drawn([0, 0], max_tokens=40, vocab_size=vocab_size)
    assert all(0 <= token < vocab_size for token in tokens)
    if vocab_size > 256:
        assert min(tokens) >= 256


def test_what_is_kept_for_a_request_is_dropped_when_it_ends() -> None:
    runner = VirtualRunner()
    core = EngineCore(EngineConfig(block_size=4, num_blocks=16), runner)
    core.submit([1], max_tokens=9, request_id="a")
    core.step()
    assert runner._digests.keys() == {"a"}
    core.abort("a")
    assert not runner._digests
    runner.forget("ghost")


def test_the_name_of_a_request_may_come_again_in_another_engine_with_another_prompt() -> None:
    """Nothing is kept under an id once its request has ended."""
    runner = VirtualRunner()
    request = Request("a", (1, 2), Sampling(max_tokens=1))
    first = runner.execute(ScheduledStep(1, (ScheduledRow(request, 0, 2, (), Phase.PREFILL, (request,)),)))
    runner.forget("a")
    other = Request("a", (3, 4), Sampling(max_tokens=1))
    second = runner.execute(ScheduledStep(2, (ScheduledRow(other, 0, 2, (), Phase.PREFILL, (other,)),)))
    assert first != second


# -- Text --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "plain", "größe 日本語 🙂", "\0\n"])
def test_text_survives_the_tokenizer(text: str) -> None:
    tokenizer = VirtualTokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert all(token < 256 for token in tokenizer.encode(text))


def test_tokens_above_bytes_read_as_syllables_each_its_own() -> None:
    tokenizer = VirtualTokenizer()
    words = [tokenizer.decode([token]) for token in range(256, 6000)]
    assert words[:2] == ["ba ", "be "]
    assert len(set(words)) == len(words)
    assert all(word.endswith(" ") and word[:-1].isalpha() for word in words)


def test_bytes_that_are_no_text_are_shown_and_do_not_swallow_what_follows() -> None:
    tokenizer = VirtualTokenizer()
    assert tokenizer.decode([0xFF, 256]) == "\ufffdba "
    assert tokenizer.decode([0xFF, 97, 97, 97, 97]) == "\ufffdaaaa"
    assert tokenizer.decode([0xE2]) == "\ufffd"


def test_the_runner_is_one_to_the_type_checker_and_needs_no_mlx() -> None:
    runner: Runner = VirtualRunner()
    assert runner.name == "virtual"
    assert not runner.is_real and runner.accepts_multimodal
    code = "import sys, minivllm.runners.virtual, minivllm.engine.core; sys.exit('mlx' in sys.modules)"
    child = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}, check=False)
    assert child.returncode == 0
