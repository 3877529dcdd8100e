"""The static key-value cache: allocated once, addressed by position, rolled back by position."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ciar.models.gpt import GPTConfig


@dataclass(frozen=True)
class KVCache:
    """Keys and values of every layer at fixed cells.

    Rolling back is writing again from an earlier position; cells after the last write are never
    read, so nothing needs to be cleared.

    Attributes:
        cells: [layers, 2, rows, heads, cells, head_dim]; keys (rotated), then values.
        first: position of the first cell. Left padding before it is not stored at all, since
            nothing attends to padding.
        chosen: int64 [n], the rows that a block is for; None is all of them.
    """

    cells: Tensor
    first: int
    chosen: Tensor | None = None

    @classmethod
    def allocate(
        cls,
        config: GPTConfig,
        *,
        text_rows: int,
        rows: int,
        dtype: torch.dtype,
        device: torch.device | str,
        spare: int = 0,
    ) -> KVCache:
        """Cells for ``text_rows`` text rows, all image tokens, and ``spare`` cells for padding."""
        length = text_rows + config.tokens + spare
        shape = (config.n_layer, 2, rows, config.n_head, length, config.head_dim)
        return cls(torch.zeros(shape, dtype=dtype, device=device), config.text_len - text_rows)

    @property
    def rows(self) -> int:
        """Rows that a block has."""
        return self.cells.shape[2] if self.chosen is None else len(self.chosen)

    @property
    def nbytes(self) -> int:
        """Bytes that the cache holds."""
        return self.cells.numel() * self.cells.element_size()

    def choose(self, rows: Tensor) -> KVCache:
        """The same cells, for blocks of these rows alone (distinct, int64 [n])."""
        if len(rows) == self.cells.shape[2]:
            return KVCache(self.cells, self.first)
        return KVCache(self.cells, self.first, rows)

    def with_room(self, end: int) -> KVCache:
        """The same keys with cells up to position ``end`` at least; itself where there are so many."""
        missing = end - self.first - self.cells.shape[4]
        if missing <= 0:
            return self
        # In large steps: trees reach one cell further with every token.
        return KVCache(F.pad(self.cells, (0, 0, 0, -(-missing // 64) * 64)), self.first, self.chosen)

    def move(self, sources: Tensor, start: int) -> None:
        """Copies cells to consecutive ones, in all layers of the chosen rows.

        Args:
            sources: int64 [n] positions of the cells.
            start: position of the first cell that is overwritten.
        """
        low, where = start - self.first, sources - self.first
        if self.chosen is None:
            self.cells[:, :, :, :, low : low + len(where)] = self.cells[:, :, :, :, where]
        else:
            moved = self.cells[:, :, self.chosen][:, :, :, :, where]
            self.cells[:, :, self.chosen, :, low : low + len(where)] = moved

    def write(self, layer: int, start: int | Tensor, fresh: Tensor) -> tuple[Tensor, Tensor]:
        """Stores a block and returns all keys and values up to its end.

        Args:
            layer: block of the transformer.
            start: position of the first stored row, the same for all rows or int64 [rows]; never
                past what was stored before, or a gap would be attended to. Or int64 [rows, n], a
                position for each, where the caller's mask hides the gaps.
            fresh: [2, rows, heads, n, head_dim], rotated keys and then values.

        Returns:
            Keys and values [rows, heads, cells, head_dim], up to the last cell written; views where
            all rows start together.
        """
        cells, n = self.cells[layer], fresh.shape[3]  # cells [2, rows, heads, cells, head_dim]
        if isinstance(start, int):
            low = start - self.first
            cells[:, :, :, low : low + n] = fresh
            keys, values = cells[:, :, :, : low + n].unbind()
            return keys, values
        cells_of = start if start.ndim == 2 else start[:, None] + torch.arange(n, device=fresh.device)
        where = cells_of - self.first  # [rows, n]
        high = int(where.max()) + 1
        rows = torch.arange(len(start), device=fresh.device) if self.chosen is None else self.chosen
        for stored, block in zip(cells.unbind(), fresh.unbind(), strict=True):
            stored[rows[:, None], :, where] = block.transpose(1, 2)
        if self.chosen is None:
            keys, values = cells[:, :, :, :high].unbind()
        else:
            keys, values = cells[:, self.chosen, :, :high].unbind()
        return keys, values
