"""``ciar``: the entry point. Builds the parser, runs one command, turns errors into exit codes.

Exit codes: 0 done; 1 an unexpected error; 2 wrong input; 3 data; 4 weights; 5 a model's numbers;
6 the cloud; 130 interrupted; 141 the reader of the output went away.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence

from ciar.cli import (
    bench,
    bench_stream,
    compare,
    convert,
    doctor,
    encode,
    evaluate,
    generate,
    inspect,
    serve,
    strategies,
    train,
)
from ciar.cli.output import OutputClosed, discard_stdout, note, prepare_streams, printable
from ciar.cli.parser import Command, Parser, add_commands, add_debug
from ciar.errors import CiarError
from ciar.version import __version__

INTERRUPTED = 130
OUTPUT_CLOSED = 141

COMMANDS: dict[str, Command] = {
    "generate": generate.COMMAND,
    "serve": serve.COMMAND,
    "train": train.COMMAND,
    "eval": evaluate.COMMAND,
    "bench": bench.COMMAND,
    "bench-stream": bench_stream.COMMAND,
    "compare": compare.COMMAND,
    "convert": convert.COMMAND,
    "encode": encode.COMMAND,
    "inspect": inspect.COMMAND,
    "strategies": strategies.COMMAND,
    "doctor": doctor.COMMAND,
}

DESCRIPTION = """\
Pictures from prompts, by autoregressive models shared between a device and a cloud.

A small model on the device drafts the picture's tokens and keeps the ones that it is certain of;
a large cloud model is asked only about the others. The model "emoji" ships with the package and
runs both sides on this machine, so the first example needs nothing else."""

EPILOG = """\
examples:
  a picture, and the picture with who decided each token drawn over it:
      ciar generate "a smiling cat with sunglasses" --seed 7 --heatmap

  the same tokens as the cloud model alone would give, in fewer passes:
      ciar generate "a red car" --seed 7 --strategy lossless

  the cloud in one terminal, the device in another:
      ciar serve --port 8765
      ciar generate "a red car" --seed 7 --cloud ws://127.0.0.1:8765

"ciar COMMAND --help" explains a command. If something does not work, begin with "ciar doctor".
"""


def build_parser() -> Parser:
    """The whole command line, without importing anything heavy."""
    parser = Parser(prog="ciar", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("--version", action="version", version=f"ciar {__version__}")
    add_debug(parser)
    add_commands(parser, COMMANDS, "command")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code of the process.

    Args:
        arguments: without the program's name; None takes them from the process.
    """
    prepare_streams()
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = build_parser()
    if not words:
        note(parser.format_help())
        return 2
    # Errors of the parser itself come before there is a parsed --debug to look at.
    debug = "--debug" in words
    try:
        return run(parser.parse_args(words))
    except SystemExit as done:  # --help and --version
        return done.code if isinstance(done.code, int) else 0
    except KeyboardInterrupt:
        note("interrupted")
        return INTERRUPTED
    except OutputClosed:
        discard_stdout()
        return OUTPUT_CLOSED
    except CiarError as error:
        if debug:
            note(traceback.format_exc())
        note(f"error: {one_line(error)}")
        return error.exit_code
    except Exception as error:
        if debug:
            note(traceback.format_exc())
        pointer = "" if debug else " Run the command again with --debug to see where."
        note(f"error: unexpected {type(error).__name__}: {one_line(error)}{pointer}")
        return 1
    finally:
        _flush_stdout()


def run(options: argparse.Namespace) -> int:
    """Runs the command that was chosen."""
    code: int = options.run(options)
    return code


def one_line(error: BaseException) -> str:
    """An error's message on one line; a remote server's words cannot move the cursor."""
    return printable(" ".join(str(error).split()), 4000) or "no message"


def _flush_stdout() -> None:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        discard_stdout()
