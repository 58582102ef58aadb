"""What every slot holds, and who reads something else than its own: by hand-written logs, then by an engine's."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.clock import VirtualClock
from minivllm.engine.core import EngineCore
from minivllm.errors import InvariantError
from minivllm.log import events as ev
from minivllm.log.event import event_from_dict
from minivllm.log.event_log import EventLog
from minivllm.log.kv_contents import KVContents, kv_contents
from minivllm.log.kv_reads import Written
from minivllm.request import ExtraKeys, MultimodalItem, Sampling, make_extra_keys
from tests.property.steady import STEADY
from tests.unit.small import FULL_PROMPT, check, events_of, run, small_core, step


class Story:
    """A log written by hand: blocks of four, eight of them, and whatever the test says happens."""

    def __init__(self) -> None:
        self.log = EventLog(VirtualClock().now_ms)
        self._arrivals = itertools.count()
        self.add(
            ev.EngineStarted(
                num_blocks=8,
                block_size=4,
                max_num_seqs=8,
                max_num_batched_tokens=64,
                publication="",
                coordination="",
                release="",
                runner="",
                scheduling="",
                block_hash="",
            )
        )

    def add(self, *events: ev.Event) -> Story:
        for event in events:
            self.log.append(event)
        return self

    def arrive(self, name: str, tokens: list[int], table: tuple[int, ...] = (), keys: ExtraKeys = ()) -> Story:
        """A request arrives and gets a block table, right or wrong."""
        arrival = next(self._arrivals)
        self.add(ev.RequestArrived(name, arrival, tuple(tokens), 8, keys, 0))
        return self.add(ev.BlocksAllocated(name, table)) if table else self

    def step(self, *chunks: tuple[str, int, int], copies: tuple[ev.BlockCopied, ...] = ()) -> Story:
        """A step computes chunks (request, first position, number of tokens), after its copies."""
        self.log.step += 1
        self.add(*copies)
        self.add(ev.StepScheduled(tuple((*chunk, "prefill") for chunk in chunks), 0, 0))
        return self.add(*(ev.ChunkComputed(*chunk, "prefill") for chunk in chunks))

    def publish(self, name: str, block_ids: tuple[int, ...], first: int = 0) -> Story:
        hashes = tuple(f"{block_id:064x}" for block_id in block_ids)
        indices = tuple(range(first, first + len(block_ids)))
        return self.add(ev.BlocksPublished(name, block_ids, hashes, ("", *hashes[:-1]), indices))

    def contents(self) -> KVContents:
        return kv_contents(self.log)


def held(contents: KVContents, block_id: int) -> list[tuple[int, int, str, int] | None]:
    """Return (token, position, writer, step) of each slot of a block."""
    return [
        None if slot is None else (slot.kv.token_id, slot.kv.position, slot.request_id, slot.step)
        for slot in contents.block(block_id)
    ]


def places(contents: KVContents) -> list[tuple[str, int]]:
    """Return (reader, position) of every wrong read."""
    return [(read.request_id, read.position) for read in contents.wrong_reads]


# -- What a slot holds -------------------------------------------------------------------------------------


def test_a_slot_holds_the_token_that_was_written_there_by_whom_and_when() -> None:
    story = Story().arrive("a", [10, 11, 12, 13, 14], (3, 5)).step(("a", 0, 3)).step(("a", 3, 2))
    contents = story.contents()
    assert held(contents, 3) == [(10, 0, "a", 1), (11, 1, "a", 1), (12, 2, "a", 1), (13, 3, "a", 2)]
    assert held(contents, 5) == [(14, 4, "a", 2), None, None, None]
    assert held(contents, 1) == [None] * 4
    written = contents.block(5)[0]
    assert written is not None
    assert written.kv.token_ids == (10, 11, 12, 13, 14)
    assert repr(written) == "K/V of token 14 at position 4, which a wrote in step 2"
    assert contents.wrong_reads == ()


def test_freeing_evicting_and_resetting_forget_names_and_leave_the_slots_as_they_are() -> None:
    story = Story().arrive("a", [10, 11, 12, 13], (1,)).step(("a", 0, 4)).publish("a", (1,))
    before = held(story.contents(), 1)
    story.add(ev.BlocksFreed("a", (), (1,), ()), ev.RequestFinished("a", "length"), ev.CacheReset((1,)))
    assert held(story.contents(), 1) == before


def test_the_next_writer_of_a_slot_replaces_what_it_held() -> None:
    story = Story().arrive("a", [10, 11], (1,)).step(("a", 0, 2)).arrive("b", [20], (1,)).step(("b", 0, 1))
    assert held(story.contents(), 1) == [(20, 0, "b", 2), (11, 1, "a", 1), None, None]


def test_the_state_at_an_earlier_moment_is_that_of_the_events_before_it() -> None:
    story = Story().arrive("a", [10, 11], (1,)).step(("a", 0, 2))
    moment = len(story.log)
    story.arrive("b", [20], (1,)).step(("b", 0, 1))
    assert held(kv_contents(story.log, moment), 1) == [(10, 0, "a", 1), (11, 1, "a", 1), None, None]


# -- Reads -------------------------------------------------------------------------------------------------


def test_a_slot_that_was_never_written_is_a_wrong_read_that_says_so() -> None:
    story = Story().arrive("b", [10, 11, 12, 13, 14], (1, 2)).step(("b", 4, 1))
    reads = story.contents().wrong_reads
    assert [(r.step, r.request_id, r.block_id, r.position, r.found) for r in reads] == [
        (1, "b", 1, position, None) for position in range(4)
    ]
    assert reads[2].expected.token_ids == (10, 11, 12)
    assert str(reads[2]) == ("Step 1: b reads position 2 (token 12) in block 1, and nothing was ever written there.")
    assert story.contents().describe() == (
        "Step 1: b reads positions 0 to 3 (tokens 10 11 12 13) in block 1, and nothing was ever written there."
    )


def test_anothers_tokens_are_a_wrong_read_that_names_them_and_their_writer() -> None:
    story = Story().arrive("a", [20, 21, 22, 23], (1,)).step(("a", 0, 4))
    story.arrive("b", [10, 11, 12, 13, 14], (1, 2)).step(("b", 4, 1))
    read = story.contents().wrong_reads[1]
    assert isinstance(read.found, Written)
    assert read.found.kv.token_ids == (20, 21)
    assert (read.found.request_id, read.found.step) == ("a", 1)
    assert read.describe() == (
        "Step 2: b reads position 1 (token 11) in block 1, and it holds the K/V of token 21 at position 1, "
        "which a wrote in step 1."
    )
    assert story.contents().describe() == (
        "Step 2: b reads positions 0 to 3 (tokens 10 11 12 13) in block 1, and it holds the K/V of tokens "
        "20 21 22 23 at positions 0 to 3, which a wrote in step 1."
    )


def test_neighbours_with_one_writer_share_a_sentence_and_others_do_not() -> None:
    story = Story().arrive("a", [20, 21], (1,)).step(("a", 0, 2))
    story.arrive("b", [10, 11, 12, 13, 14, 15, 16], (1, 2)).step(("b", 5, 1)).step(("b", 6, 1))
    sentences = [line.split(" in block ")[0] for line in story.contents().describe().splitlines()]
    assert sentences == [
        "Step 2: b reads positions 0 to 1 (tokens 10 11)",
        "Step 2: b reads positions 2 to 3 (tokens 12 13)",
        "Step 2: b reads position 4 (token 14)",
        "Step 3: b reads positions 0 to 1 (tokens 10 11)",
        "Step 3: b reads positions 2 to 3 (tokens 12 13)",
        "Step 3: b reads position 4 (token 14)",
    ]
    story = Story().arrive("b", [10, 11, 12, 13], (1,)).step(("b", 1, 1)).step(("b", 3, 1))
    assert [line[:26] for line in story.contents().describe().splitlines()] == [
        "Step 1: b reads position 0",
        "Step 2: b reads position 0",
        "Step 2: b reads position 2",
    ]


def test_the_same_tokens_of_another_request_are_no_wrong_read() -> None:
    story = Story().arrive("a", [10, 11, 12, 13], (1,)).step(("a", 0, 4))
    story.arrive("b", [10, 11, 12, 13, 14], (1, 2)).step(("b", 4, 1))
    assert story.contents().wrong_reads == ()
    assert story.contents().num_reads == 4 + 5
    assert repr(story.contents()) == "Every one of 9 slots that were read held the reader's own K/V."


def test_the_same_token_after_other_tokens_is_other_kv() -> None:
    story = Story().arrive("a", [20, 11], (1,)).step(("a", 0, 2))
    story.arrive("b", [10, 11, 12], (1,)).step(("b", 2, 1))
    assert places(story.contents()) == [("b", 0), ("b", 1)]
    assert story.contents().wrong_reads[1].describe().endswith("which a wrote in step 1, after other tokens.")


def test_the_same_tokens_under_another_salt_are_other_kv() -> None:
    salted = {salt: make_extra_keys(cache_salt=salt) for salt in ("x", "y")}
    story = Story().arrive("a", [10], (1,), salted["x"]).step(("a", 0, 1))
    story.arrive("b", [10, 11], (1,), salted["y"]).step(("b", 1, 1))
    (read,) = story.contents().wrong_reads
    assert read.describe().endswith(", under other extra keys: cache_salt x and not cache_salt y.")


def test_a_multimodal_item_changes_what_comes_from_its_first_token_on_and_nothing_before() -> None:
    keys = [make_extra_keys(multimodal=[MultimodalItem(name, 5, 2)]) for name in ("cat", "dog")]
    tokens = list(range(10, 18))
    story = Story().arrive("a", tokens, (1, 2), keys[0]).step(("a", 0, 8))
    story.arrive("b", [*tokens, 18], (1, 2, 3), keys[1]).step(("b", 8, 1))
    assert places(story.contents()) == [("b", position) for position in (5, 6, 7)]


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")], ids=["writer first", "reader first"])
def test_all_rows_of_a_step_write_before_any_of_them_reads(order: tuple[str, str]) -> None:
    story = Story().arrive("a", [10, 11, 12, 13], (1,)).arrive("b", [10, 11, 12, 13, 14], (1, 2))
    chunks = {"a": ("a", 0, 4), "b": ("b", 4, 1)}
    story.step(*(chunks[name] for name in order))
    assert story.contents().wrong_reads == ()


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")], ids=["writer first", "reader first"])
def test_rows_that_do_not_see_each_other_read_what_was_there_before_the_step(order: tuple[str, str]) -> None:
    story = Story().arrive("x", [20, 21, 22, 23], (1,)).step(("x", 0, 4))
    story.arrive("a", [10, 11, 12, 13], (1,)).arrive("b", [10, 11, 12, 13, 14], (1, 2))
    chunks = {"a": ("a", 0, 4), "b": ("b", 4, 1)}
    contents = kv_contents(story.step(*(chunks[name] for name in order)).log, rows_see_each_other=False)
    assert places(contents) == [("b", position) for position in range(4)]
    assert all(read.found is not None and read.found.request_id == "x" for read in contents.wrong_reads)
    later = kv_contents(story.step(("b", 4, 1)).log, rows_see_each_other=False)
    assert len(later.wrong_reads) == 4


def test_asking_in_the_middle_of_a_step_does_not_change_what_is_said_at_its_end() -> None:
    story = Story().arrive("a", [10, 11, 12, 13], (1,)).arrive("b", [10, 11, 12, 13, 14], (1, 2))
    contents = KVContents()
    for event in story.step(("b", 4, 1), ("a", 0, 4)).log:
        contents.take(event)
        before_a_writes = isinstance(event, ev.ChunkComputed) and event.request_id == "b"
        assert len(contents.wrong_reads) == (4 if before_a_writes else 0)
    assert contents.num_reads == 5 + 4


def test_what_is_written_in_the_next_step_comes_too_late() -> None:
    story = Story().arrive("a", [10, 11, 12, 13], (1,)).arrive("b", [10, 11, 12, 13, 14], (1, 2))
    story.step(("b", 4, 1)).step(("a", 0, 4))
    assert places(story.contents()) == [("b", position) for position in range(4)]


def test_a_row_that_ends_and_frees_its_blocks_in_its_last_step_has_still_read_them() -> None:
    story = Story().arrive("b", [10, 11], (1,)).step(("b", 1, 1))
    story.add(ev.BlocksFreed("b", (1,), (), ()), ev.RequestFinished("b", "length"))
    assert places(story.contents()) == [("b", 0)]


def test_output_tokens_are_read_like_those_of_the_prompt() -> None:
    story = Story().arrive("a", [10, 11], (1,)).step(("a", 0, 2)).add(ev.TokenOut("a", 0, 90, ""))
    story.step(("a", 2, 1))
    assert held(story.contents(), 1)[2] == (90, 2, "a", 2)
    assert story.contents().wrong_reads == ()


def test_a_preempted_request_is_held_to_the_blocks_that_it_has_when_it_resumes() -> None:
    story = Story().arrive("a", [10, 11, 12, 13, 14], (1, 2)).step(("a", 0, 5))
    story.add(ev.RequestPreempted("a", 5), ev.BlocksFreed("a", (2,), (1,), ()))
    story.add(ev.BlocksHit("a", (1,)), ev.BlocksAllocated("a", (3,))).step(("a", 4, 1))
    assert story.contents().wrong_reads == ()
    assert held(story.contents(), 3)[0] == (14, 4, "a", 2)


def test_adopted_blocks_are_read_like_hits() -> None:
    story = Story().arrive("a", [10, 11, 12, 13, 14], (1, 2)).step(("a", 0, 5))
    story.arrive("b", [10, 11, 12, 13, 15]).add(ev.BlocksAdopted("b", (1,), 4), ev.BlocksAllocated("b", (3,)))
    story.arrive("c", [10, 11, 12, 99, 15]).add(ev.BlocksAdopted("c", (1,), 4), ev.BlocksAllocated("c", (4,)))
    story.step(("b", 4, 1), ("c", 4, 1))
    assert places(story.contents()) == [("c", 3)]


# -- Samples: fork and copy on write -----------------------------------------------------------------------


def forked() -> Story:
    """Two samples of one prompt of six tokens: they share blocks 1 and 2, and have drawn different tokens."""
    story = Story().arrive("a", [10, 11, 12, 13, 14, 15], (1, 2)).arrive("a.1", [10, 11, 12, 13, 14, 15])
    story.step(("a", 0, 6)).add(ev.SamplesForked("a", ("a.1",), (1, 2)))
    return story.add(ev.TokenOut("a", 0, 90, ""), ev.TokenOut("a.1", 0, 91, ""))


def test_a_copied_block_holds_what_its_source_held_before_the_step() -> None:
    story = forked().step(("a", 6, 1), ("a.1", 6, 1), copies=(ev.BlockCopied("a", 2, 3, 2),))
    contents = story.contents()
    assert contents.wrong_reads == ()
    assert held(contents, 3) == [(14, 4, "a", 1), (15, 5, "a", 1), (90, 6, "a", 2), None]
    assert held(contents, 2) == [(14, 4, "a", 1), (15, 5, "a", 1), (91, 6, "a.1", 2), None]


def test_samples_that_write_into_a_shared_block_without_copying_read_each_others_tokens() -> None:
    story = forked().step(("a", 6, 1), ("a.1", 6, 1))
    assert places(story.contents()) == [("a", 6)]


def test_all_copies_of_a_step_read_their_sources_before_any_of_them_writes() -> None:
    """Block 2 is the source of one copy and, freed by its last reader, the target of another."""
    story = forked().arrive("c", [20, 21], (5,)).arrive("c.1", [20, 21]).step(("c", 0, 2))
    story.add(ev.SamplesForked("c", ("c.1",), (5,)), ev.TokenOut("c", 0, 92, ""), ev.TokenOut("c.1", 0, 93, ""))
    story.add(ev.BlocksFreed("a.1", (), (), (2, 1)))
    copies = (ev.BlockCopied("c", 5, 2, 2), ev.BlockCopied("a", 2, 3, 2))
    story.step(("c", 2, 1), ("a", 6, 1), copies=copies)
    assert story.contents().wrong_reads == ()
    assert held(story.contents(), 2)[:3] == [(20, 0, "c", 2), (21, 1, "c", 2), (92, 2, "c", 3)]


def test_a_row_that_is_taken_back_by_preemption_copies_nothing() -> None:
    story = forked()
    story.log.step += 1
    story.add(ev.BlockCopied("a", 2, 3, 2), ev.RequestPreempted("a", 6), ev.BlocksFreed("a", (3,), (), (1,)))
    story.add(ev.StepScheduled((("a.1", 6, 1, "decode"),), 1, 0), ev.ChunkComputed("a.1", 6, 1, "decode"))
    assert held(story.contents(), 3) == [None] * 4
    assert story.contents().wrong_reads == ()


# -- Blocks that are found and were not computed -----------------------------------------------------------


def test_a_block_published_and_never_computed_is_found_and_unwritten() -> None:
    story = Story().arrive("a", [10, 11, 12, 13, 14], (1, 2)).publish("a", (1,))
    story.add(ev.BlocksFreed("a", (2,), (1,), ()), ev.RequestAborted("a"))
    (block,) = story.contents().published_unwritten
    assert (block.block_id, block.request_id, block.index, block.num_wrong) == (1, "a", 0, 4)
    assert block.token_ids == (10, 11, 12, 13)
    assert block.found == (None, None, None, None)
    assert str(block) == (
        "Block 1 is found under 00000000 for tokens 10 11 12 13 of a, but nothing was ever written there."
    )


def test_a_block_computed_after_it_was_published_is_unwritten_only_until_then() -> None:
    story = Story().arrive("a", [10, 11, 12, 13, 14], (1, 2)).publish("a", (1,))
    assert [block.num_wrong for block in story.contents().published_unwritten] == [4]
    story.step(("a", 0, 3))
    assert [block.num_wrong for block in story.contents().published_unwritten] == [1]
    assert "but 1 of its 4 slots hold other K/V" in story.contents().describe()
    story.step(("a", 3, 2))
    assert story.contents().published_unwritten == ()


def test_an_unwritten_block_says_whose_tokens_it_holds_instead() -> None:
    story = Story().arrive("x", [20, 21, 22, 23], (1,)).step(("x", 0, 4)).arrive("a", [10, 11, 12, 13], (1,))
    story.publish("a", (1,))
    assert story.contents().published_unwritten[0].describe() == (
        "Block 1 is found under 00000000 for tokens 10 11 12 13 of a, but it holds the K/V of tokens 20 21 22 23 "
        "at positions 0 to 3, which x wrote in step 1."
    )


@pytest.mark.parametrize("forgets", [ev.BlocksEvicted("z", (1,), ("00",)), ev.CacheReset((1,))], ids=lambda e: e.kind)
def test_a_block_that_is_not_found_any_more_is_no_unwritten_block(forgets: ev.Event) -> None:
    story = Story().arrive("a", [10, 11, 12, 13], (1,)).publish("a", (1,))
    assert story.add(forgets).contents().published_unwritten == ()


def test_a_published_block_in_which_somebody_writes_is_unwritten_from_then_on() -> None:
    story = Story().arrive("a", [10, 11, 12, 13], (1,)).step(("a", 0, 4)).publish("a", (1,))
    assert story.contents().published_unwritten == ()
    story.arrive("b", [20], (1,)).step(("b", 0, 1))
    (block,) = story.contents().published_unwritten
    assert block.num_wrong == 1


# -- Logs that no engine writes ----------------------------------------------------------------------------


def test_a_chunk_beyond_the_block_table_or_the_tokens_is_an_error() -> None:
    with pytest.raises(InvariantError, match="'a' computes 5 tokens and holds 1 blocks"):
        Story().arrive("a", [10, 11, 12, 13, 14], (1,)).step(("a", 0, 5)).contents()
    with pytest.raises(InvariantError, match="'a' has 2 tokens, and 3 are spoken of"):
        Story().arrive("a", [10, 11], (1,)).step(("a", 0, 3)).contents()


@given(
    st.lists(
        st.tuples(st.lists(st.integers(1, 2), min_size=1, max_size=8), st.permutations([1, 2, 3])),
        min_size=2,
        max_size=5,
    ),
    st.data(),
)
@settings(STEADY, max_examples=200)
def test_any_tables_and_chunks_give_the_wrong_reads_of_the_slow_obvious_model(
    requests: list[tuple[list[int], list[int]]], data: st.DataObject
) -> None:
    """The model: a dictionary of slots that holds whole token tuples, and no numbers."""
    story = Story()
    slots: dict[tuple[int, int], tuple[int, ...]] = {}
    wrong: list[tuple[int, str, int, tuple[int, ...] | None]] = []
    names = [f"r{i}" for i in range(len(requests))]
    for name, (tokens, table) in zip(names, requests, strict=True):
        story.arrive(name, tokens, tuple(table))
    for number in range(1, data.draw(st.integers(1, 5)) + 1):
        chunks = []
        for name in data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True)):
            tokens = requests[names.index(name)][0]
            start = data.draw(st.integers(0, len(tokens) - 1))
            chunks.append((name, start, data.draw(st.integers(1, len(tokens) - start))))
        story.step(*chunks)
        for name, start, count in chunks:
            tokens, table = requests[names.index(name)]
            for p in range(start, start + count):
                slots[table[p // 4], p % 4] = tuple(tokens[: p + 1])
        for name, start, count in chunks:
            tokens, table = requests[names.index(name)]
            for p in range(start + count):
                found = slots.get((table[p // 4], p % 4))
                if found != tuple(tokens[: p + 1]):
                    wrong.append((number, name, p, found))
    assert [
        (r.step, r.request_id, r.position, None if r.found is None else r.found.kv.token_ids)
        for r in story.contents().wrong_reads
    ] == wrong


# -- An engine's log ---------------------------------------------------------------------------------------


def healthy(core: EngineCore) -> KVContents:
    for seen in (True, False):
        contents = kv_contents(core.log, rows_see_each_other=seen)
        assert contents.wrong_reads == ()
        assert contents.published_unwritten == ()
    return contents


@pytest.mark.parametrize("publication", ["on-completion", "incremental"])
@pytest.mark.parametrize("coordination", ["independent", "single-flight", "shared-prefix", "wait-or-recompute"])
@given(
    actions=st.lists(
        st.tuples(
            st.sampled_from(["submit", "submit", "submit", "step", "step", "step", "abort", "reset"]),
            st.integers(1, 3),
            st.integers(0, 9),
        ),
        min_size=12,
        max_size=30,
    )
)
@settings(STEADY, max_examples=40)
def test_whatever_happens_an_engine_that_publishes_what_is_computed_never_reads_wrong(
    publication: str, coordination: str, actions: list[tuple[str, int, int]]
) -> None:
    core = small_core(publication=publication, coordination=coordination, max_num_batched_tokens=7, adoption=True)
    taken = KVContents(rows_see_each_other=False)  # the stricter of the two
    seen = 0
    for kind, first, second in actions:
        if kind == "submit":
            tokens = [*range(10, 10 + 4 * first), *range(50, 51 + second)]
            core.submit(tokens, Sampling(max_tokens=1 + second % 4, n=1 + (second == 5), temperature=1.0))
        elif kind == "step":
            core.run(first)
        elif kind == "abort" and core.requests:
            core.abort(list(core.requests)[-first % len(core.requests)])
        elif kind == "reset":
            core.reset_cache()
        for event in core.log.since(seen):
            taken.take(event)
        seen = len(core.log)
        assert taken.wrong_reads == ()
        assert taken.published_unwritten == ()
    run(core)
    healthy(core)


def test_preemption_eviction_and_resumption_leave_no_wrong_read() -> None:
    core = small_core(num_blocks=6, publication="incremental")
    for name in "abc":
        core.submit([ord(name), *FULL_PROMPT[1:]], request_id=name, max_tokens=8)
    run(core)
    assert events_of(core, ev.RequestPreempted)
    assert events_of(core, ev.BlocksEvicted)
    assert healthy(core).num_reads > 100


def test_samples_that_copy_on_write_read_their_own_tokens_only() -> None:
    core = small_core(num_blocks=16)
    core.submit([10, 11, 12, 13, 14, 15], request_id="a", max_tokens=4, n=3, temperature=1.0, seed=1)
    run(core)
    assert events_of(core, ev.BlockCopied)
    healthy(core)


def test_a_log_read_from_json_tells_the_same() -> None:
    core = small_core(publication="incremental")
    for salt in (None, "s", None):
        core.submit(FULL_PROMPT, max_tokens=3, cache_salt=salt)
    run(core)
    plain = json.loads(json.dumps([event.as_dict() for event in core.log]))
    again = kv_contents(event_from_dict(event) for event in plain)
    assert [held(again, i) for i in range(1, 9)] == [held(healthy(core), i) for i in range(1, 9)]
    assert again.num_reads == healthy(core).num_reads


def colliding_prompts(core: EngineCore) -> tuple[list[int], list[int]]:
    """Return two prompts of five tokens whose first blocks differ and have the same weak hash."""
    from minivllm.cache.block_hash import BLOCK_HASHERS, HashChain

    seen: dict[bytes, list[int]] = {}
    for token in itertools.count(10):
        tokens = [token, 11, 12, 13, 14]
        chain = HashChain(core.config.block_size, (), BLOCK_HASHERS["weak-4"])
        chain.extend_to(tokens)
        if chain.hashes[0] in seen:
            return seen[chain.hashes[0]], tokens
        seen[chain.hashes[0]] = tokens
    raise AssertionError("unreachable")


@pytest.mark.parametrize("check_token_ids", [False, True])
def test_a_collision_of_weak_hashes_is_a_wrong_read_unless_token_ids_are_checked(check_token_ids: bool) -> None:
    core = small_core(publication="incremental", block_hash="weak-4", check_token_ids=check_token_ids)
    first, second = colliding_prompts(core)
    core.submit(first, request_id="a", max_tokens=1)
    step(core)
    core.submit(second, request_id="b", max_tokens=1)
    run(core)
    check(core)
    expected = [] if check_token_ids else [("b", position) for position in range(4)]
    assert places(kv_contents(core.log)) == expected


def test_the_contents_show_themselves_in_a_notebook_as_a_list_of_sentences() -> None:
    story = Story().arrive("<b>", [10, 11], (1,)).step(("<b>", 1, 1))
    assert story.contents()._repr_html_() == (
        "<ul><li>Step 1: &lt;b&gt; reads position 0 (token 10) in block 1, "
        "and nothing was ever written there.</li></ul>"
    )
