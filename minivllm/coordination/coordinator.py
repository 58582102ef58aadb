"""What the engine asks of a coordinator, in the order of a request's life.

The base class is the coordinator that coordinates nothing: a subclass overrides what it needs.
Knows request ids and hashes of blocks. Must not know block ids, the scheduler's lists or time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from minivllm.cache.block_hash import BlockHash
from minivllm.coordination.flight import Flight
from minivllm.coordination.release import ReleasePolicy
from minivllm.cost import CostModel
from minivllm.errors import UnknownRequestError
from minivllm.log import events as ev
from minivllm.log.states import Role
from minivllm.request import Request, RequestState

Released = tuple[str, ...]
"""Ids of held requests that need not wait any more: the scheduler may admit them now."""

NOBODY: Released = ()


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a coordinator may know of a request that is about to be admitted.

    ``hashes`` is the request's hash chain; its first ``num_found`` blocks are published, and at most
    ``num_usable`` can be used. ``chunk_limit`` and ``budget`` are the most tokens of a request and of all in a step,
    ``budget_left`` is what this step has left.
    """

    hashes: Sequence[BlockHash]
    num_found: int
    num_usable: int
    block_size: int
    chunk_limit: int
    budget: int
    budget_left: int


class Coordinator:
    """What the engine asks, in the order of a request's life. Each call returns who is released.

    A coordinator of your own is a subclass. The base of all coordinators: no request waits for another, and only ids
    are kept. ``flights`` and ``released_request_ids`` are the state of single flight, ``awaiting`` says behind whom a
    request is held that waits for a shared prefix: they are there, and empty, in every coordinator.
    """

    name = "base"
    asks_what_is_missing = False
    """Whether `arrive` wants to know which blocks are missing: then each prompt is looked up when it comes in."""
    cost: CostModel | None = None
    """For coordinators that predict times. The engine sets that of its runner, if none is given."""

    def __init__(self, release: ReleasePolicy, emit: Callable[[ev.Event], None]) -> None:
        self.release = release
        self.flights: dict[int, Flight] = {}
        self.released_request_ids: set[str] = set()
        self.awaiting: dict[str, str] = {}
        self._emit = emit
        self._request_ids: set[str] = set()

    def arrive(self, request: Request, missing: Sequence[BlockHash] | None = None) -> Role | None:
        """A request came in; the answer says whether it is held.

        ``missing`` are the prompt blocks that it could use and that are not published now (None: not known). Return
        None if there is nothing to coordinate: then no more is reported of this request.
        """
        self._request_ids.add(request.request_id)
        return Role.INDEPENDENT

    def who_computes(self, block_hash: BlockHash) -> str | None:
        """Return the running request that computes this block and has not published it. Changes nothing."""
        return None

    def may_admit(self, request: Request, outlook: Outlook) -> bool:
        """Whether a waiting request may run now. If not, it is held until a call returns its id as released."""
        return True

    def admitted(self, request: Request, hashes: Sequence[BlockHash]) -> None:
        """A request runs, and will compute the prompt blocks with these hashes. Preempted ones come again."""

    def preempted(self, request_id: str) -> Released:
        """A running request was preempted; what it had not published will come later, or never."""
        return NOBODY

    def wants_blocks(self, request_id: str) -> bool:
        """Shall the prompt blocks that the request has computed be published now? Changes nothing."""
        return False

    def published(self, request_id: str, hashes: Sequence[BlockHash]) -> Released:
        """Blocks with these hashes, of the request's own chain, are found from now on."""
        return NOBODY

    def wants_prompt(self, request_id: str) -> bool:
        """The request's prompt is computed: shall it be published now? Changes nothing."""
        return False

    def prompt_published(self, request_id: str) -> Released:
        """The prompt that `wants_prompt` asked for is published."""
        return NOBODY

    def request_ended(self, request_id: str, end: RequestState, *, prompt_is_published: bool) -> Released:
        """A request ended, in whatever way. Raises UnknownRequestError for an id that never arrived."""
        if request_id not in self._request_ids:
            raise UnknownRequestError(f"request {request_id!r} ended but never arrived")
        self._request_ids.remove(request_id)
        return NOBODY

    def check_invariants(self) -> None:
        """Raise InvariantError if the coordinator's state contradicts itself."""


class IndependentCoordinator(Coordinator):
    """No request waits for another; publication is left to the publication policy."""

    name = "independent"
