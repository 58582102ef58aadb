"""Engines for these tests, and what one may ask of them between two steps.

Blocks of four tokens, or, for the worked examples, ten blocks of 16; a virtual clock. Every run is also read back by
`kv_contents`, which knows what was really written where: no test here passes on the engine's state alone. Knows
`EngineCore` from outside. Must not know what any single test is about.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from minivllm.config import EngineConfig
from minivllm.engine.core import EngineCore
from minivllm.log import events as ev
from minivllm.log.kv_contents import kv_contents
from minivllm.log.metrics import Metrics, RequestMetrics
from minivllm.request import Request, make_extra_keys
from minivllm.step import ScheduledStep
from tests.unit.small import check, events_of, small_core, step

__all__ = ["check", "events_of", "small_core", "step"]

MOST_STEPS = 400
"""No test here takes so many: an engine that does is in an endless loop."""

SHARED = list(range(100, 148))
"""48 tokens: three blocks of 16."""


def numbers(first: int, count: int) -> list[int]:
    """Return ``count`` token ids from ``first`` on."""
    return list(range(first, first + count))


def ten_blocks(**settings: Any) -> EngineCore:
    """Return an engine of ten blocks of 16 tokens that publishes after each step."""
    return small_core(**{"block_size": 16, "num_blocks": 10, "publication": "incremental", **settings})


def incremental(**settings: Any) -> EngineCore:
    """Return an engine of eight blocks of four tokens that publishes after each step."""
    return small_core(**{"publication": "incremental", **settings})


def read_back(core: EngineCore) -> None:
    """Nobody has read a slot that held something else, and what is found was computed."""
    contents = kv_contents(core.log, rows_see_each_other=False)
    assert contents.wrong_reads == (), contents.describe()
    assert contents.published_unwritten == (), contents.describe()


def steps_until(core: EngineCore, what: Callable[[], bool]) -> None:
    """Run steps, with the invariants checked after each, until it is so."""
    for _ in range(MOST_STEPS):
        if what():
            return
        step(core)
    raise AssertionError(f"{MOST_STEPS} steps have not brought it about")


def finish(core: EngineCore) -> None:
    """Run to the end, with the invariants checked after each step, and read the K/V back: every block is free."""
    steps_until(core, lambda: not core.has_work)
    check(core)
    assert all(request.state.is_ended for request in core.requests.values())
    assert core.manager.pool.num_free == core.manager.pool.num_blocks
    read_back(core)


def serve(core: EngineCore, prompt: Iterable[int], **fields: Any) -> Request:
    """Let one request come, run and end, with whatever else is in the engine."""
    request = core.submit(list(prompt), **{"max_tokens": 1, **fields})
    finish(core)
    return request


def table(core: EngineCore, request: Request) -> list[int]:
    """Return the request's block table."""
    return list(core.manager.block_ids(request.request_id))


def counts(core: EngineCore, block_ids: Iterable[int]) -> list[int]:
    """Return how often each block is counted."""
    return [core.manager.pool.blocks[block_id - 1].ref_count for block_id in block_ids]


def hashed(core: EngineCore) -> list[int]:
    """Return the blocks that have a hash."""
    return [block.block_id for block in core.manager.pool.blocks if block.block_hash is not None]


def free_ids(core: EngineCore) -> list[int]:
    """Return the free queue from its head."""
    return [block.block_id for block in core.manager.pool.free_queue]


def found(core: EngineCore, prompt: Iterable[int], **keys: Any) -> int:
    """Return how many tokens a new request with this prompt would recover. Leaves nothing behind."""
    asked = Request("who only asks", tuple(prompt), extra_keys=make_extra_keys(**keys))
    answer = core.manager.get_computed_blocks(asked).num_tokens
    core.manager.free(asked)
    return answer


def everything(core: EngineCore) -> Any:
    """Return all that a call without effect must leave as it was: state, index, the links of the queue, the log."""
    return core.state().as_dict(), dict(core.manager.index.items()), free_ids(core), len(core.log)


def figures(core: EngineCore, request: Request) -> RequestMetrics:
    """Return the request's figures, from the log."""
    return Metrics.of(core.log).requests[request.request_id]


def computed_tokens(core: EngineCore, request: Request) -> int:
    """Return how many tokens' K/V the request has computed itself."""
    return sum(e.num_tokens for e in events_of(core, ev.ChunkComputed) if e.request_id == request.request_id)


def alone(prompt: Iterable[int], **fields: Any) -> list[int]:
    """Return what a request with an engine for itself generates."""
    return list(_alone(tuple(prompt), tuple(sorted(fields.items()))))


@functools.cache
def _alone(prompt: tuple[int, ...], fields: tuple[tuple[str, Any], ...]) -> tuple[int, ...]:
    core = small_core(num_blocks=256, max_num_batched_tokens=1 << 16, enable_prefix_caching=False)
    request = core.submit(list(prompt), **dict(fields))
    assert core.run(MOST_STEPS) < MOST_STEPS
    return tuple(request.output_token_ids)


def during_steps(do: Callable[[EngineCore, ScheduledStep], None], **settings: Any) -> EngineCore:
    """Return an engine in which ``do`` is called in each step, after scheduling and before computing."""
    made: list[EngineCore] = []
    made.append(incremental(**settings, on_step=lambda scheduled: do(made[0], scheduled)))
    return made[0]


def writes_private_blocks_only(core: EngineCore, scheduled: ScheduledStep) -> None:
    """Hold a step that is about to be computed to this: it writes into no block that others can read or find."""
    size = core.config.block_size
    for row in scheduled.rows:
        for place in range(row.start // size, (row.start + row.num_tokens - 1) // size + 1):
            block = core.manager.pool.blocks[row.block_ids[place] - 1]
            # Held samples of the prompt draw from the row's logits, and use its block when it is written.
            assert block.ref_count == 1, f"{row.request_id} writes into {block!r}, which others read"
            assert block.block_hash is None, f"{row.request_id} writes into {block!r}, which is found"
            assert block.block_id not in dict(core.manager.index.items()).values()


def config(**settings: Any) -> EngineConfig:
    """Return the settings of `incremental`."""
    return EngineConfig(**{"block_size": 4, "num_blocks": 8, "publication": "incremental", **settings})
