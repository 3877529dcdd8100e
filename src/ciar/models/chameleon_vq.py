"""The decoder half of Chameleon's VQGAN: codes to pictures, always float32.

The blocks are those of VQ-16 (``models.vq``). What differs: codes are used as they are stored, without
normalisation; attention is in the middle alone; and levels are numbered from the highest resolution,
so they run backwards. The encoder is not built: nothing here makes codes of pictures.

Sources: Chameleon, arXiv 2405.09818; Make-A-Scene, arXiv 2203.13131; key names of
https://github.com/facebookresearch/chameleon.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ciar.models import vq_slices
from ciar.models.vq import AttnBlock, ResBlock, Upsample, VQConfig


class _Middle(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.block_1 = ResBlock(channels, channels)
        self.attn_1 = AttnBlock(channels)
        self.block_2 = ResBlock(channels, channels)


class _Level(nn.Module):
    def __init__(self, channels_in: int, channels_out: int, blocks: int, *, double: bool) -> None:
        super().__init__()
        widths = [channels_in] + [channels_out] * blocks
        self.block = nn.ModuleList(ResBlock(a, b) for a, b in pairwise(widths))
        if double:
            self.upsample = Upsample(channels_out)


class ChameleonDecoder(nn.Module):
    """Latents [batch, z_channels, rows, columns] to pictures [batch, 3, height, width]."""

    def __init__(self, config: VQConfig) -> None:
        super().__init__()
        widths = [config.base_channels * m for m in config.channel_multipliers]
        self.conv_in = nn.Conv2d(config.z_channels, widths[-1], 3, padding=1)
        self.mid = _Middle(widths[-1])
        self.up = nn.ModuleList(
            _Level(widths[min(k + 1, len(widths) - 1)], width, config.res_blocks + 1, double=k > 0)
            for k, width in enumerate(widths)
        )
        self.norm_out = nn.GroupNorm(32, widths[0], eps=1e-6)
        self.conv_out = nn.Conv2d(widths[0], 3, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        x = self.conv_in(z)
        steps: list[nn.Module] = [self.mid.block_1, self.mid.attn_1, self.mid.block_2]
        for level in reversed(self.up):
            assert isinstance(level, _Level)
            steps += level.block
            if "upsample" in level._modules:
                steps.append(level.upsample)
        for step in steps:
            x = step(x)
        if vq_slices.worth_slicing(x.numel()):
            return vq_slices.norm_conv(self.norm_out, self.conv_out, x)
        return self.conv_out(F.silu(self.norm_out(x)))


class _Codes(nn.Module):
    def __init__(self, size: int, dim: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size, dim)


class ChameleonVQ(nn.Module):
    """Codebook and decoder.

    Args:
        config: sizes; ``patch`` is not used.
    """

    def __init__(self, config: VQConfig) -> None:
        super().__init__()
        self.config = config
        self.decoder = ChameleonDecoder(config)
        self.quantize = _Codes(config.codebook_size, config.embed_dim)
        self.post_quant_conv = nn.Conv2d(config.embed_dim, config.z_channels, 1)

    def decode(self, codes: Tensor) -> Tensor:
        """Pictures of codes.

        Args:
            codes: int64 [batch, rows * columns] in raster order.

        Returns:
            float32 [batch, 3, height, width], nominally in [-1, 1] and not clamped.
        """
        side = round(codes.shape[1] ** 0.5)
        z = self.quantize.embedding(codes).view(codes.shape[0], side, side, -1).permute(0, 3, 1, 2)
        return self.decoder(self.post_quant_conv(z))


def to_pixels(images: Tensor) -> Tensor:
    """float [batch, 3, height, width] to uint8 [batch, height, width, 3], as Chameleon's own code does."""
    return ((images.clamp(-1.0, 1.0) + 1.0) / 2.0 * 255.0).to(torch.uint8).permute(0, 2, 3, 1)
