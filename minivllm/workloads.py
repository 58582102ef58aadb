"""Workloads that a real and a virtual engine execute alike.

A workload is a list of submissions: prompts as token ids, sampling, and which request arrives after which. Knows
tokenizers and submissions; must not know engines, runners or time.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from minivllm.engine import Submission
from minivllm.errors import ConfigError, UnknownNameError, nearest
from minivllm.request import Sampling
from minivllm.step import Tokenizer

ARRIVALS = ("together", "staggered")

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
    its first token out. Greedy at ``temperature`` 0; above it, request i draws with seed ``seed + i``.

    Raises ConfigError for a number that makes no sense.
    """

    num_requests: int = 8
    prompt_tokens: int = 532
    shared_tokens: int | None = None
    max_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    arrival: str = "together"

    def __post_init__(self) -> None:
        for name, least, most in (("num_requests", 1, 256), ("prompt_tokens", 1, 1 << 20), ("max_tokens", 1, 1 << 20)):
            value = getattr(self, name)
            if not isinstance(value, int) or not least <= value <= most:
                raise ConfigError(f"{name} is {value!r}; it must be a whole number from {least} to {most:,}")
        shared = self.num_shared_tokens
        if not isinstance(shared, int) or not 0 <= shared <= self.prompt_tokens:
            raise ConfigError(
                f"shared_tokens is {shared!r}; it must be from 0 (nothing shared) to prompt_tokens, "
                f"{self.prompt_tokens} (identical)"
            )
        if self.arrival not in ARRIVALS:
            raise UnknownNameError(f"no arrival is called {self.arrival!r}; {nearest(self.arrival, ARRIVALS)}")
        Sampling(max_tokens=self.max_tokens, temperature=self.temperature, seed=self.seed)

    @property
    def num_shared_tokens(self) -> int:
        """How many tokens from the start are the same in all prompts."""
        return self.prompt_tokens if self.shared_tokens is None else self.shared_tokens


def race_submissions(race: Race, tokenizer: Tokenizer, *, prefix: str = "r") -> list[Submission]:
    """Return the race's submissions, with ids ``prefix`` + number.

    Prompts are made of plain sentences, so that a real model has something to go on; the same seed gives the
    same prompts with the same tokenizer. End of sequence is ignored, so that every run puts out as many tokens.
    """
    num_own = race.prompt_tokens - race.num_shared_tokens
    shared = document_tokens(tokenizer, race.num_shared_tokens, race.seed)
    submissions = []
    for number in range(race.num_requests):
        own = document_tokens(tokenizer, num_own, f"{race.seed}/{number}")
        if own:
            # The first token of its own tells each prompt from the others, whatever the sentences begin with.
            own[0] = _distinct_token(tokenizer, number)
        sampling = Sampling(
            max_tokens=race.max_tokens,
            temperature=race.temperature,
            seed=race.seed + number,
            ignore_eos=True,
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


def _distinct_token(tokenizer: Tokenizer, number: int) -> int:
    """Return a token id that no other number has: the code of a printable character that one token writes."""
    # 0x21 to 0x7E are single tokens in every byte-level vocabulary; beyond them, letters with accents follow.
    code = 0x21 + number if number < 94 else 0xC0 + number - 94
    return tokenizer.encode(chr(code))[-1]
