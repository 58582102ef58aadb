"""The engine's own work: everything in a step but the runner, at 8 running rows and 1,024 blocks.

    python tests/benchmarks/engine_step.py [--model virtual|tiny|smollm2] [--rows 8] [--blocks 1024] [--context 1000]

Both parts of each step are timed in the same step: the time inside `Runner.execute`, and all the rest (schedule,
allocate, publish, output, log). Medians over the steps in which all rows decode.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from minivllm import EngineConfig, EngineCore, Sampling, Submission
from minivllm.errors import RowError
from minivllm.models import cpu_blas
from minivllm.runners.factory import runner_factory
from minivllm.step import Runner, ScheduledStep
from tests.benchmarks.machine import describe


class TimedRunner:
    """Passes everything on to a runner and keeps the seconds of its last step."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.seconds = 0.0

    def __getattr__(self, name: str) -> object:
        return getattr(self.runner, name)

    def execute(self, step: ScheduledStep) -> Mapping[str, int | RowError]:
        """Time the runner's own step."""
        start = time.perf_counter()
        drawn = self.runner.execute(step)
        self.seconds = time.perf_counter() - start
        return drawn


def measure(model: str, rows: int, blocks: int, context: int, steps: int, publication: str) -> tuple[list[float], ...]:
    """Return the milliseconds of each decode step: the engine's own, the runner's."""
    timed = TimedRunner(runner_factory(model)())
    config = EngineConfig(num_blocks=blocks, max_num_seqs=rows, publication=publication)
    core = EngineCore(config, timed)  # type: ignore[arg-type]
    sampling = Sampling(max_tokens=steps + 8, ignore_eos=True)
    core.submit_batch(Submission([(row * 31 + i) % 256 for i in range(context)], sampling) for row in range(rows))
    while not all(request.is_decoding for request in core.requests.values()):
        core.step()
    own: list[float] = []
    runner: list[float] = []
    gc.collect()
    for _ in range(steps):
        start = time.perf_counter()
        core.step()
        total = time.perf_counter() - start
        runner.append(timed.seconds * 1000)
        own.append((total - timed.seconds) * 1000)
    core.check_invariants()
    core.close()
    return own, runner


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description="The engine's own milliseconds a step, beside the runner's.")
    parser.add_argument("--model", default="virtual", help="virtual, tiny or smollm2 (default: virtual)")
    parser.add_argument("--rows", type=int, default=8, help="running rows (default: 8)")
    parser.add_argument("--blocks", type=int, default=1024, help="blocks in the pool (default: 1024)")
    parser.add_argument("--context", type=int, default=1000, help="prompt tokens of each row (default: 1000)")
    parser.add_argument("--steps", type=int, default=200, help="decode steps measured (default: 200)")
    args = parser.parse_args()
    print(describe(cpu_blas.make_fast()))
    print(f"{args.rows} rows of {args.context} tokens, {args.blocks} blocks, model {args.model}, {args.steps} steps")
    heads = ("engine median ms", "p95", "max", "runner median ms", "engine/step")
    print(f"{'publication':14} {heads[0]:>17} {heads[1]:>7} {heads[2]:>7} {heads[3]:>17} {heads[4]:>12}")
    for publication in ("on-completion", "incremental"):
        own, runner = measure(args.model, args.rows, args.blocks, args.context, args.steps, publication)
        median, of_runner = statistics.median(own), statistics.median(runner)
        p95 = sorted(own)[int(len(own) * 0.95)]
        share = median / (median + of_runner)
        print(f"{publication:14} {median:17.3f} {p95:7.3f} {max(own):7.3f} {of_runner:17.3f} {share:12.1%}")


if __name__ == "__main__":
    main()
