"""What the command line writes: results on standard output, everything else on standard error.

Knows the two streams and how to lay out a table; knows nothing of pictures.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import unicodedata
from collections.abc import Sequence
from typing import Any, TextIO


class OutputClosed(Exception):
    """Whoever reads standard output has gone away (``ciar strategies | head -1``)."""


def prepare_streams() -> None:
    """Makes both streams able to write any text: what cannot be encoded is spelled out."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


def say(text: str = "") -> None:
    """Writes a line of the result to standard output.

    Raises:
        OutputClosed: nobody reads it any more.
    """
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        raise OutputClosed from None


def say_json(document: dict[str, Any]) -> None:
    """Writes one JSON document, alone on its line. NaN and infinity are refused, not written."""
    say(json.dumps(document, allow_nan=False))


def note(text: str) -> None:
    """Writes a line for the person at the terminal to standard error."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def discard_stdout() -> None:
    """Sends what is left in the buffer nowhere, so that the interpreter's own flush stays quiet."""
    # Standard output is not always a file (in a test, for example), and then there is nothing to do.
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def is_terminal(stream: TextIO) -> bool:
    """Whether a person watches the stream, so that a line can be rewritten in place."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def printable(text: str, limit: int = 100) -> str:
    """Text that cannot move the cursor, turn the line around or flood the screen.

    Control, format and unpaired-surrogate characters become spaces; longer text is cut.
    """
    safe = "".join(" " if unicodedata.category(char).startswith("C") else char for char in text[: limit + 1])
    return safe if len(safe) <= limit else safe[: limit - 3] + "..."


def table(rows: Sequence[Sequence[str]], align: str = "") -> str:
    """Lays rows out in columns, two spaces apart.

    Args:
        rows: cells; the rows may differ in length.
        align: for each column ``<`` or ``>``; columns beyond it are right-aligned.
    """
    columns = max((len(row) for row in rows), default=0)
    sides = align.ljust(columns, ">")
    widths = [max((len(row[i]) for row in rows if i < len(row)), default=0) for i in range(columns)]
    lines = ["  ".join(f"{cell:{sides[i]}{widths[i]}}" for i, cell in enumerate(row)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)
