"""``ciar inspect``: what is in a picture that ciar made, in weights, or in a backbone.

Reads headers only: no model is built in memory and no weights are loaded.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ciar.cli.output import printable, say, say_json, table
from ciar.cli.parser import Command
from ciar.errors import CheckpointError, DataError

_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``ciar inspect``."""
    parser.add_argument(
        "what",
        metavar="WHAT",
        help="a PNG file of ciar generate, a weights file (.safetensors, .pt), a model folder, a backbone",
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output, no table")


def run(options: argparse.Namespace) -> int:
    """Shows what is in a file or folder. Returns 0."""
    found = inspect(options.what)
    if options.json:
        say_json(found)
    else:
        say(table(_rows(found), "<<"))
    return 0


def inspect(what: str) -> dict[str, Any]:
    """What is known of a file or folder without loading it.

    Raises:
        DataError: the picture was not made by ciar, or cannot be read.
        CheckpointError: the weights cannot be read.
        InputError: there is no such backbone.
    """
    path = Path(what)
    if path.suffix.lower() == ".png":
        return picture_settings(path)
    if path.is_file() or path.suffix in _SUFFIXES:
        return weights_summary(path)
    from ciar.models.bundle import load_bundle
    from ciar.models.loading.describe import describe, is_weights_folder

    if is_weights_folder(path):
        return {"folder": str(path), **describe(path)}

    folder = load_bundle(what).folder
    found: dict[str, Any] = {"folder": str(folder)}
    for config in sorted(folder.rglob("*.json")):
        # Settings, not a vocabulary.
        if config.name != "tokenizer.json" and config.stat().st_size <= 64 * 1024:
            found[str(config.relative_to(folder))] = _read_json(config)
    for file in sorted(folder.rglob("*.safetensors")):
        found[str(file.relative_to(folder))] = weights_summary(file)
    return found


def picture_settings(path: Path) -> dict[str, Any]:
    """The settings that ``ciar generate`` wrote into a PNG file.

    Raises:
        DataError: there is no such picture, or it carries no settings.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as picture:
            picture.load()
            text = picture.info.get("ciar")
    except FileNotFoundError:
        raise DataError(f"{path} does not exist.") from None
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError) as error:
        raise DataError(f"{path} is no readable picture: {error}.") from None
    if not isinstance(text, str):
        raise DataError(
            f"{path} carries no settings: it was not made by ciar, or was saved by another program."
        )
    try:
        settings = json.loads(text)
    except ValueError:
        settings = None
    if not isinstance(settings, dict):
        raise DataError(f"The settings in {path} are damaged.")
    return settings


def weights_summary(path: Path) -> dict[str, Any]:
    """What a weights file is, its sizes, the preset that it fits or what is missing, and its digest.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    from ciar.models.checkpoint import file_digest
    from ciar.models.loading.describe import describe

    found = describe(path)
    return {**found, "bytes": path.stat().st_size, "sha256": file_digest(path)}


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise CheckpointError(f"{path} is no JSON. Install or download the weights again.") from None


def _rows(values: dict[str, Any], indent: str = "") -> list[list[str]]:
    rows: list[list[str]] = []
    for name, value in values.items():
        label = indent + printable(str(name))
        if isinstance(value, dict):
            rows += [[label, ""], *_rows(value, indent + "  ")]
        elif isinstance(value, list):
            rows.append([label, printable(", ".join(str(item) for item in value))])
        else:
            rows.append([label, printable(str(value), 200)])
    return rows


COMMAND = Command(
    help="show what is in a picture or in weights",
    add_arguments=add_arguments,
    run=run,
    description=(
        "Shows the settings of a picture that ciar made; or what a weights file is, its sizes and digest,\n"
        "which preset it fits, and what is missing."
    ),
)
