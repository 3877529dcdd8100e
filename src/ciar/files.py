"""Small JSON documents that are the old or the new one at every moment."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_json(path: Path) -> dict[str, Any]:
    """What :func:`write_json` wrote; nothing where it is missing or damaged."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def write_json(path: Path, values: Mapping[str, Any], indent: int | None = None) -> None:
    """Writes a document whole or not at all.

    Raises:
        OSError: it cannot be written.
        ValueError: a number is not finite.
    """
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(values, indent=indent, allow_nan=False) + "\n", encoding="utf-8")
    partial.replace(path)
