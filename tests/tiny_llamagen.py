"""A LlamaGen small enough for tests, as public files: 120 text slots, 4 x 4 tokens of 128 codes.

The transformer is the golden one, so that its pictures are known numbers; tokenizer and text encoder
have random weights.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from golden_data import GPT_T120, tensors
from safetensors.torch import save_file
from torch import Tensor

from ciar.models.bundle import Defaults
from ciar.models.presets import Preset
from ciar.models.vq import VQConfig, VQModel

VQ = VQConfig(
    image_size=8, codebook_size=128, base_channels=32, channel_multipliers=(2, 1), res_blocks=1, z_channels=32
)
FILES = ("stage1.pt", "vq_t2i.pt", "flan-t5")
DEFAULTS = Defaults(guidance=7.5, top_k=100)
ONE = Preset("tiny-one", GPT_T120, VQ, 1, FILES, DEFAULTS)
#: Weights of the same shapes, and another picture size: what the stages of LlamaGen-XL are to another.
TWO = Preset(
    "tiny-two",
    replace(GPT_T120, grid=8),
    replace(VQ, image_size=16),
    2,
    ("stage2.pt", "vq_t2i.pt", "flan-t5"),
    DEFAULTS,
)
PRESETS = {preset.name: preset for preset in (ONE, TWO)}

WORDS = ("cat", "dog", "red", "car", "house", "on", "a", "the", "fox", "blue")
T5_SIZES = {"d_model": 24, "d_kv": 8, "num_heads": 3, "d_ff": 32, "num_layers": 2, "vocab_size": 64}


def gpt_tensors() -> dict[str, Tensor]:
    """float32 tensors under LlamaGen's names."""
    return {name: value.float() for name, value in tensors("llamagen_gpt_t120").items()}


def vq_tensors() -> dict[str, Tensor]:
    """A tokenizer with LlamaGen's names, the usage counter included."""
    torch.manual_seed(11)
    model = VQModel(VQ)
    return {**model.state_dict(), "quantize.codebook_used": torch.zeros(16)}


def lantern(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The transformer under the names of LANTERN's re-export."""
    parts = {
        "attention.wo": "self_attn.o_proj",
        "feed_forward.w1": "mlp.gate_proj",
        "feed_forward.w3": "mlp.up_proj",
        "feed_forward.w2": "mlp.down_proj",
        "attention_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
    }
    whole = {"tok_embeddings.weight": "model.embed_tokens.weight", "output.weight": "lm_head.weight"}
    out: dict[str, Tensor] = {}
    for name, value in weights.items():
        if name.endswith("attention.wqkv.weight"):
            layer = name.removesuffix("attention.wqkv.weight")
            for part, rows in zip("qkv", value.chunk(3), strict=True):
                out[f"model.{layer}self_attn.{part}_proj.weight"] = rows.contiguous()
            continue
        new = whole.get(name, f"model.{name}")
        for own, other in parts.items():
            new = new.replace(f".{own}.weight", f".{other}.weight")
        out[new] = value
    return out


def trainer_file(weights: dict[str, Tensor], **arguments: Any) -> dict[str, Any]:
    """What LlamaGen's trainer saves."""
    optimizer = {"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": [{"lr": 1e-4, "params": [0]}]}
    return {"model": weights, "optimizer": optimizer, "steps": 7, "args": argparse.Namespace(**arguments)}


def write_t5(folder: Path, *, shards: int = 1, decoder: bool = False, **sizes: Any) -> Path:
    """A T5 folder in the Hugging Face layout, with a tokenizer of a few words and all letters."""
    from transformers import T5Config, T5EncoderModel

    config = T5Config(**(T5_SIZES | sizes), feed_forward_proj="gated-gelu", pad_token_id=0, eos_token_id=1)
    torch.manual_seed(5)
    weights = dict(T5EncoderModel(config).state_dict())
    del weights["encoder.embed_tokens.weight"]
    generator = torch.Generator().manual_seed(6)
    for name, value in weights.items():
        noise = torch.randn(value.shape, generator=generator)
        weights[name] = 1 + 0.1 * noise if "layer_norm" in name else 0.4 * noise
    if decoder:
        weights["decoder.block.0.layer.0.SelfAttention.q.weight"] = torch.zeros(24, 24)
        weights["lm_head.weight"] = torch.zeros(64, 24)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**config.to_dict(), "model_type": "t5"}))
    write_tokenizer(folder / "tokenizer.json")
    if shards == 1:
        save_file(weights, folder / "model.safetensors")
        return folder
    placed: dict[str, str] = {}
    names = sorted(weights)
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        own = {name: weights[name] for name in names[i::shards]}
        save_file(own, folder / file)
        placed |= dict.fromkeys(own, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return folder


def write_tokenizer(path: Path, words: Sequence[str] = WORDS) -> None:
    """A sentence-piece tokenizer as T5's: unigram pieces, ``</s>`` behind every text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    letters = "abcdefghijklmnopqrstuvwxyz"
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -3.0)]
    pieces += [(f"\u2581{word}", -1.0) for word in words] + [(letter, -4.0) for letter in letters]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer.save(str(path))


def write_sources(folder: Path, *, t5: bool = True) -> list[Path]:
    """Transformer, tokenizer and text encoder as a user downloads them."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({"model": gpt_tensors()}, folder / "stage1.pt")
    torch.save({"model": vq_tensors()}, folder / "vq_t2i.pt")
    sources = [folder / "stage1.pt", folder / "vq_t2i.pt"]
    return [*sources, write_t5(folder / "flan-t5", shards=2, decoder=True)] if t5 else sources
