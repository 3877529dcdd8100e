"""``ciar train eagle``: a drafter on the cloud model's own features, for the EAGLE strategies."""

from __future__ import annotations

import argparse

from ciar.cli.parser import real
from ciar.cli.train.stage import Stage, add_loop, loop_of, needed, report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the stage."""
    add_loop(parser)
    parser.add_argument(
        "--lr", type=real(1e-7, 1.0), default=1e-4, metavar="R", help="peak learning rate (default: 1e-4)"
    )
    parser.add_argument(
        "--device", default="cpu", metavar="NAME", help="where it is trained, such as cuda (default: cpu)"
    )


def run(options: argparse.Namespace) -> int:
    """Trains one layer to continue the cloud model's features. Returns 0."""
    from ciar.training.eagle import EAGLE_LOOP, EagleTrainConfig, train_eagle

    tiny = options.profile == "tiny"
    figures = train_eagle(
        data=needed(options.work / "data", "captions.json", "data"),
        text=needed(options.work / "text", "text.safetensors", "text"),
        codes=needed(options.work / "codes", "codes.npy", "codes"),
        backbone=needed(options.work / "backbone", "gpt.safetensors", "backbone"),
        out=options.work / "eagle",
        loop=loop_of(options, EAGLE_LOOP),
        config=EagleTrainConfig(
            batch=4 if tiny else 16, lr=options.lr, held=4 if tiny else 32, compile=not tiny
        ),
        resume=not options.no_resume,
        device=options.device,
    )
    return report(figures)


STAGE = Stage(help="train a drafter on the cloud model's features", add_arguments=add_arguments, run=run)
