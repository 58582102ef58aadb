"""The slow, obvious models that the engine is held against.

`SlowCache` knows what is findable, where, in how many block tables, and what is forgotten next: a dictionary from
token tuples to pages, and plain lists that are searched. It hashes nothing and links nothing. `SlotRunner` knows
what every slot of the pool holds: a row that would read K/V of other tokens, or K/V that was never written, is
found out in the step in which it does. Both follow the engine's log or its steps; neither may look into the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from minivllm.config import EngineConfig
from minivllm.engine.core import EngineCore
from minivllm.errors import RowError
from minivllm.log import events as ev
from minivllm.request import ExtraKeys
from minivllm.runners.virtual import VirtualRunner
from minivllm.step import Phase, ScheduledRow, ScheduledStep

Content = tuple[ExtraKeys, tuple[int, ...]]
"""What a full block stands for: the extra keys that matter up to its end, and all tokens up to there."""


class Mismatch(AssertionError):
    """The engine does not agree with what is right.

    ``kind`` names what was compared. ``check`` is one line of Python about ``core`` that fails where the engine is
    wrong, None if no look at the engine shows it.
    """

    def __init__(self, kind: str, why: str, check: str | None = None) -> None:
        super().__init__(f"{kind}: {why}")
        self.kind = kind
        self.check = check


def expect(kind: str, expression: str, found: object, expected: object) -> None:
    """Compare. ``expression`` is what a notebook would write to get ``found`` of a ``core``, or words for it."""
    if found != expected:
        check = f"assert {expression} == {expected!r}" if "core" in expression else None
        raise Mismatch(kind, f"{expression} is {found!r}, and {expected!r} is right", check)


def last_of(event: ev.Event, field_name: str) -> str:
    """Return the expression of a field of the last event like this one."""
    name = getattr(event, "request_id", None)
    of = "" if name is None else f" and e.request_id == {name!r}"
    return f"[e.{field_name} for e in core.log if e.kind == {event.kind!r}{of}][-1]"


# --- What is in the cache ---------------------------------------------------------------------------------


@dataclass(slots=True)
class _Asked:
    """What the model knows of a request. ``num_settled`` blocks are never published again."""

    tokens: list[int]
    keys: ExtraKeys
    num_prompt: int
    max_tokens: int
    rank: int
    num_computed: int = 0
    num_recovered: int = 0
    num_adopted: int = 0
    num_settled: int = 0
    was_admitted: bool = False
    has_ended: bool = False
    pages: list[int] = field(default_factory=list)


class SlowCache:
    """Follows the log and says, of each block event, what it had to be.

    From the log it takes who arrived, ran, generated, was preempted and ended, and how many new pages a row asked for.
    What is recovered, adopted, published, evicted and freed, and in which order, it finds on its own. (Of a weak hash
    it does not know which contents collide; so there the log says what is published, and all else follows as before.)
    """

    def __init__(self, config: EngineConfig) -> None:
        self.size = config.block_size
        self.config = config
        self.publication, self.coordination = str(config.publication), str(config.coordination)
        self.is_weak = str(config.block_hash).startswith("weak")
        self.num_reserved = int(config.watermark * config.num_blocks)
        self.free = list(range(1, config.num_blocks + 1))
        self.published: dict[Content, int] = {}
        self.asked: dict[str, _Asked] = {}
        self.running: list[str] = []
        self.awaiting: dict[str, str] = {}
        self.flights: dict[int, list[str]] = {}
        self.queried = 0
        self._evicted: list[int] = []
        self._preempted_in = -1
        self._shown_in = -1
        self._admitting = ""
        self._names: dict[str, Content] = {}

    # -- Questions -----------------------------------------------------------------------------------------

    def users(self, page: int) -> int:
        """Return how many block tables a page is in."""
        return sum(page in asked.pages for asked in self.asked.values())

    def content(self, asked: _Asked, end: int) -> Content:
        """Return what the block that ends at ``end`` stands for: an image counts from its first token on."""
        keys = tuple(key for key in asked.keys if len(key) == 2 or key[2] < end)
        return keys, tuple(asked.tokens[:end])

    def found(self, asked: _Asked, start: int) -> list[int]:
        """Return the pages that follow the first ``start`` tokens, up to the first miss; one token is always left."""
        pages = []
        end = start + self.size
        while end < len(asked.tokens) and (page := self.published.get(self.content(asked, end))) is not None:
            pages.append(page)
            end += self.size
        return pages

    # -- The log -------------------------------------------------------------------------------------------

    def take(self, event: ev.Event) -> None:
        """Follow one event. Raises Mismatch if it is not what had to come."""
        match event:
            case ev.PoliciesChanged(publication=publication, coordination=coordination):
                self.publication, self.coordination = publication, coordination
            case ev.RequestArrived(request_id=name, prompt_token_ids=prompt, extra_keys=keys):
                self.asked[name] = _Asked(list(prompt), keys, len(prompt), event.max_tokens, event.rank)
            case ev.RequestAdmitted(request_id=name):
                if self._preempted_in == event.step:
                    raise Mismatch("admission", f"{name} was admitted in a step that preempted")
                self.running.append(name)
                self._admitting = name
            case ev.PrefixLookedUp():
                self._look_up(event)
            case ev.BlocksHit(request_id=name, block_ids=ids):
                expect("hits", last_of(event, "block_ids"), list(ids), self.asked[name].pages)
            case ev.BlocksAdopted():
                self._adopt(event)
            case ev.BlocksEvicted(block_ids=ids):
                self._evicted = list(ids)
            case ev.BlocksAllocated(request_id=name, block_ids=ids):
                pages = self._pop(len(ids))
                expect("allocated", last_of(event, "block_ids"), list(ids), pages)
                self.asked[name].pages.extend(pages)
                if name == self._admitting:
                    self._admitting = ""
                    if len(self.running) > 1 and len(self.free) < self.num_reserved:
                        raise Mismatch("admission", f"{name} was admitted below the watermark")
            case ev.BlockCopied():
                self._copy(event)
            case ev.BlocksPublished() | ev.BlocksDuplicated():
                self._shown(event.request_id, event.block_ids, event.step)
                if self.is_weak and isinstance(event, ev.BlocksPublished):
                    self._take_as_published(event)
            case ev.StepScheduled(rows=rows):
                self._scheduled(event, rows)
            case ev.ChunkComputed(request_id=name, start=start, num_tokens=count):
                self._computed(name, start, count)
            case ev.TokenOut(request_id=name, token_id=token_id):
                asked = self.asked[name]
                asked.tokens.append(token_id)
                if len(asked.tokens) == asked.num_prompt + asked.max_tokens:  # its end follows, and is a normal one
                    self._publish(name, asked.num_computed)
            case ev.FlightOpened() | ev.FlightJoined() | ev.FlightHandedOver() | ev.FlightLeft() | ev.FlightReleased():
                self._fly(event)
            case ev.PrefixAwaited(request_id=name, leader_id=leader, block_index=index):
                self._await(name, leader, (index + 1) * self.size)
            case ev.PrefixReleased(request_ids=names):
                for name in names:
                    del self.awaiting[name]
            case ev.SamplesForked(request_id=name, sample_ids=samples):
                self._fork(name, samples)
            case ev.BlocksFreed():
                self._freed(event)
            case ev.RequestPreempted(request_id=name):
                self._preempt(event, name)
            case ev.RequestFinished() | ev.RequestAborted() | ev.RequestFailed():
                self._ended(event.request_id)
            case ev.CacheReset(block_ids=ids):
                expect("reset", last_of(event, "block_ids"), sorted(ids), sorted(self.published.values()))
                if len(self.free) < self.config.num_blocks:
                    raise Mismatch("reset", "the cache was reset while blocks were in use")
                self.published.clear()

    def _look_up(self, event: ev.PrefixLookedUp) -> None:
        asked = self.asked[event.request_id]
        pages = self.found(asked, 0)
        queried = len(asked.tokens) if self.config.enable_prefix_caching else 0
        expect("queried", last_of(event, "num_queried_tokens"), event.num_queried_tokens, queried)
        recovered = len(pages) * self.size
        expect("recovered", last_of(event, "num_recovered_tokens"), event.num_recovered_tokens, recovered)
        expect("resumed", last_of(event, "resumed"), event.resumed, asked.was_admitted)
        if self.config.admission == "whole-prompt" and not self._has_room_for_all(asked, pages):
            raise Mismatch("admission", f"{event.request_id} was admitted without room for its whole prompt")
        self._share(asked, pages)
        asked.num_computed = recovered
        if not asked.was_admitted:
            asked.num_recovered = recovered
            asked.was_admitted = True
            self.queried += queried

    def _has_room_for_all(self, asked: _Asked, pages: list[int]) -> bool:
        """Whether one that was just admitted beside others has room for all of its tokens; alone it needs none."""
        needed = -(-len(asked.tokens) // self.size) - len(pages) + sum(page in self.free for page in pages)
        return len(self.running) == 1 or needed + self.num_reserved + self._promised(asked) <= len(self.free)

    def _promised(self, but: _Asked) -> int:
        """Return how many pages those that run are still to get for the tokens that they were admitted with."""
        others = [asked for name in self.running if (asked := self.asked[name]) is not but]
        return sum(-(-len(asked.tokens) // self.size) - len(asked.pages) for asked in others)

    def computed(self) -> set[Content]:
        """Return what all full blocks stand for that are computed, found or not."""
        return {
            self.content(asked, end)
            for asked in self.asked.values()
            for end in range(self.size, asked.num_computed + 1, self.size)
        }

    def must_admit(self, name: str, budget: int, limit: int) -> bool:
        """Whether the head of the waiting list would have found room for a chunk, with so much of the step left."""
        asked = self.asked[name]
        pages = self.found(asked, 0)
        start = len(pages) * self.size
        count = min(len(asked.tokens) - start, budget, limit)
        end = start + count
        if self.config.adoption and end < len(asked.tokens) and end // self.size * self.size > start:
            end = end // self.size * self.size
        spare = self.num_reserved if self.running else 0
        if self.config.admission == "whole-prompt" and self.running:
            end = len(asked.tokens)
            spare += self._promised(asked)
        needed = -(-end // self.size) - len(pages) + sum(page in self.free for page in pages)
        return needed + spare <= len(self.free)

    def _adopt(self, event: ev.BlocksAdopted) -> None:
        asked = self.asked[event.request_id]
        if not self.config.adoption or asked.num_computed % self.size:
            raise Mismatch("adopted", f"{event.request_id} adopts where it must not", "core.check_invariants()")
        pages = self.found(asked, asked.num_computed)
        expect("adopted", last_of(event, "block_ids"), list(event.block_ids), pages)
        expect("adopted", last_of(event, "num_tokens"), event.num_tokens, len(pages) * self.size)
        self._share(asked, pages)
        asked.num_computed += event.num_tokens
        asked.num_adopted += event.num_tokens

    def _share(self, asked: _Asked, pages: Iterable[int]) -> None:
        for page in pages:
            if page in self.free:
                self.free.remove(page)
            asked.pages.append(page)

    def _pop(self, count: int) -> list[int]:
        """Take pages from the left of the free list; what they held is forgotten, and the log said so before."""
        pages, self.free = self.free[:count], self.free[count:]
        evicted = [page for page in pages if page in self.published.values()]
        if self._evicted != evicted:
            raise Mismatch("evicted", f"the log says that pages {self._evicted} were evicted; {evicted} is right")
        self._evicted = []
        self.published = {content: page for content, page in self.published.items() if page not in evicted}
        return pages

    def _copy(self, event: ev.BlockCopied) -> None:
        asked = self.asked[event.request_id]
        place, num_tokens = divmod(asked.num_computed, self.size)
        expect("copied", last_of(event, "source_block_id"), event.source_block_id, asked.pages[place])
        expect("copied", last_of(event, "num_tokens"), event.num_tokens, num_tokens)
        if self.users(event.source_block_id) < 2:
            raise Mismatch("copied", f"{event.request_id} copies a block that nobody else reads")
        (page,) = self._pop(1)
        expect("copied", last_of(event, "block_id"), event.block_id, page)
        asked.pages[place] = page

    def _scheduled(self, event: ev.StepScheduled, rows: Iterable[tuple[str, int, int, str]]) -> None:
        """Hold a step's rows against the settings and the block tables."""
        rows = list(rows)
        num_tokens, limit = sum(row[2] for row in rows), self.config.max_num_batched_tokens
        if num_tokens > limit or len(rows) > self.config.max_num_seqs:
            raise Mismatch("limits", f"the step {event.step} has rows {rows}")
        if num_tokens < limit and {row[0] for row in rows} != set(self.running):
            raise Mismatch("rows", f"{self.running} run, and the rows are {rows} with budget left")
        for name, start, count, _ in rows:
            asked, end = self.asked[name], start + count
            if start != asked.num_computed or end > len(asked.tokens):
                raise Mismatch("rows", f"{name} has {asked.num_computed} tokens computed, its row starts at {start}")
            if len(asked.pages) != -(-end // self.size):
                raise Mismatch("rows", f"{name} goes to token {end} with pages {asked.pages}")
            is_unsafe = self.publication == "at-allocation"
            if not is_unsafe and any(self.users(page) > 1 for page in asked.pages[start // self.size :]):
                raise Mismatch("rows", f"{name} writes into a block that others read")
            if is_unsafe:
                if self.config.enable_prefix_caching and not self.is_weak:
                    for stop in range(self.size, end + 1, self.size):
                        if stop > asked.num_settled * self.size and self.content(asked, stop) not in self.published:
                            raise Mismatch("at-allocation", f"{name} does not show its block that ends at {stop}")
            elif self.config.adoption and not start % self.size and self.found(asked, start):
                if self._shown_in == event.step:  # while this step was made, and perhaps after this row was
                    continue
                raise Mismatch("adopted", f"{name} computes from {start} what is there")

    def _computed(self, name: str, start: int, count: int) -> None:
        asked = self.asked[name]
        if start != asked.num_computed:
            raise Mismatch("chunks", f"a chunk of {name} starts at {start}, the last one ended at {asked.num_computed}")
        asked.num_computed += count
        if self.publication == "incremental":
            self._publish(name, asked.num_computed)

    def _shown(self, name: str, ids: tuple[int, ...], step: int) -> None:
        """Blocks became visible before they are computed, or because somebody wants them: the log says when."""
        asked = self.asked[name]
        end = (max(map(asked.pages.index, ids)) + 1) * self.size
        if self.publication == "at-allocation":
            self._publish(name, end)
            self._shown_in = step
        elif end <= asked.num_computed and self._is_wanted(name):
            self._publish(name, max(end, min(asked.num_computed, asked.num_prompt)))  # with it all that is ready
            self._shown_in = step

    def _is_wanted(self, name: str) -> bool:
        """Whether somebody is held for what a request has computed, or would be the next to compute it as well."""
        if name in self.awaiting.values():
            return True
        if self.coordination not in ("shared-prefix", "wait-or-recompute"):
            return False
        leader = self.asked[name]
        ends = range(self.size, min(leader.num_computed, leader.num_prompt) + 1, self.size)
        ready = [self.content(leader, end) for end in ends]
        waiting = [asked for other, asked in self.asked.items() if other not in self.running and not asked.has_ended]
        return any(
            self.content(asked, (len(self.found(asked, 0)) + 1) * self.size) in ready
            for asked in waiting
            if (len(self.found(asked, 0)) + 1) * self.size < len(asked.tokens)
        )

    def _publish(self, name: str, num_tokens: int) -> None:
        """Make the full blocks of the first tokens findable; of two with one content the first one is found."""
        asked = self.asked[name]
        last = num_tokens // self.size
        if not self.config.enable_prefix_caching or last <= asked.num_settled:
            return
        for place in range(asked.num_settled, last) if not self.is_weak else ():
            self.published.setdefault(self.content(asked, (place + 1) * self.size), asked.pages[place])
        asked.num_settled = last

    def _take_as_published(self, event: ev.BlocksPublished) -> None:
        """Under a weak hash the log says what found its hash unused; what is computed, and not there yet, may be it."""
        asked = self.asked[event.request_id]
        for page, place in zip(event.block_ids, event.indices, strict=True):
            end = (place + 1) * self.size
            content = self.content(asked, end)
            if content in self.published or (end > asked.num_computed and self.publication != "at-allocation"):
                raise Mismatch("findable", f"{event.request_id} publishes its block that ends at {end}")
            expect("published", last_of(event, "block_ids"), page, asked.pages[place])
            self.published[content] = page

    def _fork(self, name: str, samples: Iterable[str]) -> None:
        first = self.asked[name]
        for sample in samples:
            asked = self.asked[sample]
            asked.num_computed, asked.num_settled = first.num_computed, first.num_settled
            asked.was_admitted = True  # if it gives way it is resumed; it never asked, so nothing is queried
            asked.pages = list(first.pages)
            self.running.append(sample)

    def _await(self, name: str, leader_id: str, end: int) -> None:
        """One waits for a block that it can use, and that a running one has in its prompt and has not published yet.

        Whoever begins to wait finds all that is computed published; one that goes on to a later block, because another
        has published the one before, may be told so between the computation of that block and its publication.
        """
        asked, leader = self.asked[name], self.asked[leader_id]
        is_coming = self.content(asked, end) == self.content(leader, end)
        is_coming = is_coming and end <= leader.num_prompt
        is_coming = is_coming and (name in self.awaiting or leader.num_computed < end)
        if leader_id not in self.running or not (is_coming or self.is_weak):  # a weak hash stands for others, too
            raise Mismatch("awaited", f"{name} waits for its block that ends at {end}, and {leader_id} is not on it")
        if end >= len(asked.tokens) or name in self.running:
            raise Mismatch("awaited", f"{name} waits for its block that ends at {end}, and has no use for it")
        self.awaiting[name] = leader_id

    def _fly(self, event: ev.Event) -> None:
        """Follow the flights: those in one have one prompt and the same extra keys, and the oldest leads."""
        match event:
            case ev.FlightOpened(flight_id=flight, leader_id=name):
                if any(self._key(names[0]) == self._key(name) for names in self.flights.values()):
                    raise Mismatch("flights", f"{name} opens a second flight of its prompt")
                self.flights[flight] = [name]
                self._misses_something(name)
            case ev.FlightJoined(flight_id=flight, request_id=name):
                if self._key(self.flights[flight][0]) != self._key(name):
                    raise Mismatch("flights", f"{name} waits for a leader with another prompt or other keys")
                self.flights[flight].append(name)
                self._misses_something(name)
            case ev.FlightHandedOver(flight_id=flight, from_id=old, to_id=new):
                expect("flights", "who hands over to whom", (old, new), tuple(self.flights[flight][:2]))
                del self.flights[flight][0]
            case ev.FlightLeft(flight_id=flight, request_id=name):
                self.flights[flight].remove(name)
            case ev.FlightReleased(flight_id=flight, leader_id=name, request_ids=names, reason=reason):
                expect("flights", last_of(event, "request_ids"), (name, *names), tuple(self.flights.pop(flight)))
                if reason == "prefill":
                    self._publish(name, self.asked[name].num_prompt)

    def _misses_something(self, name: str) -> None:
        """A request is coordinated only for blocks that it could use and cannot find now."""
        asked = self.asked[name]
        if not self.is_weak and len(self.found(asked, 0)) >= (asked.num_prompt - 1) // self.size:
            raise Mismatch("flights", f"{name} is in a flight and can find all that it could ever use")

    def _key(self, name: str) -> tuple[ExtraKeys, tuple[int, ...]]:
        asked = self.asked[name]
        return asked.keys, tuple(asked.tokens[: asked.num_prompt])

    def _freed(self, event: ev.BlocksFreed) -> None:
        """Free a table from its tail: what nobody else holds goes back into the list."""
        asked = self.asked[event.request_id]
        pages, asked.pages, asked.num_settled = asked.pages[::-1], [], 0
        freed = [page for page in pages if not self.users(page)]
        plain = [page for page in freed if page not in self.published.values()]
        named = [page for page in freed if page in self.published.values()]
        front, back = (plain, named) if self.config.eviction == "lru" else ([*plain, *named], [])
        expect("freed", last_of(event, "to_front"), event.to_front, tuple(front))
        expect("freed", last_of(event, "to_back"), event.to_back, tuple(back))
        self.free = [*front, *self.free, *back]

    def _preempt(self, event: ev.RequestPreempted, name: str) -> None:
        asked = self.asked[name]
        expect("preempted", last_of(event, "num_computed_tokens"), event.num_computed_tokens, asked.num_computed)
        worst = max(self.asked[other].rank for other in self.running)
        victim = [other for other in self.running if self.asked[other].rank == worst][-1]
        expect("victim", last_of(event, "request_id").replace(f" and e.request_id == {name!r}", ""), name, victim)
        self.running.remove(name)
        asked.num_computed = 0
        self._preempted_in = event.step

    def _ended(self, name: str) -> None:
        if name in self.running:
            self.running.remove(name)
        self.awaiting.pop(name, None)
        asked = self.asked.get(name)
        if asked is None:  # it ended before it arrived
            return
        asked.has_ended = True
        if asked.pages:
            raise Mismatch("freed", f"{name} has ended and holds pages {asked.pages}")

    # -- The engine's own state ----------------------------------------------------------------------------

    def compare(self, core: EngineCore) -> None:
        """Raise Mismatch unless the engine's own state is what the model says: between two steps."""
        state = core.state()
        expect("free order", "list(core.state().free_queue)", list(state.free_queue), self.free)
        found = sorted(state.prefix_index.values())
        expect("findable", "sorted(core.state().prefix_index.values())", found, sorted(self.published.values()))
        names = {page: name for name, page in state.prefix_index.items()}
        for content, page in self.published.items():
            if not self.is_weak and self._names.setdefault(names[page], content) != content:
                raise Mismatch("findable", f"hash {names[page]} stands for {content} and {self._names[names[page]]}")
        tables = {name: asked.pages for name, asked in self.asked.items() if asked.pages}
        expect(
            "tables",
            "{i: r.block_ids for i, r in core.state().requests.items() if r.block_ids}",
            {name: view.block_ids for name, view in state.requests.items() if view.block_ids},
            tables,
        )
        counts = {page: block.ref_count for page, block in state.blocks.items() if block.ref_count}
        right: dict[int, int] = {}
        for pages in tables.values():
            for page in pages:
                right[page] = right.get(page, 0) + 1
        expect(
            "counts",
            "dict(sorted((i, b.ref_count) for i, b in core.state().blocks.items() if b.ref_count))",
            dict(sorted(counts.items())),
            dict(sorted(right.items())),
        )
        expect("running", "core.state().running", state.running, self.running)
        for name, asked in self.asked.items():
            view = state.requests[name]
            what = f"core.requests[{name!r}]"
            expect("recovered", f"{what}.num_recovered_tokens", view.num_recovered_tokens, asked.num_recovered)
            expect("adopted", f"{what}.num_adopted_tokens", view.num_adopted_tokens, asked.num_adopted)


# --- What is in the slots ---------------------------------------------------------------------------------


class Fault(RuntimeError):
    """What a device would raise."""


SPOILT = 0
"""What a slot holds after a row came out as NaN."""


class SlotRunner(VirtualRunner):
    """A virtual runner with a pool: each slot holds a code for all tokens and extra keys up to its own.

    ``in_step`` is called once, with the next step, between scheduling and computing. ``spoil`` are requests whose
    rows come out as NaN in that step (of a further sample only its own result); ``spoilt`` are those that this hit.
    ``break_with`` gets a step's tokens and may change them, or raise. While ``is_strict``, reading another's K/V is
    an error; it is counted in ``num_wrong_reads`` in any case.
    """

    def __init__(self) -> None:
        super().__init__()
        self.in_step: Callable[[ScheduledStep], None] | None = None
        self.break_with: Callable[[dict[str, int | RowError]], None] | None = None
        self.spoil: frozenset[str] = frozenset()
        self.is_strict = True
        self.num_wrong_reads = 0
        self.spoilt: list[str] = []
        self._block_size = 0
        self._num_blocks = 0
        self._slots: dict[tuple[int, int], int] = {}
        self._codes: dict[str, list[int]] = {}

    def allocate(self, num_blocks: int, block_size: int) -> None:
        self._num_blocks, self._block_size = num_blocks, block_size

    def execute(self, step: ScheduledStep) -> dict[str, int | RowError]:
        if self.in_step is not None:
            in_step, self.in_step = self.in_step, None
            in_step(step)
        spoil, self.spoil = self.spoil, frozenset()
        rows = [row for row in step.rows if not row.is_withdrawn]
        self._check_step(step)
        self._copy(step)
        writers: dict[int, str] = {}
        for row in rows:
            self._check_row(row)
            self._write(row, writers, spoilt=row.request_id in spoil)
        for row in rows:
            if row.request_id not in spoil:
                self._read(row, writers)
        drawn = super().execute(step)
        for row in rows:
            for request in row.sampled or (row.request,):
                if row.request_id in spoil or (request.request_id in spoil and not request.state.is_ended):
                    self.spoilt.append(request.request_id)
                    drawn[request.request_id] = RowError(f"the logits of {request.request_id} are not finite")
        if self.break_with is not None:
            self.break_with(drawn)
        return drawn

    def forget(self, request_id: str) -> None:
        super().forget(request_id)
        self._codes.pop(request_id, None)

    def _check_step(self, step: ScheduledStep) -> None:
        phases = [row.phase is Phase.DECODE for row in step.rows]
        targets = [copy.target for copy in step.copies]
        for is_right, why in (
            (bool(step.rows), "a step has no rows"),
            (len({row.request_id for row in step.rows}) == len(step.rows), "a request has two rows"),
            (phases == sorted(phases, reverse=True), "a row in decode stands behind a prefill"),
            (len(set(targets)) == len(targets), "two copies go to one block"),
        ):
            if not is_right:
                raise Mismatch("step", why)

    def _check_row(self, row: ScheduledRow) -> None:
        end, ids = row.start + row.num_tokens, row.block_ids
        names = [request.request_id for request in row.sampled]
        decodes = row.num_tokens == 1 and bool(row.request.output_token_ids)
        for is_right, why in (
            (row.num_tokens > 0, "computes nothing"),
            (len(ids) == -(-end // self._block_size), "has a block table that is too long or too short"),
            (len(set(ids)) == len(ids), "has a block in its table twice"),
            (all(1 <= block_id <= self._num_blocks for block_id in ids), "has a block that does not exist"),
            (row.samples == (end == row.request.num_tokens), "draws a token too early or not at all"),
            (not names or names[0] == row.request_id, "draws for others and not for itself"),
            (len(set(names)) == len(names), "draws for somebody twice"),
            (len(row.token_ids) == row.num_tokens, "has more or fewer tokens than it says"),
            (row.phase is Phase.PREFILL or decodes, "is no decode"),
        ):
            if not is_right:
                raise Mismatch("step", f"the row of {row.request_id} {why}")

    def _copy(self, step: ScheduledStep) -> None:
        """All sources are read before any target is written."""
        copied = {
            (copy.target, place): self._slots.get((copy.source, place))
            for copy in step.copies
            for place in range(self._block_size)
        }
        for slot, code in copied.items():
            if code is None:
                self._slots.pop(slot, None)
            else:
                self._slots[slot] = code

    def _write(self, row: ScheduledRow, writers: dict[int, str], *, spoilt: bool) -> None:
        codes, size, name = self._codes_of(row), self._block_size, row.request_id
        for position in range(row.start, row.start + row.num_tokens):
            block_id = row.block_ids[position // size]
            if writers.setdefault(block_id, name) != name:
                self._wrong(f"{writers[block_id]} and {name} write block {block_id} in one step")
            self._slots[block_id, position % size] = SPOILT if spoilt else codes[position]

    def _read(self, row: ScheduledRow, writers: dict[int, str]) -> None:
        codes, size, name = self._codes_of(row), self._block_size, row.request_id
        for block_id in row.block_ids:
            if writers.get(block_id, name) != name:
                self._wrong(f"{name} reads block {block_id}, which {writers[block_id]} writes in this step")
        for position in range(row.start + row.num_tokens):
            slot = row.block_ids[position // size], position % size
            if self._slots.get(slot) != codes[position]:
                self._wrong(f"{name} reads other K/V than its own at position {position}, in block {slot[0]}")
                return

    def _wrong(self, why: str) -> None:
        self.num_wrong_reads += 1
        if self.is_strict:
            raise Mismatch("reads", why)

    def _codes_of(self, row: ScheduledRow) -> list[int]:
        """Return, for each position of the request, a number that depends on all that its K/V depends on."""
        request = row.request
        codes = self._codes.setdefault(request.request_id, [])
        if len(codes) < row.start + row.num_tokens:
            pairs = tuple(key for key in request.extra_keys if len(key) == 2)
            begins = {key[2]: key for key in request.extra_keys if len(key) == 4}
            code = codes[-1] if codes else hash(pairs)
            for position in range(len(codes), len(request.token_ids)):
                code = hash((code, request.token_ids[position], begins.get(position))) or 1
                codes.append(code)
        return codes
