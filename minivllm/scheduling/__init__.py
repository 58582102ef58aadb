"""Scheduling: which requests run in a step, and how many tokens of each.

Owns the lists (waiting, running, held) and the choice of rows under a budget of tokens: chunked prefill, admission,
preemption, samples of one prompt. Must not know when blocks are published, who waits for whom and why, or how a step is
computed: it asks its hooks. It is a part of its own, below the engine, so that the configuration can name its policies
without knowing the engine.

Read `policies` (who is more important), `hooks` (what is asked of others), then `scheduler`.
"""

from minivllm.scheduling.hooks import SchedulerHooks, Verdict
from minivllm.scheduling.policies import ADMISSIONS, SCHEDULING_POLICIES, SchedulingPolicy
from minivllm.scheduling.scheduler import Scheduler

__all__ = ["ADMISSIONS", "SCHEDULING_POLICIES", "Scheduler", "SchedulerHooks", "SchedulingPolicy", "Verdict"]
