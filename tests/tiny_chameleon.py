"""An Anole small enough for tests, as public files: 4 x 4 tokens of 64 codes, a tokenizer of letters.

The image decoder is the golden one; the transformer has random weights with sharp laws. ``next_logits``
and ``meta_logits`` are what it should compute: whole sequences through transformers' own class, and
through a transcription of Meta's layout with its interleaved rotation.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from golden_data import tensors
from safetensors.torch import save_file
from torch import Tensor

from ciar.models.bundle import Defaults
from ciar.models.chameleon import Chameleon, ChameleonConfig, published_shapes
from ciar.models.checkpoint import build_from
from ciar.models.loading.chameleon_check import kept
from ciar.models.loading.layout import read
from ciar.models.presets import Preset
from ciar.models.token_text import TokenTextEncoder, code_name
from ciar.models.vq import VQConfig

CONFIG = ChameleonConfig(
    dim=32,
    n_layer=2,
    n_head=4,
    ffn_hidden=48,
    vocab_size=64,
    grid=4,
    text_len=16,
    text_vocab=104,
    end_image=68,
    begin_image=69,
    separator=70,
    max_positions=64,
)
VQ = VQConfig(
    image_size=8, codebook_size=64, embed_dim=32, base_channels=32, channel_multipliers=(2, 1), z_channels=32
)
PRESET = Preset(
    "tiny-anole",
    CONFIG,
    VQ,
    0,
    ("anole-hf/", "vqgan.ckpt", "tokenizer.json"),
    Defaults(guidance=3.0, top_p=0.9, window=4),
    "chameleon",
)
LETTERS = "abcdefghijklmnopqrstuvwxyz"
NAMES = ["<s>", "<pad>", "</s>", "<unk>", *map(code_name, range(64))]
NAMES += ["<eoss>", "<racm3:break>", "<reserved08706>", "<image>"]
#: Names of tokens in the order of their ids; a space is spelled as the byte-level alphabet does.
VOCABULARY = [*NAMES, "\u0120", *LETTERS]


def transformer_tensors(seed: int = 1) -> dict[str, Tensor]:
    """float32 tensors under the names of transformers; every head has norms of its own."""
    generator = torch.Generator().manual_seed(seed)
    out: dict[str, Tensor] = {}
    for name, shape in published_shapes(CONFIG).items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            out[name] = 1.0 + 0.2 * noise
        elif name.endswith("norm.bias"):
            out[name] = 0.2 * noise
        else:
            out[name] = noise if "embed" in name else noise * 1.5 / shape[-1] ** 0.5
    return out


def vq_tensors() -> dict[str, Tensor]:
    """The golden decoder half, and names of the encoder half that nothing reads."""
    half = {name: value.float() for name, value in tensors("chameleon_vqgan_decoder_tiny").items()}
    return half | {"encoder.conv_in.weight": torch.zeros(1), "quant_conv.bias": torch.zeros(1)}


def meta_tensors(seed: int = 2) -> dict[str, Tensor]:
    """A transformer under Meta's names, with one norm for all heads of a layer."""
    generator = torch.Generator().manual_seed(seed)
    dim, hidden, head = CONFIG.dim, CONFIG.ffn_hidden, CONFIG.head_dim

    def matrix(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 1.5 / shape[-1] ** 0.5

    out = {
        "tok_embeddings.weight": torch.randn(CONFIG.text_vocab, dim, generator=generator),
        "output.weight": matrix(CONFIG.text_vocab, dim),
        "norm.weight": torch.ones(dim),
        "rope.freqs": torch.zeros(head // 2),
    }
    for i in range(CONFIG.n_layer):
        layer = {f"attention.w{name}.weight": matrix(dim, dim) for name in "qkvo"}
        for name in "qk":
            layer[f"attention.{name}_normalization.weight"] = 1 + matrix(head)
            layer[f"attention.{name}_normalization.bias"] = matrix(head)
        layer |= {f"feed_forward.w{n}.weight": matrix(hidden, dim) for n in (1, 3)}
        layer |= {"feed_forward.w2.weight": matrix(dim, hidden)}
        layer |= {"attention_norm.weight": 1 + matrix(dim), "ffn_norm.weight": 1 + matrix(dim)}
        out |= {f"layers.{i}.{name}": value for name, value in layer.items()}
    return out


def meta_logits(weights: dict[str, Tensor], ids: list[int]) -> Tensor:
    """float32 [n, text_vocab] of one sequence: neighbouring numbers of a head rotate together."""

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + CONFIG.norm_eps).rsqrt() * weight

    head, n = CONFIG.head_dim, len(ids)
    angle = torch.arange(n)[:, None] / CONFIG.rope_base ** (torch.arange(0, head, 2) / head)
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]  # [n, 1, head / 2]
    x = weights["tok_embeddings.weight"][ids]
    for i in range(CONFIG.n_layer):
        own = {n.removeprefix(f"layers.{i}."): v for n, v in weights.items() if n.startswith(f"layers.{i}.")}
        y = norm(x, own["attention_norm.weight"])
        rows = {}
        for name in "qkv":
            rows[name] = (y @ own[f"attention.w{name}.weight"].T).view(n, CONFIG.n_head, head)
        for name in "qk":
            normal = [own[f"attention.{name}_normalization.{part}"] for part in ("weight", "bias")]
            pairs = F.layer_norm(rows[name], (head,), *normal, eps=1e-5).unflatten(-1, (-1, 2)).contiguous()
            rows[name] = torch.view_as_real(torch.view_as_complex(pairs) * turn).flatten(-2)
        scores = torch.einsum("nhd,mhd->hnm", rows["q"], rows["k"]) / head**0.5
        scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf).softmax(-1)
        mixed = torch.einsum("hnm,mhd->nhd", scores, rows["v"]).flatten(1)
        x = x + mixed @ own["attention.wo.weight"].T
        y = norm(x, own["ffn_norm.weight"])
        wide = F.silu(y @ own["feed_forward.w1.weight"].T) * (y @ own["feed_forward.w3.weight"].T)
        x = x + wide @ own["feed_forward.w2.weight"].T
    return norm(x, weights["norm.weight"]) @ weights["output.weight"].T


def public_model(weights: dict[str, Tensor]) -> Any:
    """transformers' own class with the whole vocabulary."""
    from transformers import ChameleonConfig as PublicConfig
    from transformers import ChameleonForConditionalGeneration

    model = ChameleonForConditionalGeneration(
        PublicConfig(
            vocab_size=CONFIG.text_vocab,
            hidden_size=CONFIG.dim,
            intermediate_size=CONFIG.ffn_hidden,
            num_hidden_layers=CONFIG.n_layer,
            num_attention_heads=CONFIG.n_head,
            num_key_value_heads=CONFIG.n_head,
            max_position_embeddings=CONFIG.max_positions,
            vocabulary_map={name: i for i, name in enumerate(VOCABULARY)},
            vq_config={"base_channels": 32, "channel_multiplier": [1], "num_res_blocks": 1, "resolution": 16},
        )
    )
    lost = model.load_state_dict(weights, strict=False)
    assert not lost.unexpected_keys
    assert all(name.startswith("model.vqmodel.") for name in lost.missing_keys)
    return model.eval()


@torch.no_grad()
def next_logits(model: Any, prompt: list[int], codes: list[int]) -> Tensor:
    """float32 [len(codes) + 1, 64] logits of the image codes behind a prompt, without any cache."""
    ids = torch.tensor([prompt + [CONFIG.first_code + code for code in codes]])
    hidden = model.model(input_ids=ids).last_hidden_state[0, len(prompt) - 1 :]
    logits: Tensor = model.lm_head(hidden).float()
    return logits[:, CONFIG.first_code : CONFIG.end_image]


def framed(words: str) -> list[int]:
    """The prompt's ids, spelled by hand."""
    return [0, *(VOCABULARY.index(c if c != " " else "\u0120") for c in words), 70, 69]


def chameleon(weights: dict[str, Tensor]) -> Chameleon:
    """Our model of public weights."""
    own = {name: read(value).contiguous() for name, value in kept(weights, CONFIG).items()}
    return build_from(lambda: Chameleon(CONFIG), own, "tiny").eval().requires_grad_(False)


def write_tokenizer(path: Path, names: list[str] = VOCABULARY) -> Path:
    """A byte-level tokenizer of single letters; whatever else is unknown."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    ids = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(ids, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [name for name in names if len(name) > 1]
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))
    return path


def tiny_text(folder: Path, weights: dict[str, Tensor]) -> TokenTextEncoder:
    path = write_tokenizer(folder / "tokenizer.json")
    return TokenTextEncoder(path, weights["model.embed_tokens.weight"], CONFIG.text_len)


def write_hf(folder: Path, *, decoder: bool = True, shards: int = 3, **changed: Any) -> Path:
    """The Hugging Face layout: shards, index, config, tokenizer; the decoder is in the shards."""
    weights = transformer_tensors()
    if decoder:
        weights |= {f"model.vqmodel.{name}": value for name, value in vq_tensors().items()}
    folder.mkdir(parents=True)
    names, placed = sorted(weights), {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        save_file({name: weights[name] for name in names[i::shards]}, folder / file)
        placed |= dict.fromkeys(names[i::shards], file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    facts = {"model_type": "chameleon", "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "swin_norm": False}
    # The public file is wrong about the begin of text, and nothing asks it.
    (folder / "config.json").write_text(json.dumps(facts | {"bos_token_id": 1} | changed))
    write_tokenizer(folder / "tokenizer.json")
    return folder


def write_meta(folder: Path) -> Path:
    """Meta's layout, as GAIR publishes Anole."""
    (folder / "models/7b").mkdir(parents=True)
    torch.save(meta_tensors(), folder / "models/7b/consolidated.pth")
    params = {"dim": 32, "n_heads": 4, "norm_eps": 1e-5, "qk_normalization": True, "swin_norm": False}
    (folder / "models/7b/params.json").write_text(json.dumps(params))
    write_tokenizer(folder / "tokenizer/text_tokenizer.json")
    torch.save({"state_dict": vq_tensors() | {"loss.x": torch.zeros(1)}}, folder / "tokenizer/vqgan.ckpt")
    return folder
