"""The AR transformer of the LlamaGen family; also the emoji model and every device trunk.

This is the model as it is trained and stored: whole sequences, no cache, the key names of LlamaGen's
public checkpoints. ``models.inference`` decodes with the same weights. Knows nothing of guidance,
sampling or sessions.

Source: LlamaGen, arXiv 2406.06525, section 2.2, https://github.com/FoundationVision/LlamaGen.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TextRotary = Literal["zero", "identity"]


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a text-to-image AR transformer.

    Attributes:
        dim: width of the residual stream.
        n_layer: transformer blocks.
        n_head: attention heads; ``dim / n_head`` is a multiple of 4.
        vocab_size: image codes.
        grid: tokens of a picture's edge; a picture has ``grid ** 2`` tokens.
        text_len: text slots before the first image token.
        caption_dim: width of the caption features.
        text_rotary: what the rotary table holds at text positions. ``zero`` (LlamaGen) turns their
            queries and keys into zeros, so text is averaged; ``identity`` leaves them as they are,
            so text is attended to by content.
        multiple_of: the feed-forward width is rounded up to a multiple of this.
        ffn_dim_multiplier: widens the feed-forward, before it is rounded.
    """

    dim: int = 1280
    n_layer: int = 36
    n_head: int = 20
    vocab_size: int = 16384
    grid: int = 16
    text_len: int = 120
    caption_dim: int = 2048
    text_rotary: TextRotary = "zero"
    multiple_of: int = 256
    ffn_dim_multiplier: float | None = None
    rope_base: float = 10000.0
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_head

    @property
    def ffn_hidden(self) -> int:
        hidden = int(2 * (4 * self.dim) / 3)
        if self.ffn_dim_multiplier is not None:
            hidden = int(self.ffn_dim_multiplier * hidden)
        return self.multiple_of * -(-hidden // self.multiple_of)

    @property
    def tokens(self) -> int:
        """Image tokens of a picture."""
        return self.grid**2

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> GPTConfig:
        return cls(**values)


def rotary_table(config: GPTConfig) -> Tensor:
    """The 2-D rotary table: float32 [text_len + tokens, head_dim / 2, 2], last axis (cos, sin).

    The first half of the pairs turns with the row, the second half with the column. Image position
    0 is (row 0, column 0); it is not shifted by the text.
    """
    half = config.head_dim // 2
    # Always real numbers: they are few, and arithmetic without memory loads torch's compiler.
    exponent = torch.arange(0, half, 2, device="cpu")[: half // 2].float() / half
    frequencies = 1.0 / (config.rope_base**exponent)  # [head_dim / 4]
    angle = torch.arange(config.grid, device="cpu").float()[:, None] * frequencies  # [grid, head_dim / 4]
    rows = angle[:, None, :].expand(config.grid, config.grid, -1)
    columns = angle[None, :, :].expand(config.grid, config.grid, -1)
    angles = torch.cat([rows, columns], dim=-1).flatten(0, 1)  # [tokens, head_dim / 2]
    image = torch.stack([angles.cos(), angles.sin()], dim=-1)
    text = torch.zeros(config.text_len, half, 2, device="cpu")
    if config.text_rotary == "identity":
        text[..., 0] = 1.0
    return torch.cat([text, image])


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotates interleaved pairs in float32.

    Args:
        x: [rows, heads, n, head_dim].
        table: float32 [n, head_dim / 2, 2], or [rows, 1, n, head_dim / 2, 2] where rows differ.
    """
    pairs = x.float().unflatten(-1, (-1, 2))  # [rows, heads, n, head_dim / 2, 2]
    even, odd, cos, sin = pairs[..., 0], pairs[..., 1], table[..., 0], table[..., 1]
    turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1)
    return turned.flatten(-2).type_as(x)


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return wide.type_as(x) * self.weight


class Attention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.wqkv = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)

    def project(self, x: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values; each [rows, heads, n, head_dim]."""
        q, k, v = self.wqkv(x).unflatten(-1, (3, self.n_head, -1)).permute(2, 0, 3, 1, 4)
        return rotate(q, table), rotate(k, table), v


class FeedForward(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.ffn_hidden, bias=False)
        self.w3 = nn.Linear(config.dim, config.ffn_hidden, bias=False)
        self.w2 = nn.Linear(config.ffn_hidden, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.feed_forward = FeedForward(config)
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)

    def finish(self, x: Tensor, mixed: Tensor) -> Tensor:
        """Everything after attention. ``mixed`` is [rows, heads, n, head_dim]."""
        x = x + self.attention.wo(mixed.transpose(1, 2).flatten(2))
        return x + self.feed_forward(self.ffn_norm(x))


class CaptionMLP(nn.Module):
    def __init__(self, caption_dim: int, dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(caption_dim, dim, bias=False)
        self.fc2 = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class CaptionEmbedder(nn.Module):
    """Caption features to text rows. The null caption lives in feature space and is never trained."""

    uncond_embedding: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.cap_proj = CaptionMLP(config.caption_dim, config.dim)
        null = torch.empty(config.text_len, config.caption_dim)
        nn.init.normal_(null, std=config.caption_dim**-0.5)
        self.register_buffer("uncond_embedding", null)


class GPT(nn.Module):
    """LlamaGen's text-to-image transformer."""

    table: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.cls_embedding = CaptionEmbedder(config)
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.register_buffer("table", rotary_table(config), persistent=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def fill_buffers(self) -> None:
        """Computes what no file holds, after the model was built without memory."""
        self.register_buffer("table", rotary_table(self.config), persistent=False)

    @property
    def blocks(self) -> list[Block]:
        """The transformer blocks, typed."""
        return [layer for layer in self.layers if isinstance(layer, Block)]

    def embed_text(self, features: Tensor) -> Tensor:
        """Caption features [rows, text, caption_dim] to text rows [rows, text, dim]."""
        return self.cls_embedding.cap_proj(features)

    def embed_tokens(self, tokens: Tensor) -> Tensor:
        """Codes [rows, n] to [rows, n, dim]."""
        return self.tok_embeddings(tokens)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits, float32 [..., vocab_size], of the output of :meth:`train_hidden`."""
        return self.output(hidden).float()

    def train_hidden(self, features: Tensor, text_mask: Tensor, tokens: Tensor) -> Tensor:
        """Teacher-forced pass over whole sequences, without a cache.

        Args:
            features: [rows, text, caption_dim], left-padded; ``text`` may be less than ``text_len``
                as long as the rows cut off on the left are padding in the whole batch.
            text_mask: bool [rows, text].
            tokens: int64 [rows, n] image tokens from position 0 on.

        Returns:
            [rows, n + 1, dim] normalised hidden states; entry i predicts image token i. (Feed the
            first ``tokens - 1`` tokens to get one entry a token.)
        """
        text = features.shape[1]
        return self.hidden_of(
            torch.cat([self.embed_text(features), self.embed_tokens(tokens)], dim=1), text_mask
        )[:, text - 1 :]

    def hidden_of(self, x: Tensor, text_mask: Tensor) -> Tensor:
        """Normalised hidden states [rows, text + n, dim] of embedded sequences, without a cache."""
        return self.norm(self.residual_of(x, text_mask))

    def residual_of(self, x: Tensor, text_mask: Tensor, layers: int | None = None) -> Tensor:
        """The residual stream [rows, text + n, dim] after the first blocks (default: all of them)."""
        text, length = text_mask.shape[1], x.shape[1]
        first = self.config.text_len - text
        table = self.table[first : first + length]
        mask = sequence_mask(text_mask, length)
        for block in self.blocks[:layers]:
            q, k, v = block.attention.project(block.attention_norm(x), table)
            x = block.finish(x, F.scaled_dot_product_attention(q, k, v, attn_mask=mask))
        return x


def sequence_mask(text_mask: Tensor, length: int) -> Tensor:
    """LlamaGen's rule, bool [rows, 1, length, length].

    Attention is allowed to what is not later and no padding; and always to oneself, so that a row
    of padding stays finite.
    """
    text = text_mask.shape[1]
    valid = F.pad(text_mask, (0, length - text), value=True)  # [rows, length]
    causal = torch.ones(length, length, dtype=torch.bool, device=text_mask.device).tril()
    self_only = torch.eye(length, dtype=torch.bool, device=text_mask.device)
    return ((causal & valid[:, None, :]) | self_only).unsqueeze(1)
