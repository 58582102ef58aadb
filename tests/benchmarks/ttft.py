"""Time to first token of a prompt whose beginning is cached, against the same length cold.

    python tests/benchmarks/ttft.py --prompt-tokens 904 --shared-tokens 880

Every run takes a prompt never seen before: cold first, then another one that shares its first tokens. Both go
through the whole engine, from the submission to the first token.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from minivllm.models.cpu_blas import make_fast

BLAS = make_fast()

import numpy as np  # noqa: E402

from minivllm.config import EngineConfig  # noqa: E402
from minivllm.engine.core import EngineCore  # noqa: E402
from minivllm.errors import MiniVLLMError  # noqa: E402
from minivllm.request import Sampling  # noqa: E402
from minivllm.runners.mlx import MLXRunner  # noqa: E402
from tests.benchmarks.machine import Spread, describe  # noqa: E402

LIMIT = 0.05
"""The most that the cached prompt may take, as a share of the cold one."""


def first_token_ms(core: EngineCore, prompt: list[int]) -> tuple[float, int]:
    """Submit a prompt to an idle engine; return the ms to its first token, and its recovered tokens."""
    start = time.perf_counter()
    request = core.submit(prompt, Sampling(max_tokens=1, ignore_eos=True))
    while not request.output_token_ids:
        core.step()
    return (time.perf_counter() - start) * 1e3, request.num_recovered_tokens


def measure(model: str, prompt_tokens: int, shared_tokens: int, runs: int) -> int:
    """Measure both in turn and print the table. Returns 1 if the limit is missed."""
    runner = MLXRunner.load(model)
    core = EngineCore(EngineConfig(num_blocks=512), runner)
    draw = np.random.default_rng(3)

    def tokens(count: int) -> list[int]:
        return [int(token) for token in draw.integers(2, runner.vocab_size, count)]

    first_token_ms(core, tokens(64))  # warms up
    cold, cached, ratios = [], [], []
    recovered = set()
    for _ in range(runs):
        shared = tokens(shared_tokens)
        cold_ms, cold_recovered = first_token_ms(core, shared + tokens(prompt_tokens - shared_tokens))
        cached_ms, cached_recovered = first_token_ms(core, shared + tokens(prompt_tokens - shared_tokens))
        cold.append(cold_ms)
        cached.append(cached_ms)
        ratios.append(cached_ms / cold_ms)
        recovered.add((cold_recovered, cached_recovered))
    ratio = Spread.of(cached).median / Spread.of(cold).median
    print(f"{runner.name}, prompts of {prompt_tokens} tokens, the first {shared_tokens} shared, {runs} runs")
    print(describe(BLAS))
    print(f"  cold, TTFT          {Spread.of(cold)}")
    print(f"  cached, TTFT        {Spread.of(cached)}")
    print(f"  ratio               {ratio:9.2%}      ({min(ratios):.2%} to {max(ratios):.2%} per run)")
    print(f"  limit               {LIMIT:9.2%}      {'kept' if ratio <= LIMIT else 'MISSED'}")
    print("  recovered tokens    " + ", ".join(f"cold {a}, cached {b}" for a, b in sorted(recovered)))
    runner.close()
    return 0 if ratio <= LIMIT else 1


def main() -> int:
    """Read the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="model name, hub name or folder (default: smollm2)")
    parser.add_argument("--prompt-tokens", type=int, default=904, help="tokens of a prompt (default: 904)")
    parser.add_argument("--shared-tokens", type=int, default=880, help="of these, shared (default: 880)")
    parser.add_argument("--runs", type=int, default=5, help="pairs of prompts (default: 5)")
    args = parser.parse_args()
    if not 0 <= args.shared_tokens < args.prompt_tokens or args.runs < 1:
        parser.error("--shared-tokens must be below --prompt-tokens, and --runs 1 or more")
    try:
        return measure(args.model, args.prompt_tokens, args.shared_tokens, args.runs)
    except MiniVLLMError as error:
        print(f"ttft.py: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
