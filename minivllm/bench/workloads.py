"""Workloads that a real and a virtual engine execute alike.

A workload is a list of submissions: prompts as token ids, sampling, and which request arrives after which. Knows
tokenizers and submissions; must not know engines, runners or time.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from minivllm.engine.input_processor import Submission
from minivllm.errors import ConfigError, UnknownNameError, nearest
from minivllm.request import MAX_SAMPLES, Sampling
from minivllm.step import Tokenizer

ARRIVALS = ("together", "staggered")

MAX_REQUESTS = 128
"""Most requests in a race: so many prompts differ in their first own token on any vocabulary."""

_SUBJECTS = (
    "The night librarian", "A careful baker", "The old lighthouse", "Our river ferry", "The second violin",
    "A curious student", "The town archive", "Every mountain hut", "The quiet engineer", "A travelling printer",
    "The garden school", "One small observatory",
)  # fmt: skip
_VERBS = (
    "keeps a record of", "returns each spring to", "has never forgotten", "explains to visitors",
    "measures with patience", "writes long letters about", "builds a model of", "listens closely to",
    "draws a new map of", "counts again and again",
)  # fmt: skip
_OBJECTS = (
    "the tides along the northern coast", "the stars above the harbour", "a recipe that takes three days",
    "the songs of the winter market", "the shortest way across the valley", "the clocks in the station hall",
    "the weather of a hundred years", "the stories behind the street names", "the bridges that were never built",
    "the sound of rain on a tin roof",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Race:
    """Requests that meet a cold cache.

    Their prompts have ``prompt_tokens`` tokens, of which the first ``shared_tokens`` are the same (None: all
    of them). "together" submits them in one batch; "staggered" lets each arrive when the one before has put
    its first token out. Greedy at ``temperature`` 0; above it, request i draws with seed ``seed + i``. With several
    ``samples`` each prompt is computed once and answered so many times, each time with the next seed.

    Raises ConfigError for a number that makes no sense.
    """

    num_requests: int = 8
    prompt_tokens: int = 532
    shared_tokens: int | None = None
    max_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    arrival: str = "together"
    samples: int = 1

    def __post_init__(self) -> None:
        limits = (
            ("num_requests", MAX_REQUESTS),
            ("prompt_tokens", 1 << 20),
            ("max_tokens", 1 << 20),
            ("samples", MAX_SAMPLES),
        )
        for name, most in limits:
            value = getattr(self, name)
            if not _is_whole(value) or not 1 <= value <= most:
                raise ConfigError(f"{name} is {value!r}; it must be a whole number from 1 to {most:,}")
        shared = self.num_shared_tokens
        if not _is_whole(shared) or not 0 <= shared <= self.prompt_tokens:
            raise ConfigError(
                f"shared_tokens is {shared!r}; it must be from 0 (nothing shared) to prompt_tokens, "
                f"{self.prompt_tokens:,} (identical)"
            )
        if self.arrival not in ARRIVALS:
            raise UnknownNameError(f"no arrival is called {self.arrival!r}; {nearest(self.arrival, ARRIVALS)}")
        last = (self.num_requests - 1) * self.samples
        for seed in (self.seed, self.seed + last if _is_whole(self.seed) else self.seed):
            Sampling(max_tokens=self.max_tokens, temperature=self.temperature, seed=seed, n=self.samples)

    def as_dict(self) -> dict[str, Any]:
        """Return the race's settings as plain JSON values."""
        return {
            "requests": self.num_requests,
            "prompt_tokens": self.prompt_tokens,
            "shared_tokens": self.num_shared_tokens,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "arrival": self.arrival,
            "samples": self.samples,
        }

    @property
    def num_shared_tokens(self) -> int:
        """How many tokens from the start are the same in all prompts."""
        return self.prompt_tokens if self.shared_tokens is None else self.shared_tokens


def race_submissions(race: Race, tokenizer: Tokenizer, *, prefix: str = "r") -> list[Submission]:
    """Return the race's submissions, with ids ``prefix`` + number.

    Prompts are made of plain sentences, so that a real model has something to go on; the same seed gives the
    same prompts with the same tokenizer. End of sequence is ignored, so that every run generates as many tokens.
    """
    num_own = race.prompt_tokens - race.num_shared_tokens
    shared = document_tokens(tokenizer, race.num_shared_tokens, race.seed)
    first_own = _distinct_tokens(tokenizer)
    submissions = []
    for number in range(race.num_requests):
        own = document_tokens(tokenizer, num_own, f"{race.seed}/{number}")
        if own:
            # The first token of its own distinguishes each prompt from the others, whatever the sentences begin with.
            own[0] = next(first_own)
        sampling = Sampling(
            max_tokens=race.max_tokens,
            temperature=race.temperature,
            seed=race.seed + number * race.samples,
            ignore_eos=True,
            n=race.samples,
        )
        late = race.arrival == "staggered" and number > 0
        after = (f"{prefix}{number - 1}", 1) if late else None
        submissions.append(Submission([*shared, *own], sampling, f"{prefix}{number}", None, after))
    return submissions


def document_tokens(tokenizer: Tokenizer, num_tokens: int, seed: int | str) -> list[int]:
    """Return exactly ``num_tokens`` token ids of a made-up document, the same for the same seed."""
    draw = random.Random(f"document {seed}")
    tokens: list[int] = []
    while len(tokens) < num_tokens:
        sentences = " ".join(
            f"{draw.choice(_SUBJECTS)} {draw.choice(_VERBS)} {draw.choice(_OBJECTS)}." for _ in range(40)
        )
        tokens.extend(tokenizer.encode(sentences + " "))
    return tokens[:num_tokens]


def _distinct_tokens(tokenizer: Tokenizer) -> Iterator[int]:
    """Yield token ids, each one once: the last tokens of printable characters, ASCII first, then the others.

    Even where one token is one byte, these give 94 ids and 64 more (the second bytes of U+00C0 to U+00FF).
    """
    seen: set[int] = set()
    for code in (*range(0x21, 0x7F), *range(0xC0, 0x250)):
        token = tokenizer.encode(chr(code))[-1]
        if token not in seen:
            seen.add(token)
            yield token


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
