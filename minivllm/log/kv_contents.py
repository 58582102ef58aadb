"""What every slot of the pool holds, and who has read what there, as a pure fold over the log.

The prefix index says which block is found under which hash. This fold says what was really written:

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
from typing import Any

from minivllm.errors import InvariantError
from minivllm.log import events as ev
from minivllm.log.kv_reads import KV, NEVER, Keys, Prefixes, UnwrittenBlock, Written, WrongRead, sentences

# --- What a slot holds ------------------------------------------------------------------------------------


# --- What was wrong ---------------------------------------------------------------------------------------


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
    items: dict[int, Keys]
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
        self._prefixes = Prefixes()
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
        return None if number == NEVER else Written(self._kv(number), *block.writers[offset])

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
            block_id: _Block([NEVER] * e.block_size, [("", 0)] * e.block_size)
            for block_id in range(1, e.num_blocks + 1)
        }

    def _request_arrived(self, e: ev.RequestArrived) -> None:
        items: dict[int, Keys] = {}
        others: list[tuple[str | int, ...]] = []
        for key in e.extra_keys:
            if len(key) == 4:  # a multimodal item: kind, content hash, first token, number of tokens
                items[key[2]] = (*items.get(key[2], ()), key)
            else:
                others.append(key)
        root = self._prefixes.number(NEVER, None, tuple(others))
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
