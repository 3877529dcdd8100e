"""Files that are written a part at a time and may be stopped at any moment: arrays, and how far they are."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ciar.errors import DataError
from ciar.files import read_json, write_json


class Cache:
    """Arrays of NumPy that are filled from the first row on, and a file that says how far they are.

    What was filled under the same key is kept, and anything else is made anew. The file never says more
    than the arrays hold: it goes before they are emptied, and is written after they are.

    Args:
        folder: of ``NAME.npy`` for each array; made when it is missing.
        state: name of the file.
        key: digest of everything that the rows depend on.
        arrays: type and shape of each.
        advice: what to do where there is no room, as the end of "Make room, or ...".

    Attributes:
        done: rows that are filled.
        arrays: by name, memory-mapped.

    Raises:
        DataError: the disk has no room for the rows that are missing.
    """

    def __init__(
        self,
        folder: Path,
        state: str,
        key: str,
        arrays: Mapping[str, tuple[type[np.generic], tuple[int, ...]]],
        advice: str,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._state, self._key = folder / state, key
        paths = {name: folder / f"{name}.npy" for name in arrays}
        before = read_json(self._state)
        whole = before.get("key") == key and all(path.is_file() for path in paths.values())
        self.done = int(before.get("done", 0)) if whole else 0
        needed = 0
        for name, (dtype, shape) in arrays.items():
            needed += (shape[0] - self.done) * math.prod(shape[1:]) * np.dtype(dtype).itemsize
            if not self.done and paths[name].is_file():
                needed -= _on_disk(paths[name])  # which is given back
        _check_room(folder, needed, advice)
        if not self.done:
            self._state.unlink(missing_ok=True)
        mode = "r+" if self.done else "w+"
        self.arrays: dict[str, np.memmap] = {
            name: np.lib.format.open_memmap(paths[name], mode, dtype, shape)
            for name, (dtype, shape) in arrays.items()
        }

    def filled(self, done: int) -> None:
        """Says that the first ``done`` rows of every array are filled."""
        for array in self.arrays.values():
            array.flush()
        self.done = done
        write_json(self._state, {"done": done, "key": self._key})


def _on_disk(path: Path) -> int:
    """Bytes that a file takes; one with holes takes less than it is long."""
    blocks: int = getattr(path.stat(), "st_blocks", 0)
    return blocks * 512


def _check_room(folder: Path, needed: int, advice: str) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DataError(
            f"{folder} takes {needed / 1e9:.1f} GB more, and {free / 1e9:.1f} GB are free. Make room, or "
            f"{advice}."
        )


def save_array(path: Path, array: np.ndarray) -> None:
    """Writes an array that is there whole, or not at all."""
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        np.save(file, array)
    partial.replace(path)
