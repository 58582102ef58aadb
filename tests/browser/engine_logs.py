"""Engines whose logs hold, between them, every kind of event: what each view must be right under.

Knows how to bring an engine to a certain history. Must not know what a view makes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from minivllm import EngineConfig, EngineCore, Submission, VirtualRunner
from minivllm.cache.block_pool import Block
from minivllm.cache.eviction.policy import EvictionPolicy, Placement
from minivllm.request import MultimodalItem, Sampling
from minivllm.step import ScheduledStep


def engine(on_step: Callable[[ScheduledStep], None] | None = None, **config: Any) -> EngineCore:
    """Return an engine with blocks of four tokens on a virtual clock."""
    settings = {"block_size": 4, "num_blocks": 96} | config
    return EngineCore(EngineConfig(**settings), VirtualRunner(on_step=on_step))


def ran(core: EngineCore) -> EngineCore:
    core.run()
    return core


def race(num_requests: int = 4, prompt: int = 70, max_tokens: int = 6, same: bool = True, **config: Any) -> EngineCore:
    core = engine(**config)
    core.submit_batch(
        [
            Submission(list(range(0 if same else 1000 * i, (0 if same else 1000 * i) + prompt)), Sampling(max_tokens))
            for i in range(num_requests)
        ]
    )
    return core


def prefix_race(num_requests: int = 4, shared: int = 40, own: int = 6, **config: Any) -> EngineCore:
    """Prompts that share their beginning and no more, which takes a request three steps to compute."""
    core = engine(**({"long_prefill_token_threshold": 16} | config))
    core.submit_batch(
        [
            Submission([*range(shared), *range(1000 * i, 1000 * i + own)], Sampling(max_tokens=4))
            for i in range(1, num_requests + 1)
        ]
    )
    return core


def aborted(steps: int, who: str) -> EngineCore:
    core = race(coordination="single-flight", max_num_batched_tokens=32)
    core.run(max_steps=steps)
    core.abort(who)
    core.run()
    return core


def deferred() -> EngineCore:
    core = EngineCore(EngineConfig(coordination="single-flight"), VirtualRunner())
    tokens = list(range(40))
    core.submit_batch(
        [
            Submission(tokens, Sampling(8), "a"),
            Submission(tokens, Sampling(8), "b", "team-a", ("a", 3)),
            Submission(tokens, Sampling(8, n=2), "c", None, ("b", 1)),
        ]
    )
    core.run()
    return core


def evicted_and_reset() -> EngineCore:
    core = ran(race(3, same=False, num_blocks=40))
    core.submit([7] * 90, max_tokens=3)
    core.run()
    core.reset_cache()
    core.set_policies(coordination="single-flight", publication="incremental")
    core.submit([7] * 90, max_tokens=3)
    core.submit([7] * 90, max_tokens=3)
    core.run(max_steps=3)
    return core


def placed_by(eviction: str | EvictionPolicy) -> EngineCore:
    """A small pool in which prefixes are shared, kept, forgotten and found again."""
    core = engine(num_blocks=24, eviction=eviction)
    for starts in ((0, 500), (0, 0), (500, 900), (0, 900), (500, 500)):
        for tail, start in enumerate(starts):
            core.submit([*range(start, start + 21), 5000 + tail], max_tokens=6)
        core.run()
    return core


class Backwards:
    """Puts published blocks at the front and those without a hash at the back."""

    name = "backwards"

    def place(self, freed: Sequence[Block]) -> Placement:
        return Placement(
            to_front=[block for block in freed if block.block_hash is not None],
            to_back=[block for block in freed if block.block_hash is None],
        )


def failed() -> EngineCore:
    def fail(step: Any) -> None:
        if step.number == 3:
            raise RuntimeError("the device went away")

    core = EngineCore(EngineConfig(coordination="single-flight"), VirtualRunner(on_step=fail))
    core.submit_batch([Submission(list(range(40)), Sampling(8)) for _ in range(3)])
    with pytest.raises(RuntimeError):
        core.run()
    return core


# --- Samples, shared prefixes, adoption, priorities, extra keys, early publication --------------------------


def samples(n: int = 3, prompt: int = 18, max_tokens: int = 5, **config: Any) -> EngineCore:
    """Samples of one prompt whose last block is half full, so that all but one of them copy it."""
    core = engine(**config)
    core.submit(list(range(prompt)), n=n, max_tokens=max_tokens, temperature=1.0, seed=7)
    return core


def samples_without_their_first(**config: Any) -> EngineCore:
    core = samples(max_num_batched_tokens=8, **config)
    core.step()
    core.abort("r0.2")
    core.abort("r0")
    core.run()
    return core


def samples_in_a_small_pool() -> EngineCore:
    core = samples(n=3, prompt=14, max_tokens=16, num_blocks=14, publication="incremental")
    core.submit(list(range(500, 518)), max_tokens=9)
    core.run()
    return core


def prefix_leader_aborted() -> EngineCore:
    core = prefix_race(coordination="shared-prefix")
    core.step()
    core.abort("r0")
    core.run()
    return core


def prefix_leader_preempted() -> EngineCore:
    """The leader of a shared prefix is the newest when blocks run out."""
    core = engine(num_blocks=12, long_prefill_token_threshold=12, coordination="shared-prefix")
    core.submit(list(range(900, 912)), max_tokens=24)
    core.step()
    core.submit(list(range(40)), max_tokens=3)
    core.submit([*range(36), 7, 7], max_tokens=3)
    core.run()
    return core


def waited_or_not() -> EngineCore:
    """Who would save one block computes it as well; who would save all but the end waits."""
    core = engine(coordination="wait-or-recompute", max_num_batched_tokens=48, long_prefill_token_threshold=16)
    core.submit(list(range(80)), max_tokens=3)
    core.submit([*range(8), 7, 8], max_tokens=3)
    core.submit([*range(78), 7, 8], max_tokens=3)
    core.run()
    return core


def adopted() -> EngineCore:
    """Two identical prompts, of which the second gets less of each step: it looks again before each chunk."""
    core = engine(adoption=True, publication="incremental", max_num_batched_tokens=20, long_prefill_token_threshold=16)
    core.submit(list(range(60)), max_tokens=4)
    core.submit(list(range(60)), max_tokens=4)
    core.run()
    return core


def by_priority() -> EngineCore:
    core = engine(scheduling="priority", num_blocks=24)
    for number, priority in enumerate((2, 0, 1, 0, 2)):
        core.submit(list(range(1000 * number, 1000 * number + 20)), max_tokens=24, priority=priority)
        core.step()
    core.run()
    return core


def extra_keys() -> EngineCore:
    core = engine(publication="incremental")
    tokens = list(range(30))
    cat = MultimodalItem("cat", 6, 9)
    for keys in ({}, {"adapter": "tuned"}, {"multimodal": [cat]}, {"cache_salt": "team-a"}):
        core.submit(tokens, max_tokens=3, **keys)
        core.run()
    core.submit(tokens, max_tokens=3, adapter="tuned", multimodal=[cat], cache_salt="team-a")
    core.submit(tokens, max_tokens=3, multimodal=[MultimodalItem("cat", 7, 9), MultimodalItem("dog", 20, 1)])
    core.run()
    return core


def never_computed() -> EngineCore:
    """Published at allocation, then withdrawn before the step is computed: the next request finds the blocks."""
    cores: list[EngineCore] = []

    def withdraw(step: ScheduledStep) -> None:
        if step.number == 1:
            cores[0].abort("r0")

    core = engine(withdraw, publication="at-allocation")
    cores.append(core)
    core.submit(list(range(18)), max_tokens=3)
    core.submit(list(range(500, 518)), max_tokens=3)
    core.step()
    core.submit(list(range(18)), max_tokens=3)
    core.run()
    return core


def reset_with_abort() -> EngineCore:
    core = race(3, same=False, publication="incremental", max_num_seqs=2)
    core.run(max_steps=3)
    assert core.reset_cache(abort_running=True)
    core.run()
    return core


def collided() -> EngineCore:
    core = engine(block_hash="weak-4", check_token_ids=True, publication="incremental", num_blocks=400)
    for number in range(12):
        core.submit(list(range(100 * number, 100 * number + 22)), max_tokens=2)
        core.run()
    return core


CORES: dict[str, Callable[[], EngineCore]] = {
    "cold race": lambda: ran(race()),
    "incremental": lambda: ran(race(publication="incremental", max_num_batched_tokens=50)),
    "flight after prefill": lambda: ran(race(coordination="single-flight")),
    "flight on completion": lambda: ran(race(coordination="single-flight", release="on-completion")),
    "leader aborted before its first step": lambda: aborted(0, "r0"),
    "leader aborted in prefill": lambda: aborted(1, "r0"),
    "leader aborted in decode": lambda: aborted(4, "r0"),
    "follower aborted": lambda: aborted(1, "r2"),
    "preemption": lambda: ran(race(6, prompt=40, max_tokens=30, same=False, num_blocks=60)),
    "deferred with a salt": deferred,
    "eviction, reset, other policies": evicted_and_reset,
    "most recently used evicted first": lambda: placed_by("mru"),
    "published blocks evicted first": lambda: placed_by(Backwards()),
    "failed step": failed,
    "samples copied on write": lambda: ran(samples()),
    "samples of a leader and its follower": lambda: ran(samples(coordination="single-flight")),
    "samples whose first is aborted": samples_without_their_first,
    "samples in a small pool": samples_in_a_small_pool,
    "shared prefix": lambda: ran(prefix_race(coordination="shared-prefix")),
    "shared prefix, leader aborted": prefix_leader_aborted,
    "shared prefix, leader preempted": prefix_leader_preempted,
    "waited or recomputed": waited_or_not,
    "adopted in mid-prefill": adopted,
    "priorities and preemption": by_priority,
    "adapter, multimodal and salt": extra_keys,
    "published but never computed": never_computed,
    "reset with abort": reset_with_abort,
    "hash collision": collided,
}
"""Engines by what happens in them."""
