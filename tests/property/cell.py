"""Write a failing life as a cell of a notebook: plain `minivllm` code that shows the fault.

Knows how each action is written as a call. Must not run anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minivllm.config import EngineConfig
from tests.property.actions import (
    Abort,
    Action,
    Ask,
    Crash,
    CrashKind,
    Fail,
    Finish,
    Reset,
    SetPolicies,
    Setup,
    Step,
    Submit,
)
from tests.property.models import Mismatch
from tests.property.shrink import Failure

_CHECK = """
def check(core):
    core.check_invariants()
    assert replay(core.log) == core.state()
"""

_RUNNER = '''
class Runner(VirtualRunner):
    """Does more than compute: whatever is asked for in the next step."""

    in_step, spoil, break_with = None, (), None

    def execute(self, step):
        in_step, spoil, self.in_step, self.spoil = self.in_step, self.spoil, None, ()
        if in_step:
            in_step()
        drawn = super().execute(step)
        for row in [row for row in step.rows if not row.is_withdrawn]:
            for request in row.sampled or (row.request,):
                if {row.request_id, request.request_id} & set(spoil):
                    drawn[request.request_id] = RowError("the logits are not finite")
        if self.break_with:
            self.break_with(drawn)
        return drawn
'''

_READS = '''
class Runner(Runner):
    """Knows what each slot holds, and sees a row that reads other K/V than its own."""

    def allocate(self, num_blocks, block_size):
        self.slots, self.size = {}, block_size

    def execute(self, step):
        spoil = self.spoil
        drawn = super().execute(step)
        rows = [row for row in step.rows if not row.is_withdrawn or row.request_id in drawn]
        copied = {(c.target, i): self.slots.get((c.source, i)) for c in step.copies for i in range(self.size)}
        self.slots |= copied
        for row in rows:
            assert row.num_tokens > 0, f"the row of {row.request_id} computes nothing"
            for at in range(row.start, row.start + row.num_tokens):
                slot = row.block_ids[at // self.size], at % self.size
                self.slots[slot] = None if row.request_id in spoil else self.content(row.request, at)
        for row in rows:
            for at in range(row.start + row.num_tokens if row.request_id not in spoil else 0):
                slot = row.block_ids[at // self.size], at % self.size
                assert self.slots.get(slot) == self.content(row.request, at), (
                    f"{row.request_id} reads other K/V than its own at position {at}, in block {slot[0]}")
        return drawn

    def content(self, request, at):
        return [key for key in request.extra_keys if len(key) == 2 or key[2] <= at], request.token_ids[: at + 1]
'''


def cell(failure: Failure) -> str:
    """Return the cell's source."""
    actions = _merged(failure.actions)
    special = any(isinstance(a, Crash) or (isinstance(a, Step) and (a.withdraw or a.spoil)) for a in actions)
    reads = failure.kind in ("reads", "step")
    names = ["EngineConfig", "EngineCore", "Submission", "Sampling", "VirtualRunner", "Metrics", "replay"]
    lines = [f"from minivllm import {', '.join(names)}"]
    lines.append("from minivllm import MultimodalItem")
    lines.append("from minivllm.errors import EngineDeadError, MiniVLLMError, RowError")
    lines.extend(_CHECK.splitlines())
    if special or reads:
        lines.extend(_RUNNER.splitlines())
    if reads:
        lines.extend(_READS.splitlines())
    runner = "Runner" if special or reads else "VirtualRunner"
    make = [f"runner = {runner}()", "core = EngineCore(config, runner)"]
    lines.extend(["", f"config = {_setup(failure.setup)}", *make, ""])
    for action in actions:
        lines.extend(_action(action, make))
    lines.append("check(core)")
    text = " ".join(str(failure.error).split())
    lines.append(f"# {type(failure.error).__name__}: {text}"[:300])
    if isinstance(failure.error, Mismatch) and failure.error.check:
        lines.append(failure.error.check)
    return "\n".join(line for line in lines if line is not None) + "\n"


def _merged(actions: Sequence[Action]) -> list[Action]:
    """Return the actions with plain steps in a row taken together."""
    out: list[Action] = []
    for action in actions:
        last = out[-1] if out else None
        if isinstance(action, Step) and isinstance(last, Step) and not (action.withdraw or action.spoil):
            out[-1] = Step(last.count + action.count, last.withdraw, last.spoil)
        else:
            out.append(action)
    return out


def _setup(setup: Setup) -> str:
    default = EngineConfig()
    given = [f"{name}={value!r}" for name, value in setup.items() if getattr(default, name) != value]
    return f"EngineConfig({', '.join(given)})"


def _action(action: Action, make: list[str]) -> list[str]:
    match action:
        case Submit(asks, refused):
            lines = [f"core.submit({_ask(asks[0], short=True)})"]
            if len(asks) > 1:
                lines = ["core.submit_batch([", *(f"    Submission({_ask(ask, short=False)})," for ask in asks), "])"]
            if refused:
                lines = [
                    "try:",
                    *(f"    {line}" for line in lines),
                    "except MiniVLLMError as error:",
                    "    print(error)",
                ]
            return lines
        case Step(count, withdraw, spoil):
            lines = []
            if withdraw:
                lines.append(f"runner.in_step = lambda: [core.abort(name) for name in {withdraw!r}]")
            if spoil:
                lines.append(f"runner.spoil = {spoil!r}")
            lines.append("core.step()" if count == 1 else f"for _ in range({count}): core.step()")
            return lines
        case Abort(name):
            return [f"core.abort({name!r})"]
        case Fail(name):
            return [f'core.fail({name!r}, RuntimeError("told to"))']
        case Reset(abort_running):
            return [f"core.reset_cache({'abort_running=True' if abort_running else ''})"]
        case SetPolicies(publication, coordination, release):
            return [
                "if all(request.state.is_ended for request in core.requests.values()):",
                f"    core.set_policies(publication={publication!r}, coordination={coordination!r}, "
                f"release={release!r})",
            ]
        case Crash(kind):
            broken = {
                CrashKind.RAISES: "runner.break_with = lambda drawn: 1 / 0",
                CrashKind.SHORT: "runner.break_with = lambda drawn: drawn.popitem() if drawn else 1 / 0",
                CrashKind.LONG: 'runner.break_with = lambda drawn: drawn.update({"somebody else": 1})',
            }[kind]
            return [broken, "try:", "    core.step()", "except EngineDeadError:", "    check(core)", *make]
        case Finish():
            return ["core.run()"]


def _ask(ask: Ask, *, short: bool) -> str:
    """Return the arguments of ``core.submit`` or of ``Submission``."""
    sampling: dict[str, Any] = {"max_tokens": ask.max_tokens}
    if ask.temperature:
        sampling |= {"temperature": ask.temperature, "seed": ask.seed}
    if ask.n > 1:
        sampling["n"] = ask.n
    fields = ", ".join(f"{name}={value!r}" for name, value in sampling.items())
    parts = [f"{list(ask.prompt)}", fields if short else f"Sampling({fields})", f"request_id={ask.request_id!r}"]
    for name in ("cache_salt", "adapter", "after"):
        if getattr(ask, name) is not None:
            parts.append(f"{name}={getattr(ask, name)!r}")
    if ask.multimodal:
        items = ", ".join(
            f"MultimodalItem({content!r}, {offset}, {count})" for content, offset, count in ask.multimodal
        )
        parts.append(f"multimodal=[{items}]")
    if ask.priority:
        parts.append(f"priority={ask.priority}")
    return ", ".join(parts)
