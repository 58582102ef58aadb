"""The slow, obvious models that the engine is held against.

`Visible` knows what may be recovered: a set of token sequences, without blocks, counts or a queue. `SlotRunner`
knows what every slot of the pool holds: a row that would read K/V of other tokens, or K/V that was never written,
is found out in the step in which it does. Neither must look into the engine.
"""

from __future__ import annotations

from minivllm import events as ev
from minivllm.block_hash import ExtraKeys
from minivllm.runners.virtual import VirtualRunner
from minivllm.step import Phase, ScheduledRow, ScheduledStep

Prefix = tuple[ExtraKeys, tuple[int, ...]]


class Visible:
    """What requests may recover, from what was computed and when it became visible.

    Never forgets, except at a reset. So the engine recovers as much as this says while nothing was evicted, and
    never more.
    """

    def __init__(self, block_size: int, *, enable_prefix_caching: bool = True) -> None:
        self.block_size = block_size
        self.enabled = enable_prefix_caching
        self.evicted = False
        self.num_lookups = 0
        self._published: set[Prefix] = set()
        self._tokens: dict[str, list[int]] = {}
        self._keys: dict[str, ExtraKeys] = {}
        self._num_prompt: dict[str, int] = {}
        self._computed: dict[str, int] = {}
        self._publication = ""

    def take(self, event: ev.Event) -> None:
        """Follow one event; at a look-up, hold what was recovered against what is visible."""
        match event:
            case ev.EngineStarted(publication=name) | ev.PoliciesChanged(publication=name):
                self._publication = name
            case ev.RequestArrived(request_id=name, prompt_token_ids=prompt, extra_keys=keys):
                self._tokens[name], self._keys[name], self._num_prompt[name] = list(prompt), keys, len(prompt)
            case ev.PrefixLookedUp(request_id=name, num_queried_tokens=queried, num_recovered_tokens=found):
                self._check_lookup(name, queried, found)
            case ev.ChunkComputed(request_id=name, start=start, num_tokens=count):
                assert start == self._computed[name], "a chunk does not start where the last one ended"
                self._computed[name] = start + count
                if self._publication == "incremental":
                    self._show(name, start + count)
            case ev.TokenOut(request_id=name, token_id=token_id):
                self._tokens[name].append(token_id)
            case ev.RequestPreempted(request_id=name):
                self._computed[name] = 0
            case ev.FlightReleased(leader_id=name, reason="prefill"):
                self._show(name, self._num_prompt[name])
            case ev.RequestFinished(request_id=name):
                self._show(name, self._computed[name])
            case ev.BlocksEvicted():
                self.evicted = True
            case ev.CacheReset():
                self._published.clear()
                self.evicted = False

    def _show(self, name: str, num_tokens: int) -> None:
        if self.enabled:
            for end in range(self.block_size, num_tokens + 1, self.block_size):
                self._published.add((self._keys[name], tuple(self._tokens[name][:end])))

    def _check_lookup(self, name: str, queried: int, found: int) -> None:
        tokens, keys = self._tokens[name], self._keys[name]
        visible = 0
        while visible + self.block_size < len(tokens):
            if (keys, tuple(tokens[: visible + self.block_size])) not in self._published:
                break
            visible += self.block_size
        self.num_lookups += 1
        self._computed[name] = found
        assert queried == len(tokens)
        assert found % self.block_size == 0
        if self.evicted:
            assert found <= visible, f"{name} recovered {found} tokens and {visible} were ever visible"
        else:
            assert found == visible, f"{name} recovered {found} tokens and {visible} were visible"


class Fault(RuntimeError):
    """What a device would raise."""


class SlotRunner(VirtualRunner):
    """A virtual runner with a pool: each slot holds a code for all tokens and extra keys up to its own.

    ``fail_next`` makes the next step raise before anything is written.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fail_next = False
        self._block_size = 0
        self._num_blocks = 0
        self._slots: dict[tuple[int, int], int] = {}

    def allocate(self, num_blocks: int, block_size: int) -> None:
        self._num_blocks, self._block_size = num_blocks, block_size

    def execute(self, step: ScheduledStep) -> dict[str, int]:
        if self.fail_next:
            raise Fault("told to")
        assert step.rows, "a step without rows"
        assert len({row.request_id for row in step.rows}) == len(step.rows), "a request has two rows"
        phases = [row.phase is Phase.DECODE for row in step.rows]
        assert phases == sorted(phases, reverse=True), "a row in decode stands behind a prefill"
        codes = {row.request_id: _codes(row) for row in step.rows}
        writers: dict[int, str] = {}
        for row in step.rows:
            self._check_row(row)
            for position in range(row.start, row.start + row.num_tokens):
                block_id = row.block_ids[position // self._block_size]
                assert writers.setdefault(block_id, row.request_id) == row.request_id, "two rows write one block"
                self._slots[block_id, position % self._block_size] = codes[row.request_id][position]
        for row in step.rows:
            for block_id in row.block_ids:
                assert writers.get(block_id, row.request_id) == row.request_id, "a row reads what another one writes"
            for position in range(row.start + row.num_tokens):
                slot = row.block_ids[position // self._block_size], position % self._block_size
                assert self._slots.get(slot) == codes[row.request_id][position], (
                    f"{row.request_id} reads other K/V than its own at position {position}"
                )
        return super().execute(step)

    def _check_row(self, row: ScheduledRow) -> None:
        end = row.start + row.num_tokens
        assert row.num_tokens > 0
        assert len(row.block_ids) == -(-end // self._block_size), "the block table is too long or too short"
        assert len(set(row.block_ids)) == len(row.block_ids), "a block is in the table twice"
        assert all(1 <= block_id <= self._num_blocks for block_id in row.block_ids)
        assert row.samples == (end == row.request.num_tokens)
        assert len(row.token_ids) == row.num_tokens
        assert (row.phase is Phase.DECODE) <= (row.num_tokens == 1 and bool(row.request.output_token_ids))


def _codes(row: ScheduledRow) -> list[int]:
    """Return, for each position of the row, a number that depends on all tokens up to it and the extra keys."""
    code, out = hash(row.request.extra_keys), []
    for token in row.request.token_ids[: row.start + row.num_tokens]:
        code = hash((code, token))
        out.append(code)
    return out
