"""Arguments: argparse with errors of one sentence, and the nearest name for a flag or command that does not exist.

Knows flags and words. Must not know what a command does.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NoReturn

from minivllm.errors import MiniVLLMError, UnknownNameError, nearest


class UsageError(MiniVLLMError):
    """A command line that says nothing that can be done."""


class HelpAsked(Exception):
    """Not an error: the text of a command's help is wanted."""


class Parser(argparse.ArgumentParser):
    """argparse with errors of one sentence, raised instead of printed."""

    def print_help(self, file: object = None) -> None:
        raise HelpAsked(self.format_help())

    def error(self, message: str) -> NoReturn:
        if extra := message.removeprefix("unrecognized arguments: ").removeprefix(message):
            raise UsageError(f"{extra!r} is more than the command takes; put a prompt of several words in quotes")
        message = message.removeprefix("argument ")
        raise UsageError(f"{message}; `{self.prog} --help` shows what it takes")


def whole(text: str) -> int:
    """Return a whole number. Raises ArgumentTypeError."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None


def number(text: str) -> float:
    """Return a number. Raises ArgumentTypeError."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None


def new_parser(name: str, description: str, epilog: str, under: Any = None) -> Parser:
    """Return a parser with our settings: of the command line itself, or of a command ``under`` it."""
    settings: dict[str, Any] = {
        "description": description,
        "epilog": epilog,
        "formatter_class": argparse.RawDescriptionHelpFormatter,
        "allow_abbrev": False,
    }
    if under is None:
        parser = Parser(prog=name, **settings)
        parser.set_defaults(debug=False)
    else:
        parser = under.add_parser(name, **settings)
    parser.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error"
    )
    return parser


def add_command(under: Any, name: str, run: Callable[..., None], about: str, examples: str) -> Parser:
    """Add a command, which ``run`` does, and return its parser."""
    made = new_parser(name, about, examples, under)
    made.set_defaults(run=run)
    return made


def check_arguments(parser: argparse.ArgumentParser, arguments: list[str]) -> list[str]:
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
