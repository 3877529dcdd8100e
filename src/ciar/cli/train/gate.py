"""``ciar train gate``: which score and which threshold keep a token on the device."""

from __future__ import annotations

import argparse

from ciar.cli.parser import real, whole
from ciar.cli.train.stage import Stage, add_work, needed, report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the stage."""
    add_work(parser)
    parser.add_argument(
        "--budget",
        type=real(0.0, 1.0),
        default=0.3,
        metavar="P",
        help="share of tokens to upload (default: 0.3)",
    )
    parser.add_argument(
        "--pictures", type=whole(1), default=256, metavar="N", help="pictures to calibrate on (default: 256)"
    )
    parser.add_argument(
        "--seed", type=whole(0, 2**31 - 1), default=0, metavar="N", help="of everything random"
    )


def run(options: argparse.Namespace) -> int:
    """Compares the scores and calibrates the threshold of the best. Returns 0."""
    from ciar.training.gate import calibrate_gate

    figures = calibrate_gate(
        data=needed(options.work / "data", "captions.json", "data"),
        text=needed(options.work / "text", "text.safetensors", "text"),
        codes=needed(options.work / "codes", "codes.npy", "codes"),
        backbone=needed(options.work / "backbone", "gpt.safetensors", "backbone"),
        device=needed(options.work / "device", "device.safetensors", "device"),
        out=options.work / "gate",
        budget=options.budget,
        pictures=options.pictures,
        seed=options.seed,
    )
    return report(figures)


STAGE = Stage(help="choose the gate and calibrate its threshold", add_arguments=add_arguments, run=run)
