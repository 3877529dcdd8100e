"""The VQ image tokenizer: pictures to codes and back.

One module family for LlamaGen's VQ-16 and the emoji tokenizer, with the key names of LlamaGen's
public checkpoints. Knows nothing of text or of the AR model.

Source: LlamaGen, arXiv 2406.06525, section 2.1, https://github.com/FoundationVision/LlamaGen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ciar.models import vq_slices


@dataclass(frozen=True)
class VQConfig:
    """Sizes of a VQ tokenizer.

    Attributes:
        image_size: picture edge in pixels.
        codebook_size: number of codes.
        embed_dim: numbers in a code; codes are L2-normalised at use.
        base_channels: channels of the highest level.
        channel_multipliers: per level, from the highest resolution to the lowest; each step halves
            the resolution.
        res_blocks: residual blocks a level in the encoder; the decoder has one more.
        z_channels: channels between the encoder or decoder and the code projection.
        patch: pixels of a patch edge that is folded into channels before the first convolution
            (1 = none, as in VQ-16); a cheap way to high resolution on small machines.
    """

    image_size: int = 256
    codebook_size: int = 16384
    embed_dim: int = 8
    base_channels: int = 128
    channel_multipliers: tuple[int, ...] = (1, 1, 2, 2, 4)
    res_blocks: int = 2
    z_channels: int = 256
    patch: int = 1

    @property
    def downscale(self) -> int:
        """Pixels of a token's edge."""
        return self.patch * 2 ** (len(self.channel_multipliers) - 1)

    @property
    def grid(self) -> int:
        """Tokens of a picture's edge."""
        return self.image_size // self.downscale

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> VQConfig:
        return cls(**{**values, "channel_multipliers": tuple(values["channel_multipliers"])})


def _norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(32, channels, eps=1e-6, affine=True)


class ResBlock(nn.Module):
    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.norm1 = _norm(channels_in)
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, padding=1)
        self.norm2 = _norm(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1)
        if channels_in != channels_out:
            self.nin_shortcut = nn.Conv2d(channels_in, channels_out, 1)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = getattr(self, "nin_shortcut", None)
        if vq_slices.worth_slicing(x.numel()):
            h = vq_slices.norm_conv(self.norm1, self.conv1, x)
            return vq_slices.norm_conv_add(self.norm2, self.conv2, h, x, shortcut)
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(F.silu(self.norm2(h)))
        return (x if shortcut is None else shortcut(x)) + h


class AttnBlock(nn.Module):
    """Single-head self-attention over all positions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = _norm(channels)
        self.q = nn.Conv2d(channels, channels, 1)
        self.k = nn.Conv2d(channels, channels, 1)
        self.v = nn.Conv2d(channels, channels, 1)
        self.proj_out = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)  # [batch, channels, rows, columns]
        q, k, v = (proj(h).flatten(2).transpose(1, 2) for proj in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v)  # [batch, rows * columns, channels]
        return x + self.proj_out(mixed.transpose(1, 2).reshape(x.shape))


class Downsample(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (0, 1, 0, 1)))


class Upsample(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        if vq_slices.worth_slicing(4 * x.numel()):
            return vq_slices.doubled_conv(self.conv, x)
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class Level(nn.Module):
    """One resolution: residual blocks, with attention after each at the lowest resolution."""

    def __init__(self, channels_in: int, channels_out: int, blocks: int, attention: bool) -> None:
        super().__init__()
        widths = [channels_in] + [channels_out] * blocks
        self.res = nn.ModuleList(ResBlock(a, b) for a, b in pairwise(widths))
        self.attn = nn.ModuleList(AttnBlock(channels_out) for _ in range(blocks if attention else 0))

    def steps(self) -> Iterator[nn.Module]:
        """The layers in the order in which they run."""
        for i, block in enumerate(self.res):
            yield block
            if len(self.attn):
                yield self.attn[i]
        for resample in ("downsample", "upsample"):
            if resample in self._modules:
                yield self.get_submodule(resample)


def _run(levels: nn.ModuleList, x: Tensor) -> Tensor:
    """All levels, layer by layer, so that no input outlives the layer that reads it."""
    for level in levels:
        assert isinstance(level, Level)
        for step in level.steps():
            x = step(x)
    return x


def _finish(norm: nn.GroupNorm, conv: nn.Conv2d, x: Tensor) -> Tensor:
    if vq_slices.worth_slicing(x.numel()):
        return vq_slices.norm_conv(norm, conv, x)
    return conv(F.silu(norm(x)))


def _middle(channels: int) -> nn.ModuleList:
    return nn.ModuleList([ResBlock(channels, channels), AttnBlock(channels), ResBlock(channels, channels)])


class Encoder(nn.Module):
    def __init__(self, config: VQConfig) -> None:
        super().__init__()
        self.patch = config.patch
        widths = [config.base_channels * m for m in config.channel_multipliers]
        self.conv_in = nn.Conv2d(3 * config.patch**2, config.base_channels, 3, padding=1)
        self.conv_blocks = nn.ModuleList()
        for i, width in enumerate(widths):
            lowest = i == len(widths) - 1
            level = Level(widths[i - 1] if i else config.base_channels, width, config.res_blocks, lowest)
            if not lowest:
                level.downsample = Downsample(width)
            self.conv_blocks.append(level)
        self.mid = _middle(widths[-1])
        self.norm_out = _norm(widths[-1])
        self.conv_out = nn.Conv2d(widths[-1], config.z_channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = _run(self.conv_blocks, self.conv_in(F.pixel_unshuffle(x, self.patch)))
        for block in self.mid:
            x = block(x)
        return _finish(self.norm_out, self.conv_out, x)


class Decoder(nn.Module):
    def __init__(self, config: VQConfig) -> None:
        super().__init__()
        self.patch = config.patch
        widths = [config.base_channels * m for m in reversed(config.channel_multipliers)]
        self.conv_in = nn.Conv2d(config.z_channels, widths[0], 3, padding=1)
        self.mid = _middle(widths[0])
        self.conv_blocks = nn.ModuleList()
        for i, width in enumerate(widths):
            level = Level(widths[max(i - 1, 0)], width, config.res_blocks + 1, attention=i == 0)
            if i < len(widths) - 1:
                level.upsample = Upsample(width)
            self.conv_blocks.append(level)
        self.norm_out = _norm(widths[-1])
        self.conv_out = nn.Conv2d(widths[-1], 3 * config.patch**2, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        x = self.conv_in(z)
        for block in self.mid:
            x = block(x)
        x = _run(self.conv_blocks, x)
        return F.pixel_shuffle(_finish(self.norm_out, self.conv_out, x), self.patch)


class Codebook(nn.Module):
    """L2-normalised codes. Stored rows need not be unit vectors; every use normalises them."""

    def __init__(self, size: int, dim: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size, dim)
        nn.init.normal_(self.embedding.weight)

    def unit_codes(self) -> Tensor:
        """[codes, dim] with unit rows."""
        return F.normalize(self.embedding.weight, dim=-1)

    def nearest(self, z: Tensor) -> Tensor:
        """Index of the code of largest cosine. ``z`` is [..., dim]; returns [...] int64."""
        return (F.normalize(z, dim=-1) @ self.unit_codes().T).argmax(dim=-1)


class VQModel(nn.Module):
    """Encoder, codebook and decoder."""

    def __init__(self, config: VQConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)
        self.quantize = Codebook(config.codebook_size, config.embed_dim)
        self.quant_conv = nn.Conv2d(config.z_channels, config.embed_dim, 1)
        self.post_quant_conv = nn.Conv2d(config.embed_dim, config.z_channels, 1)

    def latents(self, images: Tensor) -> Tensor:
        """Unit vectors before quantisation.

        Args:
            images: float [batch, 3, height, width] in [-1, 1].

        Returns:
            float [batch, rows, columns, embed_dim].
        """
        z = self.quant_conv(self.encoder(images)).permute(0, 2, 3, 1)
        return F.normalize(z, dim=-1)

    def encode(self, images: Tensor) -> Tensor:
        """Codes of pictures: float [batch, 3, height, width] to int64 [batch, rows * columns]."""
        return self.quantize.nearest(self.latents(images)).flatten(1)

    def decode_latents(self, z: Tensor) -> Tensor:
        """Pictures of quantised latents: [batch, rows, columns, embed_dim] to [batch, 3, h, w]."""
        return self.decoder(self.post_quant_conv(z.permute(0, 3, 1, 2)))

    def decode(self, codes: Tensor) -> Tensor:
        """Pictures of codes.

        Args:
            codes: int64 [batch, rows * columns] in raster order.

        Returns:
            float [batch, 3, height, width], nominally in [-1, 1] and not clamped.
        """
        side = round(codes.shape[1] ** 0.5)
        z = F.embedding(codes, self.quantize.unit_codes())
        return self.decode_latents(z.view(codes.shape[0], side, side, -1))


def to_uint8(images: Tensor) -> Tensor:
    """float [batch, 3, height, width] in [-1, 1] to uint8 [batch, height, width, 3]."""
    return (images * 127.5 + 128.0).clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)


def from_uint8(pixels: Tensor) -> Tensor:
    """uint8 [batch, height, width, 3] to float [batch, 3, height, width] in [-1, 1]."""
    return pixels.permute(0, 3, 1, 2).float() / 127.5 - 1.0
