"""``ciar doctor``: is everything there that a picture needs? Ends with what to do.

Looks at versions and files and imports nothing that could be broken, so it also works where
``ciar generate`` does not.
"""

from __future__ import annotations

import argparse
import platform
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec

from ciar.cli.output import note, say, table
from ciar.cli.parser import Command
from ciar.errors import CiarError
from ciar.version import __version__

REQUIRED = ("torch", "numpy", "pillow", "safetensors", "tokenizers", "msgpack", "websockets")
#: Extra of the package -> what it is for, and the distributions that it brings.
EXTRAS: dict[str, tuple[str, tuple[str, ...]]] = {
    "serve": ("ciar serve", ("starlette", "uvicorn")),
    "train": ("ciar train", ("resvg-py", "transformers", "matplotlib")),
    "t5": ("prompts for LlamaGen", ("transformers", "ftfy", "beautifulsoup4")),
}


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        subject: what was looked at.
        state: what was found.
        remedy: what to do about it; "" when all is well.
        needed: whether ``ciar generate`` cannot work without it.
    """

    subject: str
    state: str
    remedy: str = ""
    needed: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``ciar doctor``."""
    parser.add_argument(
        "--backbone", default="emoji", metavar="NAME", help="a name or a folder (default: emoji)"
    )


def run(options: argparse.Namespace) -> int:
    """Prints the report. Returns 0 when pictures can be made, else 1."""
    findings = [*_versions(), _threads(), *_weights(options.backbone), *_extras()]
    say(table([["ok" if not f.remedy else "--", f.subject, f.state] for f in findings], "<<<"))
    say()
    broken = [finding for finding in findings if finding.needed]
    if not broken:
        say('All that a picture needs is here. Try: ciar generate "a smiling cat with sunglasses" --seed 7')
    for finding in findings:
        if finding.remedy:
            say(f"{'To do' if finding.needed else 'If you want it'}: {finding.subject}: {finding.remedy}")
    if broken:
        subjects = ", ".join(dict.fromkeys(finding.subject for finding in broken))
        note(f"error: a picture cannot be made here yet; see the list above for: {subjects}")
    return 1 if broken else 0


def version_of(distribution: str) -> str | None:
    """Installed version of a distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _versions() -> list[Finding]:
    found = [
        Finding("ciar", __version__),
        Finding("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
    ]
    for name in REQUIRED:
        version = version_of(name)
        if version is None:
            found.append(Finding(name, "not installed", f"pip install {name}", needed=True))
        else:
            found.append(Finding(name, version))
    return found


def _threads() -> Finding:
    if find_spec("torch") is None:
        return Finding("torch threads", "unknown", "install torch first", needed=True)
    try:
        import torch
    except (ImportError, OSError) as error:  # a shared library that does not fit this machine
        return Finding("torch threads", f"torch does not load: {error}", "install torch again", needed=True)
    accelerator = "cuda" if torch.cuda.is_available() else "no GPU"
    return Finding("torch threads", f"{torch.get_num_threads()}, {accelerator}")


def _weights(backbone: str) -> list[Finding]:
    subject = f"weights of {backbone}"
    again = "install ciar again: pip install --force-reinstall --no-deps ciar"
    try:
        from ciar.models.bundle import load_bundle
        from ciar.models.checkpoint import check_manifest

        folder = load_bundle(backbone).folder
        problems = check_manifest(folder)
    except CiarError as error:
        return [Finding(subject, str(error), again, needed=True)]
    except (ImportError, OSError) as error:  # a package is missing; its own line says which
        return [Finding(subject, f"not looked at: {error}", "install what is missing first", needed=True)]
    if problems:
        return [Finding(subject, problem, again, needed=True) for problem in problems]
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return [Finding(subject, f"complete, SHA-256 as shipped, {size / 1e6:.1f} MB in {folder}")]


def _extras() -> list[Finding]:
    found = []
    for extra, (purpose, distributions) in EXTRAS.items():
        missing = [name for name in distributions if version_of(name) is None]
        state = f"missing {', '.join(missing)}" if missing else f"installed, for {purpose}"
        remedy = f"pip install 'ciar[{extra}]' for {purpose}" if missing else ""
        found.append(Finding(f"extra [{extra}]", state, remedy))
    return found


COMMAND = Command(
    help="check the installation and say what to do",
    add_arguments=add_arguments,
    run=run,
    description="Checks versions, weights and extras, and says what to do about what is missing.",
)
