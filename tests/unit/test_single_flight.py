"""Who computes, who waits, until when: the coordinator alone, then in an engine."""

from __future__ import annotations

from typing import Any

import pytest

from minivllm.config import EngineConfig
from minivllm.coordination.coordinator import NOBODY, IndependentCoordinator
from minivllm.coordination.release import ReleaseAfterPrefill, ReleaseOnCompletion, ReleasePolicy
from minivllm.coordination.single_flight import PrefixCacheFlightCoordinator
from minivllm.engine.core import EngineCore
from minivllm.engine.input_processor import Submission
from minivllm.errors import InvariantError, UnknownRequestError
from minivllm.log import events as ev
from minivllm.log.metrics import Metrics
from minivllm.log.replay import fold
from minivllm.log.state import RequestView, State
from minivllm.log.states import FLIGHT_TRANSITIONS, FlightAction, Role
from minivllm.request import Request, RequestState, Sampling, make_extra_keys
from minivllm.runners.virtual import VirtualRunner
from tests.unit.small import FULL_PROMPT, check, events_of, recovered, run, small_core, step

PROMPT = (10, 11, 12, 13, 14)
FINISHED, ABORTED, FAILED = RequestState.FINISHED, RequestState.ABORTED, RequestState.FAILED


def request(name: str, prompt: tuple[int, ...] = PROMPT, salt: str | None = None) -> Request:
    return Request(name, prompt, extra_keys=make_extra_keys(cache_salt=salt))


def coordinator(
    *names: str, release: ReleasePolicy | None = None
) -> tuple[PrefixCacheFlightCoordinator, list[ev.Event]]:
    """Return a coordinator at which requests of these names and one prompt have arrived, and its events."""
    events: list[ev.Event] = []
    flights = PrefixCacheFlightCoordinator(release or ReleaseOnCompletion(), events.append)
    for name in names:
        flights.arrive(request(name))
    return flights, events


# -- The coordinator alone ---------------------------------------------------------------------------------


def test_the_first_of_a_prompt_leads_and_the_others_follow() -> None:
    flights, events = coordinator()
    roles = [flights.arrive(request(name)) for name in "abc"]
    assert roles == [Role.LEADER, Role.FOLLOWER, Role.FOLLOWER]
    assert [(f.leader_id, list(f.followers)) for f in flights.flights.values()] == [("a", ["b", "c"])]
    assert events == [ev.FlightOpened(0, "a"), ev.FlightJoined(0, "a", "b"), ev.FlightJoined(0, "a", "c")]
    flights.check_invariants()


@pytest.mark.parametrize(
    "other",
    [
        request("b", (*PROMPT, 15)),
        request("b", PROMPT[:-1]),
        request("b", salt="s"),
        Request("b", PROMPT, extra_keys=make_extra_keys(adapter="s")),
    ],
    ids=["longer", "shorter", "salt", "adapter"],
)
def test_another_prompt_salt_or_adapter_leads_a_flight_of_its_own(other: Request) -> None:
    flights, _ = coordinator("a")
    assert flights.arrive(other) is Role.LEADER
    assert len(flights.flights) == 2


def test_a_long_beginning_in_common_does_not_make_a_flight() -> None:
    """Prompts are compared whole: a follower must find everything that it waits for."""
    flights, _ = coordinator()
    beginning = tuple(range(100))
    assert flights.arrive(request("a", (*beginning, 1))) is Role.LEADER
    assert flights.arrive(request("b", (*beginning, 2))) is Role.LEADER
    assert flights.arrive(request("c", (*beginning, 2))) is Role.FOLLOWER


def test_the_same_salt_shares_a_flight() -> None:
    flights, _ = coordinator()
    assert flights.arrive(request("a", salt="s")) is Role.LEADER
    assert flights.arrive(request("b", salt="s")) is Role.FOLLOWER


def test_sampling_does_not_keep_requests_apart() -> None:
    """What is shared is the prompt's computation, never the answer."""
    flights, _ = coordinator("a")
    hot = Request("b", PROMPT, Sampling(temperature=0.9, seed=3))
    assert flights.arrive(hot) is Role.FOLLOWER


def test_release_after_prefill_lets_followers_go_and_keeps_all_ids_until_they_end() -> None:
    flights, events = coordinator("a", "b", "c", release=ReleaseAfterPrefill())
    assert flights.wants_prompt("a")
    assert flights.prompt_published("a") == ("b", "c")
    assert flights.flights == {}
    assert flights.released_request_ids == {"a", "b", "c"}
    assert events[-1] == ev.FlightReleased(0, "a", ("b", "c"), "prefill")
    for name in "bac":
        assert flights.request_ended(name, FINISHED, prompt_is_published=True) == NOBODY
        flights.check_invariants()
    assert flights.released_request_ids == set()


def test_release_on_completion_lets_followers_go_when_the_leader_has_ended() -> None:
    flights, events = coordinator("a", "b", "c")
    assert not flights.wants_prompt("a")
    assert flights.request_ended("a", FINISHED, prompt_is_published=True) == ("b", "c")
    assert flights.released_request_ids == {"b", "c"}
    assert events[-1] == ev.FlightReleased(0, "a", ("b", "c"), "finished")


def test_only_a_leader_is_asked_for_its_prompt() -> None:
    flights, _ = coordinator("a", "b", release=ReleaseAfterPrefill())
    assert not flights.wants_prompt("b")
    assert not flights.wants_prompt("nobody")
    with pytest.raises(UnknownRequestError, match="'b' published its prompt but leads no flight"):
        flights.prompt_published("b")


@pytest.mark.parametrize("end", [ABORTED, FAILED])
def test_a_leader_that_ends_unpublished_hands_over_to_the_oldest_follower_alone(end: RequestState) -> None:
    flights, events = coordinator("a", "b", "c")
    assert flights.request_ended("a", end, prompt_is_published=False) == ("b",)
    assert [(f.leader_id, list(f.followers)) for f in flights.flights.values()] == [("b", ["c"])]
    assert events[-1] == ev.FlightHandedOver(0, "a", "b")
    flights.check_invariants()
    assert flights.arrive(request("d")) is Role.FOLLOWER
    assert flights.request_ended("b", end, prompt_is_published=False) == ("c",)
    flights.check_invariants()


@pytest.mark.parametrize("end", [ABORTED, FAILED])
def test_a_leader_that_ends_with_its_prompt_published_releases_everybody(end: RequestState) -> None:
    flights, events = coordinator("a", "b", "c")
    assert flights.request_ended("a", end, prompt_is_published=True) == ("b", "c")
    assert flights.flights == {}
    assert events[-1] == ev.FlightReleased(0, "a", ("b", "c"), end.value)


def test_a_leader_without_followers_takes_its_flight_with_it() -> None:
    flights, _ = coordinator("a")
    assert flights.request_ended("a", ABORTED, prompt_is_published=False) == NOBODY
    assert flights.flights == {}
    assert flights.released_request_ids == set()
    assert flights.arrive(request("b")) is Role.LEADER
    flights.check_invariants()


def test_a_follower_leaves_quietly() -> None:
    flights, events = coordinator("a", "b", "c")
    assert flights.request_ended("b", ABORTED, prompt_is_published=False) == NOBODY
    assert events[-1] == ev.FlightLeft(0, "b")
    assert flights.request_ended("a", FINISHED, prompt_is_published=True) == ("c",)
    assert flights.released_request_ids == {"c"}


@pytest.mark.parametrize("kind", [IndependentCoordinator, PrefixCacheFlightCoordinator])
def test_the_end_of_an_unknown_request_raises(
    kind: type[IndependentCoordinator] | type[PrefixCacheFlightCoordinator],
) -> None:
    flights = kind(ReleaseOnCompletion(), lambda event: None)
    with pytest.raises(UnknownRequestError, match="'ghost' ended"):
        flights.request_ended("ghost", FINISHED, prompt_is_published=False)
    flights.arrive(request("a"))
    flights.request_ended("a", FINISHED, prompt_is_published=False)
    with pytest.raises(UnknownRequestError, match="'a' ended"):
        flights.request_ended("a", FINISHED, prompt_is_published=False)


def test_a_released_request_ends_once() -> None:
    flights, _ = coordinator("a", "b", release=ReleaseAfterPrefill())
    flights.prompt_published("a")
    flights.request_ended("b", FINISHED, prompt_is_published=True)
    with pytest.raises(UnknownRequestError, match="is no leader, no follower and was not released"):
        flights.request_ended("b", FINISHED, prompt_is_published=True)


def test_after_release_the_same_prompt_opens_a_new_flight() -> None:
    flights, _ = coordinator("a", "b", release=ReleaseAfterPrefill())
    flights.prompt_published("a")
    assert flights.arrive(request("c")) is Role.LEADER
    assert list(flights.flights) == [1]
    flights.check_invariants()


def test_independent_requests_wait_for_nobody() -> None:
    flights = IndependentCoordinator(ReleaseAfterPrefill(), lambda event: None)
    assert [flights.arrive(request(name)) for name in "ab"] == [Role.INDEPENDENT] * 2
    assert not flights.wants_prompt("a")
    assert flights.request_ended("a", FINISHED, prompt_is_published=True) == NOBODY
    assert flights.flights == {}


def _lost_key(flights: PrefixCacheFlightCoordinator) -> None:
    flights._flight_by_key.clear()


def _stray_key(flights: PrefixCacheFlightCoordinator) -> None:
    flights._flight_by_key[((9,), ())] = flights.flights[0]


def _lost_member(flights: PrefixCacheFlightCoordinator) -> None:
    del flights._flight_by_request["b"]


def _leads_and_follows(flights: PrefixCacheFlightCoordinator) -> None:
    flights.flights[0].followers["a"] = request("a")


def _released_and_held(flights: PrefixCacheFlightCoordinator) -> None:
    flights.released_request_ids.add("b")


@pytest.mark.parametrize("damage", [_lost_key, _stray_key, _lost_member, _leads_and_follows, _released_and_held])
def test_the_check_of_the_books_finds_every_kind_of_damage(damage: Any) -> None:
    flights, _ = coordinator("a", "b")
    damage(flights)
    with pytest.raises(InvariantError):
        flights.check_invariants()


# -- In an engine ------------------------------------------------------------------------------------------


def flight_core(**settings: Any) -> EngineCore:
    return small_core(**{"coordination": "single-flight", "num_blocks": 32, **settings})


def race(core: EngineCore, count: int = 4, max_tokens: int = 4) -> list[Request]:
    """Submit ``count`` identical prompts together, called a, b, c, ..."""
    return core.submit_batch(
        Submission(FULL_PROMPT, Sampling(max_tokens=max_tokens), chr(ord("a") + number)) for number in range(count)
    )


@pytest.mark.parametrize("publication", ["on-completion", "incremental"])
@pytest.mark.parametrize("release", ["on-completion", "after-prefill"])
def test_every_follower_recovers_the_prompt_whatever_publication_and_release(publication: str, release: str) -> None:
    core = flight_core(publication=publication, release=release)
    requests = race(core)
    assert [r.state for r in requests] == [RequestState.WAITING] + [RequestState.HELD] * 3
    check(core)
    run(core)
    assert recovered(requests) == [0, 8, 8, 8]
    assert [row.role for row in Metrics.of(core.log).requests.values()] == ["leader"] + ["follower"] * 3
    assert sum(event.reason in ("prefill", "finished", "cached") for event in events_of(core, ev.FlightReleased)) == 1


@pytest.mark.parametrize("publication", ["on-completion", "incremental"])
def test_followers_start_in_the_step_after_the_prefill_or_after_the_end(publication: str) -> None:
    """What is published already is not waited for, whatever the release policy says."""
    at_the_end = 5 if publication == "on-completion" else 2
    for release, first_step in (("after-prefill", 2), ("on-completion", at_the_end)):
        core = flight_core(publication=publication, release=release)
        race(core, max_tokens=4)
        run(core)
        admitted = {event.request_id: event.step for event in events_of(core, ev.RequestAdmitted)}
        assert admitted == {"a": 1, "b": first_step, "c": first_step, "d": first_step}


def test_release_after_prefill_publishes_the_finished_prompt_blocks_first_whatever_the_policy() -> None:
    core = flight_core(publication="on-completion", release="after-prefill")
    race(core, 2)
    step(core)
    kinds = [event.kind for event in core.log if event.step == 1]
    assert kinds.index("blocks_published") < kinds.index("flight_released")
    assert len(core.manager.index) == 2


def test_a_late_arrival_joins_while_the_leader_decodes_under_release_on_completion() -> None:
    core = flight_core(release="on-completion")
    core.submit(FULL_PROMPT, max_tokens=6, request_id="a")
    late = core.submit(FULL_PROMPT, max_tokens=2, request_id="late", after=("a", 2))
    step(core, 2)
    assert late.state is RequestState.HELD
    assert core.coordinator.flights[0].leader_id == "a"
    run(core)
    assert late.num_recovered_tokens == 8


@pytest.mark.parametrize("publication", ["on-completion", "incremental"])
def test_a_late_arrival_finds_the_prompt_and_waits_for_nobody_under_release_after_prefill(publication: str) -> None:
    core = flight_core(publication=publication, release="after-prefill")
    core.submit(FULL_PROMPT, max_tokens=6, request_id="a")
    late = core.submit(FULL_PROMPT, max_tokens=2, request_id="late", after=("a", 2))
    step(core, 2)
    assert late.state is RequestState.WAITING
    assert core.coordinator.flights == {}
    run(core)
    assert late.num_recovered_tokens == 8
    assert [event.leader_id for event in events_of(core, ev.FlightOpened)] == ["a"]


def test_salts_never_share_a_flight_nor_a_block_and_the_same_salt_shares_both() -> None:
    core = flight_core()
    salts = ["x", "x", "y", "y", None, ""]
    requests = [core.submit(FULL_PROMPT, max_tokens=2, cache_salt=salt) for salt in salts]
    assert len(core.coordinator.flights) == 3
    run(core)
    assert recovered(requests) == [0, 8, 0, 8, 0, 8]


def test_each_follower_decodes_with_its_own_sampling() -> None:
    core = flight_core()
    hot = [
        core.submit(FULL_PROMPT, max_tokens=6, temperature=0.9, seed=seed, request_id=f"hot{seed}") for seed in (1, 2)
    ]
    greedy = core.submit(FULL_PROMPT, max_tokens=6)
    run(core)
    assert recovered([*hot, greedy]) == [0, 8, 8]
    assert len({tuple(r.output_token_ids) for r in (*hot, greedy)}) == 3


@pytest.mark.parametrize("end", [ABORTED, FAILED])
@pytest.mark.parametrize("release", ["on-completion", "after-prefill"])
def test_a_leader_that_ends_while_it_waits_hands_over(release: str, end: RequestState) -> None:
    core = flight_core(release=release)
    requests = race(core, 3)
    _end_early(core, "a", end)
    check(core)
    assert [r.state for r in requests] == [end, RequestState.WAITING, RequestState.HELD]
    run(core)
    assert [r.state for r in requests[1:]] == [FINISHED, FINISHED]
    assert recovered(requests) == [0, 0, 8]


@pytest.mark.parametrize("end", [ABORTED, FAILED])
@pytest.mark.parametrize(("publication", "kept"), [("on-completion", 0), ("incremental", 4)])
@pytest.mark.parametrize("release", ["on-completion", "after-prefill"])
def test_a_leader_that_ends_in_mid_prefill_hands_over_and_what_was_published_stays(
    release: str, publication: str, kept: int, end: RequestState
) -> None:
    core = flight_core(release=release, publication=publication, max_num_batched_tokens=5)
    requests = race(core, 3)
    step(core)
    _end_early(core, "a", end)
    check(core)
    assert [event.to_id for event in events_of(core, ev.FlightHandedOver)] == ["b"]
    run(core)
    assert recovered(requests) == [0, kept, 8]
    assert all(r.state is FINISHED for r in requests[1:])


@pytest.mark.parametrize("end", [ABORTED, FAILED])
def test_a_leader_that_ends_in_decode_with_nothing_published_hands_over(end: RequestState) -> None:
    core = flight_core(release="on-completion", publication="on-completion")
    requests = race(core, 3, max_tokens=8)
    step(core, 3)
    _end_early(core, "a", end)
    check(core)
    assert [r.state for r in requests[1:]] == [RequestState.WAITING, RequestState.HELD]
    run(core)
    assert recovered(requests) == [0, 0, 8]


@pytest.mark.parametrize("end", [ABORTED, FAILED])
def test_a_leader_that_ends_in_decode_with_its_prompt_published_has_released_everybody(end: RequestState) -> None:
    core = flight_core(release="on-completion", publication="incremental")
    requests = race(core, 3, max_tokens=8)
    step(core, 3)
    _end_early(core, "a", end)
    check(core)
    assert [r.state for r in requests[1:]] == [RequestState.RUNNING] * 2
    assert events_of(core, ev.FlightReleased)[0].reason == "cached"
    run(core)
    assert recovered(requests) == [0, 8, 8]


def test_a_leader_that_ends_after_it_has_released_changes_nothing_for_the_others() -> None:
    core = flight_core(release="after-prefill")
    requests = race(core, 3, max_tokens=8)
    step(core, 2)
    assert core.abort("a")
    check(core)
    run(core)
    assert recovered(requests) == [0, 8, 8]
    assert events_of(core, ev.FlightHandedOver) == []


def preempted_leader() -> tuple[EngineCore, list[Request]]:
    """Return an engine in which the leader of a flight of three has just been preempted.

    "old" runs first, in flight 0; the race is flight 1. Old and the leader grow to five blocks each, and seven
    are there: the leader, as the newest, gives its own up.
    """
    core = flight_core(num_blocks=7, release="on-completion", publication="on-completion")
    core.submit([1, 2, 3, 4, 5, 6, 7], max_tokens=14, request_id="old")
    step(core)
    requests = race(core, 3, max_tokens=12)
    while requests[0].state is not RequestState.PREEMPTED:
        step(core)
    return core, requests


def test_a_preempted_leader_keeps_its_lead_and_its_followers_wait_on() -> None:
    core, requests = preempted_leader()
    assert core.coordinator.flights[1].leader_id == "a"
    assert [r.state for r in requests[1:]] == [RequestState.HELD] * 2
    assert core.scheduler.waiting[0].request_id == "a"
    run(core)
    assert events_of(core, ev.FlightHandedOver) == []
    assert [r.state for r in requests] == [FINISHED] * 3
    assert recovered(requests) == [0, 8, 8]


@pytest.mark.parametrize("end", [ABORTED, FAILED])
def test_a_preempted_leader_that_ends_hands_over(end: RequestState) -> None:
    core, requests = preempted_leader()
    _end_early(core, "a", end)
    check(core)
    assert core.coordinator.flights[1].leader_id == "b"
    assert [r.state for r in requests[1:]] == [RequestState.WAITING, RequestState.HELD]
    run(core)
    assert [r.state for r in requests[1:]] == [FINISHED] * 2


def test_hand_over_goes_on_from_follower_to_follower_until_one_finishes() -> None:
    core = flight_core(release="on-completion")
    requests = race(core, 4)
    for name in "abc":
        step(core)
        core.abort(name)
        check(core)
    run(core)
    assert [r.state for r in requests] == [ABORTED] * 3 + [FINISHED]
    assert [event.to_id for event in events_of(core, ev.FlightHandedOver)] == ["b", "c", "d"]


@pytest.mark.parametrize("end", [ABORTED, FAILED])
def test_a_held_follower_that_ends_leaves_leader_and_others_alone(end: RequestState) -> None:
    core = flight_core()
    requests = race(core, 3)
    _end_early(core, "b", end)
    check(core)
    run(core)
    assert [r.state for r in requests] == [FINISHED, end, FINISHED]
    assert recovered(requests) == [0, 0, 8]


def test_a_released_follower_may_end_before_it_is_admitted() -> None:
    core = flight_core(release="after-prefill", max_num_seqs=1)
    requests = race(core, 3, max_tokens=4)
    step(core)
    assert core.coordinator.released_request_ids == {"a", "b", "c"}
    core.abort("b")
    check(core)
    run(core)
    assert [r.state for r in requests] == [FINISHED, ABORTED, FINISHED]
    assert core.coordinator.released_request_ids == set()


def test_a_new_leader_is_a_leader_in_the_figures() -> None:
    core = flight_core()
    race(core, 3)
    core.abort("a")
    run(core)
    roles = {name: row.role for name, row in Metrics.of(core.log).requests.items()}
    assert roles == {"a": "leader", "b": "leader", "c": "follower"}


def test_a_prompt_shorter_than_a_block_flies_and_ends_like_any_other() -> None:
    for release in ("on-completion", "after-prefill"):
        core = flight_core(release=release)
        requests = [core.submit([1, 2, 3], max_tokens=2) for _ in range(3)]
        run(core)
        assert recovered(requests) == [0, 0, 0]
        assert all(r.state is FINISHED for r in requests)


def test_without_prefix_caching_followers_are_released_and_compute_for_themselves() -> None:
    for release in ("on-completion", "after-prefill"):
        core = flight_core(release=release, enable_prefix_caching=False)
        requests = race(core, 3)
        run(core)
        assert recovered(requests) == [0, 0, 0]
        assert all(r.state is FINISHED for r in requests)
        assert events_of(core, ev.FlightHandedOver) == []


def test_a_release_policy_of_ones_own_decides_by_the_number_of_followers() -> None:
    class WhenTwoWait:
        name = "when-two-wait"

        def after_prefill(self, num_followers: int) -> bool:
            return num_followers >= 2

    for count, reason in ((2, "finished"), (3, "prefill")):
        core = flight_core(release=WhenTwoWait())
        race(core, count)
        run(core)
        assert events_of(core, ev.FlightReleased)[0].reason == reason


def _end_early(core: EngineCore, name: str, end: RequestState) -> None:
    ended = core.abort(name) if end is ABORTED else core.fail(name, ValueError("told to"))
    assert ended


# -- The table of roles ------------------------------------------------------------------------------------


def in_role(role: Role) -> PrefixCacheFlightCoordinator:
    """Return a coordinator to which request "x" is in this role; "a" leads where somebody else must."""
    names = {Role.INDEPENDENT: "", Role.LEADER: "xb", Role.FOLLOWER: "ax", Role.RELEASED: "ax"}
    flights, _ = coordinator(release=ReleaseAfterPrefill())
    for name in names[role]:
        flights.arrive(request(name), [b"1"])
    if role is Role.RELEASED:
        flights.prompt_published("a")
    assert flights.role_of("x") is role
    return flights


def act(flights: PrefixCacheFlightCoordinator, action: FlightAction) -> None:
    """Let what the table calls by this name happen to request "x"."""
    match action:
        case FlightAction.OPEN | FlightAction.JOIN:
            if action is FlightAction.JOIN:
                flights.arrive(request("a"), [b"1"])
            flights.arrive(request("x"), [b"1"])
        case FlightAction.PUBLISH:
            flights.prompt_published("x")
        case FlightAction.RELEASE:
            flights.published("somebody else", [b"1"])
        case FlightAction.LEAD:
            flights.request_ended("a", ABORTED, prompt_is_published=False)
        case FlightAction.END:
            flights.request_ended("x", FINISHED, prompt_is_published=True)


@pytest.mark.parametrize(("role", "action"), FLIGHT_TRANSITIONS, ids=lambda each: each.value)
def test_each_move_of_the_table_is_made(role: Role, action: FlightAction) -> None:
    flights = in_role(role)
    act(flights, action)
    assert flights.role_of("x") is FLIGHT_TRANSITIONS[role, action]
    flights.check_invariants()


@pytest.mark.parametrize("role", Role, ids=lambda role: role.value)
@pytest.mark.parametrize("action", [FlightAction.PUBLISH, FlightAction.END], ids=lambda action: action.value)
def test_what_the_table_does_not_have_is_refused(role: Role, action: FlightAction) -> None:
    flights = in_role(role)
    if (role, action) in FLIGHT_TRANSITIONS:
        act(flights, action)
    else:
        with pytest.raises(UnknownRequestError):
            act(flights, action)
    flights.check_invariants()


def test_a_log_that_breaks_the_table_is_refused() -> None:
    state = State()
    state.requests["a"] = RequestView(RequestState.WAITING)
    fold(state, ev.FlightOpened(0, "a"))
    with pytest.raises(InvariantError, match="'open' of a request that is leader in its flight"):
        fold(state, ev.FlightOpened(1, "a"))


# -- Nobody waits for what is there ------------------------------------------------------------------------


@pytest.mark.parametrize("release", ["on-completion", "after-prefill"])
@pytest.mark.parametrize("publication", ["on-completion", "incremental"])
def test_nobody_is_held_for_a_prompt_that_is_published_already(publication: str, release: str) -> None:
    core = flight_core(publication=publication, release=release)
    core.submit(FULL_PROMPT, max_tokens=1)
    run(core)
    again = race(core, 4, max_tokens=3)
    assert [r.state for r in again] == [RequestState.WAITING] * 4
    assert core.coordinator.flights == {}
    run(core)
    assert recovered(again) == [8] * 4


def test_followers_are_released_when_another_request_publishes_what_they_wait_for() -> None:
    """A longer prompt with the same beginning publishes as it goes; the leader, behind it, has not even begun."""
    core = flight_core(publication="incremental", release="on-completion", max_num_batched_tokens=12)
    core.submit([*FULL_PROMPT[:8], 90, 91, 92, 93], max_tokens=2, request_id="longer")
    requests = race(core, 3)
    step(core)
    released = [e for e in events_of(core, ev.FlightReleased) if e.request_ids]
    assert [(e.leader_id, e.request_ids, e.reason) for e in released] == [("a", ("b", "c"), "cached")]
    assert core.coordinator.released_request_ids == {"longer", "a", "b", "c"}
    check(core)
    run(core)
    assert recovered(requests) == [8] * 3


def test_nothing_is_coordinated_without_a_full_block_or_with_caching_off() -> None:
    for prompt, settings in ((FULL_PROMPT[:4], {}), (FULL_PROMPT, {"enable_prefix_caching": False})):
        core = flight_core(**settings)
        requests = [core.submit(prompt, max_tokens=2) for _ in range(3)]
        assert [r.state for r in requests] == [RequestState.WAITING] * 3
        run(core)
        assert events_of(core, ev.FlightOpened) == []


@pytest.mark.parametrize("release", ["on-completion", "after-prefill"])
def test_single_flight_on_a_warm_cache_is_as_fast_as_no_coordination(release: str) -> None:
    """The prompt is served once; then four identical requests, 64 tokens each, on the virtual clock."""
    prompt = list(range(532))
    ttft = {}
    for coordination in ("independent", "single-flight"):
        core = EngineCore(EngineConfig(coordination=coordination, release=release), VirtualRunner())
        core.submit(prompt, max_tokens=1, request_id="first")
        core.run()
        for _ in range(4):
            core.submit(prompt, max_tokens=64)
        core.run()
        figures = [each.ttft_ms or 0.0 for name, each in Metrics.of(core.log).requests.items() if name != "first"]
        ttft[coordination] = sum(figures) / len(figures)
    assert ttft["single-flight"] == ttft["independent"] < 56
