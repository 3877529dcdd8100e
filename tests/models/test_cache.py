"""The key-value cache: cells by position, rollback by position, rows that differ."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ciar.models.cache import KVCache


def cache_of(rows: int = 2, first: int = 3, end: int = 11) -> KVCache:
    return KVCache(layers=2, rows=rows, heads=2, head_dim=4, first=first, end=end)


def block(value: float, rows: int = 2, n: int = 2) -> Tensor:
    return torch.full((rows, 2, n, 4), value)


def test_a_block_lands_at_its_position() -> None:
    cache = cache_of()
    keys, values = cache.write(1, 3, block(1.0), block(2.0))
    assert keys.shape == values.shape == (2, 2, 2, 4)
    keys, values = cache.write(1, 5, block(3.0, n=3), block(4.0, n=3))
    assert keys[0, 0, :, 0].tolist() == [1.0, 1.0, 3.0, 3.0, 3.0]
    assert values[1, 1, :, 3].tolist() == [2.0, 2.0, 4.0, 4.0, 4.0]
    assert (cache.keys[0] == 0).all()


def test_rollback_is_writing_again_from_an_earlier_position() -> None:
    cache = cache_of()
    cache.write(0, 3, block(1.0, n=6), block(1.0, n=6))
    keys, _ = cache.write(0, 5, block(2.0, n=1), block(2.0, n=1))
    assert keys[0, 0, :, 0].tolist() == [1.0, 1.0, 2.0]


def test_rows_write_at_their_own_positions() -> None:
    cache = cache_of()
    cache.write(0, 3, block(1.0, n=5), block(1.0, n=5))
    keys, values = cache.write(0, torch.tensor([4, 7]), block(2.0), block(3.0))
    assert keys[0, 0, :, 0].tolist() == [1.0, 2.0, 2.0, 1.0, 1.0, 0.0]
    assert keys[1, 0, :, 0].tolist() == [1.0, 1.0, 1.0, 1.0, 2.0, 2.0]
    assert values[1, 1, 4:, 0].tolist() == [3.0, 3.0]


def test_bytes_are_counted() -> None:
    assert cache_of().nbytes == 2 * (2 * 2 * 2 * 8 * 4) * 4


def test_no_cell_past_the_end() -> None:
    with pytest.raises(RuntimeError):
        cache_of().write(0, 10, block(1.0), block(1.0))
