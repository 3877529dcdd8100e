"""The transformer as it is decoded with: fewer, larger operations on the same weights.

At one to a few rows a pass is made of small operations whose dispatch costs more than their
arithmetic. So norms are folded into the matrices behind them, projections that read the same input
are one matrix, queries and keys are rotated together, and residual sums ride on the matrix products.
Results equal ``models.gpt`` up to float32 rounding; weights of other types are left unfolded, where
folding would round twice.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ciar.models.cache import KVCache
from ciar.models.gpt import GPT, Block


class _Layer(NamedTuple):
    attention_norm: Tensor | None  # None once folded into wqkv
    wqkv: Tensor  # [3 * dim, dim]
    wo: Tensor  # [dim, dim], transposed
    ffn_norm: Tensor | None
    w13: Tensor  # [2 * hidden, dim]
    w2: Tensor  # [hidden, dim], transposed


class InferenceGPT:
    """A frozen GPT, rearranged for decoding.

    Args:
        model: whose weights are used; its matrices are copied where they are rearranged.
    """

    def __init__(self, model: GPT) -> None:
        self.config = model.config
        self.eps = model.config.norm_eps
        embedding = model.tok_embeddings.weight.detach()
        self.dtype, self.device = embedding.dtype, embedding.device
        fold = self.dtype == torch.float32
        self.embedding = embedding
        self.caption = model.cls_embedding
        table = model.table
        self.table = torch.view_as_complex(table.contiguous())  # [positions, head_dim / 2]
        self.layers = [_rearranged(block, fold) for block in model.blocks]
        norm = model.norm.weight.detach()
        self.norm: Tensor | None = norm
        self.output: Tensor | None = None  # a device trunk has its head elsewhere
        if isinstance(model.output, nn.Linear):
            self.output = model.output.weight.detach()
            if fold:
                self.output, self.norm = model.output.weight.detach() * norm, None

    def new_cache(self, text_rows: int, rows: int, spare: int = 0) -> KVCache:
        """A cache over ``text_rows`` text rows and all image tokens, with ``spare`` cells more."""
        return KVCache.allocate(
            self.config, text_rows=text_rows, rows=rows, dtype=self.dtype, device=self.device, spare=spare
        )

    def embed_text(self, features: Tensor) -> Tensor:
        """Caption features [rows, text, caption_dim] to text rows [rows, text, dim]."""
        return self.caption.cap_proj(features)

    def embed_tokens(self, ids: Tensor) -> Tensor:
        """Codes [...] to [..., dim]."""
        return self.embedding[ids]

    def forward(self, x: Tensor, start: int | Tensor, cache: KVCache, mask: Tensor | None = None) -> Tensor:
        """Runs one block of consecutive positions over the cache.

        Args:
            x: [rows, n, dim] embedded inputs of positions ``start`` to ``start + n - 1``. Position
                ``text_len`` is the first image token.
            start: position of the first input, the same for all rows or int64 [rows]. Cells at and
                after it are overwritten, which is how a rollback works: go on from an earlier
                position.
            cache: holds the positions before ``start``.
            mask: bool [rows, 1, n, length], True where attention is allowed, with ``length`` the
                cells up to the last input's. None is plain causal attention over everything that
                the cache holds; rows that start at different positions need a mask.

        Returns:
            [rows, n, dim]; pass it to :meth:`head`.
        """
        rows, n, dim = x.shape
        heads, eps = self.config.n_head, self.eps
        if isinstance(start, int):
            table = self.table[start : start + n]
            length = start + n - cache.first
            if mask is None and n > 1:
                mask = torch.ones(n, length, dtype=torch.bool, device=x.device).tril(length - n)
        else:
            # Padding behind the last position has no row in the table; any row will do for it.
            cells = (start[:, None] + torch.arange(n, device=x.device)).clamp_max(len(self.table) - 1)
            table = self.table[cells].unsqueeze(1)  # [rows, 1, n, head_dim / 2]
        x = x.reshape(rows * n, dim)
        for i, layer in enumerate(self.layers):
            qkv = F.linear(_normed(x, layer.attention_norm, eps), layer.wqkv)
            qkv = qkv.view(rows, n, 3, heads, -1).permute(2, 0, 3, 1, 4)  # [3, rows, heads, n, head_dim]
            queries, fresh = _rotated(qkv[:2], table)
            keys, values = cache.write(i, start, fresh, qkv[2])
            mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
            x = torch.addmm(x, mixed.transpose(1, 2).reshape(rows * n, dim), layer.wo)
            gate, up = F.linear(_normed(x, layer.ffn_norm, eps), layer.w13).chunk(2, dim=-1)
            x = torch.addmm(x, F.silu(gate).mul_(up), layer.w2)
        return _normed(x, self.norm, eps).view(rows, n, dim)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits, float32 [..., vocab_size], of what :meth:`forward` returned."""
        assert self.output is not None, "a device trunk has no head of its own"
        return F.linear(hidden, self.output).float()


def _rearranged(block: Block, fold: bool) -> _Layer:
    attention, feed_forward = block.attention, block.feed_forward
    wqkv = attention.wqkv.weight.detach()
    w13 = torch.cat([feed_forward.w1.weight.detach(), feed_forward.w3.weight.detach()])
    attention_norm, ffn_norm = block.attention_norm.weight.detach(), block.ffn_norm.weight.detach()
    return _Layer(
        None if fold else attention_norm,
        wqkv * attention_norm if fold else wqkv,
        attention.wo.weight.detach().T.contiguous(),
        None if fold else ffn_norm,
        w13 * ffn_norm if fold else w13,
        feed_forward.w2.weight.detach().T.contiguous(),
    )


def _normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Root-mean-square norm of [n, dim] in float32; the weight is applied in the weight's type."""
    wide = x.float()
    # vector_norm is one operation where square and mean are three.
    mean = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1])
    out = (wide * mean.add_(eps).rsqrt_()).type_as(x)
    return out if weight is None else out * weight


def _rotated(x: Tensor, table: Tensor) -> Tensor:
    """Rotates interleaved pairs in float32. ``x`` [..., n, head_dim], ``table`` complex [n, head_dim / 2]."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * table).flatten(-2).type_as(x)
