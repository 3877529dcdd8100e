"""The transformer as it is decoded with: fewer, larger operations on the same weights.

At one to a few rows a pass is made of small operations whose dispatch costs more than their
arithmetic. So norms are folded into the matrices behind them, projections that read the same input
are one matrix, queries, keys and values are rotated together (values by nothing), and residual sums
ride on the matrix products. Results equal ``models.gpt`` up to float32 rounding; weights of other types
are left unfolded, where folding would round twice. Models that ship have their norms folded already
(:func:`fold_norms`), since a fold here would take their weights out of float16 (``models.matrix``).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ciar.models.cache import KVCache
from ciar.models.gpt import GPT, Block, RMSNorm
from ciar.models.matrix import Matrix


class _Layer(NamedTuple):
    attention_norm: Tensor | None  # [dim]; None once folded into wqkv
    wqkv: Matrix  # dim to 3 * dim
    wo: Matrix  # dim to dim
    ffn_norm: Tensor | None  # [dim]; None once folded into w13
    w13: Matrix  # dim to 2 * hidden
    w2: Matrix  # hidden to dim


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
        self.norm: Tensor | None = model.norm.weight.detach()
        self.output: Matrix | None = None  # dim to vocab; a device trunk has its head elsewhere
        if isinstance(model.output, nn.Linear):
            output, self.norm = _folded(model.output.weight.detach(), model.norm, fold)
            self.output = Matrix(output)

    def new_cache(self, text_rows: int, rows: int) -> KVCache:
        """A cache over ``text_rows`` text rows and all image tokens."""
        return KVCache.allocate(
            self.config, text_rows=text_rows, rows=rows, dtype=self.dtype, device=self.device
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
            qkv = layer.wqkv(_normed(x, layer.attention_norm, eps))
            queries, fresh = _rotated(qkv.view(rows, n, 3, heads, -1), table)
            keys, values = cache.write(i, start if cells is None else cells, fresh)
            mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
            x = layer.wo.added(x, mixed.transpose(1, 2).reshape(rows * n, dim))
            both = layer.w13(_normed(x, layer.ffn_norm, eps))
            x = layer.w2.added(x, F.silu(both[:, :hidden]).mul_(both[:, hidden:]))
        return _normed(x, self.norm, eps).view(rows, n, dim)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits, float32 [..., vocab_size], of what :meth:`forward` returned."""
        assert self.output is not None, "a device trunk has no head of its own"
        return self.output(hidden).float()


def _rearranged(block: Block, fold: bool) -> _Layer:
    attention, feed_forward = block.attention, block.feed_forward
    both = torch.cat([feed_forward.w1.weight.detach(), feed_forward.w3.weight.detach()])
    wqkv, attention_norm = _folded(attention.wqkv.weight.detach(), block.attention_norm, fold)
    w13, ffn_norm = _folded(both, block.ffn_norm, fold)
    return _Layer(
        attention_norm,
        Matrix(wqkv),
        Matrix(attention.wo.weight.detach()),
        ffn_norm,
        Matrix(w13),
        Matrix(feed_forward.w2.weight.detach()),
    )


def _folded(weight: Tensor, norm: RMSNorm, fold: bool) -> tuple[Tensor, Tensor | None]:
    """A matrix with the norm before it folded in where that is asked for, and what is left of the norm."""
    scale = norm.weight.detach()
    if bool((scale == 1.0).all()):
        return weight, None
    return (weight * scale, None) if fold else (weight, scale)


@torch.no_grad()
def fold_norms(model: GPT) -> GPT:
    """Folds every norm's weight into the matrices behind it; the model computes the same.

    The last norm stays where the model has no head of its own: others read its output too.

    Returns:
        The model, changed in place.
    """
    for block in model.blocks:
        feed_forward = block.feed_forward
        block.attention.wqkv.weight.mul_(block.attention_norm.weight)
        block.attention_norm.weight.fill_(1.0)
        for linear in (feed_forward.w1, feed_forward.w3):
            linear.weight.mul_(block.ffn_norm.weight)
        block.ffn_norm.weight.fill_(1.0)
    if isinstance(model.output, nn.Linear):
        model.output.weight.mul_(model.norm.weight)
        model.norm.weight.fill_(1.0)
    return model


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
