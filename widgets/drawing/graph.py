"""Graphs written in Graphviz's language, as SVG.

The program comes with the requirements and draws the same bytes on every machine; only where it is missing does the
system's ``dot`` draw, which may place things a little differently. Live views have a layout of their own, so that they
do not jump. Knows how to run the program. Must not know what is drawn.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from minivllm.errors import ConfigError, MiniVLLMError

_TIMEOUT_S = 60  # a guard against hanging; a graph of a lab takes milliseconds


def find_dot() -> list[str]:
    """Return the command that draws. Raises ConfigError if there is none, with what to install."""
    beside = Path(sys.executable).parent / "graphviz-pure"
    for program in (str(beside), "graphviz-pure"):
        found = shutil.which(program)
        if found:
            return [found, "-Kdot"]
    found = shutil.which("dot")
    if found:
        return [found]
    raise ConfigError("no program is here that draws graphs; install it with: pip install graphviz-pure")


def dot_svg(source: str) -> str:
    """Return the drawing of a graph as SVG, on a transparent ground.

    Raises MiniVLLMError with the program's own words for a source that it does not understand.
    """
    command = [*find_dot(), "-Tsvg", "-Gbgcolor=transparent"]
    done = subprocess.run(command, input=source.encode(), capture_output=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"]
        raise MiniVLLMError(f"the graph cannot be drawn ({lines[0].strip()}); check its source")
    svg = done.stdout.decode("utf-8")
    return svg[svg.index("<svg") :].strip()
