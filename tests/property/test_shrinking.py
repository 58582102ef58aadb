"""A fault in the engine is found, made small, and printed as a cell that shows it and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from minivllm.cache.kv_cache_manager import KVCacheManager
from minivllm.engine import core as engine
from minivllm.request import Request
from minivllm.scheduling.scheduler import Scheduler
from minivllm.step import ScheduledStep
from tests.property.actions import Abort, Ask, Crash, Finish, Reset, Step, Submit
from tests.property.cell import cell
from tests.property.models import Mismatch
from tests.property.shrink import Failure, live, shrink, simpler_actions
from tests.property.soaking import Tally, live_one

MOST_LIVES = 60
"""Random lives until a fault must have shown."""


class HeadFirst(KVCacheManager):
    """Frees a block table from its head to its tail: the beginning of a chain is forgotten before its end."""

    def free(self, request: Request) -> None:
        table = self._tables.get(request.request_id)
        if table is not None:
            table.blocks.reverse()
        super().free(request)


class ForgetsToCopy(Scheduler):
    """Leaves the copies of a step out: a sample writes over what the others read."""

    def schedule(self, number: int) -> ScheduledStep:
        step = super().schedule(number)
        return ScheduledStep(step.number, step.rows)


class CountsTheLastToken(KVCacheManager):
    """Does not leave the last token to be computed."""

    def _look_up(self, request: Request, *args: Any) -> Any:
        request.token_ids.append(0)
        try:
            return super()._look_up(request, *args)
        finally:
            request.token_ids.pop()


FAULTS: dict[str, tuple[str, type, str, int]] = {
    "frees the head first": ("KVCacheManager", HeadFirst, "freed", 2),
    "leaves no token to compute": ("KVCacheManager", CountsTheLastToken, "", 5),
    "forgets to copy on write": ("Scheduler", ForgetsToCopy, "reads", 3),
}
"""The name in the engine's module, what stands there instead, how it shows ("" for any way), most actions left."""


def first_failure(seed: int) -> Failure:
    """Live random lives until one fails."""
    for number in range(MOST_LIVES):
        failure = live_one(seed, number, Tally())
        if failure is not None:
            return failure
    raise AssertionError(f"{MOST_LIVES} lives have not shown the fault")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_and_shrunk_to_a_cell_that_fails_only_on_the_broken_engine(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, broken, kind, most = FAULTS[fault]
    with monkeypatch.context() as patched:
        patched.setattr(engine, where, broken)
        failure = first_failure(3)
        small = shrink(failure)
        source = cell(small)
        assert small.kind == failure.kind
        assert kind in ("", small.kind)
        assert len(small.actions) <= most, small.actions
        assert "tests" not in source
        with pytest.raises(Exception) as shown:
            exec(source, {})
    assert not isinstance(shown.value, SyntaxError | NameError | ImportError)
    exec(source, {})
    assert live(small.setup, small.actions) is None


@pytest.mark.parametrize("coordination", ["single-flight", "shared-prefix"])
def test_a_cell_says_every_action_as_a_call_of_the_engine(coordination: str) -> None:
    setup = {"block_size": 4, "num_blocks": 12, "coordination": coordination, "publication": "incremental"}
    prompt = (10, 11, 12, 13, 14, 15, 16)
    special = Ask("b", prompt, 3, 0.7, 5, 2, "s", "a", (("image", 1, 3),), 1, ("a", 1))
    actions = (
        Submit((Ask("a", prompt, 4),)),
        Submit((special, Ask("c", prompt, 2))),
        Submit((Ask("a", prompt),), refused=True),
        Step(2, ("c",), ("a",)),
        Step(),
        Abort("b"),
        Reset(abort_running=True),
        Finish(),
        Submit((Ask("d", prompt, 2),)),
        Crash(),
        Submit((Ask("e", prompt, 2),)),
        Finish(),
    )
    assert live(setup, actions) is None
    source = cell(Failure(setup, actions, ValueError("nothing")))
    names: dict[str, Any] = {}
    exec(source, names)
    assert names["core"].requests["e"].finish_reason == "length"
    reads = cell(Failure(setup, actions, Mismatch("reads", "nothing")))
    exec(reads, {})


def test_every_simpler_action_is_another_one() -> None:
    ask = Ask("a", (1, 2, 3), 4, 0.7, 3, 3, "s", "x", (("image", 0, 2),), 2, ("b", 1))
    for action in (Submit((ask, ask)), Step(1, ("a",), ("b",)), Reset(abort_running=True)):
        simpler = list(simpler_actions(action))
        assert simpler
        assert action not in simpler
