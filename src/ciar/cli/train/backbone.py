"""``ciar train backbone``: the cloud model."""

from __future__ import annotations

import argparse

from ciar.cli.parser import whole
from ciar.cli.train.stage import (
    Stage,
    add_init,
    add_loop,
    init_from,
    load_config,
    loop_of,
    needed,
    report,
    save_module,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the stage."""
    add_loop(parser)
    add_init(parser)
    parser.add_argument(
        "--batch", type=whole(1, 4096), metavar="N", help="pictures a step (default: the profile's)"
    )
    parser.add_argument(
        "--plan-first",
        type=whole(0),
        metavar="N",
        help="of the steps, those at the start that learn what the text rows must know, and no pictures "
        "(default: the profile's)",
    )


def run(options: argparse.Namespace) -> int:
    """Trains the AR backbone. Returns 0."""
    from dataclasses import replace

    import numpy as np
    import torch

    from ciar.models.checkpoint import read_tensors
    from ciar.models.inference import fold_norms
    from ciar.models.text import StaticTextEncoder
    from ciar.models.vq import VQConfig
    from ciar.training.backbone import EMOJI_GPT, BackboneConfig, BackboneTask, fit_null_caption
    from ciar.training.captions import CaptionBank, indices_of, load_captions
    from ciar.training.loop import LoopConfig, train
    from ciar.training.tokenizer import tokenizer_home

    loop = loop_of(options, LoopConfig(steps=6000, warmup=100, decay=0.4, eval_every=500))
    icons = load_captions(needed(options.work / "data", "captions.json", "data"))
    text = StaticTextEncoder.load(needed(options.work / "text", "text.safetensors", "text"))
    tokenizer = needed(tokenizer_home(options.work), "vq.safetensors", "tokenizer")
    vq = VQConfig.from_dict(load_config(tokenizer, "vq"))
    codes = np.load(needed(options.work / "codes", "codes.npy", "codes") / "codes.npy").astype(np.int64)
    gpt = replace(
        EMOJI_GPT,
        vocab_size=vq.codebook_size,
        grid=vq.grid,
        text_len=text.text_len,
        caption_dim=text.caption_dim,
    )
    config = BackboneConfig()
    if options.profile == "tiny":
        gpt = replace(gpt, dim=32, n_layer=2, n_head=2, multiple_of=32)
        first = min(1, len(text.registers))
        config = BackboneConfig(batch=4, plan_batch=4, plan_first=first, plan_layers=1, compile=False)
    if options.batch is not None:
        config = replace(config, batch=options.batch)
    if options.plan_first is not None:
        config = replace(config, plan_first=options.plan_first)
    codebook = read_tensors(tokenizer / "vq.safetensors")["quantize.embedding.weight"]
    task = BackboneTask(
        torch.from_numpy(codes),
        CaptionBank(icons, text),
        indices_of(icons, "train"),
        indices_of(icons, "held_name", "held_pair")[::4],
        torch.nn.functional.normalize(codebook, dim=-1),
        gpt,
        config,
        loop,
    )
    init_from(options, task.model, lambda tensors: fit_null_caption(tensors, task.model))
    out = options.work / "backbone"
    figures = train(task, loop, out, resume=not options.no_resume)
    save_module(out, "gpt", fold_norms(task.model), gpt.to_dict())
    return report(figures)


STAGE = Stage(help="train the cloud model on codes and captions", add_arguments=add_arguments, run=run)
