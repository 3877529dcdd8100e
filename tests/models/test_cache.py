"""The key-value cache: cells by position, rollback by position, rows that differ."""

from __future__ import annotations

import pytest
import torch
from tiny import TINY_GPT
from torch import Tensor

from ciar.models.cache import KVCache


def cache_of(rows: int = 2, spare: int = 0) -> KVCache:
    """Two layers, two heads of 16, cells for three text rows (positions 5, 6, 7) and 16 tokens."""
    return KVCache.allocate(TINY_GPT, text_rows=3, rows=rows, dtype=torch.float32, device="cpu", spare=spare)


def block(key: float, value: float, rows: int = 2, n: int = 2) -> Tensor:
    """Keys and values of one block, [2, rows, 2, n, 16]."""
    return torch.tensor([key, value]).view(2, 1, 1, 1, 1).expand(2, rows, 2, n, 16)


def test_size() -> None:
    cache = cache_of(spare=5)
    assert cache.cells.shape == (2, 2, 2, 2, 3 + 16 + 5, 16)
    assert (cache.first, cache.rows) == (5, 2)
    assert cache.nbytes == cache.cells.numel() * 4


def test_a_block_lands_at_its_position() -> None:
    cache = cache_of()
    keys, values = cache.write(1, 5, block(1.0, 2.0))
    assert keys.shape == values.shape == (2, 2, 2, 16)
    keys, values = cache.write(1, 7, block(3.0, 4.0, n=3))
    assert keys[0, 0, :, 0].tolist() == [1.0, 1.0, 3.0, 3.0, 3.0]
    assert values[1, 1, :, 3].tolist() == [2.0, 2.0, 4.0, 4.0, 4.0]
    assert (cache.cells[0] == 0).all()


def test_rollback_is_writing_again_from_an_earlier_position() -> None:
    cache = cache_of()
    cache.write(0, 5, block(1.0, 1.0, n=6))
    keys, _ = cache.write(0, 7, block(2.0, 2.0, n=1))
    assert keys[0, 0, :, 0].tolist() == [1.0, 1.0, 2.0]


def test_rows_write_at_their_own_positions() -> None:
    cache = cache_of()
    cache.write(0, 5, block(1.0, 1.0, n=5))
    keys, values = cache.write(0, torch.tensor([6, 9]), block(2.0, 3.0))
    assert keys[0, 0, :, 0].tolist() == [1.0, 2.0, 2.0, 1.0, 1.0, 0.0]
    assert keys[1, 0, :, 0].tolist() == [1.0, 1.0, 1.0, 1.0, 2.0, 2.0]
    assert values[1, 1, 4:, 0].tolist() == [3.0, 3.0]


def test_some_rows_alone() -> None:
    cache = cache_of(rows=3)
    cache.write(0, 5, block(1.0, 1.0, rows=3))
    chosen = cache.choose(torch.tensor([0, 2]))
    assert chosen.rows == 2
    keys, _ = chosen.write(0, torch.tensor([6, 7]), block(2.0, 2.0, n=1))
    assert keys[0, 0, :, 0].tolist() == [1.0, 2.0, 0.0]
    assert keys[1, 0, :, 0].tolist() == [1.0, 1.0, 2.0]
    assert cache.cells[0, 0, 1, 0, :3, 0].tolist() == [1.0, 1.0, 0.0]


def test_no_cell_past_the_end() -> None:
    with pytest.raises(RuntimeError):
        cache_of().write(0, 23, block(1.0, 1.0))


@pytest.mark.parametrize("chosen", [None, [0, 2]])
def test_cells_can_be_added_and_moved(chosen: list[int] | None) -> None:
    """A path of a tree moves to where its tokens' own keys lie; other rows keep theirs."""
    cache = cache_of(rows=3)
    cells = torch.arange(cache.cells.numel(), dtype=torch.float32).view_as(cache.cells)
    cache.cells.copy_(cells)
    larger = cache.with_room(40)
    assert larger.cells.shape[4] >= 40 - cache.first
    assert torch.equal(larger.cells[..., :19, :], cells)
    assert larger.with_room(40) is larger
    rows = range(3) if chosen is None else chosen
    part = larger if chosen is None else larger.choose(torch.tensor(chosen))
    part.move(torch.tensor([10, 12]), 9)  # cells 5 and 7 to 4 and 5
    for row in range(3):
        expected = [*range(4), 5, 7, *range(6, 19)] if row in rows else range(19)
        assert torch.equal(larger.cells[:, :, row, :, :19], cells[:, :, row, :, list(expected)])
