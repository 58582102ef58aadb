"""`minivllm race`: fire requests at a cold cache, and show what they recover."""

from __future__ import annotations

import argparse
import contextlib
import json
import textwrap
from collections.abc import Iterator
from typing import Any

from minivllm.bench.race import OnChange, RaceResult
from minivllm.cli.arguments import add_command, number, whole
from minivllm.cli.console import MODEL_HELP, Console, bring_model
from minivllm.cli.terminal import Channel

_RACE = """\
Fire requests at a cold cache and see how many prompt tokens they recover.

Identical requests that arrive together find nothing in a cold cache: each computes the whole prompt, because blocks
are published when the first request ends, and that is too late (--publication on-completion, --coordination
independent). Under --coordination single-flight the first leads; the others are held until its prompt is published
and recover nearly all of it. --release says how long they wait.

While it runs you see a table; at the end the figures, a drawn timeline, and what they mean. --virtual computes
nothing: a cost model moves a clock, and every run gives the same."""

_RACE_EXAMPLES = """\
examples:
  minivllm race --requests 4 --max-tokens 32
  minivllm race --requests 4 --max-tokens 32 --coordination single-flight
  minivllm race --coordination single-flight --release on-completion --virtual
  minivllm race --publication incremental --requests 12 --virtual
  minivllm race --shared-tokens 400 --virtual
  minivllm race --shared-tokens 512 --coordination shared-prefix --virtual
  minivllm race --requests 2 --samples 3 --temperature 0.8 --virtual
  minivllm race --virtual --json - | python -m json.tool"""


def add_to(commands: Any) -> None:
    """Add the command to the command line."""
    made = add_command(commands, "race", race, _RACE, _RACE_EXAMPLES)
    numbers = [
        ("--requests", 8, "requests that are fired together"),
        ("--prompt-tokens", 532, "length of each prompt, in tokens"),
        ("--shared-tokens", None, "how many of them, from the start, are the same in all prompts (default: all)"),
        ("--max-tokens", 128, "output tokens of each; end of sequence is ignored"),
        ("--samples", 1, "samples of each prompt, which is computed once for all of them"),
        ("--seed", 0, "of the prompts, and of the draws: each request and sample draws with the next seed"),
        ("--blocks", 512, "blocks in the pool"),
        ("--block-size", 16, "tokens of a block"),
        ("--budget", 2048, "most tokens computed in a step"),
        ("--rows", 8, "most requests that run at the same time"),
    ]
    for flag, default, about in numbers:
        text = about if default is None else f"{about} (default: {default:,})"
        made.add_argument(flag, type=whole, default=default, metavar="N", help=text)
    made.add_argument(
        "--temperature",
        type=number,
        default=0.0,
        metavar="T",
        help="0 takes the likeliest token; above, each request draws with its own seed (default: 0)",
    )
    policies = [
        (
            "--publication",
            "on-completion",
            "on-completion, incremental, or at-allocation (before it is computed: unsafe): when others may see a full "
            "block",
        ),
        (
            "--coordination",
            "independent",
            "independent, single-flight (equal prompts wait for the first), shared-prefix (a request waits for the "
            "next block that it misses while another computes it) or wait-or-recompute (only where that is sooner)",
        ),
        ("--release", "after-prefill", "on-completion or after-prefill: until when they wait"),
    ]
    for flag, named, about in policies:
        made.add_argument(flag, default=named, metavar="POLICY", help=f"{about} (default: {named})")
    made.add_argument(
        "--adoption", action="store_true", help="running prefills look up again before each chunk, and adopt blocks"
    )
    made.add_argument(
        "--ttft-target",
        type=number,
        metavar="MS",
        help="under wait-or-recompute, waiting is soon enough within MS milliseconds (default: as soon as possible)",
    )
    made.add_argument(
        "--allow-unsafe",
        default="",
        metavar="POLICY",
        help="name an unsafe publication policy here, too, to run it on a real model: its answers may be wrong "
        "(default: none)",
    )
    made.add_argument("--model", default="smollm2", metavar="NAME", help=MODEL_HELP)
    made.add_argument(
        "--virtual", action="store_true", help="a cost model and a clock instead of a model; goes before --model"
    )
    made.add_argument(
        "--json",
        metavar="FILE",
        help='write config, requests, blocks and events there, whole or not at all; "-" is standard output, '
        "and the table then goes to standard error",
    )


def race(args: argparse.Namespace, console: Console) -> None:
    """Fire requests at a cold cache, and show what they recover."""
    from minivllm.bench.race import run_race
    from minivllm.bench.race_words import race_heading
    from minivllm.bench.workloads import Race
    from minivllm.config import EngineConfig

    config = EngineConfig(
        block_size=args.block_size,
        num_blocks=args.blocks,
        max_num_batched_tokens=args.budget,
        max_num_seqs=args.rows,
        publication=args.publication,
        coordination=args.coordination,
        release=args.release,
        adoption=args.adoption,
        allow_unsafe=args.allow_unsafe,
        ttft_target_ms=args.ttft_target,
    )
    wanted = Race(
        num_requests=args.requests,
        prompt_tokens=args.prompt_tokens,
        shared_tokens=args.shared_tokens,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        seed=args.seed,
        samples=args.samples,
    )
    model = "virtual" if args.virtual else args.model
    shown: Channel = console.notes if args.json == "-" else console.out
    with console.json_target(args.json) as write_json:
        with console.progress() as progress:
            bring_model(model, console, progress)
            heading = race_heading(wanted, config, model)
            with _shown_while_running(shown, heading, wanted.max_tokens) as on_change:
                result = run_race(wanted, config, model, on_change=on_change, progress=progress)
        if write_json is not None:
            write_json(_race_json(result))
    _show_result(result, shown)


@contextlib.contextmanager
def _shown_while_running(shown: Channel, heading: str, max_tokens: int) -> Iterator[OnChange]:
    """A table that moves on a terminal, lines elsewhere."""
    from minivllm.cli.race_progress import LiveTable, StoryLines

    if shown.is_terminal:
        with LiveTable(shown, heading, max_tokens) as table:
            yield table
    else:
        shown.line(textwrap.fill(heading, shown.width, break_on_hyphens=False))
        yield StoryLines(shown.write)
        shown.line()


def _show_result(result: RaceResult, shown: Channel) -> None:
    from minivllm.log.timeline import can_write

    width = min(shown.width, 120)
    if shown.is_terminal:
        shown.line(textwrap.fill(result.heading(), width, break_on_hyphens=False))
    shown.line(repr(result.metrics))
    shown.line()
    shown.line(result.timeline(width, ascii_only=not can_write(shown.encoding)))
    shown.line()
    shown.line(textwrap.fill(result.explanation(), width, break_on_hyphens=False))


def _race_json(result: RaceResult) -> str:
    """Return the JSON with one request or event a line: a person can read it, too."""
    parts = []
    for name, value in result.as_dict().items():
        if isinstance(value, list):
            lines = ",\n".join("  " + json.dumps(item) for item in value)
            parts.append(f" {json.dumps(name)}: [\n{lines}\n ]")
        else:
            parts.append(f" {json.dumps(name)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"
