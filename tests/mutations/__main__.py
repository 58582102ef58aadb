"""The mutation check: try every edit, say which test catches it, and which test catches none.

For each edit the facts are run first, all of them, so that every test that sees it is known. What they let pass meets
the unit tests of its module, and then the property tests. Knows edits and outcomes.
"""

from __future__ import annotations

import argparse
import collections
import os
import queue
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.mutations.edits import EDITS, UNIT_TESTS, Edit
from tests.mutations.workshop import Copy, Run, WorkshopError

FACTS = ("tests/facts", "--ignore=tests/facts/test_map.py")
PROPERTIES = ("tests/property", "--ignore=tests/property/test_soaking.py", "--ignore=tests/property/test_shrinking.py")


@dataclass(slots=True)
class Outcome:
    """What became of one edit. ``stage`` is what caught it: "facts", "unit", "property", or "" for a survivor."""

    edit: Edit
    stage: str = ""
    failed: list[str] = field(default_factory=list)
    hung: bool = False
    error: str = ""

    @property
    def is_caught(self) -> bool:
        """Whether a test saw it."""
        return bool(self.stage)

    @property
    def complaint(self) -> str:
        """What is wrong with this outcome, "" if nothing is."""
        if self.error:
            return self.error
        if self.is_caught and self.edit.equivalent_because:
            return "is said to change nothing, and a test sees it"
        if not self.is_caught and not self.edit.equivalent_because:
            return "no test sees it"
        return ""


class Check:
    """All edits over several copies of the tree, one for each worker."""

    def __init__(self, edits: list[Edit], num_jobs: int, folder: Path) -> None:
        self.outcomes: list[Outcome] = []
        self.listed: list[str] = []
        self._edits = edits
        self._queue: queue.SimpleQueue[Edit] = queue.SimpleQueue()
        for edit in edits:
            self._queue.put(edit)
        self._results: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._copies = [Copy(folder / f"copy{number}") for number in range(num_jobs)]
        self._most_seconds = 600.0
        self._green: dict[tuple[str, ...], Run] = {}
        self._green_lock = threading.Lock()

    def run(self) -> None:
        """Run everything, printing a line as each edit is done. May be interrupted."""
        started = time.monotonic()
        threads: list[threading.Thread] = []
        try:
            runs = [self._warm_up(copy) for copy in self._copies[:1]]
            self.listed = runs[0].started
            self._most_seconds = max(120.0, 8 * runs[0].seconds)
            print(
                f"{len(self._edits)} edits, {len(self.listed)} tests of facts ({runs[0].seconds:.0f} s a run), "
                f"{len(self._copies)} at a time, each in a copy of the tree: {runs_in(self._copies)}",
                flush=True,
            )
            threads = [threading.Thread(target=self._work, args=(copy,), daemon=True) for copy in self._copies]
            for thread in threads:
                thread.start()
            for count in range(1, len(self._edits) + 1):
                while True:
                    try:
                        outcome = self._results.get(timeout=0.5)  # so that Ctrl-C is heard
                        break
                    except queue.Empty:
                        continue
                self.outcomes.append(outcome)
                left = (time.monotonic() - started) / count * (len(self._edits) - count)
                print(f"[{count:3}/{len(self._edits)}] {describe(outcome)}   {left / 60:.1f} min left", flush=True)
        finally:
            for copy in self._copies:
                copy.stop()
            for thread in threads:
                thread.join()

    def _warm_up(self, copy: Copy) -> Run:
        """Run the facts unedited, which must pass; Python keeps what it compiles."""
        run = copy.run(FACTS, most_seconds=self._most_seconds, compile_all=True)
        if not run.is_green:
            raise WorkshopError(f"without any edit these fail: {', '.join(run.failed or run.unread) or 'no test ran'}")
        return run

    def _work(self, copy: Copy) -> None:
        if copy is not self._copies[0]:
            copy.run(("tests/facts/test_map.py", "--collect-only"), most_seconds=self._most_seconds, compile_all=True)
        while True:
            try:
                edit = self._queue.get_nowait()
            except queue.Empty:
                return
            outcome = Outcome(edit)
            try:
                self._try(copy, outcome)
            except WorkshopError as error:
                outcome.error = str(error)
            self._results.put(outcome)

    def _try(self, copy: Copy, outcome: Outcome) -> None:
        edit = outcome.edit
        for stage, paths in (("facts", FACTS), ("unit", UNIT_TESTS[edit.module]), ("property", PROPERTIES)):
            if stage != "facts":
                self._check_green(copy, paths)
            limit = self._most_seconds if stage == "facts" else 900.0
            with copy.edited(edit.module, edit.old, edit.new):
                run = copy.run(paths if stage == "facts" else (*paths, "-x"), most_seconds=limit)
            if run.unread and not run.started:
                raise WorkshopError(f"with this edit nothing can be imported: {run.unread[0]}")
            if not run.is_green:
                outcome.stage = stage
                outcome.failed = run.failed
                outcome.hung = bool(run.hung) or run.was_killed
                return

    def _check_green(self, copy: Copy, paths: tuple[str, ...]) -> None:
        """See once that these tests pass without any edit: else they would catch everything."""
        with self._green_lock:
            if paths not in self._green:
                self._green[paths] = copy.run(paths, most_seconds=900.0)
            run = self._green[paths]
        if not run.is_green:
            raise WorkshopError(f"without any edit these fail: {', '.join(run.failed or run.unread)}")

    def idle_tests(self) -> list[str]:
        """Return the tests of facts that no edit has turned red."""
        red = {test for outcome in self.outcomes for test in outcome.failed}
        return [test for test in self.listed if test not in red]


def runs_in(copies: list[Copy]) -> str:
    """Return where the copies are."""
    return str(copies[0].folder.parent)


def short(test: str) -> str:
    """Return a test's name without its folder."""
    return test.rsplit("/", 1)[-1]


def describe(outcome: Outcome) -> str:
    """Return one line about an edit."""
    edit = outcome.edit
    name = f"{edit.module}: {edit.name}"
    if outcome.error:
        return f"ERROR     {name}: {outcome.error}"
    if not outcome.is_caught:
        return f"{'equal     ' if edit.equivalent_because else 'SURVIVES  '}{name}"
    by = short(outcome.failed[0]) if outcome.failed else "the time limit"
    more = f" and {len(outcome.failed) - 1} more" if len(outcome.failed) > 1 else ""
    how = "hung     " if outcome.hung else "caught   "
    return f"{how} {name}, by {outcome.stage}: {by}{more}"


def summarize(check: Check, num_edits: int, *, is_whole: bool, seconds: float) -> bool:
    """Print what all of it came to. Returns whether everything is as it should be."""
    by_stage = collections.Counter(outcome.stage or "nobody" for outcome in check.outcomes if not outcome.error)
    by_module = collections.Counter(outcome.edit.module for outcome in check.outcomes if outcome.is_caught)
    print()
    print(f"{len(check.outcomes)} of {num_edits} edits tried in {seconds / 60:.1f} minutes")
    print("caught by " + ", ".join(f"{stage}: {count}" for stage, count in sorted(by_stage.items())))
    print("caught in " + ", ".join(f"{module}: {count}" for module, count in sorted(by_module.items())))
    complaints = [(outcome, outcome.complaint) for outcome in check.outcomes if outcome.complaint]
    for outcome, complaint in complaints:
        print(f"mutate: {outcome.edit.module}: {outcome.edit.name}: {complaint}")
    for outcome in check.outcomes:
        if outcome.edit.equivalent_because and not outcome.complaint:
            print(f"equal: {outcome.edit.module}: {outcome.edit.name}: {outcome.edit.equivalent_because}")
    idle = check.idle_tests() if is_whole else []
    for test in idle:
        print(f"mutate: {short(test)} catches no edit")
    if is_whole and not idle:
        print(f"each of the {len(check.listed)} tests of facts catches some edit")
    return not complaints and not idle and len(check.outcomes) == num_edits


def main() -> int:
    """Run the command and return its status."""
    parser = argparse.ArgumentParser(
        prog="tests/mutate", description="Small wrong edits of the engine: each must turn a test red."
    )
    parser.add_argument("--list", action="store_true", help="print the edits and end")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="try this edit (may be repeated)")
    parser.add_argument("--module", action="append", default=[], metavar="NAME", help="try the edits of this module")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many at a time (all cores)")
    options = parser.parse_args()
    for given, known in ((options.only, {e.name for e in EDITS}), (options.module, {e.module for e in EDITS})):
        for name in given:
            if name not in known:
                parser.error(f"there is no {name!r}; the names are {', '.join(sorted(known))}")
    edits = [
        edit
        for edit in EDITS
        if (not options.only or edit.name in options.only) and (not options.module or edit.module in options.module)
    ]
    if options.list:
        for edit in edits:
            print(f"{edit.module}: {edit.name}")
        print(f"{len(edits)} edits")
        return 0
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="minivllm-mutate-") as folder:
        check = Check(edits, max(1, min(options.jobs, len(edits))), Path(folder).resolve())
        try:
            check.run()
        except WorkshopError as error:
            print(f"mutate: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            summarize(check, len(edits), is_whole=False, seconds=time.monotonic() - started)
            return 130
    is_whole = not options.only and not options.module
    return 0 if summarize(check, len(edits), is_whole=is_whole, seconds=time.monotonic() - started) else 1


if __name__ == "__main__":
    sys.exit(main())
