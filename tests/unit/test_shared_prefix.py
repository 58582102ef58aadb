"""Requests that share a prefix: who is held, for which block, behind whom, and until when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from minivllm import EngineConfig, EngineCore, Sampling, VirtualRunner
from minivllm.coordination.coordinator import Outlook
from minivllm.coordination.release import ReleaseAfterPrefill
from minivllm.coordination.shared_prefix import SharedPrefixCoordinator
from minivllm.errors import InvariantError, UnknownRequestError
from minivllm.log import events as ev
from minivllm.request import Request, RequestState
from tests.unit.small import check, events_of, recovered, run, small_core, step

SHARED = list(range(100, 116))
"""Four blocks of four tokens."""


def shared_core(**settings: Any) -> EngineCore:
    return small_core(**{"coordination": "shared-prefix", "num_blocks": 64, **settings})


def prompts(count: int, shared: Sequence[int] = SHARED, own: int = 5) -> list[list[int]]:
    """Prompts with a common beginning and ``own`` tokens of their own."""
    return [[*shared, *range(1000 * number, 1000 * number + own)] for number in range(1, count + 1)]


def test_requests_that_share_their_beginning_compute_it_once() -> None:
    core = shared_core()
    requests = [core.submit(prompt, max_tokens=3) for prompt in prompts(8)]
    run(core)
    assert recovered(requests) == [0] + [16] * 7
    assert len(events_of(core, ev.BlocksDuplicated)) == 0


def test_a_request_is_held_while_its_next_missing_block_is_being_computed() -> None:
    core = shared_core()
    first, second = (core.submit(prompt, max_tokens=3) for prompt in prompts(2))
    step(core)
    awaited = events_of(core, ev.PrefixAwaited)
    assert [(e.request_id, e.leader_id, e.block_index, e.wait_ms) for e in awaited] == [("r1", "r0", 0, None)]
    assert [e.reason for e in events_of(core, ev.PrefixReleased)] == ["published"]
    assert (first.state, second.state) == (RequestState.RUNNING, RequestState.WAITING)
    run(core)


def test_a_follower_goes_from_block_to_block_as_its_leader_publishes() -> None:
    core = shared_core(long_prefill_token_threshold=4)
    core.submit(prompts(1)[0], max_tokens=2)
    follower = core.submit(prompts(2)[1], max_tokens=2)
    step(core, 4)
    assert [(e.leader_id, e.block_index) for e in events_of(core, ev.PrefixAwaited)] == [("r0", i) for i in range(4)]
    assert follower.state is RequestState.WAITING
    run(core)
    assert follower.num_recovered_tokens == 16


def test_what_is_awaited_is_published_even_on_completion_and_nothing_more() -> None:
    core = shared_core(publication="on-completion", long_prefill_token_threshold=8)
    core.submit(prompts(1)[0], max_tokens=2)
    step(core)
    assert len(core.manager.index) == 0, "nobody waits: nothing is visible before the end"
    core.submit(prompts(2)[1], max_tokens=2)
    step(core)
    assert len(core.manager.index) == 4, "the blocks that were computed before somebody came are published, too"
    run(core)


def test_what_a_leader_computed_before_anybody_came_is_published_for_the_first_who_comes_and_not_a_step_later() -> None:
    core = shared_core(publication="on-completion")
    core.submit(prompts(1)[0], max_tokens=9)
    step(core, 2)
    late = core.submit(prompts(2)[1], max_tokens=1)
    step(core)
    assert late.num_recovered_tokens == 16
    assert events_of(core, ev.PrefixAwaited) == []
    run(core)


def test_requests_that_share_nothing_do_not_wait() -> None:
    core = shared_core()
    for prompt in prompts(3, shared=()):
        core.submit(prompt, max_tokens=2)
    run(core)
    assert events_of(core, ev.PrefixAwaited) == []


@pytest.mark.parametrize("keys", [{"cache_salt": "a"}, {"adapter": "a"}])
def test_nobody_waits_across_salts_or_adapters(keys: dict[str, Any]) -> None:
    core = shared_core()
    core.submit(SHARED, max_tokens=2)
    core.submit(SHARED, max_tokens=2, **keys)
    run(core)
    assert events_of(core, ev.PrefixAwaited) == []


def test_nobody_waits_for_a_last_block_that_cannot_be_used() -> None:
    """Of a prompt of one whole block the last token must be computed, so its only block is of no use."""
    core = shared_core()
    core.submit([1, 2, 3, 4], max_tokens=2)
    core.submit([1, 2, 3, 4], max_tokens=2)
    run(core)
    assert events_of(core, ev.PrefixAwaited) == []


def test_without_prefix_caching_nobody_waits() -> None:
    core = shared_core(enable_prefix_caching=False)
    for prompt in prompts(2):
        core.submit(prompt, max_tokens=2)
    run(core)
    assert events_of(core, ev.PrefixAwaited) == []


def test_a_held_request_does_not_block_those_behind_it() -> None:
    core = shared_core()
    core.submit(prompts(1)[0], max_tokens=2)
    core.submit(prompts(2)[1], max_tokens=2)
    other = core.submit([7, 8, 9], max_tokens=2)
    step(core)
    assert other.state is RequestState.RUNNING
    run(core)


def test_when_the_leader_is_aborted_the_next_one_computes_and_the_others_wait_for_that() -> None:
    core = shared_core(long_prefill_token_threshold=4)
    requests = [core.submit(prompt, max_tokens=2) for prompt in prompts(4)]
    step(core, 2)
    core.abort("r0")
    check(core)
    assert [(e.leader_id, e.reason) for e in events_of(core, ev.PrefixReleased)] == [("r0", "ended")]
    run(core)
    # What r0 had published stays; r1 takes that and computes on, and r2 and r3 take all of it.
    assert recovered(requests) == [0, 8, 16, 16]
    assert {e.leader_id for e in events_of(core, ev.PrefixAwaited)} == {"r0", "r1"}


def test_when_the_leader_is_preempted_its_followers_look_again() -> None:
    core = shared_core(num_blocks=6, long_prefill_token_threshold=4)
    core.submit(list(range(900, 908)), max_tokens=12)  # grows to five blocks
    core.submit(prompts(1, own=3)[0], max_tokens=1)
    core.submit(prompts(2, own=3)[1], max_tokens=1)
    run(core)
    assert "preempted" in [e.reason for e in events_of(core, ev.PrefixReleased)]


def test_a_follower_that_is_aborted_leaves_quietly() -> None:
    core = shared_core(long_prefill_token_threshold=4)
    for prompt in prompts(3):
        core.submit(prompt, max_tokens=2)
    step(core)
    assert core.coordinator.awaiting == {"r1": "r0", "r2": "r0"}
    core.abort("r1")
    check(core)
    assert core.coordinator.awaiting == {"r2": "r0"}
    run(core)


def test_a_leader_that_fails_alone_lets_its_followers_go() -> None:
    core = shared_core(long_prefill_token_threshold=4)
    follower = [core.submit(prompt, max_tokens=2) for prompt in prompts(2)][1]
    step(core)
    core.fail("r0", RuntimeError("x"))
    check(core)
    run(core)
    assert follower.state is RequestState.FINISHED


def test_two_identical_prompts_in_lock_step_compute_everything_twice_even_when_they_look_up_again() -> None:
    requests, core = two_of_800(adoption=True)
    assert (recovered(requests), [r.num_adopted_tokens for r in requests]) == ([0, 0], [0, 0])
    assert computed(core) == {"r0": 800, "r1": 800}


def test_the_second_of_two_a_step_later_takes_each_block_that_was_published_before_each_of_its_chunks() -> None:
    requests, core = two_of_800(adoption=True, late=True)
    # 25 blocks were there when it came. The other 25 were computed in the same step as its own.
    assert (recovered(requests), computed(core)) == ([0, 400], {"r0": 800, "r1": 400})


def test_a_request_that_lags_behind_adopts_what_another_has_published_before_each_of_its_chunks() -> None:
    requests, core = two_of_800(adoption=True, max_num_batched_tokens=600)
    # Step 1: 400 tokens of the first, and of the second the 192 that fit and end at a block boundary. Then it adopts
    # up to 400 and computes 192 more; then it adopts up to 784, as the last token must be computed.
    assert (recovered(requests), [r.num_adopted_tokens for r in requests]) == ([0, 0], [0, 208 + 192])
    assert computed(core) == {"r0": 800, "r1": 192 + 192 + 16}
    assert [len(e.block_ids) for e in events_of(core, ev.BlocksAdopted)] == [13, 12]


def test_without_adoption_a_running_request_does_not_look_up_again() -> None:
    _, core = two_of_800(max_num_batched_tokens=600)
    assert computed(core) == {"r0": 800, "r1": 800}
    assert events_of(core, ev.BlocksAdopted) == []


def test_the_second_of_two_identical_prompts_computes_16_tokens_and_recovers_784_behind_the_first() -> None:
    requests, core = two_of_800(coordination="shared-prefix")
    assert recovered(requests) == [0, 784]
    assert computed(core) == {"r0": 800, "r1": 16}


def two_of_800(*, late: bool = False, **settings: Any) -> tuple[list[Request], EngineCore]:
    """Run two identical prompts of 800 tokens, 400 tokens a step each, the second perhaps a step later."""
    config = {"long_prefill_token_threshold": 400, "publication": "incremental", "num_blocks": 200, **settings}
    core = EngineCore(EngineConfig(**config), VirtualRunner())
    prompt = list(range(800))
    requests = [core.submit(prompt, max_tokens=1)]
    if late:
        step(core)
    requests.append(core.submit(prompt, max_tokens=1))
    run(core)
    return requests, core


def computed(core: EngineCore) -> dict[str, int]:
    """Return how many tokens each request computed."""
    out: dict[str, int] = {}
    for event in events_of(core, ev.ChunkComputed):
        out[event.request_id] = out.get(event.request_id, 0) + event.num_tokens
    return out


# -- The coordinator alone ---------------------------------------------------------------------------------


def running(name: str) -> Request:
    request = Request(name, tuple(range(13)), Sampling(max_tokens=1))
    request.move_to(RequestState.RUNNING)
    return request


def outlook(hashes: list[bytes], num_found: int = 0) -> Outlook:
    return Outlook(hashes, num_found, len(hashes), 4, 16, 16, 16)


def make() -> tuple[SharedPrefixCoordinator, list[ev.Event]]:
    events: list[ev.Event] = []
    return SharedPrefixCoordinator(ReleaseAfterPrefill(), events.append), events


def test_a_block_that_two_compute_is_awaited_behind_the_first_and_another_may_publish_it() -> None:
    coordinator, events = make()
    leader, twin, follower = running("a"), running("b"), Request("c", (1,))
    for request in (leader, twin, follower):
        coordinator.arrive(request)
    coordinator.admitted(leader, [b"1", b"2"])
    coordinator.admitted(twin, [b"1", b"2"])
    assert not coordinator.may_admit(follower, outlook([b"1", b"2", b"3"]))
    coordinator.check_invariants()
    assert coordinator.wants_blocks("a") and not coordinator.wants_blocks("b")
    assert coordinator.published("b", [b"1"]) == ()
    assert coordinator.awaiting == {"c": "a"}
    coordinator.check_invariants()
    assert coordinator.published("b", [b"2"]) == ("c",)
    coordinator.check_invariants()
    assert [e.kind for e in events] == ["prefix_awaited", "prefix_awaited", "prefix_released"]


def test_an_end_of_an_id_that_never_arrived_raises() -> None:
    coordinator, _ = make()
    with pytest.raises(UnknownRequestError, match="never arrived"):
        coordinator.request_ended("x", RequestState.FINISHED, prompt_is_published=False)


def _stops_running(coordinator: SharedPrefixCoordinator, leader: Request) -> None:
    leader.state = RequestState.PREEMPTED


def _forgets_a_block(coordinator: SharedPrefixCoordinator, leader: Request) -> None:
    del coordinator._computing[b"2"]


def _forgets_an_awaited_block(coordinator: SharedPrefixCoordinator, leader: Request) -> None:
    coordinator._awaited.clear()


def _forgets_a_leader(coordinator: SharedPrefixCoordinator, leader: Request) -> None:
    coordinator.awaiting["c"] = "nobody"


def _waits_in_vain(coordinator: SharedPrefixCoordinator, leader: Request) -> None:
    coordinator._followers["c"].index = 2


def _forgets_who_is_behind(coordinator: SharedPrefixCoordinator, leader: Request) -> None:
    coordinator.awaiting["d"] = "a"


@pytest.mark.parametrize(
    "damage",
    [
        _stops_running,
        _forgets_a_block,
        _forgets_an_awaited_block,
        _forgets_a_leader,
        _waits_in_vain,
        _forgets_who_is_behind,
    ],
)
def test_books_that_contradict_each_other_are_found(damage: Any) -> None:
    coordinator, _ = make()
    leader, follower = running("a"), Request("c", (1,))
    coordinator.arrive(leader)
    coordinator.arrive(follower)
    coordinator.admitted(leader, [b"1", b"2"])
    assert not coordinator.may_admit(follower, outlook([b"1", b"2", b"3"]))
    coordinator.check_invariants()
    damage(coordinator, leader)
    with pytest.raises(InvariantError):
        coordinator.check_invariants()
