"""A flight: identical prompts on their way, of which one computes.

Knows request ids and prompts. Must not know when a flight opens or ends.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from minivllm.cache.block_hash import BlockHash
from minivllm.request import ExtraKeys, Request

FlightKey = tuple[tuple[int, ...], ExtraKeys]
"""Exact prompt token ids and extra keys: never across salts or adapters."""


@dataclass(slots=True)
class Flight:
    """Identical prompts on their way: one leads, the followers are held, oldest first.

    ``followers`` is a dictionary used as an ordered set: the first leaves, and any other, in constant time.
    ``missing`` are the blocks of the prompt that they wait for; None if that is not known.
    """

    flight_id: int
    key: FlightKey
    leader: Request
    followers: OrderedDict[str, Request]
    missing: set[BlockHash] | None

    @property
    def leader_id(self) -> str:
        """Id of the request that computes the prompt."""
        return self.leader.request_id
