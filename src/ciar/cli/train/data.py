"""``ciar train data``: the emoji pictures and captions."""

from __future__ import annotations

import argparse
from pathlib import Path

from ciar.cli.parser import whole
from ciar.cli.train.stage import Stage, add_work, report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the stage."""
    add_work(parser)
    parser.add_argument(
        "--node-modules",
        type=Path,
        default=Path("recipes/emoji/node_modules"),
        metavar="DIR",
        help="picture packages, from npm (default: recipes/emoji/node_modules)",
    )
    parser.add_argument(
        "--size", type=whole(8, 1024), default=128, metavar="PX", help="picture edge (default: 128)"
    )
    parser.add_argument(
        "--workers", type=whole(1, 256), default=2, metavar="N", help="processes (default: 2)"
    )


def run(options: argparse.Namespace) -> int:
    """Renders the data set. Returns 0."""
    from ciar.training.data.emoji import build

    return report(build(options.node_modules, options.work / "data", options.size, options.workers))


STAGE = Stage(
    help="render the pictures and collect their captions",
    add_arguments=add_arguments,
    run=run,
    epilog="before it:\n  npm install --prefix recipes/emoji",
)
