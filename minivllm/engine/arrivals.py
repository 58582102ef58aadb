"""Requests that are submitted but have not arrived: each waits for an output token of another request.

    submit(prompt, after=("r0", 3))  ──►  deferred  ──r0 generates its 3rd token, or ends──►  arrives

All samples of a prompt wait together. Knows requests and what triggers them. Must not know the scheduler, blocks or the
coordinator: `RequestLifecycle` lets those arrive that are due.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from minivllm.request import Request


@dataclass(slots=True)
class _Deferred:
    """The samples of one prompt, the first one first, and the output token that they wait for."""

    requests: list[Request]
    output_token: int

    def is_due(self, other: Request) -> bool:
        return other.state.is_ended or len(other.output_token_ids) >= self.output_token


class DeferredRequests:
    """Groups of samples by the request that they wait for, in the order of submission."""

    def __init__(self) -> None:
        self._waiting_for: dict[str, dict[int, _Deferred]] = {}
        self._place_of: dict[str, tuple[str, int]] = {}
        self._numbers = itertools.count()

    def add(self, requests: Sequence[Request], after: tuple[str, int]) -> None:
        """Let the samples of a prompt wait for (request id, number of output tokens)."""
        other_id, output_token = after
        number = next(self._numbers)
        self._waiting_for.setdefault(other_id, {})[number] = _Deferred(list(requests), output_token)
        self._place_of.update((request.request_id, (other_id, number)) for request in requests)

    def pop_due(self, other: Request) -> list[list[Request]]:
        """Return, and forget, the groups that waited for a token that ``other`` has generated, or for its end."""
        waiting = self._waiting_for.get(other.request_id)
        if waiting is None:
            return []
        due = [list(group.requests) for group in waiting.values() if group.is_due(other)]
        for request in itertools.chain.from_iterable(due):
            self.remove(request)
        return due

    def remove(self, request: Request) -> None:
        """Forget one sample. If it was the first of its prompt, the next one is now. An unknown request is fine."""
        other_id, number = self._place_of.pop(request.request_id, ("", -1))
        waiting = self._waiting_for.get(other_id)
        if waiting is None:
            return
        rest = [each for each in waiting[number].requests if each.request_id in self._place_of]
        if rest:
            waiting[number].requests = rest
        else:
            del waiting[number]
        if not waiting:
            del self._waiting_for[other_id]

    def __len__(self) -> int:
        return len(self._place_of)
