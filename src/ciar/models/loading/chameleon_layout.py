"""Names of Chameleon's checkpoints: the Hugging Face layout and Meta's, image tokenizer included.

Meta's code rotates neighbouring numbers of a head together, transformers' a number of the first half
with one of the second. So the rows of the query and key matrices change places inside each head, and
the weights of the norms behind them likewise.

Sources: https://github.com/facebookresearch/chameleon, https://github.com/GAIR-NLP/anole, and the
Chameleon model of https://github.com/huggingface/transformers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ciar.errors import CheckpointError

_META = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "output.weight": "lm_head.weight",
    "norm.weight": "model.norm.weight",
}
_META_LAYER = {
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "attention.q_normalization.weight": "self_attn.q_norm.weight",
    "attention.q_normalization.bias": "self_attn.q_norm.bias",
    "attention.k_normalization.weight": "self_attn.k_norm.weight",
    "attention.k_normalization.bias": "self_attn.k_norm.bias",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "attention_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
}
_NORM = re.compile(r"(model\.layers\.\d+\.self_attn\.)([qk])_norm\.(?:weight|bias)")
_TOKENIZER = "model.vqmodel."
#: What of an image tokenizer encodes, or trained it.
_UNUSED = ("encoder.", "quant_conv.", "loss.")


def halves(head_dim: int) -> Tensor:
    """Rows of a head in Meta's order, as transformers wants them: the even ones, then the odd ones."""
    return torch.cat([torch.arange(0, head_dim, 2), torch.arange(1, head_dim, 2)])


@dataclass(frozen=True)
class Turned:
    """A query or key matrix of Meta's layout, which changes its rows' places when it is read."""

    matrix: Tensor  # [heads * head_dim, dim]
    head_dim: int

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.matrix.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.matrix.dtype

    def read(self) -> Tensor:
        """The matrix as transformers reads it."""
        return self.matrix.unflatten(0, (-1, self.head_dim))[:, halves(self.head_dim)].flatten(0, 1)


def is_meta(names: Iterable[str]) -> bool:
    """Whether a transformer's names are Meta's."""
    return any(".q_normalization." in name for name in names)


def transformer(tensors: Mapping[str, Tensor]) -> dict[str, Tensor | Turned]:
    """The transformer of a checkpoint under the names of transformers, without an image tokenizer.

    Raises:
        CheckpointError: a projection that the norms need is missing.
    """
    meta = is_meta(tensors)
    named = {
        (_from_meta(name) if meta else name): value
        for name, value in tensors.items()
        if not name.startswith(_TOKENIZER) and not name.endswith(("rope.freqs", "rotary_emb.inv_freq"))
    }
    out: dict[str, Tensor | Turned] = dict(named)
    for name, value in named.items():
        norm = _NORM.fullmatch(name)
        if norm is None:
            continue
        projection = f"{norm[1]}{norm[2]}_proj.weight"
        if projection not in named:
            raise CheckpointError(f"The checkpoint lacks {projection}. Download it again.")
        width = value.shape[-1]
        if meta and value.ndim == 1 and width % 2 == 0:
            value = value[halves(width)]
            out[projection] = Turned(named[projection], width)
        if value.ndim == 1 or value.shape[0] == 1:  # one row for all heads, as in Meta's and in older exports
            value = value.reshape(1, width).expand(named[projection].shape[0] // width, -1)
        out[name] = value
    return out


def tokenizer(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """What of an image tokenizer decodes, and the kinds of names that were left out.

    Args:
        tensors: a checkpoint of its own, or one that holds the tokenizer beside the transformer.

    Returns:
        Tensors by name, empty when there is no decoder; names left out, such as ``encoder.*``.
    """
    inside = any(name.startswith(_TOKENIZER) for name in tensors)
    own = {
        name.removeprefix(_TOKENIZER): value
        for name, value in tensors.items()
        if name.startswith(_TOKENIZER) or not inside
    }
    if not any(name.startswith("decoder.") for name in own):
        return {}, ()
    unused = tuple(f"{kind}*" for kind in _UNUSED if any(name.startswith(kind) for name in own))
    return {name: value for name, value in own.items() if not name.startswith(_UNUSED)}, unused


def _from_meta(name: str) -> str:
    layer = re.fullmatch(r"(layers\.\d+)\.(.+)", name)
    if layer is None:
        return _META.get(name, name)
    return f"model.{layer[1]}.{_META_LAYER.get(layer[2], layer[2])}"
