"""``ciar train dual-encoder``: the judge of pictures, trained on real ones only."""

from __future__ import annotations

import argparse

from ciar.cli.train.stage import Stage, add_loop, loop_of, needed, report


def run(options: argparse.Namespace) -> int:
    """Trains the dual encoder. Returns 0."""
    from ciar.models.dual_encoder import DualEncoderConfig
    from ciar.models.text import StaticTextEncoder
    from ciar.training.dual_encoder import DUAL_ENCODER_LOOP, DualEncoderTraining, train_dual_encoder

    text = needed(options.work / "text", "text.safetensors", "text")
    config, sizes = DualEncoderTraining(), None
    if options.profile == "tiny":
        config = DualEncoderTraining(batch=8, held_pictures=16)
        dim = StaticTextEncoder.load(text).caption_dim
        sizes = DualEncoderConfig(image_size=16, channels=(8, 8, 16, 16), feature_dim=16, caption_dim=dim)
    figures = train_dual_encoder(
        needed(options.work / "data", "images.npy", "data"),
        text,
        options.work / "dual-encoder",
        loop_of(options, DUAL_ENCODER_LOOP),
        config=config,
        model=sizes,
        resume=not options.no_resume,
    )
    return report(figures)


STAGE = Stage(help="train the judge of pictures and captions", add_arguments=add_loop, run=run)
