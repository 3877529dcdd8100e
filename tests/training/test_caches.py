"""Caches that may be stopped at any moment: how far they are, other keys, a full disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from ciar.errors import DataError
from ciar.files import read_json, write_json
from ciar.training import caches
from ciar.training.caches import Cache, save_array


def cache_of(folder: Path, key: str = "a", rows: int = 4) -> Cache:
    arrays: dict[str, tuple[type[np.generic], tuple[int, ...]]] = {
        "one": (np.uint16, (rows, 3)),
        "two": (np.float32, (rows,)),
    }
    return Cache(folder, "state.json", key, arrays, "use less")


def test_it_goes_on_under_its_key_alone(tmp_path: Path) -> None:
    first = cache_of(tmp_path)
    first.arrays["one"][:2] = 7
    first.arrays["two"][:2] = 0.5
    assert first.done == 0
    first.filled(2)
    again = cache_of(tmp_path)
    assert again.done == 2
    assert again.arrays["one"][:2].tolist() == [[7] * 3] * 2
    assert again.arrays["two"][:2].tolist() == [0.5] * 2
    cache_of(tmp_path, "b")  # empties the arrays, and is stopped
    assert cache_of(tmp_path).done == 0


@pytest.mark.parametrize("damaged", ["one.npy", "state.json"])
def test_what_is_missing_is_made_anew(tmp_path: Path, damaged: str) -> None:
    cache_of(tmp_path).filled(4)
    (tmp_path / damaged).unlink()
    assert cache_of(tmp_path).done == 0


class Usage(NamedTuple):
    free: int


def test_a_disk_without_room_is_said_before_anything_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 rows of 3 numbers of 2 bytes and one of 4: 40 bytes, and 20 where half of it is there."""
    old = cache_of(tmp_path)
    old.filled(2)
    monkeypatch.setattr(caches.shutil, "disk_usage", lambda _: Usage(20))
    assert cache_of(tmp_path).done == 2
    monkeypatch.setattr(caches.shutil, "disk_usage", lambda _: Usage(19))
    with pytest.raises(DataError, match=r"Make room, or use less\."):
        cache_of(tmp_path)
    monkeypatch.setattr(caches, "_on_disk", lambda _: 0)
    with pytest.raises(DataError, match="are free"):
        cache_of(tmp_path, "b")
    monkeypatch.undo()
    assert cache_of(tmp_path).done == 2


def test_files_are_the_old_ones_or_the_new_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "codes.npy"
    save_array(path, np.arange(3))

    def half(file: Any, array: np.ndarray) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "save", half)
    with pytest.raises(KeyboardInterrupt):
        save_array(path, np.arange(4))
    assert np.load(path).tolist() == [0, 1, 2]
    state = tmp_path / "state.json"
    assert read_json(state) == {}
    write_json(state, {"done": 3})
    assert read_json(state) == {"done": 3}
    state.write_text("[1]")
    assert read_json(state) == {}
    state.write_text("{")
    assert read_json(state) == {}
