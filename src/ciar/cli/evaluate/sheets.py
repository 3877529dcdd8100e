"""``ciar eval sheets``: contact sheets for the eye."""

from __future__ import annotations

import argparse
from pathlib import Path

from ciar.cli.output import say
from ciar.cli.parser import Command, whole
from ciar.cli.train.stage import needed

DESCRIPTION = """\
Draws contact sheets: originals beside their reconstruction by the tokenizer, 24 prompts from training
names and 24 from held-out names by plain AR and by ciar, and the same prompts with and without
guidance."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the evaluation."""
    parser.add_argument("--work", type=Path, default=Path("runs/emoji"), metavar="DIR", help="run folder")
    parser.add_argument("--backbone", default="emoji", metavar="NAME", help="a name or a folder")
    parser.add_argument("--out", type=Path, default=Path("docs/sheets"), metavar="DIR", help="where to")
    parser.add_argument("--seed", type=whole(0, 2**31 - 1), default=0, metavar="N", help="of picture 0")


def run(options: argparse.Namespace) -> int:
    """Writes the sheets as PNG. Returns 0."""
    from ciar.quality import draw_sheets

    data = needed(options.work / "data", "captions.json", "data")
    options.out.mkdir(parents=True, exist_ok=True)
    for path in draw_sheets(options.backbone, data, options.out, options.seed):
        say(str(path))
    return 0


EVALUATION = Command(
    help="contact sheets of reconstructions and generated pictures",
    add_arguments=add_arguments,
    run=run,
    description=DESCRIPTION,
)
