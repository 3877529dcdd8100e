"""``ciar train codes``: every picture of the data set as codes."""

from __future__ import annotations

import argparse

from ciar.cli.parser import whole
from ciar.cli.train.stage import Stage, add_work, load_config, load_module, needed, report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the stage."""
    add_work(parser)
    parser.add_argument(
        "--batch", type=whole(1, 4096), default=64, metavar="N", help="pictures at once (default: 64)"
    )


def run(options: argparse.Namespace) -> int:
    """Writes ``codes/codes.npy``, [pictures, tokens] uint16, in the data set's order. Returns 0."""
    import numpy as np
    import torch

    from ciar.models.vq import VQConfig, VQModel, from_uint8
    from ciar.training.tokenizer import EmaCodebook, assign, load_pictures, tokenizer_home

    data = needed(options.work / "data", "images.npy", "data")
    source = needed(tokenizer_home(options.work), "vq.safetensors", "tokenizer")
    model: VQModel = load_module(source, "vq", VQModel(VQConfig.from_dict(load_config(source, "vq"))))
    usage = load_module(source, "usage", EmaCodebook(model.config.codebook_size, model.config.embed_dim))
    rate = float(load_config(source, "usage")["rate"])
    pictures = load_pictures(data)
    parts = []
    with torch.no_grad():
        for start in range(0, len(pictures), options.batch):
            block = from_uint8(torch.from_numpy(np.array(pictures[start : start + options.batch])))
            chosen = assign(model, usage.counts, model.latents(block), rate).flatten(1)
            parts.append(chosen.numpy().astype(np.uint16))
    codes = np.concatenate(parts)
    out = options.work / "codes"
    out.mkdir(parents=True, exist_ok=True)
    np.save(out / "codes.npy", codes)
    return report({"pictures": len(codes), "tokens": codes.shape[1], "codes_used": len(np.unique(codes))})


STAGE = Stage(help="turn the pictures into codes", add_arguments=add_arguments, run=run)
