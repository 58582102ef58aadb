"""The runner of a model, by the model's name.

Knows which runner computes which model. Imports MLX only on the thread that will use it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from minivllm.errors import ConfigError
from minivllm.models.cpu_blas import make_fast
from minivllm.models.progress import Progress
from minivllm.step import Runner


def runner_factory(
    model: str, progress: Progress | None = None, adapters: Mapping[str, str | os.PathLike[str]] | None = None
) -> Callable[[], Runner]:
    """Return the function that makes the runner of a model, to be called on the thread that will use it.

    ``adapters`` are folders by name. The virtual model reads none of them and takes their names.
    """
    if adapters is not None and not isinstance(adapters, Mapping):
        raise ConfigError(f"adapters is {adapters!r}; give a folder for each name, such as {{'law': 'adapters/law'}}")
    if model == "virtual":
        from minivllm.runners.virtual import VirtualRunner

        return lambda: VirtualRunner(adapters=adapters or None)

    def load() -> Runner:
        from minivllm.runners.mlx import MLXRunner

        return MLXRunner.load(model, progress=progress, adapters=adapters)

    return load


def slow_note(model: str) -> str:
    """Return one sentence if this machine will compute the model more slowly than it could, with what to do."""
    return "" if model == "virtual" else make_fast().note or ""
