"""Where pictures go: names, and every check that can be made before the work begins.

Knows the file system; knows nothing of models or pixels.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ciar.errors import InputError

#: Endings of picture files that can be written.
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
#: The value of ``--heatmap`` without a file name: beside the picture.
BESIDE = ""


@dataclass(frozen=True)
class Target:
    """Where one picture goes, and its heat map (None = no heat map)."""

    picture: Path
    heatmap: Path | None


def slug(prompt: str, limit: int = 40) -> str:
    """A file-name part made of a prompt: ASCII letters and digits, words joined by ``-``."""
    ascii_text = unicodedata.normalize("NFKD", prompt).encode("ascii", "ignore").decode()
    words = re.sub(r"[^a-z0-9]+", "-", ascii_text.lower()).strip("-")
    return words[:limit].rstrip("-") or "picture"


def plan(prompts: Sequence[str], count: int, seed: int, out: str | None, heatmap: str | None) -> list[Target]:
    """Names the files of ``count`` pictures of every prompt, prompt by prompt.

    Several pictures get a number before the ending, counted over all prompts.

    Args:
        out: a file, a folder, or None for a name made of the prompt and the seed.
        heatmap: a file, :data:`BESIDE`, or None for no heat maps.

    Raises:
        InputError: ``out`` or ``heatmap`` is neither a folder that exists nor a picture file.
    """
    total = len(prompts) * count
    targets: list[Target] = []
    for index in range(total):
        named = f"ciar-{slug(prompts[index // count])}-{seed}.png"
        number = "" if total == 1 else f"-{index + 1:0{len(str(total))}d}"
        picture = _numbered(_file("--out", out or ".", named), number)
        heat = None
        if heatmap == BESIDE:
            heat = picture.with_stem(f"{picture.stem}-heat")
        elif heatmap is not None:
            heat = _numbered(_file("--heatmap", heatmap, f"{Path(named).stem}-heat.png"), number)
        targets.append(Target(picture, heat))
    return targets


def check_writable(targets: Sequence[Target], force: bool) -> None:
    """Makes sure that every file can be written before any time is spent on pictures.

    Args:
        force: existing files may be replaced.

    Raises:
        InputError: a folder is missing or closed to writing, a file exists, or two pictures would
            go to the same file.
    """
    paths = [path for target in targets for path in (target.picture, target.heatmap) if path is not None]
    if len({path.absolute() for path in paths}) < len(paths):
        raise InputError("--out and --heatmap name the same file. Give them different names.")
    for folder in dict.fromkeys(path.parent for path in paths):
        if not folder.is_dir():
            raise InputError(f"The folder {folder} does not exist. Create it with: mkdir -p {folder}")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise InputError(f"The folder {folder} cannot be written to. Choose another one with --out.")
    for path in paths:
        if path.is_dir():
            raise InputError(f"{path} is a folder, not a file. Choose another name with --out.")
        if path.exists() and not force:
            raise InputError(f"{path} exists. Pass --force to replace it, or choose another name with --out.")


def _file(option: str, given: str, named: str) -> Path:
    """The file that an option's value stands for; in a folder it is called ``named``."""
    path = Path(given)
    if path.is_dir() or given.endswith(("/", os.sep)):
        return path / named
    if path.suffix.lower() not in SUFFIXES:
        raise InputError(
            f"{option} {given} is neither a folder that exists nor a picture file. "
            f"Give a folder, or a name that ends in {', '.join(SUFFIXES)}."
        )
    return path


def _numbered(path: Path, number: str) -> Path:
    return path.with_stem(path.stem + number)
