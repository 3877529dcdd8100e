"""``ciar convert``: public checkpoints to a backbone folder."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ciar.cli.output import note, printable, say, say_json, table
from ciar.cli.parser import Command
from ciar.errors import InputError

DESCRIPTION = """\
Makes a backbone folder of public checkpoints: the transformer, the image tokenizer and, if it is
there, the text encoder (for Anole its text tokenizer) or features of "ciar encode". Everything is
checked first; a file that does not belong is refused with the reason. Nothing is downloaded."""

EPILOG = """\
examples:
  ciar convert t2i_XL_stage1_256.pt vq_ds16_t2i.pt flan-t5-xl/ --out llamagen-256
  ciar convert downloads/ --preset llamagen-xl-512 --out llamagen-512
  ciar convert Anole-7b-v0.1-hf/ --out anole
  ciar convert --random anole-7b --out anole-random
  ciar generate "a red fox" --backbone llamagen-256 --strategy base
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``ciar convert``."""
    parser.add_argument(
        "sources", nargs="*", type=Path, metavar="SOURCE", help="files, model folders, or a folder of them"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the folder to make")
    parser.add_argument(
        "--preset",
        metavar="NAME",
        help="llamagen-xl-256, llamagen-xl-512 or anole-7b (default: as the files tell)",
    )
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="what the transformer is stored and run in (default: bfloat16)",
    )
    parser.add_argument(
        "--text-dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="the same of the text encoder (default: bfloat16)",
    )
    parser.add_argument(
        "--random",
        metavar="NAME",
        help="no sources, but random weights of a preset's sizes, to measure speed and memory with",
    )
    parser.add_argument("--force", action="store_true", help="replace the backbone that is in the folder")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output, no table")


def run(options: argparse.Namespace) -> int:
    """Converts. Returns 0."""
    made = _random(options) if options.random is not None else _convert(options)
    if options.json:
        say_json(made)
        return 0
    rows = [[printable(name), f"{size / 1e6:.1f} MB"] for name, size in made["files"].items()]
    say(table(rows, "<>"))
    say(f"{made['preset']} in {made['dtype']}: {printable(made['folder'], 400)}")
    if made["text"] == "none":
        note("It has no text encoder yet: add flan-t5-xl/ to the sources, or see ciar encode --help.")
    if options.random is not None:
        note("Its pictures are noise. Measure with: ciar bench --once --backbone DIR")
        return 0
    note(
        "It has no device model yet: use --strategy base, or another that runs on the cloud alone, or make "
        "one: ciar train device --backbone DIR --prompts FILE"
    )
    return 0


def _say(words: str) -> None:
    note(f"{words} ...")


def _convert(options: argparse.Namespace) -> dict[str, Any]:
    from ciar.models.loading.convert import convert

    if not options.sources:
        raise InputError("Name the files to convert, or --random PRESET. See ciar convert --help.")
    return convert(
        options.sources,
        options.out,
        options.preset,
        options.dtype,
        options.text_dtype,
        options.force,
        say=_say,
    )


def _random(options: argparse.Namespace) -> dict[str, Any]:
    from ciar.bench import PROMPTS
    from ciar.models.loading.random import write_random

    if options.sources or options.preset:
        raise InputError("--random takes no sources and no --preset: its word is the preset.")
    return write_random(options.random, options.out, PROMPTS, options.dtype, force=options.force, say=_say)


COMMAND = Command(
    help="make a backbone folder of public checkpoints",
    add_arguments=add_arguments,
    run=run,
    description=DESCRIPTION,
    epilog=EPILOG,
)
