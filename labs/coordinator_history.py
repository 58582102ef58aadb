"""Four designs of the flight coordinator, one after the other: what each one remembers of requests that it released.

While a flight is open, all four do the same: the first request with a prompt leads, the others are held, and a
leader that ends too early hands over. They differ in two places only, and each class below is these two places:

    _remember   the flight is over: what is kept of those that were released and have not ended?
    _forget     somebody ended who is in no open flight: is that one of them, or a foreign id?

    1  DeletedAtRelease     nothing is remembered, and nothing is checked
    2  ActiveDraining       the flight stays and drains: it knows its followers
    3  DrainingWithLeader   the flight stays and drains: it knows its followers and perhaps its leader
    4  ReleasedIdsApart     the flight is gone; a set of ids says who was released

The engine has the fourth (`minivllm.coordination.single_flight`); the other three are here to be looked at, and the
engine must never import this file. `compare` drives any of them with the same calls. Knows request ids and prompts;
must not know blocks, the scheduler or time. The four steps are those by which mini-vllm-rs came to its coordinator.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

from minivllm.errors import InvariantError, UnknownRequestError

Prompt = tuple[int, ...]

PROMPT: Prompt = (10, 11, 12, 13, 14)
"""The prompt of every request that names no other."""


class Release(enum.Enum):
    """When the followers are released."""

    AFTER_PREFILL = "after-prefill"  # the leader's prompt is published; the leader itself goes on
    ON_COMPLETION = "on-completion"  # the leader has ended


# --- What is kept ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Active:
    """An open flight: one leads, the others are held, oldest first."""

    prompt: Prompt
    leader_id: str
    follower_ids: list[str] = field(default_factory=list)

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Everybody in the flight."""
        return (self.leader_id, *self.follower_ids)

    def __str__(self) -> str:
        return f"active flight: {self.leader_id} leads {_names(self.follower_ids)}"


@dataclass(slots=True)
class Draining:
    """A flight that is over, and stays until its last follower ends."""

    prompt: Prompt
    released_ids: list[str]

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Everybody whose end the flight waits for."""
        return tuple(self.released_ids)

    def __str__(self) -> str:
        return f"draining flight: released {_names(self.released_ids)}"


@dataclass(slots=True)
class DrainingLed(Draining):
    """The same, with a place for a leader that goes on: None if it has ended."""

    leader_id: str | None

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Everybody whose end the flight waits for."""
        return (*([] if self.leader_id is None else [self.leader_id]), *self.released_ids)

    def __str__(self) -> str:
        return f"draining flight: {self.leader_id or 'nobody'} leads, released {_names(self.released_ids)}"


def _names(request_ids: Iterable[str]) -> str:
    return " ".join(request_ids) or "nobody"


# --- What the four have in common -------------------------------------------------------------------------


class Design(ABC):
    """A coordinator of flights. ``release`` says when followers are released.

    ``number`` is its place in the history, ``keeps`` and ``loses`` say in words what to look for.
    """

    number: int
    name: str
    keeps: str
    loses: str

    def __init__(self, release: Release = Release.AFTER_PREFILL) -> None:
        self.release = release
        self.open: dict[Prompt, Active] = {}

    def arrive(self, request_id: str, prompt: Prompt = PROMPT) -> str:
        """Join the open flight of this prompt ("follower") or open it ("leader")."""
        flight = self.open.get(prompt)
        if flight is None:
            self.open[prompt] = Active(prompt, request_id)
            return "leader"
        flight.follower_ids.append(request_id)
        return "follower"

    def prompt_published(self, request_id: str) -> tuple[str, ...]:
        """The request's prompt is published. Returns who is released: nobody, unless it leads and others wait."""
        flight = self._open_flight_of(request_id)
        if self.release is Release.ON_COMPLETION or flight is None or flight.leader_id != request_id:
            return ()
        return self._close(flight, leader_lives=True)

    def ended(self, request_id: str, *, prompt_is_published: bool = True) -> tuple[str, ...]:
        """A request ended. Returns who is released.

        A leader whose prompt is not published hands over to the oldest follower. Raises UnknownRequestError for
        an id that the design takes for a foreign one, with nothing changed.
        """
        flight = self._open_flight_of(request_id)
        if flight is None:
            self._forget(request_id)
            return ()
        if flight.leader_id != request_id:
            flight.follower_ids.remove(request_id)
            return ()
        if prompt_is_published or not flight.follower_ids:
            return self._close(flight, leader_lives=False)
        flight.leader_id = flight.follower_ids.pop(0)
        return (flight.leader_id,)

    def _open_flight_of(self, request_id: str) -> Active | None:
        return next((flight for flight in self.open.values() if request_id in flight.request_ids), None)

    def _close(self, flight: Active, *, leader_lives: bool) -> tuple[str, ...]:
        """The wait is over: the next request with this prompt opens a flight of its own, whatever the design."""
        del self.open[flight.prompt]
        self._remember(flight, flight.leader_id if leader_lives else None)
        return tuple(flight.follower_ids)

    @abstractmethod
    def _remember(self, flight: Active, leader_id: str | None) -> None:
        """Keep what is needed of a flight that is over. ``leader_id`` is None if the leader has ended, too."""

    @abstractmethod
    def _forget(self, request_id: str) -> None:
        """One that is in no open flight ended. Raises UnknownRequestError if it was not released before."""

    def kept(self) -> tuple[Draining, ...]:
        """Flights that are over and still kept."""
        return ()

    def released_ids(self) -> frozenset[str]:
        """Ids that are kept on their own, without a flight."""
        return frozenset()

    def known_ids(self) -> frozenset[str]:
        """Every id that is kept anywhere."""
        flights: list[Active | Draining] = [*self.open.values(), *self.kept()]
        return self.released_ids().union(*(flight.request_ids for flight in flights))

    def memory(self) -> tuple[str, ...]:
        """What is remembered, a sentence for each entry."""
        flights = [str(flight) for flight in (*self.open.values(), *self.kept())]
        released = self.released_ids()
        return (*flights, f"released: {_names(sorted(released))}") if released else tuple(flights)


def _unknown(request_id: str) -> UnknownRequestError:
    return UnknownRequestError(f"request {request_id!r} ended but is no leader, no follower and was not released")


# --- The four ---------------------------------------------------------------------------------------------


class DeletedAtRelease(Design):
    """Keeps nothing of a flight that is over. Loses the id of everybody who was released.

    With ``check_ids`` it calls its own followers unknown when they end. Without (as it was first proposed) nobody
    is refused any more: a foreign id, or a second end of the same request, passes in silence.
    """

    number = 1
    name = "deleted at release"
    keeps = "nothing of a flight that is over"
    loses = "everybody who was released; so an unknown id looks like a good one"

    def __init__(self, release: Release = Release.AFTER_PREFILL, *, check_ids: bool = False) -> None:
        super().__init__(release)
        self.check_ids = check_ids

    def _remember(self, flight: Active, leader_id: str | None) -> None:
        pass

    def _forget(self, request_id: str) -> None:
        if self.check_ids:
            raise _unknown(request_id)


class DeletedAndChecked(DeletedAtRelease):
    """The first design with its check left in: the form in which the fault was found."""

    name = "deleted, ids checked"

    def __init__(self, release: Release = Release.AFTER_PREFILL) -> None:
        super().__init__(release, check_ids=True)


class ActiveDraining(Design):
    """Keeps a flight, prompt and all, until its last follower has ended. Loses a leader that outlives its flight.

    Made for release on completion, where no leader does: a draining flight has no place for one.
    """

    number = 2
    name = "active / draining"
    keeps = "the flight with its prompt, until its last follower has ended"
    loses = "a leader that goes on after it has let its followers go"

    def __init__(self, release: Release = Release.AFTER_PREFILL) -> None:
        super().__init__(release)
        self.draining: list[Draining] = []

    def _remember(self, flight: Active, leader_id: str | None) -> None:
        if flight.follower_ids:
            self.draining.append(Draining(flight.prompt, list(flight.follower_ids)))

    def _forget(self, request_id: str) -> None:
        for flight in self.draining:
            if request_id in flight.released_ids:
                flight.released_ids.remove(request_id)
                if not flight.released_ids:
                    self.draining.remove(flight)
                return
        raise _unknown(request_id)

    def kept(self) -> tuple[Draining, ...]:
        """The draining flights."""
        return tuple(self.draining)


class DrainingWithLeader(Design):
    """Keeps a flight, prompt and all, until its followers and its leader have ended. Loses nobody.

    But now a draining flight may have a leader or not, and one way of release has no use for it: so there must be
    a check that it has none. ``num_checks`` counts how often it was asked, ``num_caught`` how often it had
    something to say.
    """

    number = 3
    name = "draining, optional leader"
    keeps = "the flight with its prompt, until its last follower and its leader have ended"
    loses = "nobody; but it needs a check that no sequence of calls can make fail"

    def __init__(self, release: Release = Release.AFTER_PREFILL) -> None:
        super().__init__(release)
        self.draining: list[DrainingLed] = []
        self.num_checks = 0
        self.num_caught = 0

    def _remember(self, flight: Active, leader_id: str | None) -> None:
        if leader_id is not None or flight.follower_ids:
            self.draining.append(DrainingLed(flight.prompt, list(flight.follower_ids), leader_id))

    def _forget(self, request_id: str) -> None:
        for flight in self.draining:
            self._check_leader(flight)
            if request_id == flight.leader_id:
                flight.leader_id = None
            elif request_id in flight.released_ids:
                flight.released_ids.remove(request_id)
            else:
                continue
            if not flight.request_ids:
                self.draining.remove(flight)
            return
        raise _unknown(request_id)

    def _check_leader(self, flight: DrainingLed) -> None:
        """Released on completion, the leader has ended: the state could still say that there is one."""
        if self.release is not Release.ON_COMPLETION:
            return
        self.num_checks += 1
        if flight.leader_id is not None:
            self.num_caught += 1
            raise InvariantError(f"leader {flight.leader_id!r} has ended and is still in a draining flight")

    def kept(self) -> tuple[Draining, ...]:
        """The draining flights."""
        return tuple(self.draining)


class ReleasedIdsApart(Design):
    """Keeps the ids of those that were released, until they end, and nothing else. Loses nobody.

    Who led whom has no effect once the wait is over; so it is not kept, and no state can contradict it.
    """

    number = 4
    name = "released ids apart"
    keeps = "the ids of those that were released, until they end"
    loses = "nobody"

    def __init__(self, release: Release = Release.AFTER_PREFILL) -> None:
        super().__init__(release)
        self.released: set[str] = set()

    def _remember(self, flight: Active, leader_id: str | None) -> None:
        self.released.update(flight.follower_ids)
        if leader_id is not None:
            self.released.add(leader_id)

    def _forget(self, request_id: str) -> None:
        if request_id not in self.released:
            raise _unknown(request_id)
        self.released.remove(request_id)

    def released_ids(self) -> frozenset[str]:
        """The ids."""
        return frozenset(self.released)


DESIGNS: tuple[type[Design], ...] = (DeletedAtRelease, ActiveDraining, DrainingWithLeader, ReleasedIdsApart)


# --- The same calls for all of them -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Arrive:
    """A request arrives."""

    request_id: str
    prompt: Prompt = PROMPT

    def __str__(self) -> str:
        return f"{self.request_id} arrives"


@dataclass(frozen=True, slots=True)
class Published:
    """A request's prompt is computed and published."""

    request_id: str

    def __str__(self) -> str:
        return f"{self.request_id}'s prompt is published"


@dataclass(frozen=True, slots=True)
class Ended:
    """A request ends: normally, or (``prompt_is_published=False``) before its prompt was published."""

    request_id: str
    prompt_is_published: bool = True

    def __str__(self) -> str:
        return f"{self.request_id} ends" + ("" if self.prompt_is_published else " before its prompt is published")


Call = Arrive | Published | Ended


@dataclass(frozen=True, slots=True)
class Answer:
    """What a design answered to one call: a role, or who was released, or the error that it raised."""

    role: str = ""
    released: tuple[str, ...] = ()
    error: Exception | None = None

    def __str__(self) -> str:
        if self.error is not None:
            return f"✗ {type(self.error).__name__}"
        return self.role or (f"releases {_names(self.released)}" if self.released else "ok")


def answer(design: Design, call: Call) -> Answer:
    """Make one call and return what came of it; an error of the package is an answer, too."""
    try:
        match call:
            case Arrive(request_id, prompt):
                return Answer(role=design.arrive(request_id, prompt))
            case Published(request_id):
                return Answer(released=design.prompt_published(request_id))
            case Ended(request_id, prompt_is_published):
                return Answer(released=design.ended(request_id, prompt_is_published=prompt_is_published))
    except (UnknownRequestError, InvariantError) as error:
        return Answer(error=error)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one design made of a sequence of calls.

    ``lost`` were alive and at some moment in no book; ``refused`` are good ends that raised; ``accepted`` are ends of
    ids that had never arrived or had ended already, and passed. ``memory`` is what is left at the end, and
    ``num_prompt_tokens`` how many prompt tokens that keeps in memory.
    """

    design: str
    answers: tuple[Answer, ...]
    lost: tuple[str, ...]
    refused: tuple[str, ...]
    accepted: tuple[str, ...]
    memory: tuple[str, ...]
    num_prompt_tokens: int


def outcome(design: Design, calls: Sequence[Call]) -> Outcome:
    """Drive one design with the calls, in order, and compare what it keeps with who is really alive after each."""
    alive: set[str] = set()
    answers: list[Answer] = []
    lost: dict[str, None] = {}
    refused: list[str] = []
    accepted: list[str] = []
    for call in calls:
        got = answer(design, call)
        answers.append(got)
        match call:
            case Arrive(request_id):
                alive.add(request_id)
            case Ended(request_id):
                if request_id in alive:
                    alive.remove(request_id)
                    if got.error is not None:
                        refused.append(request_id)
                elif got.error is None:
                    accepted.append(request_id)
        lost.update(dict.fromkeys(sorted(alive - design.known_ids())))
    prompts = [*design.open, *(flight.prompt for flight in design.kept())]
    return Outcome(
        design.name,
        tuple(answers),
        tuple(lost),
        tuple(refused),
        tuple(accepted),
        design.memory(),
        sum(map(len, prompts)),
    )


@dataclass(frozen=True, slots=True)
class Comparison:
    """The same calls, and what each design made of them. Shows itself as a table: a row a call, a column a design."""

    release: Release
    calls: tuple[Call, ...]
    outcomes: tuple[Outcome, ...]

    def __getitem__(self, design: type[Design]) -> Outcome:
        """Return the outcome of one design."""
        return next(found for found in self.outcomes if found.design == design.name)

    def rows(self) -> list[tuple[str, ...]]:
        """The table's cells, without its head."""
        out = [(str(call), *(str(o.answers[i]) for o in self.outcomes)) for i, call in enumerate(self.calls)]
        out.append(("→ alive, and in no book", *(" ".join(o.lost) or "–" for o in self.outcomes)))
        out.append(("→ a good end refused", *(" ".join(o.refused) or "–" for o in self.outcomes)))
        out.append(("→ a foreign end accepted", *(" ".join(o.accepted) or "–" for o in self.outcomes)))
        out.append(("→ still kept", *("; ".join(o.memory) or "–" for o in self.outcomes)))
        out.append(("→ prompt tokens kept", *(str(o.num_prompt_tokens) for o in self.outcomes)))
        return out

    def _head(self) -> tuple[str, ...]:
        return (f"release {self.release.value}", *(o.design for o in self.outcomes))

    def __repr__(self) -> str:
        table = [self._head(), *self.rows()]
        widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table
        )

    def _repr_html_(self) -> str:
        head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in self._head())
        body = "".join(
            f'<tr><th scope="row">{escape(row[0])}</th>' + "".join(f"<td>{escape(c)}</td>" for c in row[1:]) + "</tr>"
            for row in self.rows()
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def compare(
    calls: Iterable[Call],
    release: Release = Release.AFTER_PREFILL,
    designs: Sequence[type[Design]] = DESIGNS,
) -> Comparison:
    """Give the same calls to a fresh coordinator of each design and return what each made of them."""
    calls = tuple(calls)
    return Comparison(release, calls, tuple(outcome(design(release), calls) for design in designs))
