"""The static key-value cache: allocated once, addressed by position, rolled back by position."""

from __future__ import annotations

import torch
from torch import Tensor


class KVCache:
    """Keys and values of every layer at fixed cells.

    Rolling back is writing again from an earlier position; cells after the last write are never
    read, so nothing needs to be cleared.

    Attributes:
        first: position of the first cell. Left padding before it is not stored at all, since
            nothing attends to padding.
        end: one past the last position that there is a cell for.
    """

    def __init__(
        self,
        *,
        layers: int,
        rows: int,
        heads: int,
        head_dim: int,
        first: int,
        end: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (layers, rows, heads, end - first, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.first = first
        self.end = end

    @property
    def nbytes(self) -> int:
        """Bytes that the cache holds."""
        return 2 * self.keys.numel() * self.keys.element_size()

    def write(self, layer: int, start: int | Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stores a block and returns all keys and values up to its end.

        Args:
            layer: block of the transformer.
            start: position of the first stored row, the same for all rows or int64 [rows]; never
                past what was stored before, or a gap would be attended to.
            k: [rows, heads, n, head_dim], rotated.
            v: [rows, heads, n, head_dim].

        Returns:
            Views [rows, heads, cells, head_dim] of keys and values, up to the last cell written.
        """
        keys, values = self.keys[layer], self.values[layer]
        n = k.shape[2]
        if isinstance(start, int):
            low = start - self.first
            high = low + n
            keys[:, :, low:high] = k
            values[:, :, low:high] = v
        else:
            cells = start[:, None] - self.first + torch.arange(n, device=k.device)  # [rows, n]
            high = int(cells.max()) + 1
            rows = torch.arange(k.shape[0], device=k.device)[:, None]
            keys[rows, :, cells] = k.transpose(1, 2)
            values[rows, :, cells] = v.transpose(1, 2)
        return keys[:, :, :high], values[:, :, :high]
