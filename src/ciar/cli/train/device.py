"""``ciar train device``: the one-layer model that drafts."""

from __future__ import annotations

import argparse
from typing import Any

from ciar.cli.parser import real, whole
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
    parser.add_argument(
        "--finish-from",
        type=real(0.0, 0.99),
        metavar="P",
        help="train device-finish instead, which begins as the trained device model and learns only what "
        "follows this share of the tokens: for the strategy code",
    )


def run(options: argparse.Namespace) -> int:
    """Distils the guided law of the cloud model into the device model. Returns 0."""
    from dataclasses import replace

    from ciar.training.distil import DEVICE_LOOP, distil_config, train_device

    config = distil_config(options.profile)
    sizes: dict[str, Any] = {
        name: value for name in ("real", "drifted") if (value := getattr(options, name)) is not None
    }
    general = None
    if options.finish_from is not None:
        general = needed(options.work / "device", "device.safetensors", "device")
        sizes["finish_from"] = options.finish_from
    figures = train_device(
        data=needed(options.work / "data", "captions.json", "data"),
        text=needed(options.work / "text", "text.safetensors", "text"),
        codes=needed(options.work / "codes", "codes.npy", "codes"),
        backbone=needed(options.work / "backbone", "gpt.safetensors", "backbone"),
        out=options.work / ("device" if general is None else "device-finish"),
        loop=loop_of(options, DEVICE_LOOP),
        loss=options.loss,
        profile=options.profile,
        resume=not options.no_resume,
        config=replace(config, **sizes),
        general=general,
    )
    return report(figures)


STAGE = Stage(help="distil the device model from the cloud model", add_arguments=add_arguments, run=run)
