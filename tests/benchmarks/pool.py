"""The K/V pool's bytes over a run of many requests: allocated once, the same from the first step to the last.

python tests/benchmarks/pool.py [--model smollm2] [--requests 500]
"""

from __future__ import annotations

import argparse
import random

from minivllm import Engine, EngineConfig, EngineCore, Sampling, Submission
from minivllm.engine.handle import Handle


def pool_bytes(core: EngineCore) -> tuple[int, int]:
    """Return the bytes of the pool and all that MLX holds. On the engine's thread."""
    import mlx.core as mx

    return core.runner.pool_bytes, mx.get_active_memory()  # type: ignore[attr-defined]


def main() -> None:
    """Print the bytes as the run goes on, and whether they stayed the same."""
    parser = argparse.ArgumentParser(description="The pool's bytes over a run of many requests.")
    parser.add_argument("--model", default="smollm2", help="a real model (default: smollm2)")
    parser.add_argument("--requests", type=int, default=500, help="requests in all (default: 500)")
    args = parser.parse_args()
    draw = random.Random(0)
    seen: set[int] = set()
    with Engine(args.model, EngineConfig(publication="incremental")) as engine:
        print(f"{'requests':>8} {'pool bytes':>14} {'MLX active bytes':>17}")
        waiting: list[Handle] = []
        for number in range(args.requests):
            shared = [7] * draw.randrange(0, 48)
            own = [draw.randrange(engine.vocab_size) for _ in range(draw.randrange(1, 24))]
            waiting += engine.submit_batch([Submission([*shared, *own], Sampling(max_tokens=4, ignore_eos=True))])
            if len(waiting) == 8 or number == args.requests - 1:
                for handle in waiting:
                    handle.result()
                waiting = []
                pool, active = engine.call(pool_bytes)
                seen.add(pool)
                if number < 8 or number % 100 > 91 or number == args.requests - 1:
                    print(f"{number + 1:8} {pool:14,} {active:17,}")
        engine.check_invariants()
    print("constant" if len(seen) == 1 else f"NOT constant: {sorted(seen)}")


if __name__ == "__main__":
    main()
