"""`minivllm bench`: what things cost on this machine."""

from __future__ import annotations

import argparse
import json
from typing import Any

from minivllm.cli.arguments import Parser, add_command, new_parser, whole
from minivllm.cli.console import Console

_BENCH_MANAGER = """\
Measure what the cache manager itself costs, without any model: hashing, allocating and publishing, looking up, taking
hits and freeing 1,024 blocks, with the events that go with it, beside an obvious manager in the same runs; and whether
the cost of a request grows with the requests before it. Takes about half a minute. Ctrl-C shows what is done."""

_BENCH_EXAMPLES = """\
examples:
  minivllm bench manager
  minivllm bench manager --runs 200 --json manager.json"""


def add_to(commands: Any) -> None:
    """Add the command to the command line."""
    bench = new_parser(
        "bench",
        "Measure what things cost on this machine, beside the obvious way of doing them.",
        _BENCH_EXAMPLES,
        commands,
    )
    under = bench.add_subparsers(metavar="WHAT", parser_class=Parser)
    made = add_command(under, "manager", bench_manager, _BENCH_MANAGER, _BENCH_EXAMPLES)
    made.add_argument("--runs", type=whole, default=50, metavar="N", help="runs of each (default: 50)")
    made.add_argument(
        "--json", metavar="FILE", help='write the figures there, whole or not at all; "-" is standard output'
    )


def bench_manager(args: argparse.Namespace, console: Console) -> None:
    """Measure what the cache manager itself costs."""
    from minivllm.bench.manager import run_bench_manager

    with console.json_target(args.json) as write_json:
        with console.progress(counts_bytes=False) as progress:
            found = run_bench_manager(args.runs, progress)
        (console.notes if args.json == "-" else console.out).line(repr(found))
        if found.stopped_by is not None:
            raise found.stopped_by  # what was done is shown; a file is written whole or not at all
        if write_json is not None:
            write_json(json.dumps(found.as_dict(), indent=1) + "\n")
