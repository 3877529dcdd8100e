"""``ciar train gate``: which gate keeps a token on the device, and a threshold for each of them."""

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
        "--learn",
        type=whole(0),
        default=256,
        metavar="N",
        help="training pictures of the learned gate, 0 = none (default: 256)",
    )
    parser.add_argument(
        "--rounds",
        type=whole(1, 20),
        default=3,
        metavar="N",
        help="how often pictures are made to calibrate a threshold, at most (default: 3)",
    )
    parser.add_argument(
        "--scores",
        metavar="LIST",
        help='gates to compare, comma-separated (default: all of "ciar strategies --gates")',
    )
    parser.add_argument(
        "--seed", type=whole(0, 2**31 - 1), default=0, metavar="N", help="of everything random"
    )


def run(options: argparse.Namespace) -> int:
    """Compares the gates and calibrates a threshold of each. Returns 0.

    Raises:
        InputError: a gate is unknown.
    """
    from ciar.intervals.gates import gate_named
    from ciar.training.gate import calibrate_gate

    scores = None if options.scores is None else [gate_named(n).name for n in options.scores.split(",")]
    figures = calibrate_gate(
        data=needed(options.work / "data", "captions.json", "data"),
        text=needed(options.work / "text", "text.safetensors", "text"),
        codes=needed(options.work / "codes", "codes.npy", "codes"),
        backbone=needed(options.work / "backbone", "gpt.safetensors", "backbone"),
        device=needed(options.work / "device", "device.safetensors", "device"),
        out=options.work / "gate",
        budget=options.budget,
        pictures=options.pictures,
        learn=options.learn,
        rounds=options.rounds,
        scores=scores,
        seed=options.seed,
    )
    return report(figures)


STAGE = Stage(help="compare the gates and calibrate their thresholds", add_arguments=add_arguments, run=run)
