"""``ciar train curves``: what the logs of the stages say, as a picture."""

from __future__ import annotations

import argparse
from pathlib import Path

from ciar.cli.output import say
from ciar.cli.train.stage import Stage, add_work
from ciar.errors import DataError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the stage."""
    add_work(parser)
    parser.add_argument(
        "--runs",
        nargs="+",
        default=["tokenizer", "backbone", "device/round-2"],
        metavar="RUN",
        help="sub-folders with a log (default: tokenizer, backbone, device/round-2)",
    )
    parser.add_argument(
        "--figures",
        nargs="+",
        default=["loss", "held_loss", "psnr", "held_psnr", "tv", "held_tv", "held_greedy"],
        metavar="NAME",
        help="figures to draw, as the log names them",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("curves.png"), metavar="FILE", help="picture to write"
    )


def run(options: argparse.Namespace) -> int:
    """Draws the curves. Returns 0."""
    from ciar.training.curves import draw_curves

    for name in options.runs:
        path = options.work / name / "log.jsonl"
        if not path.is_file():
            stage = name.split("/")[0]
            raise DataError(f"{path} does not exist. Run first: ciar train {stage} --work {options.work}")
    draw_curves({name: options.work / name for name in options.runs}, options.out, options.figures)
    say(str(options.out))
    return 0


STAGE = Stage(help="draw the logs of the stages", add_arguments=add_arguments, run=run)
