"""``ciar train tokenizer``: pictures to codes and back."""

from __future__ import annotations

import argparse

from ciar.cli.train.stage import Stage, add_init, add_loop, init_from, loop_of, needed, report, save_module


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the stage."""
    add_loop(parser)
    add_init(parser)


def run(options: argparse.Namespace) -> int:
    """Trains the VQ tokenizer. Returns 0."""
    import numpy as np

    from ciar.models.vq import VQConfig
    from ciar.training.captions import load_captions
    from ciar.training.loop import LoopConfig, train
    from ciar.training.tokenizer import EMOJI_VQ, TokenizerConfig, TokenizerTask, load_pictures

    loop = loop_of(options, LoopConfig(steps=2600, warmup=50, decay=0.5, eval_every=200))
    tiny = options.profile == "tiny"
    data = needed(options.work / "data", "images.npy", "data")
    pictures = load_pictures(data)
    is_train = np.array([icon.split == "train" for icon in load_captions(data)])
    held = np.ascontiguousarray(pictures[~is_train][: 16 if tiny else 256])
    vq, config = EMOJI_VQ, TokenizerConfig(batch=16, lr=2e-3)
    if tiny:
        edge = pictures.shape[1]
        vq = VQConfig(
            edge, 64, 8, base_channels=32, channel_multipliers=(1, 1), res_blocks=1, z_channels=32, patch=4
        )
        config = TokenizerConfig(batch=4, lr=2e-3, compile=False)
    task = TokenizerTask(np.ascontiguousarray(pictures[is_train]), held, vq, config, loop)
    init_from(options, task.model)
    out = options.work / "tokenizer"
    figures = train(task, loop, out, resume=not options.no_resume)
    save_module(out, "vq", task.model, vq.to_dict())
    # How often each code is used: common codes win ties when pictures are turned into codes.
    save_module(out, "usage", task.ema, {"rate": config.rate})
    return report(figures)


STAGE = Stage(help="train the picture tokenizer", add_arguments=add_arguments, run=run)
