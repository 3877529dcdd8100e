"""The golden tensors of ``tests/golden``: reference inputs and outputs, described in golden.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ciar.models.checkpoint import load_strict, read_tensors
from ciar.models.gpt import GPT, GPTConfig
from ciar.models.text import TextFeatures
from ciar.models.vq import VQConfig, VQModel

GOLDEN = Path(__file__).parent / "golden"
#: Tolerances that golden.json suggests, absolute.
CLOSE = {"atol": 1e-4, "rtol": 0.0}
CLOSE_GUIDED = {"atol": 1e-3, "rtol": 0.0}
#: Guidance scale of every guided golden tensor.
SCALE = 7.5

GPT_TINY = GPTConfig(dim=64, n_layer=3, n_head=4, vocab_size=512, grid=4, text_len=8, caption_dim=32)
GPT_T120 = GPTConfig(dim=32, n_layer=2, n_head=2, vocab_size=128, grid=4, text_len=120, caption_dim=24)
VQ_TINY = VQConfig(
    image_size=8, codebook_size=512, base_channels=32, channel_multipliers=(2, 1), res_blocks=2, z_channels=32
)


def tensors(name: str) -> dict[str, Tensor]:
    """Tensors of a golden file, by name."""
    return read_tensors(GOLDEN / f"{name}.safetensors")


def described(name: str) -> dict[str, Any]:
    """What a JSON file of the golden folder says."""
    values: dict[str, Any] = json.loads((GOLDEN / f"{name}.json").read_text())
    return values


def golden_gpt(name: str, config: GPTConfig) -> GPT:
    """A reference transformer in float32, loaded strictly under the public key names."""
    model = GPT(config)
    load_strict(model, tensors(name), name)
    return model.eval().requires_grad_(False)


def golden_vq() -> VQModel:
    """The reference tokenizer; its usage buffer, which no computation reads, is left out."""
    model = VQModel(VQ_TINY)
    values = {k: v for k, v in tensors("llamagen_vq_tiny").items() if k != "quantize.codebook_used"}
    load_strict(model, values, "llamagen_vq_tiny")
    return model.eval().requires_grad_(False)


def prompts(features: Tensor, mask: Tensor) -> list[TextFeatures]:
    """Left-padded caption features [rows, text, dim] and mask [rows, text], one object a prompt."""
    return [TextFeatures(f, m.bool()) for f, m in zip(features, mask, strict=True)]


def left_padded(features: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Right-padded encoder output to LlamaGen's layout: valid rows last, padding zero."""
    out, flipped = torch.zeros_like(features, dtype=torch.float32), torch.zeros_like(mask, dtype=torch.bool)
    for row, valid in enumerate(mask.sum(dim=1).tolist()):
        out[row, -valid:] = features[row, :valid].float()
        flipped[row, -valid:] = True
    return out, flipped
