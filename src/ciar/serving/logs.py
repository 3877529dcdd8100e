"""Logs as JSON lines. Nothing here ever sees a prompt: events carry names, counts and identifiers only."""

from __future__ import annotations

import json
import logging
import traceback
from datetime import UTC, datetime
from typing import Any

#: Logger of everything that the server says.
LOGGER = logging.getLogger("ciar.serving")
_FIELDS = "ciar_fields"


def log(level: int, event: str, **fields: Any) -> None:
    """Write one event.

    Args:
        level: of the ``logging`` module.
        event: what happened, in a few words.
        fields: numbers, names and identifiers; never anything that a user wrote.
    """
    LOGGER.log(level, event, extra={_FIELDS: fields})


def describe(error: BaseException) -> dict[str, Any]:
    """An exception for the log: its types and where they were raised; its words may quote a prompt."""
    kinds: list[str] = []
    frames: list[str] = []
    link: BaseException | None = error
    while link is not None and len(kinds) < 8:
        kinds.append(type(link).__name__)
        frames += [f"{f.filename}:{f.lineno} in {f.name}" for f in traceback.extract_tb(link.__traceback__)]
        link = link.__cause__
    return {"error": " from ".join(kinds), "frames": frames[-24:]}


class JsonLines(logging.Formatter):
    """Formats each record as one line of JSON with ``time``, ``level``, ``event`` and the event's fields."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
        }
        if record.name != LOGGER.name:
            line["logger"] = record.name
        line |= getattr(record, _FIELDS, {})
        if record.exc_info and record.exc_info[1] is not None:
            line |= describe(record.exc_info[1])
        return json.dumps(line, ensure_ascii=False, default=str)


def log_to_stderr() -> logging.Handler:
    """Send the logs of server and web server to standard error as JSON lines; returns the handler."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    for name, level in ((LOGGER.name, logging.INFO), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.setLevel(level)
        logger.addHandler(handler)
        logger.propagate = False
    return handler


def stop_logging(handler: logging.Handler) -> None:
    """Undo :func:`log_to_stderr`."""
    for name in (LOGGER.name, "uvicorn"):
        logger = logging.getLogger(name)
        logger.removeHandler(handler)
        logger.propagate = True
