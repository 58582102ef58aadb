"""Run a lab from top to bottom and save it as the rules of labs ask.

    python -m tests.labs.save labs/01_the_cold_cache_race.ipynb ...

A saved lab shows on a plain web page of its file: no widget of a kernel that is gone, each stream in one piece. Knows
the notebook format. Must not know what any lab is about. A cell that fails leaves the file as it was.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

WIDGET = "application/vnd.jupyter.widget-view+json"


def tidy(outputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a cell's outputs with neighbouring pieces of a stream joined, and without live widgets."""
    tidied: list[dict[str, Any]] = []
    for output in outputs:
        last = tidied[-1] if tidied else {}
        if output["output_type"] == "stream" == last.get("output_type") and output["name"] == last["name"]:
            last["text"] += output["text"]
            continue
        output.get("data", {}).pop(WIDGET, None)
        tidied.append(output)
    return tidied


def save(path: Path) -> None:
    """Run one lab and save it. Raises nbclient.exceptions.CellExecutionError if a cell fails."""
    notebook = nbformat.read(path, as_version=4)
    metadata = notebook["metadata"].copy()
    client = NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(path.parent)}})
    client.store_widget_state = False
    client.execute()
    notebook["metadata"] = metadata  # the kernel would add its version
    for cell in notebook["cells"]:
        cell["metadata"].pop("execution", None)  # times of one machine
        if cell["cell_type"] == "code":
            cell["outputs"] = tidy(cell["outputs"])
    nbformat.write(notebook, path)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(f"running {name} ...", flush=True)
        save(Path(name))
