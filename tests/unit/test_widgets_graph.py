"""Graphs are drawn by one program, the same each time."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from minivllm.errors import ConfigError, MiniVLLMError
from widgets.drawing import dot_svg, find_dot


def test_a_graph_is_svg_and_the_same_bytes_each_time() -> None:
    source = 'digraph { rankdir=LR; node [shape=box]; root -> "a1b2" -> "c3d4 é" }'
    svg = dot_svg(source)
    assert svg == dot_svg(source)
    words = {node.text for node in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")}
    assert {"root", "a1b2", "c3d4 é"} <= words


def test_the_program_of_the_requirements_comes_first() -> None:
    assert Path(find_dot()[0]).name.startswith("graphviz-pure")


def test_a_source_with_a_mistake_is_a_sentence() -> None:
    with pytest.raises(MiniVLLMError, match="the graph cannot be drawn"):
        dot_svg("digraph { a -> ")


def test_without_any_program_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(ConfigError, match="pip install graphviz-pure"):
        dot_svg("digraph {}")


def test_the_systems_dot_is_the_second_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/dot" if name == "dot" else None)
    assert find_dot() == ["/usr/bin/dot"]
