"""How a correct prefix cache behaves, one sentence a fact: rules, examples, and faults that engines have shipped.

The tests beside this file carry the ids (``@pytest.mark.fact("example-3")``), and `tests/facts/map.py` holds the two
against each other. Knows sentences. Must not know the engine or the tests.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Kind(enum.Enum):
    """What a fact is; the value is the heading it is printed under."""

    RULE = "Rules"
    EXAMPLE = "Examples (blocks of 16 tokens, ten blocks, unless said)"
    FAULT = "Faults that engines have shipped, and what is right instead"


@dataclass(frozen=True, slots=True)
class Fact:
    """One sentence about behaviour, with the id that tests name it by."""

    fact_id: str
    sentence: str
    kind: Kind


_RULES = {
    "hash-full-blocks": "A block has a hash once it is full, and none while it still grows.",
    "hash-chain": "A block's hash contains its parent's, so equal tokens after different beginnings differ.",
    "hash-root": "Every chain begins at one root that never changes.",
    "hash-everywhere": "Equal input gives an equal hash, whatever the process or the machine.",
    "hash-extra-keys": "Extra keys say their kind and come in one order: adapter, multimodal items, salt.",
    "hash-salt-once": "The salt is hashed with the first block, and the chain brings it to all others.",
    "hash-no-salt": "A salt without a character is the same as none.",
    "hash-whole-ids": "Every bit of every token id counts.",
    "lookup-pure": "Looking up leaves counts, order, figures and the log as they are.",
    "lookup-first-miss": "A look-up follows the chain from its start, and what lies behind a gap is not found.",
    "lookup-last-token": "The last token is never found, since its logits are needed.",
    "lookup-whole-blocks": "A prompt that ends with a block computes that block, though all of it is cached.",
    "lookup-not-again": "A request that runs does not look up again, unless adoption is on.",
    "adoption-boundary": "With adoption a running prefill looks up before each chunk, between two blocks.",
    "adoption-apart": "Adopted tokens are counted apart from recovered ones.",
    "allocation-room-first": "Room is checked before anything moves.",
    "allocation-hits-first": "Hits are taken before new blocks are popped, so no request evicts its own hit.",
    "allocation-from-head": "New blocks come from the head of the free queue and lose what they held.",
    "allocation-free-hits": "A hit that nobody uses takes up room as it leaves the free queue; one in use takes none.",
    "allocation-no-trace": "An allocation that fails changes nothing at all.",
    "sharing-count": "A block's count is the number of block tables that it is in.",
    "sharing-two-copies": "Of two equal blocks the first one published is found; the other stays private.",
    "sharing-append-only": "A block table only grows at its end, until all of it is freed.",
    "sharing-samples": "Samples of one prompt use the same prompt blocks.",
    "sharing-copy-on-write": "Samples share a partly filled block until one writes, and that one writes into a copy.",
    "freeing-tail-first": "Blocks are freed from the end of a chain to its beginning.",
    "freeing-plain-front": "A freed block without a hash is reused next.",
    "freeing-published-back": "A freed published block is reused last.",
    "freeing-still-found": "A freed published block is found until it is popped.",
    "eviction-unused-only": "Only a block that nobody uses is evicted.",
    "eviction-hash-first": "The index forgets a popped block before anybody writes into it.",
    "eviction-old-hash": "The old hash of an evicted block misses.",
    "reset-refused": "A reset is refused, without a trace, while a block is in use.",
    "reset-all": "A reset forgets every hash.",
    "preemption-newest": "When blocks run out, the request admitted last gives up all of its own.",
    "preemption-front": "A preempted request waits before all others, with nothing computed.",
    "preemption-finds-own": "A preempted request takes its own published blocks again when it resumes.",
    "preemption-admits-nobody": "A step that preempts admits nobody.",
    "figures-once": "Queried and recovered are tokens, counted once a request, at its admission.",
    "figures-own-apart": "What a preempted request finds of its own is counted apart.",
    "figures-own-chunks": "A request's earlier chunks are no hits.",
    "figures-ratio": "The hit rate of a window is recovered over queried tokens, and no mean of rates.",
    "figures-no-query": "Without a query there is no rate, not a rate of 0.",
    "publication-at-allocation": "Published at allocation, two of three equal prompts hit in the same step.",
    "publication-after-pass": "Published after the forward pass, all three of them compute.",
    "publication-lock-step": "Two equal prompts in lock-step compute their second half twice under either publication.",
    "publication-single-flight": "Single flight lets the second of two equal prompts compute only what it must.",
}

_EXAMPLES = {
    "example-1": "A cold prompt of 55 tokens recovers 0, takes blocks 1 to 4, and 1 to 3 are hashed.",
    "example-2": "Meanwhile the same 48 tokens and 5 others recover 48, take block 5, and 5 blocks are left.",
    "example-3": "Both end, the first one first: the free queue is 5, 4, 6, 7, 8, 9, 10, 3, 2, 1.",
    "example-4": "The same prompt again, of 16, 32, 47, 48 or 49 tokens, recovers 0, 16, 32, 32 or 48.",
    "example-5": "A pool of one block: the next prompt gets the same block, and the old hash is gone.",
    "example-6": "Without caching, blocks of 4, a pool of 4: 3 blocks; then 4 and nothing recovered; then no room.",
    "example-7": "55 tokens and 4 more need no new block; 19 more need one, and the fourth is hashed.",
    "example-8": "What salt `a` cached is found by `a` and not by `b`, no salt, or an empty one.",
    "example-9": "An adapter called `foo` and a salt called `foo` give different first hashes.",
    "example-10": "A window of 5 requests over (1, 20, 9), (4, 80, 16), (1, 10, 2): rates .45, .25, .2.",
    "example-11": "Three prompts of 800, 1,024 tokens a step, 400 a request: 400/400/224 twice, then 1/1/352.",
    "example-12": "A request that was refused once and then admitted counts as one query.",
    "example-13": "Asking for more blocks than are free says how many were asked for and how many are free.",
}

_FAULTS = {
    "fault-zombie": "Only computed blocks are ever found; what is withdrawn takes its blocks along.",
    "fault-stale-hash": "No way to hand a block out leaves its old hash behind.",
    "fault-leaked-counts": "Whatever fails, counts are as before; a count below 0 is an error at once.",
    "fault-full-hit": "A full hit still computes a token and answers.",
    "fault-double-counting": "Retries, chunks, waiting and resumption add nothing to the figures.",
    "fault-salt-lost": "A salt, an adapter or an item given at submission reaches the hash, on every way in.",
    "fault-key-collisions": "Only the very same tokens and keys have the same hash.",
    "fault-publication-moment": "Once a handle says finished, a new request recovers, and not before it should.",
    "fault-cancel-corrupts": "Whenever a request is cancelled, a key never says more than what was computed.",
    "fault-restored-reply": "A chat turn made of the generated ids is found; one made of text may miss.",
    "fault-flattering-rates": "Figures are tokens: a partial hit is never a rate of 1.",
    "fault-head-before-tail": "Under pressure a chain loses its end before its beginning.",
    "fault-frequency": "A prefix that was hit often and is not asked for any more is forgotten in its turn.",
    "fault-shared-in-full": "Admission counts what is new: sharers do not pay for what is shared.",
    "fault-nan": "Nothing that is no number stays where masked slots are read.",
    "fault-shallow-copies": "Only full blocks that nobody writes any more are shared.",
    "fault-memory-pinned": "The pool is made once; its bytes are known and stay the same.",
}

FACTS: dict[str, Fact] = {
    fact_id: Fact(fact_id, sentence, kind)
    for kind, sentences in ((Kind.RULE, _RULES), (Kind.EXAMPLE, _EXAMPLES), (Kind.FAULT, _FAULTS))
    for fact_id, sentence in sentences.items()
}
"""Every fact by its id, in the order in which they are printed."""
