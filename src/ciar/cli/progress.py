"""The line that shows how far a run is; only where a person watches."""

from __future__ import annotations

import shutil
import time
from typing import Any, TextIO

from ciar.cli.output import is_terminal
from ciar.ledger import Ledger

#: Seconds between two redraws; drawing more often costs more than it tells.
REDRAW_S = 0.1


class Progress:
    """Rewrites one line of a terminal; silent on anything else.

    Args:
        stream: where to write, usually standard error.
        pictures: pictures of the whole run.
        quiet: never write.
    """

    def __init__(self, stream: TextIO, pictures: int, *, quiet: bool = False) -> None:
        self._stream = stream
        self._pictures = pictures
        self._shown = not quiet and is_terminal(stream)
        self._drawn_at = -REDRAW_S
        #: Pictures finished in earlier calls of the pipeline.
        self.finished = 0

    def message(self, text: str) -> None:
        """Shows a sentence in place of the line."""
        if self._shown:
            width = shutil.get_terminal_size().columns - 1
            self._stream.write(f"\r\x1b[K{text[:width]}")
            self._stream.flush()

    def step(self, pipeline: Any, step: int, info: dict[str, Any]) -> bool:
        """The pipeline's ``callback_on_step_end``. Never stops the run."""
        now = time.monotonic()
        if self._shown and (now - self._drawn_at >= REDRAW_S or info["done"] == info["total"]):
            self._drawn_at = now
            self.message(line(info, self.finished, self._pictures))
        return True

    def clear(self) -> None:
        """Removes the line."""
        self.message("")


def line(info: dict[str, Any], finished: int, pictures: int) -> str:
    """Tokens done of the current picture and the share of them that stayed on the device.

    Args:
        info: what the pipeline hands to its callback: ``done``, ``total``, ``image``, ``ledger``.
        finished: pictures made in earlier calls.
        pictures: pictures in all; the picture is numbered only if there are several.
    """
    done, total = int(info["done"]), int(info["total"])
    ledger: Ledger = info["ledger"]
    local = 100 * ledger.counts["device"] / done if done else 0.0
    filled = round(20 * done / total) if total else 0
    bar = "#" * filled + "." * (20 - filled)
    which = f"picture {finished + int(info['image']) + 1} of {pictures}  " if pictures > 1 else ""
    return f"{which}[{bar}] {done}/{total} tokens, {local:.0f} % kept local"
