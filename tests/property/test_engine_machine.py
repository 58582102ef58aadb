"""Random lives of an engine, for every combination of policies.

`Life` says what is held together after every action; here hypothesis draws the actions.
"""

from __future__ import annotations

import zlib
from collections import Counter
from typing import Any

import pytest
from hypothesis import seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from tests.property.actions import (
    POLICIES,
    SWITCHES,
    Choose,
    Finish,
    Setup,
    draw_end,
    draw_rare,
    draw_setup,
    draw_step,
    draw_submit,
)
from tests.property.life import Life
from tests.property.steady import STEADY

NUM_ACTIONS = 10_000
"""At least as many are done over all combinations."""

LIVES, ACTIONS_OF_A_LIFE = 13, 40


def chooser(data: st.DataObject) -> Choose:
    """Let hypothesis choose."""
    return lambda options: data.draw(st.sampled_from(options))


class EngineMachine(RuleBasedStateMachine):
    """One life. Each rule draws one kind of action and applies it."""

    policies: Setup
    done: Counter[str]

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        self.life = Life(draw_setup(chooser(data), self.policies, data.draw(st.sampled_from(SWITCHES))))

    @precondition(lambda self: len(self.life.live()) <= 14)
    @rule(data=st.data())
    def submit(self, data: st.DataObject) -> None:
        """Submit a batch."""
        self.life.apply(draw_submit(chooser(data), self.life))

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """Run some steps."""
        self.life.apply(draw_step(chooser(data), self.life))

    @rule(data=st.data())
    def step_again(self, data: st.DataObject) -> None:
        """Run some steps: twice as often as others are done."""
        self.life.apply(draw_step(chooser(data), self.life))

    @precondition(lambda self: self.life.known())
    @rule(data=st.data())
    def end_early(self, data: st.DataObject) -> None:
        """Abort or fail a request."""
        self.life.apply(draw_end(chooser(data), self.life))

    @rule(data=st.data())
    def rare(self, data: st.DataObject) -> None:
        """What happens less often."""
        self.life.apply(draw_rare(chooser(data), self.life))

    def teardown(self) -> None:
        """Every life ends well."""
        if hasattr(self, "life"):
            self.life.apply(Finish())
            self.done.update(self.life.done)


@pytest.mark.parametrize("policies", POLICIES, ids=lambda policies: "/".join(policies.values()))
def test_the_books_add_up_after_every_action(policies: Setup) -> None:
    # Each combination lives lives of its own: the same in every run, others than the next one's.
    number = zlib.crc32("/".join(policies.values()).encode())
    members: dict[str, Any] = {"policies": policies, "done": Counter()}
    machine = seed(number)(type("EngineMachine", (EngineMachine,), members))
    run_state_machine_as_test(
        machine, settings=settings(STEADY, max_examples=LIVES, stateful_step_count=ACTIONS_OF_A_LIFE)
    )
    assert members["done"].total() >= NUM_ACTIONS / len(POLICIES)
