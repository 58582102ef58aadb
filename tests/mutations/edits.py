"""The edits: each a small mistake that somebody could make, found in its module by a text that is there once.

An edit that changes nothing anybody could see says why in ``equivalent_because``; every other one must turn a test red.
Knows the texts of the engine's modules. Must not know the tests, but for which unit tests belong to a module.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Edit:
    """Put ``new`` in the place of ``old`` in ``minivllm/<module>.py``."""

    module: str
    name: str
    old: str
    new: str
    equivalent_because: str = ""


@dataclass(frozen=True, slots=True)
class Area:
    """Modules that do one thing together, and the unit tests that should see a mistake in any of them."""

    modules: tuple[str, ...]
    tests: tuple[str, ...]


AREAS: dict[str, Area] = {
    "block hash": Area(
        ("cache/block_hash", "request"), ("tests/unit/test_block_hash.py", "tests/unit/test_request.py")
    ),
    "block pool": Area(
        ("cache/block_pool", "log/states"), ("tests/unit/test_block_pool.py", "tests/unit/test_kv_cache_manager.py")
    ),
    "cache manager": Area(
        ("cache/kv_cache_manager", "cache/content", "cache/token_check", "cache/block_table", "cache/eviction/policy"),
        ("tests/unit/test_kv_cache_manager.py", "tests/unit/test_samples.py", "tests/unit/test_hash_collisions.py"),
    ),
    "prefix index": Area(
        ("cache/prefix_index/hash_map",), ("tests/unit/test_prefix_index.py", "tests/unit/test_kv_cache_manager.py")
    ),
    "single flight": Area(
        ("coordination/single_flight", "coordination/coordinator", "coordination/release"),
        ("tests/unit/test_single_flight.py",),
    ),
    "shared prefix": Area(("coordination/shared_prefix",), ("tests/unit/test_shared_prefix.py",)),
    "wait or recompute": Area(("coordination/wait_or_recompute",), ("tests/unit/test_wait_or_recompute.py",)),
    "scheduler": Area(
        ("scheduling/scheduler", "scheduling/policies"),
        ("tests/unit/test_scheduler.py", "tests/unit/test_pressure.py", "tests/unit/test_samples.py"),
    ),
    "publication": Area(("cache/publication",), ("tests/unit/test_publication.py", "tests/unit/test_at_allocation.py")),
    "replay": Area(("log/replay", "log/state"), ("tests/unit/test_replay.py",)),
    "engine core": Area(
        ("engine/core", "engine/lifecycle", "engine/sharing", "engine/arrivals", "engine/output"),
        ("tests/unit/test_core.py", "tests/unit/test_samples.py"),
    ),
    "input processor": Area(("engine/input_processor",), ("tests/unit/test_core.py",)),
    "engine": Area(("engine/engine", "engine/worker", "engine/handle"), ("tests/unit/test_engine.py",)),
    "eviction": Area(("cache/eviction/lru", "cache/eviction/mru"), ("tests/unit/test_block_pool.py",)),
    "metrics": Area(("log/metrics",), ("tests/unit/test_metrics.py",)),
    "kv contents": Area(("log/kv_contents", "log/kv_reads"), ("tests/unit/test_kv_contents.py",)),
    "mlx runner": Area(
        ("runners/mlx",),
        ("tests/parity/test_samples.py", "tests/parity/test_nonfinite.py", "tests/parity/test_adapters.py"),
    ),
    "paged cache": Area(("runners/paged_cache",), ("tests/parity/test_samples.py", "tests/parity/test_nonfinite.py")),
}
"""Where the edits are, and the tests, beside those of the facts and the properties, that should see a mistake there."""

AREA_OF: dict[str, str] = {module: name for name, area in AREAS.items() for module in area.modules}

UNIT_TESTS: dict[str, tuple[str, ...]] = {module: AREAS[name].tests for module, name in AREA_OF.items()}


EDITS: tuple[Edit, ...] = (
    # -- block_hash ----------------------------------------------------------------------------------------------
    Edit(
        "cache/block_hash",
        "another-root",
        '_ROOT_NAME = b"prefix cache root"',
        '_ROOT_NAME = b"prefix cache Root"',
    ),
    Edit(
        "cache/block_hash",
        "salt-in-every-block",
        "elif block_index == 0 or key[0] != CACHE_SALT:",
        "else:",
    ),
    Edit(
        "cache/block_hash",
        "salt-in-no-block",
        "elif block_index == 0 or key[0] != CACHE_SALT:",
        "elif key[0] != CACHE_SALT:",
    ),
    Edit(
        "cache/block_hash",
        "adapter-in-the-first-block-only",
        "elif block_index == 0 or key[0] != CACHE_SALT:",
        "elif block_index == 0:",
    ),
    Edit(
        "cache/block_hash",
        "salt-before-adapter",
        "    return tuple(keys)\n",
        "    return tuple(reversed(keys))\n",
    ),
    Edit(
        "cache/block_hash",
        "kinds-not-said",
        "for text in pair:",
        "for text in pair[1:]:",
    ),
    Edit(
        "cache/block_hash",
        "text-without-its-length",
        'parts += struct.pack("<I", len(data)), data',
        'parts += b"", data',
    ),
    Edit(
        "cache/block_hash",
        "low-32-bits-of-ids",
        'return struct.pack(f"<{len(token_ids)}Q", *token_ids)',
        'return struct.pack(f"<{len(token_ids)}Q", *[t & 0xFFFFFFFF for t in token_ids])',
    ),
    Edit(
        "cache/block_hash",
        "low-8-bits-of-ids",
        'return struct.pack(f"<{len(token_ids)}Q", *token_ids)',
        'return struct.pack(f"<{len(token_ids)}Q", *[t & 0xFF for t in token_ids])',
    ),
    Edit(
        "cache/block_hash",
        "pythons-own-hash",
        "return hashlib.sha256(data).digest()\n\n\nclass Xxh3",
        "return hashlib.sha256(repr(hash(data)).encode()).digest()\n\n\nclass Xxh3",
    ),
    Edit(
        "cache/block_hash",
        "parent-left-out",
        "parent = digest(parent + count",
        "parent = digest(self.hasher.root + count",
    ),
    Edit(
        "cache/block_hash",
        "a-partial-block-is-hashed",
        "len(self.hashes), len(token_ids) // self.block_size",
        "len(self.hashes), -(-len(token_ids) // self.block_size)",
    ),
    Edit(
        "cache/block_hash",
        "item-without-its-place",
        '(kind, f"{content_hash}@{offset}+{num_tokens}")',
        "(kind, content_hash)",
    ),
    Edit(
        "cache/block_hash",
        "item-in-its-first-block-only",
        "if offset < end and offset + num_tokens > first:",
        "if first <= offset < end:",
    ),
    Edit(
        "cache/block_hash",
        "item-one-block-early",
        "if offset < end and",
        "if offset <= end and",
    ),
    Edit(
        "cache/block_hash",
        "item-forgotten-in-its-last-block",
        "last_token // self.block_size + 1",
        "last_token // self.block_size",
    ),
    Edit(
        "request",
        "an-empty-salt-is-a-salt",
        "if cache_salt:",
        "if cache_salt is not None:",
    ),
    Edit(
        "cache/block_hash",
        "samples-share-a-chain",
        "twin.hashes = list(self.hashes)",
        "twin.hashes = self.hashes",
    ),
    Edit(
        "cache/block_hash",
        "parent-of-the-next",
        "return self.hashes[index - 1] if index else self.hasher.root",
        "return self.hashes[-1] if index else self.hasher.root",
    ),
    # -- block_pool ----------------------------------------------------------------------------------------------
    Edit(
        "cache/block_pool",
        "queue-from-its-end",
        "block = self._head.next_free\n        for _",
        "block = self._tail.prev_free\n        for _",
    ),
    Edit(
        "cache/block_pool",
        "links-kept-when-popped",
        "            block.prev_free = block.next_free = None\n            block = after",
        "            block = after",
    ),
    Edit(
        "cache/block_pool",
        "popped-and-still-counted-free",
        "self.num_free -= len(taken)",
        "self.num_free -= 1",
    ),
    Edit(
        "cache/block_pool",
        "removed-and-still-counted-free",
        "        self.num_free -= len(blocks)\n",
        "",
    ),
    Edit(
        "cache/block_pool",
        "appended-at-the-head",
        "self._insert(self._tail.prev_free, blocks, self._tail)",
        "self._insert(self._head, blocks, self._head.next_free)  # type: ignore",
    ),
    Edit(
        "cache/block_pool",
        "prepended-at-the-end",
        "self._insert(self._head, blocks, self._head.next_free)",
        "self._insert(self._tail.prev_free, blocks, self._tail)  # type: ignore",
    ),
    Edit(
        "cache/block_pool",
        "one-too-many-may-be-taken",
        "if num_blocks > self.num_free:\n"
        "            raise OutOfBlocksError(\n"
        '                f"{num_blocks} blocks were asked for and {self.num_free} of',
        "if num_blocks > self.num_free + 1:\n"
        "            raise OutOfBlocksError(\n"
        '                f"{num_blocks} blocks were asked for and {self.num_free} of',
    ),
    Edit(
        "cache/block_pool",
        "a-taken-block-keeps-its-count",
        "block.ref_count = 1\n",
        "block.ref_count += 0\n",
    ),
    Edit(
        "cache/block_pool",
        "a-hit-stays-in-the-queue",
        "self.free_queue.remove_n(freed)\n",
        "",
    ),
    Edit(
        "cache/block_pool",
        "a-hit-counts-nothing",
        "block.ref_count = count + 1\n",
        "block.ref_count = max(count, 1)\n",
    ),
    Edit(
        "cache/block_pool",
        "a-count-may-go-below-0",
        "if count < 0:",
        "if count < -1:",
    ),
    Edit(
        "cache/block_pool",
        "a-count-below-0-leaves-others-lowered",
        "                    dropped.ref_count += 1\n",
        "                    dropped.ref_count += 0\n",
    ),
    Edit(
        "cache/block_pool",
        "freed-while-another-holds-it",
        "            if count:\n                still_held.append(block)",
        "            if count > 1:\n                still_held.append(block)",
    ),
    Edit(
        "cache/block_pool",
        "popping-says-no-numbers",
        'f"{num_blocks} blocks were asked for and {self.num_free} are free; "',
        'f"not enough blocks are free; "',
    ),
    # -- prefix_index --------------------------------------------------------------------------------------------
    Edit(
        "cache/prefix_index/hash_map",
        "walks-on-behind-a-gap",
        "                break\n            found",
        "                continue\n            found",
    ),
    Edit(
        "cache/prefix_index/hash_map",
        "remembers-for-ever",
        "self._block_ids.pop(block_hash, None) is None",
        "self._block_ids.get(block_hash) is None",
    ),
    Edit(
        "cache/prefix_index/hash_map",
        "a-look-up-forgets",
        "            block_id = self._block_ids.get(block_hash)\n            if block_id is None:",
        "            block_id = self._block_ids.pop(block_hash, None)\n            if block_id is None:",
    ),
    Edit(
        "cache/prefix_index/hash_map",
        "the-last-hit-left-out",
        "        return found\n",
        "        return found[:-1] if len(found) > 1 else found\n",
    ),
    Edit(
        "cache/prefix_index/hash_map",
        "another-hash-will-do",
        "self._block_ids[block_hash] = block_id",
        "self._block_ids[block_hash[:1]] = block_id",
    ),
    Edit(
        "cache/prefix_index/hash_map",
        "the-later-copy-is-found",
        "        if block_hash in self._block_ids:\n            raise",
        "        if False:\n            raise",
    ),
    Edit(
        "cache/prefix_index/hash_map",
        "never-found-alone",
        "        return self._block_ids.get(block_hash)\n",
        "        return None\n",
    ),
    Edit(
        "cache/prefix_index/hash_map",
        "starts-at-the-second",
        "for block_hash in hashes:",
        "for block_hash in hashes[1:]:",
    ),
    Edit(
        "cache/prefix_index/hash_map",
        "lists-nothing",
        "return iter(self._block_ids.items())",
        "return iter(())",
    ),
    Edit(
        "cache/prefix_index/hash_map",
        "counts-one-too-many",
        "return len(self._block_ids)",
        "return len(self._block_ids) + 1",
    ),
    # -- kv_cache_manager ----------------------------------------------------------------------------------------
    Edit(
        "cache/kv_cache_manager",
        "the-last-token-may-be-found",
        "most = (request.num_tokens - 1) // self.block_size",
        "most = request.num_tokens // self.block_size",
    ),
    Edit(
        "cache/kv_cache_manager",
        "one-block-less-is-found",
        "most = (request.num_tokens - 1) // self.block_size",
        "most = (request.num_tokens - 2) // self.block_size",
    ),
    Edit(
        "cache/kv_cache_manager",
        "free-hits-cost-nothing",
        "num_free_hits = [block.ref_count for block in hits].count(0)",
        "num_free_hits = 0",
    ),
    Edit(
        "cache/kv_cache_manager",
        "hits-in-use-cost-too",
        "num_free_hits = [block.ref_count for block in hits].count(0)",
        "num_free_hits = len(hits)",
    ),
    Edit(
        "cache/kv_cache_manager",
        "shared-blocks-charged-in-full",
        "- num_held - len(hits)\n",
        "- num_held\n",
    ),
    Edit(
        "cache/kv_cache_manager",
        "no-room-counted-for-a-copy",
        "return max(num_new, 0) + num_free_hits + copied",
        "return max(num_new, 0) + num_free_hits",
    ),
    Edit(
        "cache/kv_cache_manager",
        "new-blocks-before-hits",
        "        if hits:\n            self._take_hits(request, table, computed, hits)\n        if computed.collision",
        "        num_known = request.num_computed_tokens + computed.num_tokens\n"
        "        early = self.pool.get_new_blocks(\n"
        "            max(self.num_blocks_for(num_known + num_new_tokens) - len(table.blocks) - "
        "len(hits), 0) if hits else 0\n"
        "        )\n"
        "        self._forget(request.request_id, early)\n"
        "        if hits:\n"
        "            self._take_hits(request, table, computed, hits)\n"
        "            table.blocks.extend(early)\n"
        "            if early:\n"
        "                self._emit(ev.BlocksAllocated(request.request_id, tuple(b.block_id for b in early)))\n"
        "        if computed.collision",
    ),
    Edit(
        "cache/kv_cache_manager",
        "hits-counted-before-the-check",
        "        hits = self._hits(computed)\n"
        "        needed = self._num_blocks_needed(request, num_new_tokens, computed, hits)\n"
        "        if needed > self.pool.num_free:\n"
        "            raise",
        "        hits = self._hits(computed)\n"
        "        needed = self._num_blocks_needed(request, num_new_tokens, computed, hits)\n"
        "        if needed > self.pool.num_free:\n"
        "            self.pool.touch(hits)\n"
        "            raise",
    ),
    Edit(
        "cache/kv_cache_manager",
        "room-for-one-more",
        "return needed + num_spare <= self.pool.num_free",
        "return needed + num_spare < self.pool.num_free",
    ),
    Edit(
        "cache/kv_cache_manager",
        "room-that-is-not-there",
        "return needed + num_spare <= self.pool.num_free",
        "return needed + num_spare <= self.pool.num_free + 1",
    ),
    Edit(
        "cache/kv_cache_manager",
        "the-watermark-counts-nothing",
        "return needed + num_spare <= self.pool.num_free",
        "return needed <= self.pool.num_free",
    ),
    Edit(
        "cache/kv_cache_manager",
        "hash-kept-on-reuse",
        "        self._forget(request.request_id, taken)\n",
        "",
    ),
    Edit(
        "cache/kv_cache_manager",
        "index-keeps-a-reused-block",
        "        self.index.remove(block.block_hash)\n        block.block_hash = None",
        "        block.block_hash = None",
    ),
    Edit(
        "cache/kv_cache_manager",
        "block-keeps-a-forgotten-hash",
        "        self.index.remove(block.block_hash)\n        block.block_hash = None",
        "        self.index.remove(block.block_hash)",
    ),
    Edit(
        "cache/kv_cache_manager",
        "contents-kept-for-ever",
        "            self._check.forget(block.block_id)\n",
        "            pass\n",
    ),
    Edit(
        "cache/kv_cache_manager",
        "published-before-computed",
        "if num_tokens > request.num_computed_tokens and not before_computed:",
        "if False:",
    ),
    Edit(
        "cache/kv_cache_manager",
        "the-later-copy-takes-over",
        "            if twin is None:\n                index.insert",
        "            if twin is None or twin != block.block_id:\n"
        "                if twin is not None:\n"
        "                    index.remove(block_hash)\n"
        "                    self.pool.blocks[twin - 1].block_hash = None\n"
        "                index.insert",
    ),
    Edit(
        "cache/kv_cache_manager",
        "published-again-and-again",
        "        table.num_settled = last\n",
        "",
    ),
    Edit(
        "cache/kv_cache_manager",
        "hits-count-as-own-work",
        "            table.num_settled += len(hits)\n",
        "            table.num_settled += 0\n",
    ),
    Edit(
        "cache/kv_cache_manager",
        "freed-head-first",
        "self.pool.free_blocks(table.blocks[::-1])",
        "self.pool.free_blocks(table.blocks)",
    ),
    Edit(
        "cache/kv_cache_manager",
        "a-freed-table-stays",
        "table = self._tables.pop(request.request_id, None)",
        "table = self._tables.get(request.request_id)",
    ),
    Edit(
        "cache/kv_cache_manager",
        "reset-while-in-use",
        "if self.pool.num_free != self.pool.num_blocks:",
        "if self.pool.num_free == 0:",
    ),
    Edit(
        "cache/kv_cache_manager",
        "reset-forgets-the-used-half",
        "forgotten = [block for block in self.pool.blocks if",
        "forgotten = [block for block in self.pool.blocks[:1] if",
    ),
    Edit(
        "cache/block_table",
        "no-copy-on-write",
        "return bool(offset) and self.blocks[position].ref_count > 1",
        "return False",
    ),
    Edit(
        "cache/block_table",
        "the-last-one-copies-too",
        "return bool(offset) and self.blocks[position].ref_count > 1",
        "return bool(offset) and self.blocks[position].ref_count > 0",
    ),
    Edit(
        "cache/kv_cache_manager",
        "the-copied-block-keeps-its-count",
        "        self.pool.free_blocks([source])  # the others",
        "        # the others",
    ),
    Edit(
        "cache/kv_cache_manager",
        "the-copy-is-taken-the-wrong-way",
        "return BlockCopy(source.block_id, block.block_id)",
        "return BlockCopy(block.block_id, source.block_id)",
    ),
    Edit(
        "cache/kv_cache_manager",
        "adoption-inside-a-block",
        "or request.num_computed_tokens % self.block_size:",
        "or False:",
    ),
    Edit(
        "cache/kv_cache_manager",
        "adoption-looks-from-the-start",
        "return self._look_up(request, table, request.num_computed_tokens // self.block_size)",
        "return self._look_up(request, table, 0)",
    ),
    Edit(
        "cache/block_table",
        "samples-share-a-table",
        "self.chain.fork(), list(self.blocks), self.num_settled",
        "self.chain.fork(), self.blocks, self.num_settled",
    ),
    Edit(
        "cache/kv_cache_manager",
        "samples-are-not-counted",
        "            self.pool.touch(table.blocks)\n",
        "",
    ),
    Edit(
        "cache/kv_cache_manager",
        "a-look-up-counts-its-hits",
        "        collision = None\n        if self._check is not None:",
        "        self.pool.touch([self.pool.blocks[i - 1] for i in block_ids])\n        collision = None\n        if self._check is not None:",
    ),
    Edit(
        "cache/token_check",
        "collisions-are-served",
        "        if not held.same_as(wanted):",
        "        if False:",
    ),
    Edit(
        "cache/kv_cache_manager",
        "refused-without-numbers",
        'f"request {request.request_id!r} asks for {needed} blocks and {self.pool.num_free} of "',
        'f"request {request.request_id!r} finds no room in "',
    ),
    # -- eviction ------------------------------------------------------------------------------------------------
    Edit(
        "cache/eviction/lru",
        "plain-blocks-last",
        "(placement.to_front if block.block_hash is None else placement.to_back).append(block)",
        "placement.to_back.append(block)",
    ),
    Edit(
        "cache/eviction/lru",
        "published-blocks-next",
        "(placement.to_front if block.block_hash is None else placement.to_back).append(block)",
        "placement.to_front.append(block)",
    ),
    Edit(
        "cache/eviction/lru",
        "heads-before-tails",
        "        placement = Placement([], [])\n        for block in freed:",
        "        placement = Placement([], [])\n        for block in reversed(freed):",
    ),
    # -- publication ---------------------------------------------------------------------------------------------
    Edit(
        "cache/publication",
        "completion-shows-at-once",
        "return num_computed_tokens if moment is Moment.FINISHED else 0",
        "return num_computed_tokens",
    ),
    Edit(
        "cache/publication",
        "completion-shows-nothing",
        "return num_computed_tokens if moment is Moment.FINISHED else 0",
        "return 0",
    ),
    Edit(
        "cache/publication",
        "completion-shows-less",
        "return num_computed_tokens if moment is Moment.FINISHED else 0",
        "return num_computed_tokens // 2 if moment is Moment.FINISHED else 0",
    ),
    Edit(
        "cache/publication",
        "incremental-waits-for-the-end",
        '        """Return all that is computed, at any moment."""\n        return num_computed_tokens',
        '        """Return all that is computed, at any moment."""\n'
        "        return num_computed_tokens if moment is Moment.FINISHED else 0",
    ),
    Edit(
        "cache/publication",
        "incremental-not-at-the-end",
        '        """Return all that is computed, at any moment."""\n        return num_computed_tokens',
        '        """Return all that is computed, at any moment."""\n'
        "        return 0 if moment is Moment.FINISHED else num_computed_tokens",
    ),
    Edit(
        "cache/publication",
        "incremental-a-token-late",
        '        """Return all that is computed, at any moment."""\n        return num_computed_tokens',
        '        """Return all that is computed, at any moment."""\n        return max(num_computed_tokens - 1, 0)',
    ),
    Edit(
        "cache/publication",
        "at-allocation-is-safe",
        "    is_safe = False\n",
        "    is_safe = True\n",
    ),
    Edit(
        "cache/publication",
        "nothing-is-safe",
        'getattr(policy, "is_safe", True)',
        'getattr(policy, "is_safe", False)',
    ),
    Edit(
        "cache/publication",
        "at-allocation-waits",
        '        """Return all, at any moment."""\n        return num_computed_tokens',
        '        """Return all, at any moment."""\n'
        "        return 0 if moment is Moment.ALLOCATED else num_computed_tokens",
    ),
    # -- scheduler -----------------------------------------------------------------------------------------------
    Edit(
        "scheduling/scheduler",
        "prefills-before-decodes",
        "for request in (*decoding, *prefilling):",
        "for request in (*prefilling, *decoding):",
    ),
    Edit(
        "scheduling/scheduler",
        "the-oldest-gives-way",
        "for request in reversed(self.running) if request.rank == worst",
        "for request in self.running if request.rank == worst",
    ),
    Edit(
        "scheduling/scheduler",
        "the-most-important-gives-way",
        "worst = max(request.rank for request in self.running)",
        "worst = min(request.rank for request in self.running)",
    ),
    Edit(
        "scheduling/scheduler",
        "preempted-to-the-end",
        "        bisect.insort_left(self.waiting, request, key=_place)\n",
        "        self.waiting.append(request)\n",
    ),
    Edit(
        "scheduling/scheduler",
        "preempted-keeps-what-it-computed",
        "        request.num_computed_tokens = 0\n        request.num_preemptions += 1",
        "        request.num_preemptions += 1",
    ),
    Edit(
        "scheduling/scheduler",
        "preempted-keeps-its-blocks",
        "        self._manager.free(request)\n",
        "",
    ),
    Edit(
        "scheduling/scheduler",
        "preemptions-not-counted",
        "        request.num_preemptions += 1\n",
        "",
    ),
    Edit(
        "scheduling/scheduler",
        "a-step-that-preempts-admits",
        "        if not preempted:\n            self._admit_waiting(planned)",
        "        self._admit_waiting(planned)",
    ),
    Edit(
        "scheduling/scheduler",
        "a-row-taken-back-is-still-computed",
        "withdrawn = planned.pop(victim.request_id, None)",
        "withdrawn = planned.get(victim.request_id)",
    ),
    Edit(
        "scheduling/scheduler",
        "a-row-taken-back-keeps-its-budget",
        "                    self.budget_left += withdrawn.num_tokens\n",
        "                    pass\n",
    ),
    Edit(
        "scheduling/scheduler",
        "one-row-too-many",
        "if self._num_rows() + num_rows > self._max_rows:",
        "if self._num_rows() + num_rows > self._max_rows + 1:",
    ),
    Edit(
        "scheduling/scheduler",
        "no-rows-kept-for-samples",
        "if self._num_rows() + num_rows > self._max_rows:",
        "if len(self.running) + 1 > self._max_rows:",
    ),
    Edit(
        "scheduling/scheduler",
        "the-budget-is-not-spent",
        "        self.budget_left -= count\n",
        "",
    ),
    Edit(
        "scheduling/scheduler",
        "chunks-without-a-limit",
        "self.budget_left, self._chunk_limit)",
        "self.budget_left)",
    ),
    Edit(
        "scheduling/scheduler",
        "counted-when-it-resumes-too",
        "            if not resumed:\n                request.num_recovered_tokens",
        "            if True:\n                request.num_recovered_tokens",
    ),
    Edit(
        "scheduling/scheduler",
        "resuming-is-not-said",
        "queried, computed.num_tokens, resumed))",
        "queried, computed.num_tokens, False))",
    ),
    Edit(
        "scheduling/scheduler",
        "counted-at-each-look-up",
        "            computed = self._manager.get_computed_blocks(request)\n            resumed = request.state",
        "            computed = self._manager.get_computed_blocks(request)\n"
        "            self._emit(ev.PrefixLookedUp(request.request_id, request.num_tokens, 0, False))\n"
        "            resumed = request.state",
    ),
    Edit(
        "scheduling/scheduler",
        "somebody-overtakes-the-head",
        "            if not self._may_take_room(request, count, computed):\n                break",
        "            if not self._may_take_room(request, count, computed):\n"
        "                if len(self.waiting) < 2 or self.waiting[0].arrival > self.waiting[1].arrival:\n"
        "                    break\n"
        "                self.waiting.rotate(-1)\n"
        "                continue",
    ),
    Edit(
        "scheduling/scheduler",
        "running-prefills-look-up-again",
        "if self._adoption and not request.is_decoding:",
        "if not request.is_decoding:",
    ),
    Edit(
        "scheduling/scheduler",
        "nobody-adopts",
        "if self._adoption and not request.is_decoding:",
        "if False:",
    ),
    Edit(
        "scheduling/scheduler",
        "adopted-not-counted",
        "                request.num_adopted_tokens += adopted.num_tokens\n",
        "",
    ),
    Edit(
        "scheduling/scheduler",
        "adopted-counted-as-recovered",
        "                request.num_adopted_tokens += adopted.num_tokens\n",
        "                request.num_recovered_tokens += adopted.num_tokens\n",
    ),
    Edit(
        "scheduling/scheduler",
        "chunks-end-anywhere",
        "            if boundary > known:\n                return boundary - known\n",
        "            pass\n",
    ),
    Edit(
        "scheduling/scheduler",
        "the-whole-prompt-is-a-chunk",
        "            count = request.num_tokens - computed.num_tokens\n            spare +=",
        "            spare +=",
    ),
    Edit(
        "scheduling/scheduler",
        "the-watermark-is-forgotten",
        "        spare = self._num_reserved\n",
        "        spare = 0\n",
    ),
    Edit(
        "scheduling/scheduler",
        "what-others-were-promised-is-given-away",
        "            spare += sum(self._num_blocks_to_come(other) for other in self.running)\n",
        "",
    ),
    Edit(
        "scheduling/scheduler",
        "recovered-tokens-are-computed-again",
        "        request.num_computed_tokens += computed.num_tokens\n        planned",
        "        planned",
    ),
    Edit(
        "scheduling/scheduler",
        "released-to-the-end",
        "            request.move_to(RequestState.WAITING)\n            self.add(request)\n",
        "            request.move_to(RequestState.WAITING)\n            self.waiting.append(request)\n",
    ),
    Edit(
        "scheduling/policies",
        "priority-is-not-asked",
        '        """Return the request\'s priority."""\n        return request.priority',
        '        """Return the request\'s priority."""\n        return 0',
    ),
    Edit(
        "scheduling/scheduler",
        "samples-do-not-draw",
        "sampled = (request, *self.samples.get(request.request_id, ()))",
        "sampled = (request,)",
    ),
    Edit(
        "scheduling/scheduler",
        "samples-begin-at-0",
        "            sample.num_computed_tokens = first.num_computed_tokens\n",
        "",
    ),
    Edit(
        "scheduling/scheduler",
        "rows-in-the-order-of-planning",
        "rows.sort(key=lambda row: row.phase is not Phase.DECODE)",
        "pass",
    ),
    # -- flights -------------------------------------------------------------------------------------------------
    Edit(
        "coordination/single_flight",
        "flights-across-salts",
        "key = (request.prompt_token_ids, request.extra_keys)",
        "key = (request.prompt_token_ids, ())",
    ),
    Edit(
        "coordination/single_flight",
        "flights-of-a-common-beginning",
        "key = (request.prompt_token_ids, request.extra_keys)",
        "key = (request.prompt_token_ids[:12], request.extra_keys)",
    ),
    Edit(
        "coordination/single_flight",
        "release-forgets-the-followers-ids",
        "        self.released_request_ids.update(followers)\n",
        "",
    ),
    Edit(
        "coordination/single_flight",
        "release-forgets-the-leaders-id",
        "        self.released_request_ids.add(request_id)\n        return released",
        "        return released",
    ),
    Edit(
        "coordination/single_flight",
        "released-ids-are-kept",
        "            self.released_request_ids.remove(request_id)\n            return NOBODY",
        "            return NOBODY",
    ),
    Edit(
        "coordination/single_flight",
        "an-ended-leader-frees-everybody",
        "if end is RequestState.FINISHED or prompt_is_published or not flight.followers:",
        "if True:",
    ),
    Edit(
        "coordination/single_flight",
        "a-published-prompt-is-handed-over",
        "if end is RequestState.FINISHED or prompt_is_published or not flight.followers:",
        "if end is RequestState.FINISHED or not flight.followers:",
    ),
    Edit(
        "coordination/single_flight",
        "a-finished-leader-is-not-enough",
        "if end is RequestState.FINISHED or prompt_is_published or not flight.followers:",
        "if prompt_is_published or not flight.followers:",
    ),
    Edit(
        "coordination/single_flight",
        "the-youngest-leads",
        "flight.followers.popitem(last=False)",
        "flight.followers.popitem(last=True)",
    ),
    Edit(
        "coordination/single_flight",
        "a-closed-flight-is-still-joined",
        "del self.flights[flight.flight_id], self._flight_by_key[flight.key]",
        "del self.flights[flight.flight_id]",
    ),
    Edit(
        "coordination/single_flight",
        "a-follower-that-left-is-released",
        "del flight.followers[request_id], self._flight_by_request[request_id]",
        "del self._flight_by_request[request_id]",
    ),
    Edit(
        "coordination/single_flight",
        "nobody-hears-of-the-heir",
        "return (flight.leader_id,)",
        "return NOBODY",
    ),
    Edit(
        "coordination/release",
        "released-before-the-prompt-is-there",
        '        """Never."""\n        return False',
        '        """Never."""\n        return True',
    ),
    Edit(
        "coordination/release",
        "never-released-after-prefill",
        '        """Always."""\n        return True',
        '        """Always."""\n        return False',
    ),
    Edit(
        "coordination/single_flight",
        "any-member-publishes-the-prompt",
        "        if self.role_of(request_id) is not Role.LEADER:",
        "        if self.role_of(request_id) is Role.INDEPENDENT:",
    ),
    Edit(
        "coordination/single_flight",
        "everybody-leads",
        "        if flight is None:\n            wanted: ",
        "        if True:\n            wanted: ",
    ),
    # -- shared_prefix -------------------------------------------------------------------------------------------
    Edit(
        "coordination/shared_prefix",
        "nobody-waits",
        "        if leader_id is None:\n            return True\n        prediction",
        "        return True\n        prediction",
    ),
    Edit(
        "coordination/shared_prefix",
        "preempted-leaders-are-waited-for",
        'return self._gone(request_id, "preempted")',
        "return NOBODY",
    ),
    Edit(
        "coordination/shared_prefix",
        "ended-leaders-are-waited-for",
        'return self._gone(request_id, "ended")',
        "return NOBODY",
    ),
    Edit(
        "coordination/shared_prefix",
        "published-blocks-release-nobody",
        'return self._release(released, request_id, "published")',
        "return NOBODY",
    ),
    Edit(
        "coordination/shared_prefix",
        "released-at-the-first-block",
        "                if not self._goes_on(follower):",
        "                if True:",
    ),
    Edit(
        "coordination/shared_prefix",
        "blocks-are-published-as-the-policy-says",
        "return leader is not None and bool(leader.followers)",
        "return False",
    ),
    Edit(
        "coordination/shared_prefix",
        "waits-for-a-block-that-it-cannot-use",
        "if outlook.num_found >= outlook.num_usable:",
        "if False:",
    ),
    # -- wait_or_recompute ---------------------------------------------------------------------------------------
    Edit(
        "coordination/wait_or_recompute",
        "always-recomputes",
        "if prediction.wait_ms <= prediction.recompute_ms:",
        "if False:",
    ),
    Edit(
        "coordination/wait_or_recompute",
        "always-waits",
        "if prediction.wait_ms <= prediction.recompute_ms:",
        "if True:",
    ),
    Edit(
        "coordination/wait_or_recompute",
        "the-target-is-ignored",
        "if self.ttft_target_ms is not None and",
        "if False and",
    ),
    Edit(
        "coordination/wait_or_recompute",
        "own-tokens-are-free",
        "own = case.own if waits else case.shared + case.own",
        "own = case.own",
    ),
    # -- replay --------------------------------------------------------------------------------------------------
    Edit(
        "log/state",
        "preempted-in-no-order",
        "return view.rank, -1 if view.state is RequestState.PREEMPTED else view.arrival",
        "return view.rank, view.arrival",
    ),
    Edit(
        "log/replay",
        "front-in-the-wrong-order",
        "for block_id in reversed(e.to_front):",
        "for block_id in e.to_front:",
    ),
    Edit(
        "log/replay",
        "back-at-the-front",
        "    for block_id in e.to_back:\n        state.free_queue[block_id] = None",
        "    for block_id in e.to_back:\n"
        "        state.free_queue[block_id] = None\n"
        "        state.free_queue.move_to_end(block_id, last=False)",
    ),
    Edit(
        "log/replay",
        "freed-blocks-stay-in-the-table",
        "    state.requests[e.request_id].block_ids.clear()\n",
        "",
    ),
    Edit(
        "log/replay",
        "hits-stay-free",
        "        state.free_queue.pop(block_id, None)\n",
        "",
    ),
    Edit(
        "log/replay",
        "evicted-blocks-are-still-found",
        "        del state.prefix_index[block_hash]\n",
        "",
    ),
    Edit(
        "log/replay",
        "resumed-counts-as-recovered",
        "    if not e.resumed:\n        view.num_recovered_tokens",
        "    if True:\n        view.num_recovered_tokens",
    ),
    Edit(
        "log/replay",
        "every-release-is-after-prefill",
        '    if e.reason in ("prefill", "cached"):',
        "    if True:\n",
    ),
    Edit(
        "log/replay",
        "preempted-keeps-its-tokens",
        "    view.num_computed_tokens = 0\n    view.num_preemptions += 1",
        "    view.num_preemptions += 1",
    ),
    Edit(
        "log/replay",
        "the-heir-is-still-a-follower",
        "    flight.follower_ids.remove(e.to_id)\n",
        "",
    ),
    Edit(
        "log/replay",
        "a-copy-leaves-the-source-counted",
        "    state.blocks[e.source_block_id].ref_count -= 1\n",
        "",
    ),
    Edit(
        "log/replay",
        "samples-count-once",
        "state.blocks[block_id].ref_count += len(e.sample_ids)",
        "state.blocks[block_id].ref_count += 1",
    ),
    Edit(
        "log/replay",
        "adopted-tokens-are-recovered",
        "    view.num_adopted_tokens += e.num_tokens\n",
        "    view.num_recovered_tokens += e.num_tokens\n",
    ),
    Edit(
        "log/state",
        "released-ids-never-end",
        "        self.released_request_ids.discard(request_id)\n",
        "",
    ),
    Edit(
        "log/replay",
        "awaiting-for-ever",
        "        del state.awaiting[request_id]\n",
        "        pass\n",
    ),
    # -- engine --------------------------------------------------------------------------------------------------
    Edit(
        "engine/core",
        "withdrawn-rows-count-as-computed",
        "rows = [row for row in step.rows if not row.is_withdrawn]\n        check_drawn",
        "rows = list(step.rows)\n        check_drawn",
    ),
    Edit(
        "engine/core",
        "rows-without-numbers-go-on",
        "            self._lifecycle.fail_non_finite(row, drawn)\n",
        "            pass\n",
    ),
    Edit(
        "engine/lifecycle",
        "published-when-cancelled-too",
        "        if end is RequestState.FINISHED:\n            self._sharing.publish_visible(request, Moment.FINISHED",
        "        if self._manager.block_ids(request.request_id):\n            self._sharing.publish_visible(request, Moment.FINISHED",
    ),
    Edit(
        "engine/lifecycle",
        "heard-before-it-is-published",
        "            self._listener(Output(name, token_id, text))\n            self._admit_due(request)\n        else:\n",
        "            self._listener(Output(name, token_id, text))\n            self._admit_due(request)\n        else:\n            self._listener(Output(name, token_id, text, RequestState.FINISHED))\n",
    ),
    Edit(
        "engine/lifecycle",
        "blocks-are-not-freed",
        "        self._manager.free(request)\n        if end is",
        "        if end is",
    ),
    Edit(
        "engine/core",
        "published-before-the-forward-pass",
        "        drawn = self.runner.execute(step)\n",
        "        for row in step.rows:\n"
        "            row.request.num_computed_tokens += row.num_tokens\n"
        "            self._publish(row.request, Moment.STEP_DONE, row.request.num_computed_tokens)\n"
        "            row.request.num_computed_tokens -= row.num_tokens\n"
        "        drawn = self.runner.execute(step)\n",
    ),
    Edit(
        "engine/sharing",
        "more-is-shown-than-computed",
        "self._publish(request, min(visible, num_tokens), before_computed=moment is Moment.ALLOCATED)",
        "self._publish(request, visible, before_computed=True)",
    ),
    Edit(
        "engine/sharing",
        "steps-publish-nothing",
        "        self.publish_visible(request, Moment.STEP_DONE, request.num_computed_tokens)\n",
        "",
    ),
    Edit(
        "engine/sharing",
        "leaders-do-not-publish-their-prompt",
        "            self._publish(request, request.num_prompt_tokens)",
        "            pass",
    ),
    Edit(
        "engine/sharing",
        "a-real-model-may-be-unsafe",
        "if self._runner.is_real and not is_safe",
        "if False and not is_safe",
    ),
    Edit(
        "engine/core",
        "reset-without-aborting",
        "            while self.scheduler.running:\n",
        "            while False:\n",
    ),
    Edit(
        "engine/lifecycle",
        "samples-of-one-seed",
        "request.seed = request.sampling.seed if request.sampling.seed is not None else request.arrival",
        "request.seed = 0",
    ),
    # -- the input processor and the thread ---------------------------------------------------------------------------------
    Edit(
        "engine/input_processor",
        "the-salt-is-lost",
        "            cache_salt=salt,\n        )\n",
        "            cache_salt=None,\n        )\n",
    ),
    Edit(
        "engine/input_processor",
        "the-adapter-is-lost",
        "            adapter=submission.adapter,\n",
        "",
    ),
    Edit(
        "engine/input_processor",
        "the-items-are-lost",
        "            multimodal=self._checked_items(submission.multimodal, len(tokens)),\n",
        "",
    ),
    Edit(
        "engine/input_processor",
        "every-request-has-a-salt-of-its-own",
        "            cache_salt=salt,\n        )\n",
        "            cache_salt=salt and salt + str(next(self._ids)),\n        )\n",
    ),
    Edit(
        "engine/input_processor",
        "samples-lose-their-keys",
        "Request(each, tokens, submission.sampling.of_sample(number), extra_keys, priority)",
        "Request(each, tokens, submission.sampling.of_sample(number), extra_keys if number else (), priority)",
    ),
    Edit(
        "engine/engine",
        "the-salt-stops-at-the-thread",
        "submission = Submission(prompt, chosen, request_id, cache_salt, after, adapter, multimodal, priority)",
        "submission = Submission(prompt, chosen, request_id, None, after, adapter, multimodal, priority)",
    ),
    # -- metrics -------------------------------------------------------------------------------------------------
    Edit(
        "log/metrics",
        "resumed-finds-count-as-recovered",
        "                    request.resumed_recovered_tokens += found\n",
        "                    request.recovered_tokens += found\n",
    ),
    Edit(
        "log/metrics",
        "hits-instead-of-tokens",
        "self.hit_rate.observe(1, queried, found)",
        "self.hit_rate.observe(1, 1, int(found > 0))",
    ),
    Edit(
        "log/metrics",
        "no-query-is-a-rate-of-0",
        "return self._recovered / self._queried if self._queried else None",
        "return self._recovered / self._queried if self._queried else 0.0",
    ),
    Edit(
        "log/metrics",
        "the-window-keeps-too-much",
        "while self._requests > self.window and",
        "while self._requests > self.window + 1 and",
    ),
    Edit(
        "log/metrics",
        "adopted-is-recovered",
        "                self._request(name).adopted_tokens += count\n",
        "                self._request(name).recovered_tokens += count\n",
    ),
    Edit(
        "log/metrics",
        "counted-when-it-arrives",
        "                request.prompt_tokens, request.arrived_ms = len(tokens), event.ms\n",
        "                request.prompt_tokens, request.arrived_ms = len(tokens), event.ms\n"
        "                request.queried_tokens = len(tokens)\n",
    ),
    # -- the runner ----------------------------------------------------------------------------------------------
    Edit(
        "runners/mlx",
        "withdrawn-rows-are-computed",
        "rows = [row for row in step.rows if not row.is_withdrawn]",
        "rows = list(step.rows)",
    ),
    Edit(
        "runners/mlx",
        "blocks-are-not-copied",
        "        if step.copies:\n",
        "        if False:\n",
    ),
    Edit(
        "runners/mlx",
        "adapters-in-one-call",
        "own = [row for row in rows if row.request.adapter == adapter]",
        "own = list(rows)",
    ),
    Edit(
        "runners/mlx",
        "the-base-for-everybody",
        ".applied(adapter):",
        ".applied(None):",
    ),
    Edit(
        "runners/mlx",
        "nan-stays-in-the-pool",
        "                pool.wipe(call, index)\n",
        "",
    ),
    Edit(
        "runners/mlx",
        "nan-is-a-token",
        "            if bad:\n",
        "            if False:\n",
    ),
    Edit(
        "runners/paged_cache",
        "padding-is-written",
        "padded = [[*table, *[SCRATCH_BLOCK_ID] * (width - len(table))] for table in tables]",
        "padded = [[*table, *[table[-1]] * (width - len(table))] for table in tables]\n"
        "        pool._keys[0][0] = mx.ones(())",
    ),
    Edit(
        "runners/paged_cache",
        "padding-is-seen",
        "<= starts[:, None]",
        "<= starts.max()",
    ),
    Edit(
        "runners/paged_cache",
        "the-pool-grows",
        "            half[targets] = content\n",
        '            half[targets] = content\n            self._kept = [*getattr(self, "_kept", []), content + 1]\n',
    ),
    Edit(
        "runners/paged_cache",
        "written-one-slot-on",
        "write_offsets=mx.array([position % pool.block_size for position in positions]),",
        "write_offsets=mx.array([(position + 1) % pool.block_size for position in positions]),",
    ),
)
