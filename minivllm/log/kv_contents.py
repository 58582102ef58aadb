"""What every slot of the pool holds, and who has read what there, as a pure fold over the log.

The books of the engine say which block is found under which hash. This fold says what was really written:

    ChunkComputed   writes:  the K/V of the row's new tokens, each with all tokens before it
                    reads:   every slot from the row's start to its last new token, through its block table
    BlockCopied     copies a block's slots, before any row of the step is computed

A read that finds something else than the row's own tokens is a `WrongRead`. A block that is found under a hash
whose K/V was never computed in it is an `UnwrittenBlock` (a "zombie block"). Both say so in a sentence.

Within a step all writes come before all reads, as in an engine whose layers write the whole batch's K/V and then
attend. With ``rows_see_each_other=False`` a row sees what earlier steps have written, and its own tokens: that is
all that `Runner.execute` promises, and less than publication at allocation needs.

Freeing, eviction and a reset forget names; none of them wipes memory. So a slot holds what was last written there,
whoever did. What a row computes after a wrong read counts as its own: who read what is said, not what came of it.

Knows events only. Must not look into the engine. Tokens are compared exactly, not by a hash: each sequence of
tokens under its extra keys gets one number when it is first met. The cost is constant for each slot read or written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from html import escape
from itertools import groupby
from typing import Any

from minivllm.errors import InvariantError
from minivllm.log import events as ev

_NEVER = 0
"""The number of no sequence: a slot that was never written."""

_Keys = tuple[tuple[str | int, ...], ...]


class _Prefixes:
    """Every sequence of tokens that was met, once: a tree, whose nodes are numbered from 1.

    A node stands for a token after all tokens before it, under the request's extra keys. A multimodal item comes in
    at its first token: what is before it does not depend on it.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int | None, _Keys], int] = {}
        self._nodes: list[tuple[int, int | None, _Keys]] = [(_NEVER, None, ())]

    def number(self, parent: int, token_id: int | None, keys: _Keys = ()) -> int:
        """Return the number of a token after ``parent``; of a root, if there is no token."""
        node = (parent, token_id, keys)
        number = self._numbers.get(node)
        if number is None:
            number = self._numbers[node] = len(self._nodes)
            self._nodes.append(node)
        return number

    def path(self, number: int) -> tuple[tuple[int, ...], _Keys]:
        """Return the tokens from the start to this one, and the extra keys on the way."""
        tokens: list[int] = []
        keys: list[tuple[str | int, ...]] = []
        while number != _NEVER:
            number, token_id, own = self._nodes[number]
            keys[:0] = own
            if token_id is not None:
                tokens.append(token_id)
        return tuple(reversed(tokens)), tuple(keys)


# --- What a slot holds ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KV:
    """The K/V of one token: it depends on all tokens before it, and on the extra keys."""

    _number: int
    _prefixes: _Prefixes = field(compare=False)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens from the start to this one."""
        return self._prefixes.path(self._number)[0]

    @property
    def extra_keys(self) -> _Keys:
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


# --- What was wrong ---------------------------------------------------------------------------------------


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


def _keys(keys: _Keys) -> str:
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


# --- The fold ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Block:
    """The slots of one block: the number of what each holds, and who wrote it in which step."""

    numbers: list[int]
    writers: list[tuple[str, int]]


@dataclass(slots=True)
class _Tokens:
    """The tokens of one request, numbered as far as they were needed."""

    token_ids: list[int]
    items: dict[int, _Keys]
    root: int
    numbers: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Read:
    """What a row reads in a step, kept until all rows of the step have written."""

    request_id: str
    table: list[int]
    numbers: list[int]
    end: int


@dataclass(slots=True)
class _Published:
    """A block that is found: by whom it was published, under which hash, and the numbers that the hash speaks of."""

    request_id: str
    index: int
    block_hash: str
    numbers: list[int]


class KVContents:
    """What the pool's slots hold after the events that were taken. `kv_contents` makes one of a log."""

    def __init__(self, *, rows_see_each_other: bool = True) -> None:
        self.block_size = 0
        self.rows_see_each_other = rows_see_each_other
        self._prefixes = _Prefixes()
        self._blocks: dict[int, _Block] = {}
        self._tokens: dict[str, _Tokens] = {}
        self._tables: dict[str, list[int]] = {}
        self._published: dict[int, _Published] = {}
        self._copies: list[ev.BlockCopied] = []
        self._reads: list[_Read] = []
        self._early: dict[str, list[WrongRead]] = {}  # what rows read wrong of earlier steps, if they see no more
        self._step = 0
        self._num_settled = 0
        self._wrong: list[WrongRead] = []

    # -- Answers -------------------------------------------------------------------------------------------

    @property
    def wrong_reads(self) -> tuple[WrongRead, ...]:
        """Every wrong read so far, in the order of steps, rows and positions. Asking changes nothing.

        In the middle of a step it is what the rows so far would have read, had they not waited for the others.
        """
        return (*self._wrong, *self._wrong_now())

    @property
    def num_reads(self) -> int:
        """How many slots were read so far, over all rows."""
        return self._num_settled + sum(read.end for read in self._reads)

    @property
    def published_unwritten(self) -> tuple[UnwrittenBlock, ...]:
        """The blocks that are found now and hold K/V that was never computed for their hash, by block id.

        Between steps. While a step is computed, a policy that publishes at allocation has such blocks anyway.
        """
        out = []
        for block_id, published in sorted(self._published.items()):
            numbers = self._blocks[block_id].numbers
            if numbers == published.numbers:
                continue
            wrong = sum(a != b for a, b in zip(numbers, published.numbers, strict=True))
            tokens = tuple(self._kv(number).token_id for number in published.numbers)
            out.append(
                UnwrittenBlock(
                    block_id,
                    published.block_hash,
                    published.request_id,
                    published.index,
                    tokens,
                    self.block(block_id),
                    wrong,
                )
            )
        return tuple(out)

    def block(self, block_id: int) -> tuple[Written | None, ...]:
        """Return what each slot of a block holds, None where nothing was ever written. Raises KeyError for no block."""
        return tuple(self._written(block_id, offset) for offset in range(len(self._blocks[block_id].numbers)))

    def describe(self) -> str:
        """Say everything that is wrong, a sentence a line."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        wrong, unwritten = self.wrong_reads, self.published_unwritten
        yield from sentences(wrong)
        yield from (block.describe() for block in unwritten)
        if not wrong and not unwritten:
            yield f"Every one of {self.num_reads:,} slots that were read held the reader's own K/V."

    def __repr__(self) -> str:
        return self.describe()

    def _repr_html_(self) -> str:
        return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in self._lines()) + "</ul>"

    # -- Events --------------------------------------------------------------------------------------------

    def take(self, event: ev.Event) -> None:
        """Follow one event."""
        if event.step != self._step:
            self._settle_reads()
            self._step = event.step
        apply = _FOLDS.get(type(event))
        if apply is not None:
            apply(self, event)

    def _kv(self, number: int) -> KV:
        return KV(number, self._prefixes)

    def _written(self, block_id: int, offset: int) -> Written | None:
        block = self._blocks[block_id]
        number = block.numbers[offset]
        return None if number == _NEVER else Written(self._kv(number), *block.writers[offset])

    def _numbers_up_to(self, request_id: str, end: int) -> list[int]:
        """Return the numbers of a request's tokens, at least up to position ``end``. Grows; is never changed."""
        tokens = self._tokens[request_id]
        numbers = tokens.numbers
        if end > len(tokens.token_ids):
            raise InvariantError(f"request {request_id!r} has {len(tokens.token_ids)} tokens, and {end} are spoken of")
        parent = numbers[-1] if numbers else tokens.root
        for position in range(len(numbers), end):
            keys = tokens.items.get(position, ())
            parent = self._prefixes.number(parent, tokens.token_ids[position], keys)
            numbers.append(parent)
        return numbers

    def _wrong_now(self) -> Iterator[WrongRead]:
        """Compare what each row of the step has read with its own tokens."""
        for read in self._reads:
            yield from self._compare(read) if self.rows_see_each_other else self._early.get(read.request_id, ())

    def _compare(self, read: _Read) -> Iterator[WrongRead]:
        """Compare the slots before ``read.end``, as they are now, with the reader's own tokens."""
        size = self.block_size
        for start in range(0, read.end, size):
            stop = min(start + size, read.end)
            block_id = read.table[start // size]
            held = self._blocks[block_id].numbers
            # One comparison of lists for each block; slots are looked at one by one only where it fails.
            if held[: stop - start] == read.numbers[start:stop]:
                continue
            for position in range(start, stop):
                number = read.numbers[position]
                if held[position - start] != number:
                    found = self._written(block_id, position - start)
                    yield WrongRead(self._step, read.request_id, block_id, position, found, self._kv(number))

    def _settle_reads(self) -> None:
        """All rows of the step have written: what they read is certain."""
        self._wrong.extend(self._wrong_now())
        self._num_settled += sum(read.end for read in self._reads)
        self._reads.clear()

    def _engine_started(self, e: ev.EngineStarted) -> None:
        self.block_size = e.block_size
        self._blocks = {
            block_id: _Block([_NEVER] * e.block_size, [("", 0)] * e.block_size)
            for block_id in range(1, e.num_blocks + 1)
        }

    def _request_arrived(self, e: ev.RequestArrived) -> None:
        items: dict[int, _Keys] = {}
        others: list[tuple[str | int, ...]] = []
        for key in e.extra_keys:
            if len(key) == 4:  # a multimodal item: kind, content hash, first token, number of tokens
                items[key[2]] = (*items.get(key[2], ()), key)
            else:
                others.append(key)
        root = self._prefixes.number(_NEVER, None, tuple(others))
        self._tokens[e.request_id] = _Tokens(list(e.prompt_token_ids), items, root)
        self._tables[e.request_id] = []

    def _token_out(self, e: ev.TokenOut) -> None:
        self._tokens[e.request_id].token_ids.append(e.token_id)

    def _request_ended(self, e: ev.RequestFinished | ev.RequestAborted | ev.RequestFailed) -> None:
        self._tokens.pop(e.request_id, None)  # one that never arrived has none
        self._tables.pop(e.request_id, None)

    def _blocks_added(self, e: ev.BlocksHit | ev.BlocksAllocated | ev.BlocksAdopted) -> None:
        self._tables[e.request_id].extend(e.block_ids)

    def _blocks_freed(self, e: ev.BlocksFreed) -> None:
        self._tables[e.request_id] = []  # a new list: reads of this step still hold the old one

    def _samples_forked(self, e: ev.SamplesForked) -> None:
        for request_id in e.sample_ids:
            self._tables[request_id] = list(e.block_ids)

    def _block_copied(self, e: ev.BlockCopied) -> None:
        table = self._tables[e.request_id]
        table[table.index(e.source_block_id)] = e.block_id
        self._copies.append(e)

    def _step_scheduled(self, e: ev.StepScheduled) -> None:
        """Do the step's copies, all sources first; a row that was taken back by preemption copies nothing."""
        rows = {row[0] for row in e.rows}
        sources = [(c.block_id, self._blocks[c.source_block_id]) for c in self._copies if c.request_id in rows]
        copies = {target: _Block(list(block.numbers), list(block.writers)) for target, block in sources}
        self._blocks.update(copies)
        self._copies.clear()
        if not self.rows_see_each_other:
            self._early = {row[0]: list(self._compare(self._read(row[0], row[1]))) for row in e.rows}

    def _chunk_computed(self, e: ev.ChunkComputed) -> None:
        read = self._read(e.request_id, e.start + e.num_tokens)
        writer = (e.request_id, e.step)
        for position in range(e.start, read.end):
            block, offset = self._blocks[read.table[position // self.block_size]], position % self.block_size
            block.numbers[offset] = read.numbers[position]
            block.writers[offset] = writer
        self._reads.append(read)

    def _read(self, request_id: str, end: int) -> _Read:
        table = self._tables[request_id]
        if len(table) * self.block_size < end:
            raise InvariantError(f"request {request_id!r} computes {end} tokens and holds {len(table)} blocks")
        return _Read(request_id, table, self._numbers_up_to(request_id, end), end)

    def _blocks_published(self, e: ev.BlocksPublished) -> None:
        size = self.block_size
        for block_id, block_hash, index in zip(e.block_ids, e.block_hashes, e.indices, strict=True):
            numbers = self._numbers_up_to(e.request_id, (index + 1) * size)[index * size : (index + 1) * size]
            self._published[block_id] = _Published(e.request_id, index, block_hash, numbers)

    def _blocks_forgotten(self, e: ev.BlocksEvicted | ev.CacheReset) -> None:
        for block_id in e.block_ids:
            del self._published[block_id]


_FOLDS: dict[type[ev.Event], Callable[[KVContents, Any], None]] = {
    ev.EngineStarted: KVContents._engine_started,
    ev.RequestArrived: KVContents._request_arrived,
    ev.TokenOut: KVContents._token_out,
    ev.RequestFinished: KVContents._request_ended,
    ev.RequestAborted: KVContents._request_ended,
    ev.RequestFailed: KVContents._request_ended,
    ev.BlocksHit: KVContents._blocks_added,
    ev.BlocksAllocated: KVContents._blocks_added,
    ev.BlocksAdopted: KVContents._blocks_added,
    ev.BlocksFreed: KVContents._blocks_freed,
    ev.SamplesForked: KVContents._samples_forked,
    ev.BlockCopied: KVContents._block_copied,
    ev.StepScheduled: KVContents._step_scheduled,
    ev.ChunkComputed: KVContents._chunk_computed,
    ev.BlocksPublished: KVContents._blocks_published,
    ev.BlocksEvicted: KVContents._blocks_forgotten,
    ev.CacheReset: KVContents._blocks_forgotten,
}
# Preemption is BlocksFreed; what the request computes again comes as new chunks. All other events touch no slot.


def kv_contents(
    log: Iterable[ev.Event], until_seq: int | None = None, *, rows_see_each_other: bool = True
) -> KVContents:
    """Return what the pool holds after all events, or after those with a number below ``until_seq``."""
    contents = KVContents(rows_see_each_other=rows_see_each_other)
    for event in log:
        if until_seq is not None and event.seq >= until_seq:
            break
        contents.take(event)
    return contents
