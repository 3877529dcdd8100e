"""``ciar train assemble``: a run folder as a backbone that can be used."""

from __future__ import annotations

import argparse
from pathlib import Path

from ciar.cli.parser import real
from ciar.cli.train.stage import Stage, add_work, report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the stage."""
    add_work(parser)
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="backbone folder (default: the run folder's backbone-NAME)"
    )
    parser.add_argument("--name", default="emoji", metavar="NAME", help="what it is called (default: emoji)")
    parser.add_argument(
        "--guidance",
        type=real(0.0, 100.0),
        default=3.0,
        metavar="S",
        help="its default guidance (default: 3)",
    )


def run(options: argparse.Namespace) -> int:
    """Packs the stages' weights, the gate and the defaults. Returns 0."""
    from ciar.training.assemble import assemble

    out = options.out or options.work / f"backbone-{options.name}"
    return report(assemble(options.work, out, options.name, options.guidance))


STAGE = Stage(help="pack everything into a backbone folder", add_arguments=add_arguments, run=run)
