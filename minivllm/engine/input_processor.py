"""Input processing: checks each submission completely before the engine stores anything for it.

A submission that can never run is refused here; the error says what is wrong, the limit and what to do. One that passes
becomes a request, or one per sample. Knows the limits of the configuration and of the runner. Changes nothing in the
engine, so any thread may call it. Must not know lists, blocks or flights.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from minivllm.config import EngineConfig
from minivllm.errors import DuplicateRequestError, InvalidRequestError, UnknownRequestError, nearest
from minivllm.request import MultimodalItem, Request, Sampling, make_extra_keys
from minivllm.step import Runner


@dataclass(frozen=True, slots=True)
class Submission:
    """What a caller submits: a prompt (text, or token ids) and its options.

    ``after`` = (request id, n) is a trigger: the request arrives when that other request has generated its n-th output
    token (the first is 1), or has ended before. ``cache_salt`` lets only requests with the same salt share its blocks.
    ``adapter`` names the LoRA adapter to compute with. ``multimodal`` says which tokens are placeholders for images
    and the like. Under priority scheduling a lower ``priority`` goes first.
    """

    prompt: str | Sequence[int]
    sampling: Sampling = field(default_factory=Sampling)
    request_id: str | None = None
    cache_salt: str | None = None
    after: tuple[str, int] | None = None
    adapter: str | None = None
    multimodal: Sequence[MultimodalItem] = ()
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checked submission: its request, its trigger if it has one, and the further samples of its prompt."""

    request: Request
    after: tuple[str, int] | None
    samples: tuple[Request, ...] = ()

    @property
    def requests(self) -> tuple[Request, ...]:
        """All samples, the first one first."""
        return (self.request, *self.samples)


class InputProcessor:
    """Checks submissions for one engine, and makes their requests."""

    def __init__(self, config: EngineConfig, runner: Runner) -> None:
        self._config = config
        self._runner = runner
        self._ids = itertools.count()

    def prepare(self, submissions: Iterable[Submission], is_taken: Callable[[str], bool]) -> list[Prepared]:
        """Check submissions and make their requests. ``is_taken`` says which ids are in use.

        Raises InvalidRequestError, DuplicateRequestError or UnknownRequestError, which refuses the whole batch.
        """
        prepared: list[Prepared] = []
        names: set[str] = set()

        def in_use(name: str) -> bool:
            return name in names or is_taken(name)

        if isinstance(submissions, (str, Submission)) or not isinstance(submissions, Iterable):
            raise InvalidRequestError(f"a batch is {submissions!r}; pass a list of Submission(...)")
        for submission in submissions:
            if not isinstance(submission, Submission):
                raise InvalidRequestError(f"a batch holds {submission!r}; wrap each prompt: Submission(prompt)")
            requests = self._make_requests(submission, in_use)
            trigger = self._checked_trigger(submission.after, in_use)
            prepared.append(Prepared(requests[0], trigger, tuple(requests[1:])))
            # Added after the check of the trigger: a request that waits for itself would never arrive.
            names.update(request.request_id for request in requests)
        return prepared

    def _make_requests(self, submission: Submission, in_use: Callable[[str], bool]) -> list[Request]:
        """Check a submission and return its requests, one per sample. Raises Invalid- or DuplicateRequestError."""
        prompt = submission.prompt
        if isinstance(prompt, str):
            tokens = tuple(self._runner.tokenizer.encode(checked_text(prompt)))
        else:
            tokens = _checked_tokens(prompt, self._runner.vocab_size)
        if not tokens:
            raise InvalidRequestError("the prompt is empty; give it at least one token")
        if not isinstance(submission.sampling, Sampling):
            raise InvalidRequestError(f"sampling is {submission.sampling!r}; pass a Sampling(...)")
        most = submission.sampling.max_tokens
        self._check_length(len(tokens), most)
        salt = submission.cache_salt
        if salt is not None and not isinstance(salt, str):
            raise InvalidRequestError(f"cache_salt is {salt!r}; it must be a string, or None for no salt")
        priority = submission.priority
        if not isinstance(priority, int) or isinstance(priority, bool):
            raise InvalidRequestError(f"priority is {priority!r}; it must be a whole number, lower goes first")
        if submission.sampling.n > self._config.max_num_seqs:
            raise InvalidRequestError(
                f"n is {submission.sampling.n} samples, which decode side by side, and max_num_seqs is "
                f"{self._config.max_num_seqs}; ask for fewer or raise max_num_seqs"
            )
        self._check_adapter(submission.adapter)
        extra_keys = make_extra_keys(
            adapter=submission.adapter,
            multimodal=self._checked_items(submission.multimodal, len(tokens)),
            cache_salt=salt,
        )

        count = submission.sampling.n
        name = submission.request_id
        if name is None:
            fresh = map("r{}".format, self._ids)
            name = next(each for each in fresh if not any(map(in_use, _sample_names(each, count))))
        elif not isinstance(name, str) or not name:
            raise InvalidRequestError(f"request_id is {name!r}; it must be a string of one character or more")
        else:
            checked_text(name, "request_id")
        sample_names = _sample_names(name, count)
        for each in sample_names:
            if in_use(each):
                raise DuplicateRequestError(f"request id {each!r} is in use; choose another or leave it out")
        return [
            Request(each, tokens, submission.sampling.of_sample(number), extra_keys, priority)
            for number, each in enumerate(sample_names)
        ]

    def _check_adapter(self, adapter: object) -> None:
        if adapter is None:
            return
        if not isinstance(adapter, str) or not adapter:
            raise InvalidRequestError(f"adapter is {adapter!r}; it must be the name of an adapter, or None")
        known = self._runner.adapters
        if known is not None and adapter not in known:
            have = nearest(adapter, sorted(known)) if known else "none was loaded; pass Engine(..., adapters={...})"
            raise InvalidRequestError(f"model {self._runner.name!r} has no adapter {adapter!r}; {have}")

    def _checked_items(self, items: object, num_tokens: int) -> Sequence[MultimodalItem]:
        """Return the multimodal items in order of their offset. Raises InvalidRequestError for one that cannot be."""
        if isinstance(items, str) or not isinstance(items, Sequence):
            raise InvalidRequestError(f"multimodal is {items!r}; pass a list of MultimodalItem(...)")
        for item in items:
            if not isinstance(item, MultimodalItem):
                raise InvalidRequestError(f"multimodal holds {item!r}; pass MultimodalItem(hash, offset, num_tokens)")
            if item.offset + item.num_tokens > num_tokens:
                raise InvalidRequestError(
                    f"a multimodal item covers tokens {item.offset} to {item.offset + item.num_tokens - 1}, "
                    f"and the prompt has {num_tokens}; its tokens must be in the prompt"
                )
        if items and not self._runner.accepts_multimodal:
            raise InvalidRequestError(
                f"model {self._runner.name!r} reads text alone; multimodal items are for the virtual model"
            )
        ordered = sorted(items, key=lambda item: item.offset)
        for one, other in itertools.pairwise(ordered):
            if one.offset + one.num_tokens > other.offset:
                raise InvalidRequestError(
                    f"two multimodal items cover token {other.offset}; each token stands for one of them at most"
                )
        return ordered

    def _check_length(self, num_prompt: int, max_tokens: int) -> None:
        limit = self._runner.max_model_len
        # The token that comes out last needs no K/V and no position: the request ends with it.
        if num_prompt + max_tokens - 1 > limit:
            raise InvalidRequestError(
                f"the prompt has {num_prompt:,} tokens and max_tokens is {max_tokens:,}, together more than the "
                f"{limit:,} that model {self._runner.name!r} can hold; shorten the prompt or lower max_tokens"
            )
        needed = -(-(num_prompt + max_tokens - 1) // self._config.block_size)
        if needed > self._config.num_blocks:
            room = self._config.num_blocks * self._config.block_size
            raise InvalidRequestError(
                f"the prompt has {num_prompt:,} tokens and max_tokens is {max_tokens:,}: that needs {needed:,} blocks, "
                f"and the pool has {self._config.num_blocks:,} (room for {room:,} tokens); shorten the prompt, lower "
                "max_tokens or raise num_blocks"
            )

    def _checked_trigger(
        self, after: tuple[str, int] | None, is_known: Callable[[str], bool]
    ) -> tuple[str, int] | None:
        if after is None:
            return None
        if not isinstance(after, (tuple, list)) or len(after) != 2 or not isinstance(after[0], str):
            raise InvalidRequestError(f"after is {after!r}; give (request id, output token), such as ('r0', 1)")
        other, count = after
        if not is_known(other):
            raise UnknownRequestError(f"after names request {other!r}, which is not known; submit that one first")
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise InvalidRequestError(f"after waits for output token {count!r}; the first output token is 1")
        return other, count


def _sample_names(name: str, count: int) -> list[str]:
    """Return the ids of all samples of a request, its own first."""
    return [name, *[f"{name}.{number}" for number in range(1, count)]]


def make_submission(prompt: str | Sequence[int], sampling: Sampling | None, fields: dict[str, Any]) -> Submission:
    """Return a Submission of the prompt and ``fields``: those of `Submission`, which are removed from ``fields``.

    The rest are fields of `Sampling`. Raises InvalidRequestError like `make_sampling`.
    """
    own = {name: fields.pop(name) for name in _SUBMISSION_FIELDS & fields.keys()}
    return Submission(prompt, make_sampling(sampling, fields), **own)


_SUBMISSION_FIELDS = frozenset({field.name for field in dataclasses.fields(Submission)} - {"prompt", "sampling"})


def make_sampling(sampling: Sampling | None, fields: dict[str, Any]) -> Sampling:
    """Return ``sampling``, or a Sampling with ``fields``. Raises InvalidRequestError for both, or an unknown field."""
    if not fields:
        return sampling if sampling is not None else Sampling()
    if sampling is not None:
        raise InvalidRequestError(f"pass either sampling= or {', '.join(fields)}, not both")
    try:
        return Sampling(**fields)
    except TypeError as error:
        raise InvalidRequestError(
            f"{error}; sampling has max_tokens, temperature, top_p, top_k, seed, stop, ignore_eos and n"
        ) from None


def checked_text(text: str, what: str = "the prompt") -> str:
    """Return the text. Raises InvalidRequestError for half a surrogate pair, which nothing can encode or show."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"character {error.start} of {what} is half of a surrogate pair; remove it, it stands for no text"
        ) from None
    return text


def _checked_tokens(prompt: object, vocab_size: int) -> tuple[int, ...]:
    """Return the token ids as integers. Raises InvalidRequestError for any that is not an id of the vocabulary."""
    if isinstance(prompt, (bytes, bytearray)) or not isinstance(prompt, Iterable):
        raise InvalidRequestError(f"the prompt is a {type(prompt).__name__}; give a string or a list of token ids")
    tokens = []
    for place, item in enumerate(prompt):
        try:
            if isinstance(item, bool):
                raise TypeError
            token = operator.index(item)  # takes whole numbers of any library, and cuts none
        except TypeError:
            raise InvalidRequestError(f"token {place} of the prompt is {item!r}; token ids are whole numbers") from None
        if not 0 <= token < vocab_size:
            raise InvalidRequestError(
                f"token {place} of the prompt is {token}; the vocabulary has ids 0 to {vocab_size - 1}"
            )
        tokens.append(token)
    return tuple(tokens)


def chat_tokens(tokenizer: Any, message: str) -> list[int]:
    """Return the token ids of one user message in the tokenizer's chat template, or of the bare message.

    Raises InvalidRequestError if the message is no text or is empty (the template alone is not a prompt).
    """
    if not isinstance(message, str) or not message:
        raise InvalidRequestError(f"the message is {message!r}; write some text to answer")
    checked_text(message)
    if getattr(tokenizer, "chat_template", None) is None:
        return list(tokenizer.encode(message))
    messages = [{"role": "user", "content": message}]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
