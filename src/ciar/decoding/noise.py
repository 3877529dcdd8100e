"""A picture's noise as the strategies read it: whole positions at a time, as torch tensors."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ciar.noise import ACCEPT_LANE, FRESH_LANE, RESIDUAL_LANE, gumbel_table, gumbel_torch, uniform


@lru_cache(maxsize=8)
def _table(seed: int, image: int, total: int, vocab_size: int) -> Tensor:
    # Device and cloud of one process share the table; 4 MB at 256 positions and 4,096 codes.
    return torch.from_numpy(gumbel_table(seed, image, range(total), vocab_size))


class PictureNoise:
    """The noise of one picture (DESIGN section 2).

    Args:
        seed: the picture's seed.
        image: index of the picture in its request.
        total: tokens of the picture.
        vocab_size: number of codes.
        device: where the tensors live.
    """

    def __init__(
        self, seed: int, image: int, total: int, vocab_size: int, device: torch.device | str = "cpu"
    ) -> None:
        self.seed, self.image, self.vocab_size = seed, image, vocab_size
        self.table = _table(seed, image, total, vocab_size).to(device)

    def gumbel(self, start: int, count: int) -> Tensor:
        """float32 [count, vocab] Gumbel variates of positions from ``start`` on."""
        return self.table[start : start + count]

    def accept(self, position: int) -> float:
        """Uniform variate in (0, 1) for an acceptance test."""
        return float(uniform(self.seed, self.image, position, 0, ACCEPT_LANE))

    def residual(self, position: int) -> Tensor:
        """float32 [vocab] Gumbel variates for a redraw."""
        tokens = torch.arange(self.vocab_size, device=self.table.device)
        where = torch.full_like(tokens, position)
        return gumbel_torch(self.seed, self.image, where, tokens, RESIDUAL_LANE)

    def fresh(self, start: int, count: int, draw: int) -> Tensor:
        """float64 [count] uniform variates of positions from ``start`` on, new for every ``draw``."""
        where = np.arange(start, start + count)
        values = uniform(self.seed, self.image, where, draw, FRESH_LANE)
        return torch.from_numpy(np.asarray(values)).to(self.table.device)
