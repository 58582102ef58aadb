"""The default model through the runner: what mlx-lm says of it, and an answer in English."""

from __future__ import annotations

import pytest

from minivllm.models.folder import LoadedModel
from minivllm.models.load import load_model
from tests.parity.direct import Reference, StepDriver

pytestmark = pytest.mark.model

QUESTIONS = ("What is the capital of France?", "Name three colours.")


@pytest.fixture(scope="module")
def smollm2() -> LoadedModel:
    """The default model, from the user's cache."""
    return load_model("smollm2")


def chat(loaded: LoadedModel, question: str) -> list[int]:
    message = [{"role": "user", "content": question}]
    return [int(token) for token in loaded.tokenizer.apply_chat_template(message, add_generation_prompt=True)]


def test_the_default_model_equals_mlx_lm_in_batch_chunks_shared_prefix_and_after_preemption(
    smollm2: LoadedModel,
) -> None:
    driver = StepDriver.over(smollm2, block_size=16, num_blocks=24)
    prompts = [chat(smollm2, question) for question in QUESTIONS]
    references = [Reference.of(smollm2, ids, 8) for ids in prompts]
    first, second = (driver.request(f"r{n}", ids) for n, ids in enumerate(prompts))
    driver.prefill(first)
    common = next(n for n, (a, b) in enumerate(zip(*prompts, strict=False)) if a != b)
    shared = common // 16 * 16
    assert shared >= 16  # the system text of the chat template
    driver.share(first, second, shared)
    driver.prefill(second, chunk=7)
    driver.decode(first, second, steps=3)
    driver.preempt(second)
    driver.decode(first, steps=1)
    driver.prefill(second, chunk=20)
    driver.decode(first, second, steps=3)
    for request, reference in zip((first, second), references, strict=True):
        assert len(request.output_token_ids) == 8
        driver.check(request, reference)
    assert "Paris" in smollm2.tokenizer.decode(first.output_token_ids)
    driver.runner.close()
