"""More agents than there is room for: one pushes the other out, and still every turn ends.

An agent's turn is a prompt that begins with all that it has said and heard before, so that it wants its own blocks
back and pushes the others' out.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from minivllm import EngineConfig, EngineCore, replay
from minivllm.log import events as ev
from minivllm.scheduling.policies import ADMISSIONS
from tests.property.actions import COORDINATIONS, SCHEDULINGS
from tests.property.models import SlotRunner, SlowCache

BLOCK_SIZE, BLOCKS_OF_AN_AGENT = 4, 14
TURNS = 4
MOST_STEPS = 4_000
"""Far more than all need: a guard against going round in circles."""

CHOICES = list(itertools.product(SCHEDULINGS, ADMISSIONS, (0.0, 0.1, 0.5), ("lru", "mru"), COORDINATIONS))


def thrash(rng: random.Random, room_for: int, num_agents: int, **settings: Any) -> EngineCore:
    """Let agents talk in a pool with room for some of them, and return the engine when all have had their turns."""
    config = EngineConfig(
        block_size=BLOCK_SIZE,
        num_blocks=BLOCKS_OF_AN_AGENT * room_for,
        max_num_seqs=num_agents,
        max_num_batched_tokens=rng.choice([8, 16, 64]),
        publication="incremental",
        **settings,
    )
    core = EngineCore(config, SlotRunner())
    slow, num_seen = SlowCache(config), 0
    talks = {agent: list(range(100 * agent, 100 * agent + 4)) for agent in range(1, num_agents + 1)}
    turns = dict.fromkeys(talks, 0)
    speaking: dict[str, int] = {}
    count = 0
    while any(turn < TURNS for turn in turns.values()) or speaking:
        for agent, talk in talks.items():
            if turns[agent] < TURNS and agent not in speaking.values():
                request = core.submit(talk, max_tokens=12, seed=agent, priority=agent % 2)
                speaking[request.request_id] = agent
                turns[agent] += 1
        assert core.step(), "nobody runs, and somebody waits"
        core.check_invariants()
        for event in core.log.since(num_seen):
            slow.take(event)
        num_seen = len(core.log)
        slow.compare(core)
        for name in [name for name in speaking if core.requests[name].state.is_ended]:
            talks[speaking.pop(name)] = [*core.requests[name].token_ids, rng.randrange(900, 910)]
        count += 1
        assert count < MOST_STEPS, "they go round in circles"
    return core


@pytest.mark.parametrize(("scheduling", "admission", "watermark", "eviction", "coordination"), CHOICES)
def test_one_agent_more_than_there_is_room_for_ends_every_time(
    scheduling: str, admission: str, watermark: float, eviction: str, coordination: str
) -> None:
    settings = {
        "scheduling": scheduling,
        "admission": admission,
        "watermark": watermark,
        "eviction": eviction,
        "coordination": coordination,
    }
    for room_for, num_agents in ((2, 3), (1, 4)):
        core = thrash(random.Random(str(settings)), room_for, num_agents, **settings)
        assert [request.finish_reason for request in core.requests.values()] == ["length"] * TURNS * num_agents
        assert core.manager.pool.num_free == core.config.num_blocks
        assert replay(core.log) == core.state()
        assert any(isinstance(event, ev.BlocksEvicted) for event in core.log)


@pytest.mark.parametrize("num_agents", [3, 6])
def test_the_oldest_agents_keep_their_blocks_and_the_newest_gives_way(num_agents: int) -> None:
    core = thrash(random.Random(0), 2, num_agents, admission="by-chunk", watermark=0.0)
    assert any(isinstance(event, ev.RequestPreempted) for event in core.log)
    arrivals = {event.request_id: event.arrival for event in core.log if isinstance(event, ev.RequestArrived)}
    running: list[str] = []
    for event in core.log:
        if isinstance(event, ev.RequestAdmitted):
            running.append(event.request_id)
        elif isinstance(event, ev.RequestFinished):
            running.remove(event.request_id)
        elif isinstance(event, ev.RequestPreempted):
            assert arrivals[event.request_id] == max(arrivals[name] for name in running)
            running.remove(event.request_id)


def test_with_half_of_the_pool_kept_free_nobody_gives_way() -> None:
    core = thrash(random.Random(0), 2, 6, admission="whole-prompt", watermark=0.5)
    assert not any(isinstance(event, ev.RequestPreempted) for event in core.log)
