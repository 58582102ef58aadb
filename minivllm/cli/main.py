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
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from minivllm.cli import bench, generate, model, race
from minivllm.cli.arguments import HelpAsked, Parser, UsageError, check_arguments, new_parser
from minivllm.cli.console import Console
from minivllm.cli.terminal import (
    Channel,
    PipeClosed,
    Stopped,
    arguments_as_text,
    disarm,
    leave_without_a_word,
    standard_streams,
    stoppable,
)
from minivllm.errors import ConfigError, InvalidRequestError, MiniVLLMError, UnknownNameError

FAILED, WRONG_USE, PIPE_CLOSED = 1, 2, 141

_DESCRIPTION = """\
A small serving engine with prefix caching, built to be looked at.

  minivllm generate   answer a prompt with a real model, token by token
  minivllm race       fire equal requests at a cold cache and see what they recover
  minivllm bench      what things cost on this machine, beside the obvious way of doing them
  minivllm model      which models there are, and bring one here"""


def build_parser() -> Parser:
    """Return the parser of all commands. Each names its function as ``run``."""
    top = new_parser("minivllm", _DESCRIPTION, "`minivllm COMMAND --help` tells more of each, with examples.")
    top.add_argument("--version", action="store_true", help="print the version and leave")
    commands = top.add_subparsers(metavar="COMMAND", parser_class=Parser)
    for command in (generate, race, bench, model):
        command.add_to(commands)
    return top


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return what the arguments say. Raises UsageError or UnknownNameError, with the nearest name."""
    parser = build_parser()
    args = parser.parse_args(check_arguments(parser, list(arguments)))
    if args.version or hasattr(args, "run"):
        return args
    groups = {"model": "one of list, get", "bench": "manager"}
    kind = next((groups[word] for word in arguments if word in groups), "one of generate, race, bench, model")
    raise UsageError(f"no command is given; choose {kind}, and see `minivllm --help`")


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
