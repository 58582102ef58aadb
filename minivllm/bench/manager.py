"""What the cache manager itself costs: hashing, allocating, publishing, looking up, taking hits, freeing.

One prompt of many full blocks and one token more goes through the real `KVCacheManager`, with a real log behind it, and
through an obvious manager (a dictionary of token tuples, a list as the queue) in turn: run by run, so that both meet
the same machine. Then thousands of requests share half of their blocks in a full pool, to see whether the cost of one
grows. No model, no MLX and no engine. The one place beside the clock that reads the time.
"""

from __future__ import annotations

import functools
import gc
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from minivllm.bench.manager_report import GrowthCost, ManagerBench, Operation, OperationCost, Spread
from minivllm.bench.reference_manager import ObviousManager
from minivllm.cache.block_hash import BLOCK_HASHERS, SHA256, BlockHasher
from minivllm.cache.block_pool import Block
from minivllm.cache.block_table import NOTHING_COMPUTED, ComputedBlocks
from minivllm.cache.eviction.lru import LRU
from minivllm.cache.kv_cache_manager import KVCacheManager
from minivllm.cache.prefix_index.hash_map import HashMapIndex
from minivllm.clock import WallClock
from minivllm.errors import ConfigError, InvariantError
from minivllm.log import events as ev
from minivllm.log.event_log import EventLog
from minivllm.request import Request

OnProgress = Callable[[str, int, int], None]
"""Called with what is being measured, how much of it is done, and how much there is in all."""

_SPARE_BLOCKS = 1024
_SHARING_WINDOW = 500


# -- The result --------------------------------------------------------------------------------------------


# -- What is measured --------------------------------------------------------------------------------------


class _Subject(Protocol):
    """A manager, with the moves that are timed. A prompt is known by its number."""

    def hash(self, number: int, tokens: list[int]) -> None: ...

    def allocate_and_publish(self, number: int) -> None: ...

    def look_up(self, number: int) -> int:
        """Return how many blocks were found."""
        ...

    def take_hits(self, number: int) -> None:
        """Take what `look_up` found, and one block for the last token."""
        ...

    def free(self, number: int) -> None: ...


class _RealManager:
    """`KVCacheManager`, called as the scheduler calls it."""

    def __init__(
        self, num_blocks: int, block_size: int, emit: Callable[[ev.Event], None], hasher: BlockHasher = SHA256
    ) -> None:
        self.manager = KVCacheManager(num_blocks, block_size, HashMapIndex(), LRU(), emit, hasher=hasher)
        self.requests: dict[int, Request] = {}
        self.found: dict[int, ComputedBlocks] = {}

    def prepare(self, number: int, tokens: list[int]) -> None:
        """Make the request, which is not the manager's work."""
        self.requests[number] = Request(f"r{number}", tuple(tokens))

    def hash(self, number: int, tokens: list[int]) -> None:
        self.manager.chain_hashes(self.requests[number])

    def allocate_and_publish(self, number: int) -> None:
        request = self.requests[number]
        self.manager.allocate_slots(request, request.num_tokens)
        request.num_computed_tokens = request.num_tokens
        self.manager.publish(request, request.num_tokens)

    def look_up(self, number: int) -> int:
        self.found[number] = self.manager.get_computed_blocks(self.requests[number])
        return len(self.found[number].block_ids)

    def take_hits(self, number: int) -> None:
        self.manager.allocate_slots(self.requests[number], 1, self.found[number])

    def free(self, number: int) -> None:
        self.manager.free(self.requests[number])


_Times = dict[Operation, float]


def _timed(times: _Times, operation: Operation, call: Callable[[], Any], per: int = 1) -> Any:
    """Call it, write down how many µs it took, and return its answer."""
    start = time.perf_counter_ns()
    answer = call()
    times[operation] = (time.perf_counter_ns() - start) / 1000 / per
    return answer


def _one_run(subject: _Subject, tokens: list[int], num_blocks: int) -> _Times:
    """Send one prompt through three times: cold, beside the first one, and after it.

    Raises InvariantError if what is timed did not happen: a look-up that finds less than every full block.
    """
    times: _Times = {}

    def found(number: int, count: int) -> None:
        if count != num_blocks:
            raise InvariantError(f"prompt {number} should have found {num_blocks} blocks, and found {count}")

    _timed(times, Operation.HASH, lambda: subject.hash(0, tokens), per=num_blocks)
    _timed(times, Operation.COLD, lambda: subject.allocate_and_publish(0))
    subject.hash(1, tokens)
    found(1, _timed(times, Operation.LOOK_UP, lambda: subject.look_up(1)))
    _timed(times, Operation.HITS_IN_USE, lambda: subject.take_hits(1))
    _timed(times, Operation.FREE_SHARED, lambda: subject.free(1))
    _timed(times, Operation.FREE_LAST, lambda: subject.free(0))
    subject.hash(2, tokens)
    found(2, subject.look_up(2))
    _timed(times, Operation.HITS_FREE, lambda: subject.take_hits(2))
    subject.free(2)
    return times


def _run_real(
    tokens: list[int], num_blocks: int, block_size: int, emit: Callable[[ev.Event], None], hasher: BlockHasher = SHA256
) -> _Times:
    subject = _RealManager(num_blocks + _SPARE_BLOCKS, block_size, emit, hasher)
    for number in range(3):
        subject.prepare(number, tokens)
    times = _one_run(subject, tokens, num_blocks)
    subject.manager.check_invariants()
    return times


# -- What events cost --------------------------------------------------------------------------------------


def _events_of_run(log: EventLog) -> dict[Operation, list[ev.Event]]:
    """Say which events each operation of `_one_run` left in the log."""
    hit, allocated = ([e for e in log if isinstance(e, kind)] for kind in (ev.BlocksHit, ev.BlocksAllocated))
    published, freed = ([e for e in log if isinstance(e, kind)] for kind in (ev.BlocksPublished, ev.BlocksFreed))
    return {
        Operation.COLD: [allocated[0], published[0]],
        Operation.HITS_IN_USE: [hit[0], allocated[1]],
        Operation.FREE_SHARED: [freed[0]],
        Operation.FREE_LAST: [freed[1]],
        Operation.HITS_FREE: [hit[1], allocated[2]],
    }


def _time_events(log: EventLog, again: EventLog) -> _Times:
    """Make each operation's events once more, from blocks and digests as the manager has them, and keep them."""
    times: _Times = {}
    blocks: dict[int, Block] = {}
    digests: dict[str, bytes] = {}
    for operation, events in _events_of_run(log).items():
        for event in events:
            for block_id in _ids_in(event):
                blocks.setdefault(block_id, Block(block_id))
            if isinstance(event, ev.BlocksPublished):
                digests.update((name, bytes.fromhex(name)) for name in event.block_hashes)
        makers = [_maker(event, blocks, digests) for event in events]
        _timed(times, operation, functools.partial(_keep, again, makers))
    return times


def _keep(log: EventLog, makers: Sequence[Callable[[], ev.Event]]) -> None:
    for make in makers:
        log.append(make())


def _ids_in(event: ev.Event) -> tuple[int, ...]:
    match event:
        case ev.BlocksFreed(_, to_front, to_back, still_held):
            return (*to_front, *to_back, *still_held)
        case ev.BlocksHit(_, block_ids) | ev.BlocksAllocated(_, block_ids) | ev.BlocksPublished(_, block_ids):
            return block_ids
    raise InvariantError(f"a run has left an event that it should not: {event!r}")


def _maker(event: ev.Event, blocks: dict[int, Block], digests: dict[str, bytes]) -> Callable[[], ev.Event]:
    """Return what makes the event anew. Whatever the manager has at hand is prepared here."""
    match event:
        case ev.BlocksHit(request_id, block_ids):
            return lambda: ev.BlocksHit(request_id, block_ids)
        case ev.BlocksAllocated(request_id, block_ids):
            taken = [blocks[block_id] for block_id in block_ids]
            return lambda: ev.BlocksAllocated(request_id, tuple([block.block_id for block in taken]))
        case ev.BlocksFreed(request_id, to_front, to_back, still_held):
            lists = [[blocks[block_id] for block_id in group] for group in (to_front, to_back, still_held)]
            return lambda: ev.BlocksFreed(request_id, *[tuple([b.block_id for b in group]) for group in lists])
        case ev.BlocksPublished(request_id, block_ids, block_hashes, _, indices):
            full = [blocks[block_id] for block_id in block_ids]
            hashes = [digests[name] for name in block_hashes]

            def published() -> ev.BlocksPublished:
                names = [h.hex() for h in hashes]
                ids = tuple([block.block_id for block in full])
                return ev.BlocksPublished(request_id, ids, tuple(names), ("", *names[:-1]), tuple(indices))

            return published
    raise InvariantError(f"a run has left an event that it should not: {event!r}")


# -- Whether the cost grows --------------------------------------------------------------------------------


def _growth_prompts(num_requests: int, blocks_per_request: int, block_size: int) -> list[list[int]]:
    """Return prompts that share their first half with one of the last few hundred before, drawn from a seed."""
    draw = random.Random(0)
    shared = blocks_per_request // 2 * block_size
    length = blocks_per_request * block_size + 1
    prompts: list[list[int]] = []
    for number in range(num_requests):
        earlier = prompts[draw.randrange(max(0, number - _SHARING_WINDOW), number)][:shared] if number else []
        prompts.append([*earlier, *(draw.getrandbits(17) for _ in range(length - len(earlier)))])
    return prompts


def measure_growth(
    num_requests: int, num_blocks: int, block_size: int, blocks_per_request: int = 20, report: OnProgress | None = None
) -> GrowthCost:
    """Let many requests come and go, one after the other, in a pool that is full of published blocks.

    Each shares the first half of its blocks with an earlier one and evicts what it takes for the rest. Raises
    ConfigError if they are too few to be divided in tenths, or the pool too small to keep what they share.
    """
    if num_requests < 20:
        raise ConfigError(f"num_requests is {num_requests}; the first and the last tenth need 20 or more in all")
    needed = (_SHARING_WINDOW + 1) * (blocks_per_request + 1)
    if num_blocks < needed:
        raise ConfigError(f"num_blocks is {num_blocks:,}; what requests share stays in a pool of {needed:,} or more")
    log = EventLog(WallClock().now_ms)
    manager = KVCacheManager(num_blocks, block_size, HashMapIndex(), LRU(), log.append)
    _fill(manager, num_blocks, block_size)
    start = len(log)
    times = []
    prompts = _growth_prompts(num_requests, blocks_per_request, block_size)
    gc.collect()
    for number, tokens in enumerate(prompts):
        request = Request(f"r{number}", tuple(tokens))
        begun = time.perf_counter_ns()
        computed = manager.get_computed_blocks(request)
        manager.allocate_slots(request, request.num_tokens - computed.num_tokens, computed)
        request.num_computed_tokens = request.num_tokens
        manager.publish(request, request.num_tokens)
        manager.free(request)
        times.append((time.perf_counter_ns() - begun) / 1000)
        if report is not None and (number + 1) % max(1, num_requests // 100) == 0:
            report("growth", number + 1, num_requests)
    manager.check_invariants()
    events = log.since(start)
    tenth = num_requests // 10
    return GrowthCost(
        num_requests,
        num_blocks,
        blocks_per_request,
        sum(len(e.block_ids) for e in events if isinstance(e, ev.BlocksHit)),
        sum(len(e.block_ids) for e in events if isinstance(e, ev.BlocksEvicted)),
        Spread.of(times[:tenth]),
        Spread.of(times[-tenth:]),
    )


def _fill(manager: KVCacheManager, num_blocks: int, block_size: int) -> None:
    """Publish the whole pool, with tokens that no prompt of the measurement begins with."""
    filler = Request("filler", tuple(1 << 20 for _ in range(num_blocks * block_size)))
    manager.allocate_slots(filler, filler.num_tokens, NOTHING_COMPUTED)
    filler.num_computed_tokens = filler.num_tokens
    manager.publish(filler, filler.num_tokens)
    manager.free(filler)


# -- All of it ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Samples:
    """µs by operation, run by run."""

    manager: list[_Times] = field(default_factory=list)
    unlogged: list[_Times] = field(default_factory=list)
    events: list[_Times] = field(default_factory=list)
    obvious: list[_Times] = field(default_factory=list)

    def cost(self, operation: Operation) -> OperationCost:
        """Sum one operation up."""

        def spread(runs: list[_Times]) -> Spread | None:
            values = [times[operation] for times in runs if operation in times]
            return Spread.of(values) if values else None

        manager, unlogged = spread(self.manager), spread(self.unlogged)
        assert manager is not None and unlogged is not None
        return OperationCost(operation, manager, unlogged, spread(self.events), spread(self.obvious))


def run_bench_manager(
    runs: int = 50,
    progress: OnProgress | None = None,
    *,
    num_blocks: int = 1024,
    block_size: int = 16,
    growth_requests: int = 10_000,
    growth_blocks: int = 100_000,
) -> ManagerBench:
    """Measure the manager on this machine, on one thread, and return the table.

    Each run is one prompt through the real manager with its events logged, through one whose events are dropped, and
    through the obvious one, in this order. Ctrl-C ends it early: `ManagerBench.stopped_by` says so, and whole runs
    count. Raises ConfigError for fewer than 1 run or 1 block.
    """
    if runs < 1 or num_blocks < 1 or block_size < 1:
        raise ConfigError(
            f"runs is {runs}, num_blocks is {num_blocks} and block_size is {block_size}; each must be 1 or more"
        )
    report = progress or (lambda what, done, total: None)
    bench = ManagerBench(num_blocks, block_size, 0)
    samples = _Samples()
    try:
        for number in range(runs):
            _measure_run(samples, number, num_blocks, block_size)
            bench.num_runs += 1
            report("runs", number + 1, runs)
        bench.growth = measure_growth(growth_requests, growth_blocks, block_size, report=report)
    except KeyboardInterrupt as stop:
        bench.stopped_by = stop
    if samples.manager:
        bench.costs = [samples.cost(operation) for operation in Operation]
    return bench


def _measure_run(samples: _Samples, number: int, num_blocks: int, block_size: int) -> None:
    """One prompt through everything. Adds to ``samples`` only when all of it is done."""
    draw = random.Random(number)
    tokens = [draw.getrandbits(17) for _ in range(num_blocks * block_size + 1)]
    clock = WallClock()
    gc.collect()  # so that no collection of what was before falls into what is timed
    log, again = EventLog(clock.now_ms), EventLog(clock.now_ms)
    manager = _run_real(tokens, num_blocks, block_size, log.append)
    events = _time_events(log, again)
    unlogged = _run_real(tokens, num_blocks, block_size, lambda event: None)
    for times, emit in ((manager, log.append), (unlogged, lambda event: None)):
        xxh3 = _run_real(tokens, num_blocks, block_size, emit, BLOCK_HASHERS["xxh3-128"])
        times[Operation.HASH_XXH3] = xxh3[Operation.HASH]
    obvious = _one_run(ObviousManager(num_blocks + _SPARE_BLOCKS, block_size), tokens, num_blocks)
    samples.manager.append(manager)
    samples.events.append(events)
    samples.unlogged.append(unlogged)
    samples.obvious.append(obvious)
