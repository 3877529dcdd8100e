"""The tokenizer stage: its losses, its moving codebook, and that a tiny one learns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ciar.models.vq import VQConfig, from_uint8
from ciar.training.loop import LoopConfig, train
from ciar.training.tokenizer import (
    EMOJI_VQ,
    EmaCodebook,
    TokenizerConfig,
    TokenizerTask,
    assign,
    augment,
    load_pictures,
    perplexity,
    psnr,
    reconstruction_losses,
)

TINY = VQConfig(16, 32, 8, 32, (1, 1), 1, 32, patch=4)


def pictures(count: int, seed: int = 0) -> np.ndarray:
    """White squares of 16 px with one coloured rectangle."""
    generator = np.random.default_rng(seed)
    out = np.full((count, 16, 16, 3), 255, dtype=np.uint8)
    for picture in out:
        top, left = generator.integers(0, 8, 2)
        picture[top : top + 8, left : left + 8] = generator.choice([30, 128, 220], 3)
    return out


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_the_emoji_tokenizer_has_256_tokens() -> None:
    assert (EMOJI_VQ.grid, EMOJI_VQ.downscale, EMOJI_VQ.codebook_size) == (16, 8, 4096)


def test_psnr() -> None:
    x = torch.zeros(2, 3, 4, 4)
    # Off by 0.2 of a range of 2: 20 dB; and by 0.02: 40 dB; the mean of both.
    y = torch.stack([torch.full((3, 4, 4), 0.2), torch.full((3, 4, 4), 0.02)])
    assert float(psnr(y, x)) == pytest.approx(30.0, abs=1e-4)
    assert float(psnr(x, x)) == pytest.approx(10 * np.log10(4e6), abs=1e-3)


def test_edge_loss_sees_blur_and_no_shift_of_brightness() -> None:
    x = torch.zeros(1, 1, 4, 4)
    x[..., 2:] = 1.0
    assert [float(v) for v in reconstruction_losses(x + 0.5, x)] == [0.5, 0.25, 0.0]
    blurred = x.clone()
    blurred[..., 1], blurred[..., 2] = 0.25, 0.75
    l1, _, edges = reconstruction_losses(blurred, x)
    # The edge of height 1 became three of 0.25, 0.5, 0.25: errors of 0.25, 0.5, 0.25 in 3 differences.
    assert float(l1) == pytest.approx(0.125)
    assert float(edges) == pytest.approx(1.0 / 3.0)


def test_augmentation_shifts_over_white_and_flips() -> None:
    x = from_uint8(torch.from_numpy(pictures(32)))
    out = augment(x, generator(1), shift=3)
    assert out.shape == x.shape
    assert torch.equal(out, augment(x, generator(1), shift=3))
    flipped = torch.rand(32, generator=generator(1)) < 0.5
    assert 4 < int(flipped.sum()) < 28
    for row in range(32):
        source = x[row].flip(-1) if flipped[row] else x[row]
        padded = F.pad(source[None], (3,) * 4, value=1.0)[0]
        windows = [
            torch.equal(padded[:, top : top + 16, left : left + 16], out[row])
            for top in range(7)
            for left in range(7)
        ]
        assert any(windows)


def test_assignment_is_the_nearest_code_and_common_codes_win_ties() -> None:
    torch.manual_seed(0)
    task = TokenizerTask(
        pictures(4), pictures(4), TINY, TokenizerConfig(batch=2, compile=False), LoopConfig()
    )
    z = F.normalize(torch.randn(2, 3, 8, generator=generator()), dim=-1)
    counts = torch.ones(32)
    codes = task.model.quantize.unit_codes()
    distance = (z[..., None, :] - codes).square().sum(-1)
    assert torch.equal(assign(task.model, counts, z, 0.0), distance.argmin(-1))
    assert torch.equal(assign(task.model, counts, z, 0.5), distance.argmin(-1))
    counts[7] = 1e6
    rate = 0.1
    log_prior = (counts + 1e-3).log() - (counts + 1e-3).sum().log()
    weighed = assign(task.model, counts, z, rate)
    assert torch.equal(weighed, (distance - rate * log_prior).argmin(-1))
    assert (assign(task.model, counts, z, 10.0) == 7).all()


def test_perplexity_counts_codes_in_even_use() -> None:
    assert float(perplexity(torch.tensor([3, 3, 3]))) == pytest.approx(1.0)
    assert float(perplexity(torch.arange(10).repeat(4))) == pytest.approx(10.0, rel=1e-4)
    assert 1.0 < float(perplexity(torch.tensor([0] * 9 + [1]))) < 1.5


def clusters(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Unit vectors around four centres, and which centre each belongs to."""
    which = torch.randint(4, (count,), generator=generator(seed))
    noise = 0.05 * torch.randn(count, 8, generator=generator(seed + 1))
    return F.normalize(torch.eye(8)[which] + noise, dim=-1), which


def test_codes_move_to_the_mean_of_their_latents() -> None:
    torch.manual_seed(0)
    ema = EmaCodebook(4, 8)
    config = TokenizerConfig(ema=0.9, revive_below=0.0)
    codes = Tensor()
    for step in range(80):
        latents, which = clusters(64, 2 * step)
        codes = ema.update(latents, which, config, generator(step))
    torch.testing.assert_close(codes.norm(dim=-1), torch.ones(4))
    assert (codes * torch.eye(8)[:4]).sum(-1).min() > 0.99


def test_dead_codes_are_seeded_again_and_counted_ones_stay() -> None:
    torch.manual_seed(0)
    ema = EmaCodebook(16, 8)
    config = TokenizerConfig(ema=0.9)
    codes = F.normalize(ema.sums, dim=-1)
    for step in range(300):
        latents, _ = clusters(256, 2 * step)
        chosen = (latents @ codes.T).argmax(-1)
        codes = ema.update(latents, chosen, config, generator(step))
    assert not codes.isnan().any()
    # Every code now lies at one of the four clusters, where there is something to say.
    assert (codes @ torch.eye(8)[:4].T).amax(-1).min() > 0.9
    latents, _ = clusters(2000, 9999)
    assert len((latents @ codes.T).argmax(-1).unique()) >= 12


def test_a_tiny_tokenizer_learns(tmp_path: Path) -> None:
    loop = LoopConfig(steps=30, warmup=3, log_every=30, eval_every=30)
    config = TokenizerConfig(batch=8, lr=3e-3, compile=False)
    task = TokenizerTask(pictures(64), pictures(16, seed=1), TINY, config, loop)
    before = task.evaluate()
    figures = train(task, loop, tmp_path)
    assert figures["held_psnr"] > before["psnr"] + 4.0
    assert 0 < figures["held_codes_used"] <= 1
    weight = task.model.quantize.embedding.weight
    assert not weight.requires_grad
    torch.testing.assert_close(weight.norm(dim=-1), torch.ones(32))


def test_pictures_are_mapped_not_read(tmp_path: Path) -> None:
    np.save(tmp_path / "images.npy", pictures(3))
    loaded = load_pictures(tmp_path)
    assert isinstance(loaded, np.memmap)
    assert loaded.shape == (3, 16, 16, 3)
