"""The transformer as it is decoded with: fewer, larger operations on the same weights.

At one to a few rows a pass is made of small operations whose dispatch costs more than their
arithmetic. So norms are folded into the matrices behind them, projections that read the same input
are one matrix, queries, keys and values are rotated together (values by nothing), and residual sums
ride on the matrix products. Results equal ``models.gpt`` up to float32 rounding; weights of other types
are left unfolded, where folding would round twice.

Matrices are kept inputs first, [inputs, outputs]: with few rows that takes processors two thirds of the
time. Measured and not kept: ``W @ x.T`` (faster from eight rows on, slower at two), and 8-bit products
(a tenth faster without 8-bit dot products in the processor, and no longer the same numbers everywhere).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ciar.models.cache import KVCache
from ciar.models.gpt import GPT, Block


class _Layer(NamedTuple):
    attention_norm: Tensor | None  # [dim]; None once folded into wqkv
    wqkv: Tensor  # [dim, 3 * dim]
    wo: Tensor  # [dim, dim], inputs first
    ffn_norm: Tensor | None  # [dim]; None once folded into w13
    w13: Tensor  # [dim, 2 * hidden]
    w2: Tensor  # [hidden, dim]


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
        turn = torch.view_as_complex(model.table.contiguous())  # [positions, head_dim / 2]
        self.table = torch.stack([turn, turn, torch.ones_like(turn)], dim=1)[:, :, None]
        self.layers = [_rearranged(block, fold) for block in model.blocks]
        norm = model.norm.weight.detach()
        self.norm: Tensor | None = norm
        self.output: Tensor | None = None  # [dim, vocab]; a device trunk has its head elsewhere
        if isinstance(model.output, nn.Linear):
            output = model.output.weight.detach()
            if fold:
                output, self.norm = output * norm, None
            self.output = output.T.contiguous()

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

    def forward(
        self,
        x: Tensor,
        start: int | Tensor,
        cache: KVCache,
        mask: Tensor | None = None,
        cells: Tensor | None = None,
    ) -> Tensor:
        """Runs one block of positions over the cache, consecutive ones unless ``start`` says otherwise.

        Args:
            x: [rows, n, dim] embedded inputs of positions ``start`` to ``start + n - 1``. Position
                ``text_len`` is the first image token.
            start: position of the first input, the same for all rows or int64 [rows]; or int64
                [rows, n], the position of each input. Cells at and after it are overwritten, which
                is how a rollback works: go on from an earlier position.
            cache: holds the positions before ``start``.
            mask: bool [rows, 1, n, length], True where attention is allowed, with ``length`` the
                cells up to the last input's. None is plain causal attention over everything that
                the cache holds; rows that start at different positions, and positions that are not
                consecutive, need a mask.
            cells: int64 [rows, n], the position of the cell that each input is stored in, where it is not
                the input's own: for trees, whose nodes share positions.

        Returns:
            [rows, n, dim]; pass it to :meth:`head`.
        """
        rows, n, dim = x.shape
        heads, eps, hidden = self.config.n_head, self.eps, self.config.ffn_hidden
        if isinstance(start, int):
            table = self.table[start : start + n]  # [n, 3, 1, head_dim / 2]
            length = start + n - cache.first
            if mask is None and n > 1:
                mask = torch.ones(n, length, dtype=torch.bool, device=x.device).tril(length - n)
        else:
            # Padding behind the last position has no row in the table; any row will do for it.
            where = start if start.ndim == 2 else start[:, None] + torch.arange(n, device=x.device)
            table = self.table[where.clamp_max(len(self.table) - 1)]  # [rows, n, 3, 1, head_dim / 2]
        if mask is not None:  # once here, where attention would do it in every layer
            mask = torch.zeros(mask.shape, dtype=x.dtype, device=x.device).masked_fill_(~mask, -torch.inf)
        x = x.reshape(rows * n, dim)
        for i, layer in enumerate(self.layers):
            qkv = _normed(x, layer.attention_norm, eps) @ layer.wqkv
            queries, fresh = _rotated(qkv.view(rows, n, 3, heads, -1), table)
            keys, values = cache.write(i, start if cells is None else cells, fresh)
            mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
            x = torch.addmm(x, mixed.transpose(1, 2).reshape(rows * n, dim), layer.wo)
            both = _normed(x, layer.ffn_norm, eps) @ layer.w13
            x = torch.addmm(x, F.silu(both[:, :hidden]).mul_(both[:, hidden:]), layer.w2)
        return _normed(x, self.norm, eps).view(rows, n, dim)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits, float32 [..., vocab_size], of what :meth:`forward` returned."""
        assert self.output is not None, "a device trunk has no head of its own"
        return (hidden @ self.output).float()


def _rearranged(block: Block, fold: bool) -> _Layer:
    attention, feed_forward = block.attention, block.feed_forward
    wqkv = attention.wqkv.weight.detach()
    w13 = torch.cat([feed_forward.w1.weight.detach(), feed_forward.w3.weight.detach()])
    attention_norm, ffn_norm = block.attention_norm.weight.detach(), block.ffn_norm.weight.detach()
    if fold:
        wqkv, w13 = wqkv * attention_norm, w13 * ffn_norm
    return _Layer(
        None if fold else attention_norm,
        wqkv.T.contiguous(),
        attention.wo.weight.detach().T.contiguous(),
        None if fold else ffn_norm,
        w13.T.contiguous(),
        feed_forward.w2.weight.detach().T.contiguous(),
    )


def _normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Root-mean-square norm of [m, dim] in float32; the weight is applied in the weight's type."""
    wide = x.float()
    # vector_norm is one operation where square and mean are three.
    mean = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1])
    out = (wide * mean.add_(eps).rsqrt_()).type_as(x)
    return out if weight is None else out * weight


def _rotated(qkv: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Rotates interleaved pairs in float32.

    Args:
        qkv: [rows, n, 3, heads, head_dim], contiguous.
        table: complex [n, 3, 1, head_dim / 2], or with a first axis of rows.

    Returns:
        Queries [rows, heads, n, head_dim]; keys and values [2, rows, heads, n, head_dim].
    """
    pairs = torch.view_as_complex(qkv.float().unflatten(-1, (-1, 2)))
    turned = torch.view_as_real(pairs * table).flatten(-2).type_as(qkv).permute(2, 0, 3, 1, 4)
    return turned[0], turned[1:]
