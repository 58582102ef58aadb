"""`minivllm model`: which models there are, and bring one to this machine."""

from __future__ import annotations

import argparse
from typing import Any

from minivllm.cli.arguments import Parser, add_command, new_parser
from minivllm.cli.console import Console

_MODEL_EXAMPLES = """\
examples:
  minivllm model list
  minivllm model get smollm2
  minivllm model get mlx-community/Qwen2.5-0.5B-Instruct-4bit"""


def add_to(commands: Any) -> None:
    """Add the command to the command line."""
    about = "Which models there are, and bring one to this machine."
    model = new_parser("model", about, _MODEL_EXAMPLES, commands)
    under = model.add_subparsers(metavar="COMMAND", parser_class=Parser)
    about = "Show the models: what each is, its size and licence, and whether it is on this machine."
    add_command(under, "list", model_list, about, _MODEL_EXAMPLES)
    about = (
        "Bring a model's files to this machine, with progress. What is here already is left alone; what is cut off or "
        "changed is replaced. After Ctrl-C, call it again."
    )
    made = add_command(under, "get", model_get, about, _MODEL_EXAMPLES)
    made.add_argument("name", metavar="NAME", help="smollm2, or a hub name OWNER/NAME")


def model_list(args: argparse.Namespace, console: Console) -> None:
    """Show which models there are."""
    from minivllm.models.downloads import cache_dir
    from minivllm.models.load import list_models

    rows = [("name", "what it is", "size", "licence", "here")]
    details = [""]
    for model in list_models():
        size = f"{model.size_bytes / 1e6:.0f} MB" if model.size_bytes else "–"
        here = "yes" if model.is_here else "–" if " " in model.name else "no"
        rows.append((model.name, model.title, size, model.license, here))
        details.append(f"{model.note}; from: {model.source}")
    rows.append(("virtual", "no model: a cost model and a clock", "–", "Apache-2.0", "yes"))
    details.append("needs no MLX, and every run gives the same; from: minivllm itself")
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row, detail in zip(rows, details, strict=True):
        cells = (
            cell.rjust(width) if i == 2 else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        console.out.line("  ".join(cells).rstrip())
        if detail:
            console.out.line(" " * (widths[0] + 2) + detail)
    console.out.line(f"Files of models by name are kept in {cache_dir()}; $MINIVLLM_CACHE names another folder.")


def model_get(args: argparse.Namespace, console: Console) -> None:
    """Bring a model's files to this machine."""
    from minivllm.models import load as models

    if args.name in ("virtual", "tiny"):
        console.out.line(f"{args.name} needs no file: it is part of minivllm")
        return
    with console.progress() as progress:
        path = models.fetch(args.name, progress)
    console.out.line(f"{args.name} is {'now' if progress.was_used else 'already'} in {path}")
