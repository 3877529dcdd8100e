"""What a checkpoint is, told from its tensor names, and its tensors under this project's names.

Source of the layouts: LlamaGen (https://github.com/FoundationVision/LlamaGen) and LANTERN's
re-export of the same weights (https://github.com/jadohu/LANTERN); ``chameleon_layout`` for Chameleon.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from ciar.errors import CheckpointError
from ciar.models.loading import chameleon_layout

Kind = Literal[
    "gpt",
    "vq",
    "t5",
    "device",
    "static-text",
    "token-table",
    "class-gpt",
    "chameleon",
    "chameleon-vq",
    "unknown",
]
#: Family and part of what a backbone is made of.
PARTS: dict[Kind, tuple[str, Literal["gpt", "vq"]]] = {
    "gpt": ("llamagen", "gpt"),
    "vq": ("llamagen", "vq"),
    "chameleon": ("chameleon", "gpt"),
    "chameleon-vq": ("chameleon", "vq"),
}

#: For people.
DESCRIPTIONS: dict[Kind, str] = {
    "gpt": "text-to-image transformer of the LlamaGen family",
    "vq": "VQ image tokenizer of the LlamaGen family",
    "t5": "T5 text encoder",
    "device": "device model of ciar",
    "static-text": "word-piece table of ciar",
    "token-table": "token table of a text encoder of ciar",
    "class-gpt": "class-conditional transformer of LlamaGen, which draws no prompts; ciar cannot use it",
    "chameleon": "transformer of the Chameleon family (Anole)",
    "chameleon-vq": "image tokenizer of the Chameleon family (Anole)",
    "unknown": "unknown weights",
}
#: A name that only this kind of checkpoint has; looked at in this order.
_MARKS: tuple[tuple[str, Kind], ...] = (
    ("trunk.tok_embeddings.weight", "device"),
    ("cls_embedding.embedding_table.weight", "class-gpt"),
    ("cls_embedding.cap_proj.fc1.weight", "gpt"),
    ("layers.0.attention.wqkv.weight", "gpt"),
    ("model.layers.0.self_attn.q_norm.weight", "chameleon"),
    ("layers.0.attention.q_normalization.weight", "chameleon"),
    ("decoder.mid.block_1.norm1.weight", "chameleon-vq"),
    ("decoder.conv_blocks.0.res.0.norm1.weight", "vq"),
    ("encoder.block.0.layer.0.SelfAttention.q.weight", "t5"),
    ("scale", "static-text"),
    ("table", "token-table"),
)
#: Computed anew or never read, so a file may carry it.
_IGNORED = re.compile(
    r"freqs_cis|causal_mask|layers\.\d+\.attention\.kv_cache\.[kv]_cache|quantize\.codebook_used"
)
#: Names and types that only quantised checkpoints have.
_QUANTISED_NAME = re.compile(r"\.(SCB|absmax|quant_map|qweight|qzeros|scales|weight_scale|weight_format)\b")
_PLAIN_TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

_LANTERN = {
    "lm_head.weight": "output.weight",
    "model.embed_tokens.weight": "tok_embeddings.weight",
    "model.norm.weight": "norm.weight",
}
_LANTERN_LAYER = {
    "self_attn.o_proj.weight": "attention.wo.weight",
    "mlp.gate_proj.weight": "feed_forward.w1.weight",
    "mlp.up_proj.weight": "feed_forward.w3.weight",
    "mlp.down_proj.weight": "feed_forward.w2.weight",
    "input_layernorm.weight": "attention_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
}
_QKV = tuple(f"self_attn.{part}_proj.weight" for part in "qkv")


@dataclass(frozen=True)
class Joined:
    """Matrices that become one, row after row, when they are read."""

    parts: tuple[Tensor, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    def read(self) -> Tensor:
        """The matrix."""
        return torch.cat(self.parts)


class Later(Protocol):
    """What becomes a tensor when it is read, and not before."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def read(self) -> Tensor: ...


#: A tensor, or what becomes one.
Stored = Tensor | Later


def read(stored: Stored) -> Tensor:
    """The tensor itself."""
    return stored if isinstance(stored, Tensor) else stored.read()


@dataclass(frozen=True)
class Part:
    """A checkpoint, understood.

    Attributes:
        kind: what it is.
        layout: whose names the file used.
        tensors: under this project's names.
        ignored: names that were left out, because they are computed anew or never read.
        others: further parts that lie in the same file or folder.
    """

    kind: Kind
    layout: str
    tensors: dict[str, Stored]
    ignored: tuple[str, ...] = ()
    others: tuple[Part, ...] = ()


def strip_prefixes(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Names without what DistributedDataParallel and torch.compile put into them.

    Raises:
        CheckpointError: two names become the same.
    """
    out: dict[str, Tensor] = {}
    for name, value in tensors.items():
        bare = name.replace("_orig_mod.", "")
        while bare.startswith("module."):
            bare = bare.removeprefix("module.")
        if bare in out:
            raise CheckpointError(f"The checkpoint holds {bare} twice, with and without a prefix.")
        out[bare] = value
    return out


def understand(tensors: Mapping[str, Tensor]) -> Part:
    """Tells what a checkpoint is and renames its tensors.

    Raises:
        CheckpointError: two tensors have one name, or a layer of LANTERN's layout lacks one of q, k, v.
    """
    bare = strip_prefixes(tensors)
    layout = "LlamaGen"
    if "model.cls_embedding.cap_proj.fc1.weight" in bare:
        bare, layout = _without_frequencies(bare), "LANTERN"
        named: dict[str, Stored] = _from_lantern(bare)
    else:
        named = dict(bare)
    kind = kind_of(named)
    if kind in ("chameleon", "chameleon-vq"):
        return _chameleon(kind, bare)
    if kind == "t5":
        named, layout = _encoder_of(named), "Hugging Face"
    elif kind in ("device", "static-text", "token-table"):
        layout = "ciar"
    elif kind not in ("gpt", "vq", "class-gpt"):
        layout = "other"
    ignored = tuple(name for name in named if _IGNORED.fullmatch(name))
    return Part(kind, layout, {n: v for n, v in named.items() if n not in ignored}, ignored)


def _chameleon(kind: Kind, tensors: dict[str, Tensor]) -> Part:
    """Transformer, image tokenizer, or both in one, as Anole's Hugging Face layout has them."""
    decoder, unused = chameleon_layout.tokenizer(tensors)
    vq = Part("chameleon-vq", "Chameleon", dict(decoder), unused)
    if kind == "chameleon-vq":
        return vq
    layout = "Meta" if chameleon_layout.is_meta(tensors) else "Hugging Face"
    if "null_prompt" in tensors:
        layout = "ciar"
    named: dict[str, Stored] = dict(chameleon_layout.transformer(tensors))
    return Part(kind, layout, named, (), (vq,) if decoder else ())


def kind_of(names: Mapping[str, object]) -> Kind:
    """What a checkpoint with these names is."""
    if any(name.startswith("model.vqmodel.") for name in names):
        return "chameleon"
    return next((kind for mark, kind in _MARKS if mark in names), "unknown")


def quantised(tensors: Mapping[str, Stored]) -> str:
    """A name that shows that the weights are quantised; "" when they are not."""
    for name, value in tensors.items():
        if value.dtype not in _PLAIN_TYPES or _QUANTISED_NAME.search(name):
            return name
    return ""


def _encoder_of(tensors: dict[str, Stored]) -> dict[str, Stored]:
    """The encoder half of T5; the embeddings that it shares with the decoder have two names."""
    second = "encoder.embed_tokens.weight"
    out = {name: value for name, value in tensors.items() if name.startswith("encoder.") and name != second}
    shared = tensors.get("shared.weight", tensors.get(second))
    return out if shared is None else {"shared.weight": shared, **out}


def _without_frequencies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    # Rotary frequencies of the Llama class that the re-export borrows; LlamaGen's table is computed.
    return {name: value for name, value in tensors.items() if not name.endswith("rotary_emb.inv_freq")}


def _from_lantern(tensors: dict[str, Tensor]) -> dict[str, Stored]:
    out: dict[str, Stored] = {}
    for name, value in tensors.items():
        layer = re.fullmatch(r"model\.(layers\.\d+)\.(.+)", name)
        if layer is None:
            out[_LANTERN.get(name, name.removeprefix("model."))] = value
        elif layer[2] in _LANTERN_LAYER:
            out[f"{layer[1]}.{_LANTERN_LAYER[layer[2]]}"] = value
        elif layer[2] in _QKV:
            names = [f"model.{layer[1]}.{part}" for part in _QKV]
            lost = [one for one in names if one not in tensors]
            if lost:
                raise CheckpointError(f"The checkpoint lacks {', '.join(lost)}. Download it again.")
            out[f"{layer[1]}.attention.wqkv.weight"] = Joined(tuple(tensors[one] for one in names))
        else:
            out[name] = value
    return out
