"""A request: its prompt, how its tokens are drawn, and the states that it may be in.

Knows tokens, states and what else its K/V depends on. Must not know blocks, the scheduler, flights, models or clocks.
"""

from __future__ import annotations

import dataclasses
import enum
import numbers
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from minivllm.errors import InvalidRequestError, InvariantError


class RequestState(enum.Enum):
    """Where a request is. `TRANSITIONS` says which state may follow which."""

    DEFERRED = "deferred"  # not here yet: arrives when another request has generated a certain token
    WAITING = "waiting"  # may be admitted
    HELD = "held"  # waits for what another request computes, not for room: a follower, or a sample
    RUNNING = "running"  # a row of the batch, in prefill or decode
    PREEMPTED = "preempted"  # freed its blocks; waits at the head of its rank
    FINISHED = "finished"
    ABORTED = "aborted"
    FAILED = "failed"

    @property
    def is_ended(self) -> bool:
        """Whether nothing can follow."""
        return not TRANSITIONS[self]


MAX_SAMPLES = 128

MAX_TEMPERATURE = 1e30
"""Above, draws are as uniform as they can be, and a Python number may be too large for any float."""

_ENDS = frozenset({RequestState.ABORTED, RequestState.FAILED})

TRANSITIONS: dict[RequestState, frozenset[RequestState]] = {
    RequestState.DEFERRED: _ENDS | {RequestState.WAITING},
    RequestState.WAITING: _ENDS | {RequestState.HELD, RequestState.RUNNING},
    RequestState.HELD: _ENDS | {RequestState.WAITING, RequestState.RUNNING},
    RequestState.RUNNING: _ENDS | {RequestState.PREEMPTED, RequestState.FINISHED},
    RequestState.PREEMPTED: _ENDS | {RequestState.RUNNING},
    RequestState.FINISHED: frozenset(),
    RequestState.ABORTED: frozenset(),
    RequestState.FAILED: frozenset(),
}
"""The one table of transitions, shared by the code, the tests and the drawn diagram."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a request's output tokens are drawn. The default is greedy.

    ``temperature`` 0 takes the likeliest token. ``top_p`` keeps the likeliest tokens that sum to it, ``top_k``
    the k likeliest (0: all). ``seed`` makes the draws repeat; without one, the engine picks one per request.
    ``stop`` are strings at which the output ends (they are not part of it). ``ignore_eos`` goes on after an
    end-of-sequence token, so that a benchmark has a fixed number of tokens. ``n`` asks for several samples of one
    prompt, which is computed once; sample i draws with ``seed + i``.

    Raises InvalidRequestError for a value that makes no sense.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    n: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if not isinstance(self.stop, Iterable):
            raise InvalidRequestError(f"stop is {self.stop!r}; it must be a string or a list of strings")
        object.__setattr__(self, "stop", tuple(self.stop))
        if not _is_int(self.max_tokens) or self.max_tokens < 1:
            raise InvalidRequestError(f"max_tokens is {self.max_tokens!r}; it must be a whole number of 1 or more")
        if not _is_number(self.temperature) or not 0 <= self.temperature <= MAX_TEMPERATURE:
            raise InvalidRequestError(
                f"temperature is {self.temperature!r}; it must be a number of 0 (greedy) or more, "
                f"such as 0.7, and at most {MAX_TEMPERATURE:g}"
            )
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise InvalidRequestError(f"top_p is {self.top_p!r}; it must be above 0 and at most 1 (1 keeps all)")
        if not _is_int(self.top_k) or self.top_k < 0:
            raise InvalidRequestError(f"top_k is {self.top_k!r}; it must be 0 (keep all) or a whole number above")
        if self.seed is not None and (not _is_int(self.seed) or not 0 <= self.seed < 2**64):
            raise InvalidRequestError(f"seed is {self.seed!r}; it must be a whole number from 0 to 2**64 - 1")
        if not _is_int(self.n) or not 1 <= self.n <= MAX_SAMPLES:
            raise InvalidRequestError(f"n is {self.n!r}; it must be a whole number of samples from 1 to {MAX_SAMPLES}")
        if self.seed is not None and self.seed + self.n > 2**64:
            raise InvalidRequestError(
                f"seed is {self.seed!r} and n is {self.n}, so the last sample's seed would be above 2**64 - 1; "
                "lower the seed"
            )
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise InvalidRequestError(f"stop holds {text!r}; it must hold strings of one character or more")
        # Numbers of other libraries become Python's own, which JSON and the log can hold.
        for name, kind in (
            ("max_tokens", int),
            ("temperature", float),
            ("top_p", float),
            ("top_k", int),
            ("seed", int),
            ("n", int),
        ):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, kind(value))

    def of_sample(self, number: int) -> Sampling:
        """Return the sampling of sample ``number`` alone: what a lone request would need to draw the same."""
        seed = None if self.seed is None else self.seed + number
        return dataclasses.replace(self, n=1, seed=seed)


# -- What else the K/V depends on ----------------------------------------------------------------------------

ExtraKey = tuple[str, str] | tuple[str, str, int, int]
"""(kind, value), or ("multimodal", content hash, first token, number of tokens)."""

ExtraKeys = tuple[ExtraKey, ...]
"""The extra keys of a whole request, in the order adapter, multimodal (by place), salt."""

ADAPTER = "adapter"
MULTIMODAL = "multimodal"
CACHE_SALT = "cache_salt"


@dataclass(frozen=True, slots=True)
class MultimodalItem:
    """An image or the like, of which a prompt holds only placeholder tokens.

    ``content_hash`` names its content. It stands for ``num_tokens`` tokens from token ``offset`` of the prompt on.
    Raises InvalidRequestError for values that describe no item.
    """

    content_hash: str
    offset: int
    num_tokens: int

    def __post_init__(self) -> None:
        if not isinstance(self.content_hash, str) or not self.content_hash:
            raise InvalidRequestError(
                f"content_hash is {self.content_hash!r}; it must be a string of one character or more"
            )
        for name, value, least in (("offset", self.offset, 0), ("num_tokens", self.num_tokens, 1)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise InvalidRequestError(
                    f"{name} of a multimodal item is {value!r}; it must be a whole number of {least} or more"
                )


def make_extra_keys(
    *, adapter: str | None = None, multimodal: Sequence[MultimodalItem] = (), cache_salt: str | None = None
) -> ExtraKeys:
    """Return the tagged extra keys of a request, always in the same order. An empty salt is no salt.

    The tag keeps an adapter named ``foo`` apart from a salt ``foo``.
    """
    keys: list[ExtraKey] = []
    if adapter:
        keys.append((ADAPTER, adapter))
    for item in sorted(multimodal, key=lambda item: (item.offset, item.num_tokens, item.content_hash)):
        keys.append((MULTIMODAL, item.content_hash, item.offset, item.num_tokens))
    if cache_salt:
        keys.append((CACHE_SALT, cache_salt))
    return tuple(keys)


def _is_int(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


@dataclass(slots=True, eq=False)
class Request:
    """One prompt on its way through the engine. Two are equal only if they are the same object.

    ``arrival`` is its place in the order of arrival, given by the engine. ``num_computed_tokens`` is how many
    of its tokens, from the start, have their K/V in the pool: computed or recovered. The token drawn last has
    none yet: it is computed in the next step. ``seed`` is the one that its draws use.

    ``num_recovered_tokens`` came from the cache when it was first admitted, ``num_adopted_tokens`` afterwards, in
    mid-prefill. A lower ``priority`` is more important; ``rank`` is what the scheduling policy made of it.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    extra_keys: ExtraKeys = ()
    priority: int = 0
    rank: int = 0
    arrival: int = -1
    state: RequestState = RequestState.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(init=False)
    num_computed_tokens: int = 0
    num_recovered_tokens: int = 0
    num_adopted_tokens: int = 0
    seed: int = 0
    num_preemptions: int = 0
    finish_reason: str | None = None

    def __post_init__(self) -> None:
        self.token_ids = [*self.prompt_token_ids, *self.output_token_ids]

    @property
    def adapter(self) -> str | None:
        """Name of the adapter to compute with, None for the model as it is."""
        return next((key[1] for key in self.extra_keys if key[0] == ADAPTER), None)

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt, in tokens."""
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far, in tokens."""
        return len(self.token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens known but without K/V: a whole prompt at first, one token in decode."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        """Whether the only token left to compute is the one that came out last."""
        return bool(self.output_token_ids) and self.num_uncomputed_tokens == 1

    def move_to(self, state: RequestState) -> None:
        """Change the state. Raises InvariantError for a move that `TRANSITIONS` does not have."""
        if state not in TRANSITIONS[self.state]:
            raise InvariantError(f"request {self.request_id!r} cannot go from {self.state.value} to {state.value}")
        self.state = state

    def append_output(self, token_id: int) -> None:
        """Take a token that was just drawn."""
        self.output_token_ids.append(token_id)
        self.token_ids.append(token_id)
