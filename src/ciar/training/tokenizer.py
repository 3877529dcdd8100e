"""Trains the VQ tokenizer on pictures.

Codes live on the unit sphere and follow an exponential moving average of the latents assigned to
them; codes that die are re-seeded where the quantisation error is largest, which keeps the whole
codebook in use. The reconstruction loss adds image gradients, which makes edges crisp without an
adversary.

Two terms make the codes easy to predict, without which an encoder spreads what it knows of the whole
picture over the codes of its white background (hundreds of codes for white alone): a *consistency*
loss asks for the same latents when the surroundings are swapped for another picture's, and a *rate*
term lets common codes win ties (entropy-constrained vector quantisation, Chou et al. 1989).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ciar.models.vq import VQConfig, VQModel, from_uint8
from ciar.training.loop import LoopConfig, Task, batches

#: The tokenizer that ships as ``emoji``: 128 px to 16 x 16 codes of 8 px.
EMOJI_VQ = VQConfig(
    image_size=128,
    codebook_size=4096,
    embed_dim=8,
    base_channels=64,
    channel_multipliers=(1, 2),
    res_blocks=1,
    z_channels=128,
    patch=4,
)


@dataclass(frozen=True)
class TokenizerConfig:
    """Settings of the tokenizer stage.

    Attributes:
        batch: pictures a step.
        lr: AdamW's peak learning rate.
        ema: decay of the codebook's moving average.
        revive_below: a code whose moving count is under this share of the mean is re-seeded.
        commitment: weight of the commitment loss.
        gradient: weight of the image-gradient loss.
        consistency: weight of the loss that makes latents independent of far surroundings.
        rate: how much squared distance one nat of code probability is worth.
    """

    batch: int = 32
    lr: float = 1e-3
    ema: float = 0.99
    revive_below: float = 0.03
    commitment: float = 0.25
    gradient: float = 1.0
    consistency: float = 4.0
    rate: float = 0.002
    compile: bool = True


class EmaCodebook(nn.Module):
    """The moving averages behind the codes."""

    sums: Tensor
    counts: Tensor

    def __init__(self, size: int, dim: int) -> None:
        super().__init__()
        self.register_buffer("sums", F.normalize(torch.randn(size, dim), dim=-1))
        self.register_buffer("counts", torch.ones(size))

    @torch.no_grad()
    def update(
        self, latents: Tensor, codes: Tensor, config: TokenizerConfig, generator: torch.Generator
    ) -> Tensor:
        """Moves the averages towards a batch and returns the new unit codes [codes, dim].

        Args:
            latents: [positions, dim] unit vectors.
            codes: [positions] int64, the code that each latent was given.
        """
        counts = torch.bincount(codes, minlength=len(self.counts)).float()
        sums = torch.zeros_like(self.sums).index_add_(0, codes, latents)
        self.counts.mul_(config.ema).add_(counts, alpha=1 - config.ema)
        self.sums.mul_(config.ema).add_(sums, alpha=1 - config.ema)
        mean = self.counts.mean()
        dead = (self.counts < config.revive_below * mean).nonzero().squeeze(1)
        if len(dead):
            error = 1.0 - (latents * F.normalize(self.sums, dim=-1)[codes]).sum(-1)
            # Not more than a few a step, and from distinct latents: common ones (white background)
            # would otherwise be given most of the codes.
            count = min(len(dead), len(latents) // 32)
            pick = torch.multinomial(error.clamp_min(1e-8), count, generator=generator)
            dead = dead[torch.randperm(len(dead), generator=generator)[:count]]
            self.sums[dead] = latents[pick] * mean * 0.3
            self.counts[dead] = mean * 0.3
        return F.normalize(self.sums, dim=-1)


class TokenizerTask(Task):
    """Reconstructs pictures through the codebook."""

    def __init__(
        self,
        images: np.ndarray,
        held: np.ndarray,
        vq: VQConfig,
        config: TokenizerConfig,
        loop: LoopConfig,
    ) -> None:
        torch.manual_seed(loop.seed)
        self.images, self.held, self.config, self.loop = images, held, config, loop
        self.model = VQModel(vq)
        self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.model.quantize.embedding.weight.requires_grad_(False)
        self.ema = EmaCodebook(vq.codebook_size, vq.embed_dim)
        self.modules = {"vq": self.model, "ema": self.ema}
        weights = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizers = [torch.optim.AdamW(weights, lr=config.lr, betas=(0.9, 0.95), weight_decay=1e-4)]
        self._latents = torch.compile(self.model.latents) if config.compile else self.model.latents
        self._decode = (
            torch.compile(self.model.decode_latents) if config.compile else self.model.decode_latents
        )
        self._pending: tuple[Tensor, Tensor] | None = None

    def loss(self, step: int, generator: torch.Generator) -> tuple[Tensor, dict[str, Any]]:
        index = batches(len(self.images), self.config.batch, self.loop.seed, step).numpy()
        x = augment(from_uint8(torch.from_numpy(self.images[index])), generator)
        x = x.contiguous(memory_format=torch.channels_last)
        z = self._latents(x)
        consistency = self._consistency(x, z, generator)
        with torch.no_grad():
            codes = assign(self.model, self.ema.counts, z, self.config.rate)
            quantised = F.embedding(codes, self.model.quantize.unit_codes())
        commitment = F.mse_loss(z, quantised) * z.shape[-1]
        y = self._decode(z + (quantised - z).detach())
        l1, mse, edges = reconstruction_losses(y, x)
        self._pending = (z.detach().flatten(0, 2), codes.flatten())
        loss = l1 + 2.0 * mse + self.config.gradient * edges + self.config.commitment * commitment
        loss = loss + self.config.consistency * consistency
        figures = {"l1": l1.detach(), "psnr": psnr(y.detach(), x), "commitment": commitment.detach()}
        return loss, figures | {"consistency": consistency.detach(), "perplexity": perplexity(codes)}

    def _consistency(self, x: Tensor, z: Tensor, generator: torch.Generator) -> Tensor:
        """How much latents change when a rectangle of the picture is set into another picture.

        Args:
            x: [batch, 3, height, width].
            z: [batch, rows, columns, dim], its latents.
        """
        grid, pixels = z.shape[1], self.model.config.downscale
        inside = torch.zeros(grid, grid, dtype=torch.bool)
        height, width = torch.randint(grid // 4, 3 * grid // 4 + 1, (2,), generator=generator).tolist()
        top = int(torch.randint(0, grid - height + 1, (1,), generator=generator))
        left = int(torch.randint(0, grid - width + 1, (1,), generator=generator))
        inside[top : top + height, left : left + width] = True
        other = torch.arange(len(x)).roll(1)
        big = inside.repeat_interleave(pixels, 0).repeat_interleave(pixels, 1)
        mixed = torch.where(big, x, x[other]).contiguous(memory_format=torch.channels_last)
        target = torch.where(inside[:, :, None], z, z[other])
        # Tokens at the seam see both pictures, so nothing is asked of them.
        seam = F.max_pool2d(inside[None, None].float(), 3, 1, 1) - (
            1.0 - F.max_pool2d(1.0 - inside[None, None].float(), 3, 1, 1)
        )
        weight = (1.0 - seam[0, 0])[:, :, None]
        change = (self._latents(mixed) - target).square() * weight
        return change.sum() / (weight.sum() * len(x)).clamp_min(1.0)

    def after_step(self, step: int, generator: torch.Generator) -> None:
        assert self._pending is not None
        codes = self.ema.update(*self._pending, self.config, generator)
        self.model.quantize.embedding.weight.copy_(codes)

    def evaluate(self) -> dict[str, float]:
        reconstructed, codes = reconstruct(self.model, self.held, self.ema.counts, self.config.rate)
        used = torch.bincount(codes.flatten(), minlength=self.model.config.codebook_size) > 0
        return {
            "psnr": float(psnr(reconstructed, from_uint8(torch.from_numpy(self.held)))),
            "codes_used": float(used.float().mean()),
            "perplexity": float(perplexity(codes)),
        }


def assign(model: VQModel, counts: Tensor, z: Tensor, rate: float) -> Tensor:
    """Codes of latents, common codes winning ties.

    ``argmin ||z - c||^2 - rate * log p(c)``; nearest code when ``rate`` is 0.

    Args:
        counts: float [codes] how often each code is used.
        z: [..., dim] unit vectors.

    Returns:
        int64 [...].
    """
    log_prior = (counts + 1e-3).log() - (counts + 1e-3).sum().log()
    return (z @ model.quantize.unit_codes().T + 0.5 * rate * log_prior).argmax(dim=-1)


def perplexity(codes: Tensor) -> Tensor:
    """Exponential of the entropy of the codes' frequencies: how many codes are in even use."""
    p = torch.bincount(codes.flatten()).float()
    p = p[p > 0] / p.sum()
    return (-(p * p.log()).sum()).exp()


@torch.no_grad()
def reconstruct(
    model: VQModel, pictures: np.ndarray, counts: Tensor, rate: float, batch: int = 64
) -> tuple[Tensor, Tensor]:
    """Pictures through the codebook: float [n, 3, h, w] in [-1, 1] and codes int64 [n, tokens]."""
    out: list[Tensor] = []
    all_codes: list[Tensor] = []
    for start in range(0, len(pictures), batch):
        images = from_uint8(torch.from_numpy(pictures[start : start + batch]))
        codes = assign(model, counts, model.latents(images), rate).flatten(1)
        all_codes.append(codes)
        out.append(model.decode(codes).clamp(-1, 1))
    return torch.cat(out), torch.cat(all_codes)


def psnr(output: Tensor, target: Tensor) -> Tensor:
    """Mean over pictures of the peak signal-to-noise ratio in dB; both [n, 3, h, w] in [-1, 1]."""
    error = (output - target).square().mean(dim=(1, 2, 3)).clamp_min(1e-6)
    return (10.0 * torch.log10(4.0 / error)).mean()


def reconstruction_losses(y: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """L1, squared error, and L1 of the horizontal and vertical image gradients."""
    error = y - x
    across = (error[..., 1:] - error[..., :-1]).abs().mean()
    down = (error[..., 1:, :] - error[..., :-1, :]).abs().mean()
    return error.abs().mean(), error.square().mean(), across + down


def augment(images: Tensor, generator: torch.Generator, shift: int = 8) -> Tensor:
    """Flips half of the batch and shifts it by up to ``shift`` pixels over white."""
    flip = torch.rand(len(images), generator=generator) < 0.5
    images = torch.where(flip[:, None, None, None], images.flip(-1), images)
    padded = F.pad(images, (shift,) * 4, value=1.0)
    top, left = torch.randint(0, 2 * shift + 1, (2,), generator=generator).tolist()
    height, width = images.shape[-2:]
    return padded[..., top : top + height, left : left + width]


def tokenizer_home(work: Path) -> Path:
    """Folder of the tokenizer of a run: with its codebook refilled, where that stage was run."""
    refilled = work / "codebook"
    return refilled if (refilled / "vq.safetensors").is_file() else work / "tokenizer"


def load_pictures(data: Path) -> np.ndarray:
    """[pictures, height, width, 3] uint8, memory-mapped."""
    return np.load(data / "images.npy", mmap_mode="r")
