"""What happened, in order: the one log of the engine.

Everything that changes is one event, appended once. An event carries the facts of one call, with the ids of
all blocks that the call touched. Views, metrics, traces and the time slider read the log; none of them
reaches into the engine. `replay.py` folds the log into the state at any moment.

Knows nothing of the objects that emit: an event holds numbers, strings and tuples of them, so that it can be
read from another thread and written as JSON. Must not know of a wall clock: the engine's clock gives the time.
"""

from __future__ import annotations

from dataclasses import dataclass

from minivllm.log.event import Event as Event
from minivllm.log.event import register
from minivllm.request import ExtraKeys

# --- The engine itself ------------------------------------------------------------------------------------


@register
@dataclass(slots=True)
class EngineStarted(Event):
    """First event of every log: what a view needs to know before anything moves."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    publication: str
    coordination: str
    release: str
    runner: str
    scheduling: str
    block_hash: str


@register
@dataclass(slots=True)
class PoliciesChanged(Event):
    """The engine continues under other policies. Only possible while no request is in it."""

    publication: str
    coordination: str
    release: str


@register
@dataclass(slots=True)
class StepScheduled(Event):
    """A step begins. ``rows`` are (request id, first position, number of tokens, "prefill" | "decode")."""

    rows: tuple[tuple[str, int, int, str], ...]
    num_waiting: int
    num_held: int


@register
@dataclass(slots=True)
class StepFailed(Event):
    """The engine stopped on an error in this step; nothing that it should have computed counts as computed."""

    error: str


@register
@dataclass(slots=True)
class CacheReset(Event):
    """Every published block was forgotten. Only possible while no request holds a block."""

    block_ids: tuple[int, ...]


# --- A request's way --------------------------------------------------------------------------------------


@register
@dataclass(slots=True)
class RequestDeferred(Event):
    """A request waits for another's output token ``output_token`` (1 is the first) before it arrives."""

    request_id: str
    after_request_id: str
    output_token: int


@register
@dataclass(slots=True)
class RequestArrived(Event):
    """A request came in; its clock (TTFT, completion) starts here.

    ``arrival`` counts the requests that came, from 0. ``extra_keys`` are the tagged keys that keep its blocks
    apart from others, such as ``("cache_salt", "team-a")``. The waiting list is in the order of ``rank``, within a
    rank preempted requests first (the one preempted last at the head), then by arrival.
    """

    request_id: str
    arrival: int
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    extra_keys: ExtraKeys
    rank: int


@register
@dataclass(slots=True)
class RequestAdmitted(Event):
    """A waiting request became a running row; a preempted one did so again (``resumed``)."""

    request_id: str
    resumed: bool


@register
@dataclass(slots=True)
class PrefixLookedUp(Event):
    """What the index had for a request at the moment it was admitted. Written once per admission.

    ``num_queried_tokens`` is the number of tokens asked for, ``num_recovered_tokens`` how many of them were
    taken from the cache. With ``resumed`` it is a preempted request that finds its own blocks again, which
    is counted apart.
    """

    request_id: str
    num_queried_tokens: int
    num_recovered_tokens: int
    resumed: bool


@register
@dataclass(slots=True)
class ChunkComputed(Event):
    """The step has written the K/V of ``num_tokens`` tokens from position ``start`` on.

    ``phase`` is "prefill" or "decode".
    """

    request_id: str
    start: int
    num_tokens: int
    phase: str


@register
@dataclass(slots=True)
class PrefillFinished(Event):
    """All prompt tokens of the request have their K/V (computed or recovered)."""

    request_id: str


@register
@dataclass(slots=True)
class TokenOut(Event):
    """An output token left the engine at the end of the step. ``index`` counts from 0."""

    request_id: str
    index: int
    token_id: int
    text: str


@register
@dataclass(slots=True)
class RequestPreempted(Event):
    """The newest running request of the highest rank freed its blocks; it waits at the head of its rank.

    ``num_computed_tokens`` is what it had computed and may have to compute again.
    """

    request_id: str
    num_computed_tokens: int


@register
@dataclass(slots=True)
class RequestFinished(Event):
    """Normal end. ``reason`` is "length" (max_tokens reached) or "stop" (end of sequence, stop string)."""

    request_id: str
    reason: str


@register
@dataclass(slots=True)
class RequestAborted(Event):
    """The caller took the request back."""

    request_id: str


@register
@dataclass(slots=True)
class RequestFailed(Event):
    """The request ended on an error."""

    request_id: str
    error: str


# --- Blocks -----------------------------------------------------------------------------------------------


@register
@dataclass(slots=True)
class BlocksHit(Event):
    """Published blocks entered the request's block table: each count went up by one.

    Those that were in the free queue left it.
    """

    request_id: str
    block_ids: tuple[int, ...]


@register
@dataclass(slots=True)
class BlocksEvicted(Event):
    """Free published blocks were forgotten so that ``request_id`` can have them: their hashes now miss."""

    request_id: str
    block_ids: tuple[int, ...]
    block_hashes: tuple[str, ...]


@register
@dataclass(slots=True)
class BlocksAllocated(Event):
    """Blocks were popped from the head of the free queue and appended to the request's block table."""

    request_id: str
    block_ids: tuple[int, ...]


@register
@dataclass(slots=True)
class BlocksPublished(Event):
    """Full, computed blocks became visible to others.

    ``parent_hashes[i]`` is the hash of the block before, "" for the root. Hashes are in
    hexadecimal. ``block_ids[i]`` is logical block ``indices[i]`` of the request: not always neighbours, as
    blocks that hit or that another request published first are left out.
    """

    request_id: str
    block_ids: tuple[int, ...]
    block_hashes: tuple[str, ...]
    parent_hashes: tuple[str, ...]
    indices: tuple[int, ...]


@register
@dataclass(slots=True)
class BlocksDuplicated(Event):
    """Full blocks that could have been published, had another request not published the same content first.

    ``block_ids`` stay private to the request until it frees them; ``twin_block_ids`` are the ones that are found.
    """

    request_id: str
    block_ids: tuple[int, ...]
    twin_block_ids: tuple[int, ...]
    block_hashes: tuple[str, ...]


@register
@dataclass(slots=True)
class BlocksFreed(Event):
    """A request freed its block table, tail first: each count went down by one.

    ``to_front`` are now at the head of the free queue in this order, ``to_back`` at its end in this order (by
    the usual policy: those without a hash, and the published ones, which are still found); ``still_held`` are
    in use by others.
    """

    request_id: str
    to_front: tuple[int, ...]
    to_back: tuple[int, ...]
    still_held: tuple[int, ...]


@register
@dataclass(slots=True)
class BlockCopied(Event):
    """Copy on write: a sample was about to write into a block that other samples read.

    Its block table has ``block_id``, popped from the free queue, in place of ``source_block_id`` from now on;
    ``num_tokens`` tokens of K/V were copied. The source's count went down by one, and never to 0.
    """

    request_id: str
    source_block_id: int
    block_id: int
    num_tokens: int


@register
@dataclass(slots=True)
class BlocksAdopted(Event):
    """A running request found, in mid-prefill, blocks that others have published since, and took them.

    They count as computed; each count went up by one, and those that were in the free queue left it.
    """

    request_id: str
    block_ids: tuple[int, ...]
    num_tokens: int


@register
@dataclass(slots=True)
class HashCollision(Event):
    """A block was found by its hash and holds other tokens: with the check of token ids it is not served.

    Without the check, ``request_id`` would have read the K/V of ``held_token_ids`` for its own ``token_ids``.
    Tokens may be equal in the block itself when an earlier block of the chain differs.
    """

    request_id: str
    block_id: int
    block_hash: str
    token_ids: tuple[int, ...]
    held_token_ids: tuple[int, ...]


# --- Samples of one prompt --------------------------------------------------------------------------------


@register
@dataclass(slots=True)
class SampleHeld(Event):
    """A further sample of a prompt has arrived; it waits until ``first_id`` has computed the prompt for both."""

    request_id: str
    first_id: str


@register
@dataclass(slots=True)
class SampleLeads(Event):
    """The first sample ended before the prompt was computed: the next one takes its place and may be admitted."""

    from_id: str
    to_id: str


@register
@dataclass(slots=True)
class SamplesForked(Event):
    """The prompt is computed: each further sample runs now, on the same blocks.

    Each of ``sample_ids`` took the block table of ``request_id``, which is ``block_ids``: every count went up by
    one per sample.
    """

    request_id: str
    sample_ids: tuple[str, ...]
    block_ids: tuple[int, ...]


# --- Shared prefixes --------------------------------------------------------------------------------------


@register
@dataclass(slots=True)
class PrefixAwaited(Event):
    """A request is held because its next missing block is being computed by ``leader_id``.

    Written again when it goes on to wait for a later block, or behind another request. ``wait_ms`` and
    ``recompute_ms`` are the times to its first token that were predicted, where a policy predicts them.
    """

    request_id: str
    leader_id: str
    block_index: int
    block_hash: str
    wait_ms: float | None
    recompute_ms: float | None


@register
@dataclass(slots=True)
class PrefixReleased(Event):
    """Held requests may be admitted: what they waited for is published, or is computed by their leader no more.

    They look again, and may be held behind another. ``reason`` is "published" (by ``leader_id``), or what became of
    ``leader_id``: "ended" or "preempted".
    """

    request_ids: tuple[str, ...]
    leader_id: str
    reason: str


@register
@dataclass(slots=True)
class RecomputeChosen(Event):
    """A request computes what ``leader_id`` is computing as well, because that is sooner than waiting for it."""

    request_id: str
    leader_id: str
    block_index: int
    wait_ms: float
    recompute_ms: float


# --- Flights ----------------------------------------------------------------------------------------------


@register
@dataclass(slots=True)
class FlightOpened(Event):
    """The first request with this prompt and these extra keys: it leads and computes the prompt."""

    flight_id: int
    leader_id: str


@register
@dataclass(slots=True)
class FlightJoined(Event):
    """The same prompt again while its flight is open: the request is held behind the leader."""

    flight_id: int
    leader_id: str
    request_id: str


@register
@dataclass(slots=True)
class FlightReleased(Event):
    """The flight is over; its followers are released and may be admitted.

    ``reason`` is "prefill" (the leader's prompt is published), "cached" (others have published what was still missing
    of it), "finished" (the leader ended), or "aborted" / "failed" (the leader ended so, with nothing left to wait for).
    """

    flight_id: int
    leader_id: str
    request_ids: tuple[str, ...]
    reason: str


@register
@dataclass(slots=True)
class FlightHandedOver(Event):
    """The leader ended before it had published its prompt: the oldest follower leads."""

    flight_id: int
    from_id: str
    to_id: str


@register
@dataclass(slots=True)
class FlightLeft(Event):
    """A follower ended while it was held; the others wait on."""

    flight_id: int
    request_id: str
