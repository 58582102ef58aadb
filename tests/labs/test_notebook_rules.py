"""Each rule finds the fault it is there for, and finds none in a sound notebook."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import pytest

from tests.labs import notebook_rules as rules
from tests.labs.notebook_rules import RULES, Notebook, Rule

Output = dict[str, Any]


def stream(text: str, name: str = "stdout") -> Output:
    return {"output_type": "stream", "name": name, "text": text}


def shown(mime: str, value: Any) -> Output:
    return {"output_type": "display_data", "metadata": {}, "data": {mime: value}}


def error(traceback: str = "boom") -> Output:
    return {"output_type": "error", "ename": "ValueError", "evalue": "boom", "traceback": [traceback]}


def code(source: str, *outputs: Output, tags: tuple[str, ...] = ()) -> dict[str, Any]:
    metadata = {"tags": list(tags)} if tags else {}
    return {"cell_type": "code", "source": source, "outputs": list(outputs), "metadata": metadata}


def markdown(source: str) -> dict[str, Any]:
    return {"cell_type": "markdown", "source": source, "metadata": {}}


def notebook(*cells: dict[str, Any]) -> Notebook:
    """Return a notebook of these cells with ids, and counts as if it had been run from top to bottom."""
    count = 0
    for position, cell in enumerate(cells):
        cell["id"] = f"cell-{position}"
        if cell["cell_type"] == "code":
            cell["execution_count"] = None
            if cell["source"].strip():
                count += 1
                cell["execution_count"] = count
    kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return {"nbformat": 4, "nbformat_minor": 5, "metadata": {"kernelspec": kernelspec}, "cells": list(cells)}


def picture(svg: str, alt: str = 'alt="four requests"') -> Output:
    return shown("text/html", f'<img {alt} src="data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}">')


def sound() -> Notebook:
    return notebook(
        markdown("# A lab\nWith a picture ![of a block](block.svg) and `minivllm/bench/workloads.py`."),
        code("import minivllm"),
        code("print(1)", stream("1\n")),
        code("show()", picture("<svg>block 0x1f</svg>")),
        code("  \n"),
        code("1/0", error(), tags=("raises-exception",)),
        code(
            "%time 1",
            stream("a race at https://example.org/home/page 12:30\n"),
            tags=("nbval-ignore-output",),
        ),
    )


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_sound_notebook_keeps_every_rule(rule: Rule) -> None:
    assert rule(sound()) == []


def without_count() -> Notebook:
    bad = sound()
    bad["cells"][2]["execution_count"] = None
    return bad


def out_of_order() -> Notebook:
    bad = sound()
    bad["cells"][1]["execution_count"] = 7
    return bad


def without_id() -> Notebook:
    bad = sound()
    del bad["cells"][0]["id"]
    return bad


def same_id() -> Notebook:
    bad = sound()
    bad["cells"][0]["id"] = bad["cells"][1]["id"]
    return bad


def old_format() -> Notebook:
    return sound() | {"nbformat_minor": 4}


def broken_format() -> Notebook:
    bad = sound()
    bad["cells"][2]["outputs"][0]["name"] = 3
    return bad


def widget_state() -> Notebook:
    bad = sound()
    bad["metadata"]["widgets"] = {"application/vnd.jupyter.widget-state+json": {}}
    return bad


def other_kernel() -> Notebook:
    bad = sound()
    bad["metadata"]["kernelspec"]["name"] = "my-lab-venv"
    return bad


def no_kernel() -> Notebook:
    return sound() | {"metadata": {}}


def one_in_four_ignored() -> Notebook:
    quiet = [code(f"x = {number}") for number in range(3)]
    return notebook(*quiet, code("now()", stream("1\n"), tags=("nbval-ignore-output",)))


def ignored_by_comment() -> Notebook:
    return notebook(code("# NBVAL_IGNORE_OUTPUT\nprint(1)", stream("1\n")))


WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"

FAULTS: list[tuple[str, Rule, Callable[[], Notebook]]] = [
    ("a cell without a count", rules.was_run_from_top_to_bottom, without_count),
    ("cells run out of order", rules.was_run_from_top_to_bottom, out_of_order),
    ("no code at all", rules.was_run_from_top_to_bottom, lambda: notebook(markdown("# words"))),
    (
        "a print without its output",
        rules.keeps_its_outputs,
        lambda: notebook(code("x = 1\nprint(x)"), code("2", stream("2"))),
    ),
    ("no output anywhere", rules.keeps_its_outputs, lambda: notebook(code("x = 1"))),
    ("a cell without an id", rules.is_valid_and_has_ids, without_id),
    ("two cells of one id", rules.is_valid_and_has_ids, same_id),
    ("a format without ids", rules.is_valid_and_has_ids, old_format),
    ("a broken format", rules.is_valid_and_has_ids, broken_format),
    ("widget state", rules.holds_no_widget, widget_state),
    (
        "a widget view",
        rules.holds_no_widget,
        lambda: notebook(code("view", shown(WIDGET_VIEW, {"model_id": "1"}))),
    ),
    ("a path of Linux in a source", rules.names_no_machine, lambda: notebook(code("open('/home/ann/x')"))),
    (
        "a path of a Mac in an output",
        rules.names_no_machine,
        lambda: notebook(code("x", stream("in /Users/ann/x\n"))),
    ),
    ("a path of Windows", rules.names_no_machine, lambda: notebook(code("x", stream("C:\\Users\\ann")))),
    (
        "a path in a warning",
        rules.names_no_machine,
        lambda: notebook(code("x", stream("/tmp/ipykernel_1/2.py:1", "stderr"))),
    ),
    ("a path of root in words", rules.names_no_machine, lambda: notebook(markdown("see (/root/x)"))),
    (
        "a path in a work folder",
        rules.names_no_machine,
        lambda: notebook(code("x", shown("text/plain", ["'/work/", "a'"]))),
    ),
    (
        "a path in a coloured traceback",
        rules.names_no_machine,
        lambda: notebook(code("x", error("File \x1b[32m/home/ann/x"))),
    ),
    (
        "a path inside a picture",
        rules.names_no_machine,
        lambda: notebook(code("x", picture("<svg>/tmp/x</svg>"))),
    ),
    (
        "an address",
        rules.names_no_machine,
        lambda: notebook(code("x", shown("text/plain", "<A at 0x7f12ab34cd>"))),
    ),
    ("an unplanned error", rules.fails_only_on_purpose, lambda: notebook(code("1/0", error()))),
    (
        "a planned error that did not come",
        rules.fails_only_on_purpose,
        lambda: notebook(code("1", tags=("raises-exception",))),
    ),
    ("one in four not compared", rules.is_really_compared, one_in_four_ignored),
    ("not compared, by a comment", rules.is_really_compared, ignored_by_comment),
    ("skipped by a tag", rules.is_really_compared, lambda: notebook(code("1", tags=("nbval-skip",)))),
    ("skipped by a comment", rules.is_really_compared, lambda: notebook(code("x = 1\n# NBVAL_SKIP"))),
    (
        "an image without alt",
        rules.describes_its_pictures,
        lambda: notebook(code("x", picture("<svg/>", alt=""))),
    ),
    (
        "an image with an empty alt",
        rules.describes_its_pictures,
        lambda: notebook(code("x", picture("<svg/>", alt='alt=" "'))),
    ),
    (
        "an image in words without alt",
        rules.describes_its_pictures,
        lambda: notebook(markdown('<p><img src="x.svg"></p>')),
    ),
    (
        "a markdown image without words",
        rules.describes_its_pictures,
        lambda: notebook(markdown("![](x.svg)")),
    ),
    ("somebody's own kernel", rules.runs_on_any_python_kernel, other_kernel),
    ("no kernel", rules.runs_on_any_python_kernel, no_kernel),
]


@pytest.mark.parametrize(("rule", "bad"), [fault[1:] for fault in FAULTS], ids=[fault[0] for fault in FAULTS])
def test_the_rule_finds_the_fault(rule: Rule, bad: Callable[[], Notebook]) -> None:
    faults = rule(bad())
    assert faults
    assert all(len(fault.splitlines()) == 1 for fault in faults)


def test_every_rule_is_seen_to_fail() -> None:
    assert {rule for _, rule, _ in FAULTS} == set(RULES)


def test_a_fifth_of_the_cells_may_vary() -> None:
    quiet = [code(f"x = {number}") for number in range(4)]
    assert rules.is_really_compared(notebook(*quiet, code("now()", tags=("nbval-ignore-output",)))) == []
