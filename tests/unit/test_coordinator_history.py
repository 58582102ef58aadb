"""The coordinator's four designs under the same calls: who loses an id, who takes a foreign one, who checks in vain."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labs.coordinator_history import (
    DESIGNS,
    PROMPT,
    ActiveDraining,
    Answer,
    Arrive,
    Call,
    DeletedAndChecked,
    DeletedAtRelease,
    Design,
    DrainingLed,
    DrainingWithLeader,
    Ended,
    Published,
    Release,
    ReleasedIdsApart,
    answer,
    compare,
    outcome,
)
from minivllm.coordination.release import RELEASE_POLICIES
from minivllm.coordination.single_flight import PrefixCacheFlightCoordinator
from minivllm.errors import InvariantError, UnknownRequestError
from minivllm.log import events as ev
from minivllm.log.states import Role
from minivllm.request import Request, RequestState
from tests.property.steady import STEADY

ROOT = Path(__file__).resolve().parents[2]
OTHER = (20, 21, 22)
ALL = (DeletedAtRelease, DeletedAndChecked, ActiveDraining, DrainingWithLeader, ReleasedIdsApart)

EARLY = (Arrive("a"), Arrive("b"), Published("a"), Ended("b"), Ended("a"))
"""The leader releases its follower after prefill and goes on; both end well."""

LATE = (Arrive("a"), Arrive("b"), Ended("a"), Ended("b"))
"""The leader releases its follower by ending; the follower ends well."""


@st.composite
def sequences(draw: st.DrawFn) -> list[Call]:
    """Return calls in any order: arrivals of new ids, and publications and ends of any id, foreign ones included."""
    arrived: list[str] = []
    calls: list[Call] = []
    kinds = st.sampled_from(["arrive", "arrive", "published", "ended", "ended", "ended early"])
    for kind in draw(st.lists(kinds, min_size=10, max_size=30)):
        if kind == "arrive":
            name = f"r{len(arrived)}"
            arrived.append(name)
            calls.append(Arrive(name, draw(st.sampled_from([PROMPT, PROMPT, OTHER]))))
            continue
        name = draw(st.sampled_from([*arrived[-6:], "foreign"]))
        calls.append(Published(name) if kind == "published" else Ended(name, prompt_is_published=kind == "ended"))
    return calls


# -- Sequences that show one thing each --------------------------------------------------------------------


@pytest.mark.parametrize("calls", [EARLY, LATE], ids=["early", "late"])
def test_a_flight_deleted_at_release_loses_everybody_who_was_released(calls: tuple[Call, ...]) -> None:
    found = outcome(DeletedAtRelease(Release.AFTER_PREFILL), calls)
    assert "b" in found.lost
    assert found.refused == ()


def test_with_its_check_left_in_the_first_design_refuses_its_own_requests() -> None:
    found = outcome(DeletedAndChecked(), EARLY)
    assert found.refused == ("b", "a")
    assert all(isinstance(a.error, UnknownRequestError) for a in found.answers[3:])


def test_with_its_check_taken_out_the_first_design_accepts_a_foreign_id_and_a_second_end() -> None:
    found = outcome(DeletedAtRelease(), (*EARLY, Ended("foreign"), Ended("a")))
    assert found.accepted == ("foreign", "a")


@pytest.mark.parametrize("design", [ActiveDraining, DrainingWithLeader, ReleasedIdsApart])
def test_the_later_designs_refuse_a_foreign_id_and_a_second_end(design: type[Design]) -> None:
    found = outcome(design(), (*EARLY, Ended("foreign"), Ended("b")))
    assert found.accepted == ()
    assert [type(a.error) for a in found.answers[-2:]] == [UnknownRequestError, UnknownRequestError]


def test_active_and_draining_are_enough_while_the_leader_ends_first() -> None:
    found = outcome(ActiveDraining(Release.ON_COMPLETION), LATE)
    assert (found.lost, found.refused, found.memory) == ((), (), ())


def test_active_and_draining_lose_a_leader_that_goes_on_after_the_release() -> None:
    found = outcome(ActiveDraining(), EARLY)
    assert (found.lost, found.refused) == (("a",), ("a",))


@pytest.mark.parametrize("release", Release)
@pytest.mark.parametrize("calls", [EARLY, LATE], ids=["early", "late"])
@pytest.mark.parametrize("design", [DrainingWithLeader, ReleasedIdsApart])
def test_the_last_two_designs_lose_nobody_and_end_with_empty_books(
    design: type[Design], calls: tuple[Call, ...], release: Release
) -> None:
    found = outcome(design(release), calls)
    assert (found.lost, found.refused, found.accepted, found.memory) == ((), (), (), ())


def test_draining_flights_keep_their_prompts_and_released_ids_do_not() -> None:
    found = compare(EARLY[:3])
    assert [found[design].num_prompt_tokens for design in DESIGNS] == [0, 5, 5, 0]
    assert found[ReleasedIdsApart].memory == ("released: a b",)


@pytest.mark.parametrize("design", ALL)
def test_in_every_design_a_new_request_opens_a_flight_of_its_own_after_the_release(design: type[Design]) -> None:
    found = outcome(design(), (*EARLY[:3], Arrive("c"), Arrive("d")))
    assert [a.role for a in found.answers[-2:]] == ["leader", "follower"]


@pytest.mark.parametrize("design", ALL)
def test_in_every_design_a_leader_that_ends_too_early_hands_over_to_the_oldest_follower(design: type[Design]) -> None:
    found = outcome(design(), (Arrive("a"), Arrive("b"), Arrive("c"), Ended("a", prompt_is_published=False)))
    assert found.answers[-1].released == ("b",)
    assert found.memory == ("active flight: b leads c",)


# -- Any sequence ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("release", Release)
@given(calls=sequences())
@settings(STEADY, max_examples=300)
def test_no_sequence_makes_the_last_two_designs_lose_refuse_or_accept_wrongly(
    release: Release, calls: list[Call]
) -> None:
    for design in (DrainingWithLeader, ReleasedIdsApart):
        found = outcome(design(release), calls)
        assert (found.lost, found.refused, found.accepted) == ((), (), ())


@given(calls=sequences())
@settings(STEADY, max_examples=300)
def test_released_on_completion_no_sequence_tells_the_last_three_designs_apart(calls: list[Call]) -> None:
    """The way of release that came first is why the second design looked right."""
    found = compare(calls, Release.ON_COMPLETION)
    answers = [[str(a) for a in found[design].answers] for design in DESIGNS[1:]]
    assert answers[0] == answers[1] == answers[2]


def test_the_check_that_an_optional_leader_needs_is_asked_often_and_never_fails() -> None:
    """Counted by the design itself: how often the check was asked, and how often it had something to say."""
    checks: list[int] = []
    caught: list[int] = []

    @given(calls=sequences())
    @settings(STEADY, max_examples=1_000)
    def count(calls: list[Call]) -> None:
        design = DrainingWithLeader(Release.ON_COMPLETION)
        found = outcome(design, calls)
        checks.append(design.num_checks)
        caught.append(design.num_caught)
        assert not any(isinstance(a.error, InvariantError) for a in found.answers)

    count()
    assert sum(checks) > 500, "the sequences hardly reach the check: this test would say nothing"
    assert sum(caught) == 0


def test_only_a_hand_that_writes_into_the_books_makes_that_check_fail() -> None:
    design = DrainingWithLeader(Release.ON_COMPLETION)
    design.draining.append(DrainingLed(PROMPT, ["b"], leader_id="a"))
    assert isinstance(answer(design, Ended("b")).error, InvariantError)
    assert (design.num_checks, design.num_caught) == (1, 1)


def test_the_fourth_design_has_no_place_for_what_the_check_forbids() -> None:
    design = ReleasedIdsApart(Release.ON_COMPLETION)
    outcome(design, LATE[:3])
    assert design.kept() == ()
    assert design.memory() == ("released: b",)


# -- The engine's own --------------------------------------------------------------------------------------


def answer_of_the_engine(flights: PrefixCacheFlightCoordinator, call: Call) -> Answer:
    """Make one call on the engine's coordinator, as the engine makes it."""
    match call:
        case Arrive(request_id, prompt):
            role = flights.arrive(Request(request_id, prompt))
            return Answer(role="leader" if role is Role.LEADER else "follower")
        case Published(request_id):
            if not flights.wants_prompt(request_id):
                return Answer()
            return Answer(released=flights.prompt_published(request_id))
        case Ended(request_id, published):
            end = RequestState.FINISHED if published else RequestState.ABORTED
            try:
                released = flights.request_ended(request_id, end, prompt_is_published=published)
            except UnknownRequestError as error:
                return Answer(error=error)
            return Answer(released=released)


@pytest.mark.parametrize("release", Release)
@given(calls=sequences())
@settings(STEADY, max_examples=500)
def test_the_fourth_design_answers_and_remembers_what_the_engines_coordinator_does(
    release: Release, calls: list[Call]
) -> None:
    events: list[ev.Event] = []
    flights = PrefixCacheFlightCoordinator(RELEASE_POLICIES[release.value], events.append)
    design = ReleasedIdsApart(release)
    for call in calls:
        ours, theirs = answer(design, call), answer_of_the_engine(flights, call)
        assert (ours.role, ours.released, type(ours.error)) == (theirs.role, theirs.released, type(theirs.error))
        flights.check_invariants()
        assert design.released_ids() == flights.released_request_ids
        assert [(f.leader_id, f.follower_ids) for f in design.open.values()] == [
            (f.leader_id, list(f.followers)) for f in flights.flights.values()
        ]


# -- As a lab sees it --------------------------------------------------------------------------------------


def test_a_comparison_shows_a_row_for_each_call_and_a_column_for_each_design() -> None:
    found = compare((*EARLY, Ended("<x>")))
    text = repr(found).splitlines()
    assert len(text) == 1 + 6 + 5
    assert text[0].split("  ")[0] == "release after-prefill"
    assert all(design.name in text[0] for design in DESIGNS)
    assert "✗ UnknownRequestError" in repr(found)
    html = found._repr_html_()
    assert html.count("<tr>") == len(text)
    assert html.count('scope="col"') == 1 + len(DESIGNS)
    assert "&lt;x&gt; ends" in html and "<x>" not in html


def test_every_design_says_what_it_keeps_and_what_it_loses() -> None:
    assert [design.number for design in DESIGNS] == [1, 2, 3, 4]
    assert len({design.name for design in ALL}) == len(ALL)
    assert all(design.keeps and design.loses and design.__doc__ for design in ALL)


def test_a_notebook_in_the_labs_folder_imports_the_file_by_its_name() -> None:
    code = "import coordinator_history as h; print(h.compare([h.Arrive('a')])[h.ReleasedIdsApart].answers[0])"
    path = f"import sys; sys.path.append({str(ROOT)!r}); "
    done = subprocess.run(
        [sys.executable, "-c", path + code], cwd=ROOT / "labs", capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("leader\n", "")


def test_the_engine_imports_nothing_from_the_labs() -> None:
    for path in sorted((ROOT / "minivllm").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                assert name.split(".")[0] not in {"labs", "coordinator_history"}, f"{path.name} imports {name}"
