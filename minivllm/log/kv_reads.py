"""What was written in a slot of the K/V pool, and what a request read there that is not its own, in words.

Knows tokens and positions. Must not know events.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby

NEVER = 0
"""The number of no sequence: a slot that was never written."""


Keys = tuple[tuple[str | int, ...], ...]


class Prefixes:
    """Every sequence of tokens that was met, once: a tree, whose nodes are numbered from 1.

    A node stands for a token after all tokens before it, under the request's extra keys. A multimodal item comes in
    at its first token: what is before it does not depend on it.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int | None, Keys], int] = {}
        self._nodes: list[tuple[int, int | None, Keys]] = [(NEVER, None, ())]

    def number(self, parent: int, token_id: int | None, keys: Keys = ()) -> int:
        """Return the number of a token after ``parent``; of a root, if there is no token."""
        node = (parent, token_id, keys)
        number = self._numbers.get(node)
        if number is None:
            number = self._numbers[node] = len(self._nodes)
            self._nodes.append(node)
        return number

    def path(self, number: int) -> tuple[tuple[int, ...], Keys]:
        """Return the tokens from the start to this one, and the extra keys on the way."""
        tokens: list[int] = []
        keys: list[tuple[str | int, ...]] = []
        while number != NEVER:
            number, token_id, own = self._nodes[number]
            keys[:0] = own
            if token_id is not None:
                tokens.append(token_id)
        return tuple(reversed(tokens)), tuple(keys)


@dataclass(frozen=True, slots=True)
class KV:
    """The K/V of one token: it depends on all tokens before it, and on the extra keys."""

    _number: int
    _prefixes: Prefixes = field(compare=False)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens from the start to this one."""
        return self._prefixes.path(self._number)[0]

    @property
    def extra_keys(self) -> Keys:
        """The extra keys that it was computed under."""
        return self._prefixes.path(self._number)[1]

    @property
    def token_id(self) -> int:
        """The token itself."""
        return self.token_ids[-1]

    @property
    def position(self) -> int:
        """Its place in its request, from 0."""
        return len(self.token_ids) - 1

    def __repr__(self) -> str:
        return f"K/V of token {self.token_id} at position {self.position}"


@dataclass(frozen=True, slots=True)
class Written:
    """What was last written into a slot, by whom and in which step. A copied slot says who computed it."""

    kv: KV
    request_id: str
    step: int

    def __repr__(self) -> str:
        return f"{self.kv!r}, which {self.request_id} wrote in step {self.step}"


@dataclass(frozen=True, slots=True)
class WrongRead:
    """A row read a slot that holds something else than the K/V of its own token. ``found`` is None if never written."""

    step: int
    request_id: str
    block_id: int
    position: int
    found: Written | None
    expected: KV

    def describe(self) -> str:
        """Return one sentence: who read what where, and what should have been there."""
        return _sentence([self])

    def __repr__(self) -> str:
        return self.describe()


@dataclass(frozen=True, slots=True)
class UnwrittenBlock:
    """A block that is found now under a hash whose K/V was never computed in it.

    ``request_id`` published it as its logical block ``index``; ``token_ids`` are the tokens that the hash speaks of,
    ``found`` what is in each slot instead (None: never written), ``num_wrong`` how many slots differ.
    """

    block_id: int
    block_hash: str
    request_id: str
    index: int
    token_ids: tuple[int, ...]
    found: tuple[Written | None, ...]
    num_wrong: int

    def describe(self) -> str:
        """Return one sentence: under which tokens the block is found, and what it holds."""
        tokens = " ".join(map(str, self.token_ids))
        whole = self.num_wrong == len(self.found)
        what = "" if whole else f"{self.num_wrong} of its {len(self.found)} slots hold other K/V: "
        held = [_holding(list(run)) for _, run in groupby(self.found, key=_writer)]
        return (
            f"Block {self.block_id} is found under {self.block_hash[:8]} for tokens {tokens} of {self.request_id}, "
            f"but {what}{', then '.join(held)}."
        )

    def __repr__(self) -> str:
        return self.describe()


def _writer(found: Written | None) -> tuple[str, int] | None:
    return None if found is None else (found.request_id, found.step)


def _holding(found: list[Written | None]) -> str:
    """Say what a run of slots of one writer holds."""
    first = found[0]
    if first is None:
        return "nothing was ever written there"
    tokens = " ".join(str(w.kv.token_id) for w in found if w is not None)
    first_position = first.kv.position
    places = f"position {first_position}"
    if len(found) > 1:
        places = f"positions {first_position} to {first_position + len(found) - 1}"
    return (
        f"it holds the K/V of token{'s' * (len(found) > 1)} {tokens} at {places}, "
        f"which {first.request_id} wrote in step {first.step}"
    )


def _sentence(reads: list[WrongRead]) -> str:
    """Say several neighbouring wrong reads of one row in one block, with one writer, in one sentence."""
    first, last = reads[0], reads[-1]
    tokens = " ".join(str(read.expected.token_id) for read in reads)
    places = f"position {first.position} (token {tokens})"
    if len(reads) > 1:
        places = f"positions {first.position} to {last.position} (tokens {tokens})"
    holding = _holding([read.found for read in reads])
    wanted, found = first.expected, first.found
    if found is not None and found.kv.token_ids == wanted.token_ids:
        holding += f", under other extra keys: {_keys(found.kv.extra_keys)} and not {_keys(wanted.extra_keys)}"
    elif found is not None and (found.kv.token_id, found.kv.position) == (wanted.token_id, wanted.position):
        holding += ", after other tokens"
    return f"Step {first.step}: {first.request_id} reads {places} in block {first.block_id}, and {holding}."


def _keys(keys: Keys) -> str:
    return ", ".join(f"{key[0]} {key[1]}" for key in keys) or "none"


def sentences(reads: Iterable[WrongRead]) -> list[str]:
    """Return a sentence for each run of neighbouring wrong reads: the same row, block and writer."""
    runs: list[list[WrongRead]] = []
    for read in reads:
        last = runs[-1][-1] if runs else None
        if (
            last is not None
            and (last.step, last.request_id, last.block_id) == (read.step, read.request_id, read.block_id)
            and last.position + 1 == read.position
            and _writer(last.found) == _writer(read.found)
        ):
            runs[-1].append(read)
        else:
            runs.append([read])
    return [_sentence(run) for run in runs]
