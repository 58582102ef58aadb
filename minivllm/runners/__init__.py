"""Runners: they compute the steps that a scheduler has made.

Owns the K/V arrays, the forward pass, sampling, and the clock that passes meanwhile. `MLXRunner` computes with a real
model; `VirtualRunner` computes nothing and moves a clock by a cost model. Must not know why a row was chosen, what is
published, or the engine. MLX is imported when `mlx` is, and only there.

Read `virtual` first (a runner in one screen), then `mlx`, `paged_cache` (blocks under an unchanged mlx-lm model),
`forward` and `sampler`. `factory` finds the runner of a model's name. A new runner has the methods of
`minivllm.step.Runner`; tests/parity shows what it must give.
"""

from minivllm.runners.factory import runner_factory
from minivllm.runners.virtual import VirtualRunner, VirtualTokenizer

__all__ = ["VirtualRunner", "VirtualTokenizer", "runner_factory"]
