"""``ciar train codebook``: unused codes are given to where they help most."""

from __future__ import annotations

import argparse
from pathlib import Path

from ciar.cli.parser import whole
from ciar.cli.train.stage import Stage, add_work, load_config, load_module, needed, report, save_module


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the stage."""
    add_work(parser)
    parser.add_argument(
        "--batch", type=whole(1, 4096), default=64, metavar="N", help="pictures at once (default: 64)"
    )
    parser.add_argument(
        "--gpt",
        type=Path,
        metavar="FILE",
        help="weights of a backbone trained on the old codes: also writes WORK/codebook/gpt.safetensors, "
        "with which ciar train backbone --init goes on",
    )


def run(options: argparse.Namespace) -> int:
    """Splits crowded codes into unused ones; writes ``codebook/``. Returns 0."""
    import numpy as np
    import torch
    from safetensors.torch import save_file

    from ciar.models.checkpoint import read_tensors
    from ciar.models.vq import VQConfig, VQModel, from_uint8
    from ciar.training.captions import indices_of, load_captions
    from ciar.training.codebook import inherit_rows, refill
    from ciar.training.tokenizer import EmaCodebook, assign, load_pictures

    data = needed(options.work / "data", "images.npy", "data")
    folder = needed(options.work / "tokenizer", "vq.safetensors", "tokenizer")
    model: VQModel = load_module(folder, "vq", VQModel(VQConfig.from_dict(load_config(folder, "vq"))))
    usage = load_module(folder, "usage", EmaCodebook(model.config.codebook_size, model.config.embed_dim))
    rate = float(load_config(folder, "usage")["rate"])
    pictures, index = load_pictures(data), indices_of(load_captions(data), "train")
    latents, codes = [], []
    with torch.no_grad():
        for part in index.split(options.batch):
            z = model.latents(from_uint8(torch.from_numpy(np.array(pictures[part.numpy()]))))
            latents.append(z.flatten(0, 2))
            codes.append(assign(model, usage.counts, z, rate).flatten())
        before = torch.cat(codes)
        unit, after, parents = refill(model.quantize.unit_codes(), torch.cat(latents), before, rate)
        counts = torch.bincount(after, minlength=len(unit)).float()
        # The scale of a moving average; only the proportions matter.
        usage.counts.copy_(counts * usage.counts.sum() / counts.sum())
        usage.sums.copy_(unit * usage.counts[:, None])
        model.quantize.embedding.weight.copy_(unit)
    out = options.work / "codebook"
    out.mkdir(parents=True, exist_ok=True)
    save_module(out, "vq", model, model.config.to_dict())
    save_module(out, "usage", usage, {"rate": rate})
    if options.gpt is not None:
        save_file(inherit_rows(read_tensors(options.gpt), parents), out / "gpt.safetensors")
    return report(
        {
            "codes_used_before": len(before.unique()),
            "codes_used": len(after.unique()),
            "refilled": len(parents),
        }
    )


STAGE = Stage(help="give unused codes to where they help most", add_arguments=add_arguments, run=run)
