"""``ciar train text``: the word-piece table, distilled from a sentence model."""

from __future__ import annotations

import argparse
from pathlib import Path

from ciar.cli.parser import whole
from ciar.cli.train.stage import Stage, add_work, report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the stage."""
    add_work(parser)
    parser.add_argument(
        "--model", type=Path, required=True, metavar="DIR", help="folder of a BERT-like sentence model"
    )
    parser.add_argument(
        "--dim", type=whole(1, 4096), default=128, metavar="N", help="numbers a piece (default: 128)"
    )
    parser.add_argument(
        "--text-len",
        type=whole(17, 512),
        default=48,
        metavar="N",
        help="text slots, the last 16 of them registers (default: 48)",
    )


def run(options: argparse.Namespace) -> int:
    """Distils the table. Returns 0."""
    from ciar.training.text import distil_text_encoder

    encoder = distil_text_encoder(options.model, options.work / "text", options.dim, options.text_len)
    return report(
        {"pieces": len(encoder.vocabulary), "dim": encoder.caption_dim, "text_len": encoder.text_len}
    )


STAGE = Stage(help="distil the text encoder from a sentence model", add_arguments=add_arguments, run=run)
