"""A backbone small enough for tests: 4 x 4 tokens of 64 codes, random weights with sharp laws."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from ciar.intervals.thresholds import ThresholdConfig
from ciar.models.bundle import Defaults, write_config
from ciar.models.checkpoint import save_tensors, write_manifest
from ciar.models.device import DeviceConfig, DeviceModel
from ciar.models.eagle import EagleModel
from ciar.models.gpt import GPT, GPTConfig
from ciar.models.text import StaticTextEncoder
from ciar.models.vq import VQConfig, VQModel

WORDS = ["[UNK]", "a", "cat", "dog", "smiling", "red", "car", "with", "sunglasses", "##s", "sun"]
TINY_GPT = GPTConfig(
    dim=32,
    n_layer=2,
    n_head=2,
    vocab_size=64,
    grid=4,
    text_len=8,
    caption_dim=16,
    text_rotary="identity",
    multiple_of=32,
)
TINY_VQ = VQConfig(
    image_size=16,
    codebook_size=64,
    base_channels=32,
    channel_multipliers=(1, 1),
    res_blocks=1,
    z_channels=32,
    patch=2,
)


def sharpen(model: GPT, seed: int, scale: float = 1.0) -> GPT:
    """Random weights whose laws differ from position to position and from prompt to prompt."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                shape = parameter.shape
                parameter.copy_(torch.randn(shape, generator=generator) * scale / shape[1] ** 0.5)
    return model


def tiny_text() -> StaticTextEncoder:
    table = torch.randn(len(WORDS), 16, generator=torch.Generator().manual_seed(5))
    return StaticTextEncoder(WORDS, table, 8)


def tiny_device(seed: int = 2) -> DeviceModel:
    torch.manual_seed(seed)
    reader = replace(TINY_GPT, n_layer=1)
    config = DeviceConfig.for_cloud(TINY_GPT, radius_rank=8, feature_hidden=8, feature_top_k=8, reader=reader)
    device = DeviceModel(config)
    sharpen(device.trunk, seed)
    assert device.reader is not None
    sharpen(device.reader.trunk, seed)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(seed)
        device.head.centre.weight.normal_(generator=generator).mul_(0.4)
        device.phi.up.weight.normal_(generator=generator).mul_(0.05)
        device.reader.out.weight.normal_(generator=generator).mul_(0.3)
    return device.eval()


def tiny_gpt(seed: int = 1) -> GPT:
    torch.manual_seed(seed)
    return sharpen(GPT(TINY_GPT), seed).eval()


def tiny_eagle(seed: int = 7) -> EagleModel:
    """A drafter of random weights beside a start that makes it right now and then."""
    torch.manual_seed(seed)
    eagle = EagleModel(TINY_GPT)
    eagle.start_from(tiny_gpt())
    with torch.no_grad():
        eagle.fc.weight.add_(torch.randn(eagle.fc.weight.shape) * 0.05)
        eagle.fc.bias.normal_(std=0.05)
    return eagle.eval()


def write_tiny_bundle(folder: Path) -> None:
    """Writes a whole backbone folder."""
    device = tiny_device()
    defaults = Defaults(top_k=0, window=4, threshold=ThresholdConfig(kind="fixed", value=0.5))
    write_config(folder, "tiny", TINY_GPT, TINY_VQ, {"device": device.config}, defaults)
    torch.manual_seed(3)
    save_tensors(tiny_gpt(), folder / "gpt.safetensors")
    save_tensors(VQModel(TINY_VQ), folder / "vq.safetensors")
    save_tensors(device, folder / "device.safetensors")
    save_tensors(tiny_eagle(), folder / "eagle.safetensors")
    tiny_text().save(folder)
    write_manifest(folder)
