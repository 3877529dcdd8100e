"""``ciar train device``: the one-layer model that drafts."""

from __future__ import annotations

import argparse

from ciar.cli.parser import whole
from ciar.cli.train.stage import Stage, add_loop, loop_of, needed, report

LOSSES = ("coverage", "inter-dro")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the stage."""
    add_loop(parser)
    parser.add_argument(
        "--loss", choices=LOSSES, default="coverage", help="of the interval's radius (default: coverage)"
    )
    parser.add_argument(
        "--real", type=whole(1), metavar="N", help="most real pictures in the teacher's cache (default: all)"
    )
    parser.add_argument(
        "--drifted", type=whole(1), metavar="N", help="pictures continued by the device (default: 1536)"
    )


def run(options: argparse.Namespace) -> int:
    """Distils the guided law of the cloud model into the device model. Returns 0."""
    from dataclasses import replace

    from ciar.training.distil import DEVICE_LOOP, distil_config, train_device

    config = distil_config(options.profile)
    sizes = {name: value for name in ("real", "drifted") if (value := getattr(options, name)) is not None}
    figures = train_device(
        data=needed(options.work / "data", "captions.json", "data"),
        text=needed(options.work / "text", "text.safetensors", "text"),
        codes=needed(options.work / "codes", "codes.npy", "codes"),
        backbone=needed(options.work / "backbone", "gpt.safetensors", "backbone"),
        out=options.work / "device",
        loop=loop_of(options, DEVICE_LOOP),
        loss=options.loss,
        profile=options.profile,
        resume=not options.no_resume,
        config=replace(config, **sizes),
    )
    return report(figures)


STAGE = Stage(help="distil the device model from the cloud model", add_arguments=add_arguments, run=run)
