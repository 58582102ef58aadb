"""Who is more important: the order of the waiting list, and the order of preemption.

Knows a request's own fields. Must not know lists, blocks or time.
"""

from __future__ import annotations

from typing import Protocol

from minivllm.request import Request


class SchedulingPolicy(Protocol):
    """Decides who is more important. The waiting list is in this order; the victim is of the highest rank."""

    name: str

    def rank(self, request: Request) -> int:
        """Return the request's rank: lower goes first. Asked once, when it is let in; it has no arrival number yet."""
        ...


class FirstComeFirstServed:
    """Everybody is as important as everybody else: the order of arrival decides."""

    name = "fcfs"

    def rank(self, request: Request) -> int:
        """Return 0."""
        return 0


class PriorityFirst:
    """By the priority that the caller gave, then by arrival. Under a steady load the least important may starve."""

    name = "priority"

    def rank(self, request: Request) -> int:
        """Return the request's priority."""
        return request.priority


SCHEDULING_POLICIES: dict[str, SchedulingPolicy] = {p.name: p for p in (FirstComeFirstServed(), PriorityFirst())}

BY_CHUNK, WHOLE_PROMPT = "by-chunk", "whole-prompt"
ADMISSIONS = (BY_CHUNK, WHOLE_PROMPT)
"""A request is admitted when its first chunk finds room, or only when all of its tokens would."""
