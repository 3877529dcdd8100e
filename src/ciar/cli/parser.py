"""The command line's parser: what a command is, sentences for wrong input, hints for near misses.

Built on argparse. Knows nothing of what the commands do and imports nothing heavy, so that
``ciar --help`` answers at once.
"""

from __future__ import annotations

import argparse
import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from ciar.errors import InputError


@dataclass(frozen=True)
class Command:
    """One command, or one stage of a command.

    Attributes:
        help: its line in the list of commands.
        add_arguments: adds its options to a parser.
        run: does it and returns the exit code; imports what is heavy when it is called. None for a
            command that only holds others.
        description: what ``--help`` says above the options; "" repeats ``help``.
        epilog: examples, below the options.
    """

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int] | None = None
    description: str = ""
    epilog: str = ""


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps descriptions as they are written, and the help beside its option."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28)
        # argparse forgets the indent of sub-commands, and breaks the line of the longest one.
        self._action_max_length = 16


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises :class:`InputError` and names the nearest valid word.

    Abbreviated options are refused: ``--temp`` means something else once ``--template`` exists.
    """

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", HelpFormatter)
        super().__init__(allow_abbrev=False, **options)
        #: The argument that holds the sub-commands, if there are any.
        self.commands: argparse.Action | None = None

    def error(self, message: str) -> NoReturn:
        """Raises instead of printing the usage and leaving.

        Raises:
            InputError: always.
        """
        message = message.removeprefix("argument ").rstrip(". ")
        raise InputError(f"{message}{'' if message.endswith('?') else '.'} See {self.prog} --help.")

    def parse_known_args(  # type: ignore[override]  # argparse overloads this by namespace type
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As argparse's, but refuses unknown arguments here, where the command's options are known."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(self._about_unknown(unknown[0]))
        if self.commands and getattr(parsed, self.commands.dest) is None:
            names = ", ".join(self.commands.choices or ())
            self.error(f"name the {self.commands.dest}, one of: {names}")
        return parsed, []

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            what = "command" if action.nargs == argparse.PARSER else "choice"
            hint = near_miss(str(value), known) or f"Known: {', '.join(known)}"
            message = f"there is no {what} {value!r}. {hint}"
            raise argparse.ArgumentError(None if what == "command" else action, message)

    def _about_unknown(self, argument: str) -> str:
        option = argument.partition("=")[0]
        if not option.startswith("-"):
            return (
                f"{argument!r} was not expected here. Put quotes around a prompt of several words, "
                "and prompts next to one another"
            )
        hint = near_miss(option, list(self._option_string_actions))
        if not option.startswith("--") and not hint:
            hint = f"If it begins a prompt, write -- {argument!r}"
        return f"there is no option {option}. {hint}"


def near_miss(word: str, known: Iterable[str]) -> str:
    """The question whether something near was meant, or "" when nothing known is near.

    A word that was cut short means the word that it begins.
    """
    words = list(known)
    near = [full for full in words if len(word) > 2 and full.startswith(word)]
    near = near or difflib.get_close_matches(word, words, n=1, cutoff=0.6)
    return f"Did you mean {near[0]}?" if near else ""


def add_commands(parser: argparse.ArgumentParser, commands: Mapping[str, Command], dest: str) -> None:
    """Gives ``parser`` one sub-parser a command; the chosen command's ``run`` lands in ``run``."""
    # Not "required": argparse would complain of the missing command before an unknown option.
    group = parser.add_subparsers(title=f"{dest}s", dest=dest, metavar=dest.upper(), parser_class=Parser)
    if isinstance(parser, Parser):
        parser.commands = group
    for name, command in commands.items():
        sub = group.add_parser(
            name, help=command.help, description=command.description or command.help, epilog=command.epilog
        )
        command.add_arguments(sub)
        if command.run is not None:
            sub.set_defaults(run=command.run)
            add_debug(sub)


def add_debug(parser: argparse.ArgumentParser) -> None:
    """Adds ``--debug``, which is understood before and after the command's name."""
    parser.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error"
    )


def whole(low: int, high: int | None = None) -> Callable[[str], int]:
    """An argparse type: a whole number from ``low`` to ``high``, both included (None = no limit)."""

    def parse(text: str) -> int:
        span = f"of at least {low}" if high is None else f"from {low} to {high}"
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"give a whole number {span}, not {text!r}") from None
        if value < low or (high is not None and value > high):
            raise argparse.ArgumentTypeError(f"give a whole number {span}, not {text}")
        return value

    return parse


def real(
    low: float, high: float = math.inf, *, above: bool = False, infinite: bool = False
) -> Callable[[str], float]:
    """An argparse type: a number from ``low`` to ``high``.

    Args:
        above: ``low`` itself is not allowed.
        infinite: infinity is allowed.
    """
    start = f"above {low:g}" if above else f"of at least {low:g}"
    span = start if high == math.inf else f"{start} and at most {high:g}"
    kind = "number" if infinite else "finite number"

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        fits = low < value <= high if above else low <= value <= high
        if not fits or (math.isinf(value) and not infinite):
            raise argparse.ArgumentTypeError(f"give a {kind} {span}, not {text!r}")
        return value

    return parse
