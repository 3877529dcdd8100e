"""A run folder small enough for tests: random pictures, captions of known words, stages of random weights."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import chain, combinations
from pathlib import Path

import numpy as np
import torch
from tiny import TINY_GPT, TINY_VQ, WORDS, tiny_device, tiny_gpt, tiny_text, write_tiny_bundle

from ciar.bench import PROMPTS
from ciar.models.checkpoint import save_tensors, write_manifest
from ciar.models.dual_encoder import DualEncoder, DualEncoderConfig
from ciar.models.text import StaticTextEncoder
from ciar.models.vq import VQModel
from ciar.quality import SHEET_PROMPTS
from ciar.training.data.emoji import Icon
from ciar.training.distil import save_device

#: Words of names; all are known to the tiny text encoder.
NAME_WORDS = ("cat", "dog", "smiling", "red", "car", "sunglasses", "sun", "with")
PICTURES = 150
#: Sixteen pictures are the fewest that features of this width allow without a warning.
FEATURES = 8


def tiny_icons(count: int = PICTURES) -> list[Icon]:
    """Icons of distinct names, no two of the same words: one in 30 held out by name, one by pair."""
    names = chain.from_iterable(combinations(NAME_WORDS, size) for size in (1, 2, 3, 4))
    splits = {5: "held_name", 15: "held_pair"}
    return [Icon("-".join(next(names)), "flat", splits.get(i % 30, "train"), ()) for i in range(count)]


def write_tiny_data(data: Path, count: int = PICTURES) -> None:
    """Random pictures of 16 px with their captions."""
    data.mkdir(parents=True)
    generator = np.random.default_rng(0)
    np.save(data / "images.npy", generator.integers(0, 256, (count, 16, 16, 3), dtype=np.uint8))
    (data / "captions.json").write_text(json.dumps([asdict(icon) for icon in tiny_icons(count)]))


def write_tiny_run(work: Path) -> None:
    """Everything that a backbone is judged by: data, text encoder, dual encoder."""
    write_tiny_data(work / "data")
    (work / "text").mkdir()
    tiny_text().save(work / "text")
    torch.manual_seed(4)
    config = DualEncoderConfig(16, (4, 4, 8, 8), feature_dim=FEATURES, caption_dim=16, caption_hidden=16)
    DualEncoder(config).save(work / "dual-encoder")


def write_tiny_stages(work: Path) -> None:
    """What the stages that are packed into a backbone leave: tokenizer, backbone, device, text."""
    for name in ("tokenizer", "backbone", "device", "text"):
        (work / name).mkdir(parents=True)
    torch.manual_seed(3)
    save_tensors(VQModel(TINY_VQ), work / "tokenizer" / "vq.safetensors")
    (work / "tokenizer" / "vq.json").write_text(json.dumps(TINY_VQ.to_dict()))
    save_tensors(tiny_gpt(), work / "backbone" / "gpt.safetensors")
    (work / "backbone" / "gpt.json").write_text(json.dumps(TINY_GPT.to_dict()))
    save_device(tiny_device(), work / "device")
    tiny_text().save(work / "text")


def write_wide_bundle(folder: Path) -> None:
    """The tiny backbone with a text encoder that knows the words of the built-in prompts."""
    write_tiny_bundle(folder)
    prompts = " ".join((*SHEET_PROMPTS, *PROMPTS)).split()
    words = [*WORDS, *sorted(set(prompts) - set(WORDS))]
    table = torch.randn(len(words), 16, generator=torch.Generator().manual_seed(6))
    StaticTextEncoder(words, table, 8).save(folder)
    write_manifest(folder)
