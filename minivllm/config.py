"""How an engine is set up, checked before anything is built.

Knows the names and limits of every setting. Must not know how any of them works.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from minivllm.cache.block_hash import BLOCK_HASHERS, BlockHasher
from minivllm.cache.eviction.names import EVICTION_POLICIES
from minivllm.cache.eviction.policy import EvictionPolicy
from minivllm.cache.prefix_index.index import PrefixIndex
from minivllm.cache.prefix_index.names import PREFIX_INDEXES
from minivllm.cache.publication import PUBLICATION_POLICIES, PublicationPolicy, is_safe
from minivllm.coordination.coordinator import Coordinator
from minivllm.coordination.names import COORDINATORS
from minivllm.coordination.release import RELEASE_POLICIES, ReleasePolicy
from minivllm.coordination.wait_or_recompute import WaitOrRecompute
from minivllm.cost import CostModel
from minivllm.errors import ConfigError, UnknownNameError, nearest
from minivllm.scheduling.policies import ADMISSIONS, BY_CHUNK, SCHEDULING_POLICIES, SchedulingPolicy

_P = TypeVar("_P")

MAX_NUM_BLOCKS = 1 << 20
MAX_BLOCK_SIZE = 4096
_POLICIES = ("publication", "coordination", "release", "eviction", "prefix_index", "block_hash", "scheduling")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine. Every policy is a name or an object with the policy's interface.

    ``block_size`` is in tokens. ``num_blocks`` is the number of usable blocks (the scratch block is apart).
    ``max_num_batched_tokens`` is the token budget of a step, ``max_num_seqs`` the most running rows; of more
    rows than budget, the later ones wait until earlier ones end.
    ``long_prefill_token_threshold`` limits one request's prompt tokens in a step (0: no limit of its own).
    ``coordination`` and ``prefix_index`` may also be classes, as each engine makes its own.
    ``admission`` is "by-chunk" (room for the first chunk is enough) or "whole-prompt"; ``watermark`` is the share of
    the pool that stays free when a request is admitted beside running ones. With ``adoption`` running prefills look
    up again before each chunk. ``check_token_ids`` compares tokens on every hit, so that a collision of hashes is
    seen and not served. ``allow_unsafe`` names an unsafe publication policy that may run on a real model.
    ``cost`` and ``ttft_target_ms`` are for "wait-or-recompute" (None: the runner's own cost model, no target).

    Raises ConfigError or UnknownNameError with what was wrong, the limit, and what to do.
    """

    block_size: int = 16
    num_blocks: int = 512
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 8
    long_prefill_token_threshold: int = 0
    enable_prefix_caching: bool = True
    publication: str | PublicationPolicy = "on-completion"
    coordination: str | Callable[..., Coordinator] = "independent"
    release: str | ReleasePolicy = "after-prefill"
    eviction: str | EvictionPolicy = "lru"
    prefix_index: str | Callable[[], PrefixIndex] = "hash-map"
    block_hash: str | BlockHasher = "sha256"
    check_token_ids: bool = False
    scheduling: str | SchedulingPolicy = "fcfs"
    admission: str = BY_CHUNK
    watermark: float = 0.0
    adoption: bool = False
    allow_unsafe: str = ""
    cost: CostModel | None = None
    ttft_target_ms: float | None = None

    def __post_init__(self) -> None:
        _whole("block_size", self.block_size, 1, MAX_BLOCK_SIZE, "16 is usual, 4 for small examples")
        _whole("num_blocks", self.num_blocks, 1, MAX_NUM_BLOCKS, "512 blocks of 16 tokens hold 8,192 tokens")
        _whole("max_num_batched_tokens", self.max_num_batched_tokens, 1, 1 << 20, "2048 is the default budget")
        _whole("max_num_seqs", self.max_num_seqs, 1, 1024, "8 rows is the default")
        _whole("long_prefill_token_threshold", self.long_prefill_token_threshold, 0, 1 << 20, "0 sets no limit")
        for name in (*_POLICIES, "admission"):
            value = getattr(self, name)
            if isinstance(value, str):  # names have hyphens; the constant's spelling in code is understood, too
                object.__setattr__(self, name, value.lower().replace("_", "-"))
        if self.admission not in ADMISSIONS:
            raise UnknownNameError(f"no admission is called {self.admission!r}; {nearest(self.admission, ADMISSIONS)}")
        _number("watermark", self.watermark, 0.0, 0.9, "a share of the pool, such as 0.05")
        if self.ttft_target_ms is not None:
            _number("ttft_target_ms", self.ttft_target_ms, 0.0, 1e9, "milliseconds, such as 200, or None")
        if self.cost is not None and not isinstance(self.cost, CostModel):
            raise ConfigError(f"cost is {self.cost!r}; pass a CostModel(...), or None for the runner's own")
        unsafe = {name for name, policy in PUBLICATION_POLICIES.items() if not is_safe(policy)}
        if not is_safe(self.publication_policy):
            unsafe.add(policy_name(self.publication_policy))  # a student's own
        if self.allow_unsafe and self.allow_unsafe not in unsafe:
            raise UnknownNameError(
                f"allow_unsafe is {self.allow_unsafe!r}; it names an unsafe publication policy: "
                + ", ".join(sorted(unsafe))
            )
        # Ask for each policy once, so that a wrong name is reported here and not in the engine.
        for name in _POLICIES:
            getattr(self, f"{name}_policy")

    @property
    def publication_policy(self) -> PublicationPolicy:
        """The publication policy object."""
        return _resolve("publication policy", self.publication, PUBLICATION_POLICIES, "visible_tokens")

    @property
    def coordination_policy(self) -> Callable[..., Coordinator]:
        """The class of the coordinator."""
        found = _resolve("coordination", self.coordination, COORDINATORS, "arrive", is_class=True)
        if found is WaitOrRecompute:
            return WaitOrRecompute.choosing(cost=self.cost, ttft_target_ms=self.ttft_target_ms)
        return found

    @property
    def release_policy(self) -> ReleasePolicy:
        """The release policy object."""
        return _resolve("release policy", self.release, RELEASE_POLICIES, "after_prefill")

    @property
    def eviction_policy(self) -> EvictionPolicy:
        """The eviction policy object."""
        return _resolve("eviction policy", self.eviction, EVICTION_POLICIES, "place")

    @property
    def prefix_index_policy(self) -> Callable[[], PrefixIndex]:
        """The class of the prefix index."""
        return _resolve("prefix index", self.prefix_index, PREFIX_INDEXES, "longest_prefix", is_class=True)

    @property
    def block_hash_policy(self) -> BlockHasher:
        """The object that hashes blocks."""
        return _resolve("block hash", self.block_hash, BLOCK_HASHERS, "digest")

    @property
    def scheduling_policy(self) -> SchedulingPolicy:
        """The scheduling policy object."""
        return _resolve("scheduling policy", self.scheduling, SCHEDULING_POLICIES, "rank")

    @property
    def chunk_limit(self) -> int:
        """The most tokens of one request in a step."""
        return self.long_prefill_token_threshold or self.max_num_batched_tokens

    @property
    def num_reserved_blocks(self) -> int:
        """The watermark in blocks."""
        return int(round(self.watermark * self.num_blocks, 6))  # .29 of 100 is 28.999999999999996 in floating point

    def replace(self, **changes: Any) -> EngineConfig:
        """Return a copy with some settings changed. Raises UnknownNameError for a setting that does not exist."""
        known = [field.name for field in dataclasses.fields(self)]
        for name in changes:
            if name not in known:
                raise UnknownNameError(f"no setting is called {name!r}; {nearest(name, known)}")
        return dataclasses.replace(self, **changes)

    def with_policies(self, publication: Any = None, coordination: Any = None, release: Any = None) -> EngineConfig:
        """Return a copy with other policies (None: as before). Consent to an unsafe policy goes with it."""
        given = {"publication": publication, "coordination": coordination, "release": release}
        changes = {name: policy for name, policy in given.items() if policy is not None}
        if publication is not None and self.allow_unsafe not in (*PUBLICATION_POLICIES, policy_name(publication)):
            changes["allow_unsafe"] = ""
        return self.replace(**changes)

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as plain JSON values, policies by their names."""
        out: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, CostModel):
                out[field.name] = dataclasses.asdict(value)
            else:
                plain = value is None or isinstance(value, (str, int, float))
                out[field.name] = value if plain else policy_name(value)
        return out


def policy_name(policy: object) -> str:
    """Return the name of a policy given by name, by object or by class."""
    if isinstance(policy, str):
        return policy
    return str(getattr(policy, "name", None) or getattr(policy, "__name__", type(policy).__name__))


def _whole(name: str, value: object, least: int, most: int, hint: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ConfigError(f"{name} is {value!r}; it must be a whole number from {least} to {most:,} ({hint})")


def _number(name: str, value: object, least: float, most: float, hint: str) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not least <= value <= most:
        raise ConfigError(f"{name} is {value!r}; it must be a number from {least:g} to {most:g} ({hint})")


def _resolve(what: str, given: Any, known: Mapping[str, _P], member: str, *, is_class: bool = False) -> _P:
    """Return the policy that ``given`` names, or ``given`` itself if it has the interface.

    ``is_class`` says that a class is meant, and not an object of it.
    """
    if isinstance(given, str):
        found = known.get(given)
        if found is None:
            raise UnknownNameError(f"no {what} is called {given!r}; {nearest(given, known)}")
        return found
    if not hasattr(given, member):
        raise ConfigError(
            f"{given!r} is no {what}: it has no {member}(); pass one of {', '.join(known)}, or an object that has it"
        )
    if is_class and not isinstance(given, type):
        raise ConfigError(f"the {what} {given!r} is an object; pass its class, as each engine makes its own")
    if isinstance(given, type) and not is_class:
        raise ConfigError(f"the {what} {given!r} is a class; pass an object of it, {given.__name__}()")
    return given
