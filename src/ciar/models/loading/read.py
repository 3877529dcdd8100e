"""Opens a weights file or a sharded folder, whatever its container. Memory-mapped where possible."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from ciar.errors import CheckpointError
from ciar.models.checkpoint import read_tensors
from ciar.models.loading.sniff import sniff
from ciar.models.loading.torch_files import read_torch

#: What the files of the Hugging Face layout are called: a single file, or the index of its shards.
_WHOLE = ("model.safetensors", "pytorch_model.bin")
_INDEX = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


@dataclass(frozen=True)
class Opened:
    """A checkpoint, before anything is known of its content.

    Attributes:
        path: file or folder.
        container: ``safetensors``, ``torch`` or ``torch-legacy``; of the first shard for a folder.
        tensors: under the names that the file uses.
        wrapper, beside, arguments: see ``torch_files.Unwrapped``.
        files: the files that were read.
    """

    path: Path
    container: str
    tensors: dict[str, Tensor]
    wrapper: str = ""
    beside: tuple[str, ...] = ()
    arguments: dict[str, Any] = field(default_factory=dict)
    files: tuple[Path, ...] = ()


def open_file(path: Path) -> Opened:
    """Opens one weights file.

    Raises:
        CheckpointError: it cannot be read; see ``sniff`` and ``read_torch``.
    """
    container = sniff(path)
    if container == "safetensors":
        return Opened(path, container, read_tensors(path), files=(path,))
    found = read_torch(path, container)
    return Opened(path, container, found.tensors, found.wrapper, found.beside, found.arguments, files=(path,))


def weight_files(folder: Path) -> list[Path]:
    """The weights files of a folder in the Hugging Face layout; empty when it has none.

    Raises:
        CheckpointError: the index is damaged, or names a file that is not there.
    """
    for name in _INDEX:
        index = folder / name
        if index.is_file():
            try:
                listed = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            except (ValueError, KeyError, TypeError, AttributeError):
                raise CheckpointError(f"{index} is damaged. Download or copy it again.") from None
            lost = [file for file in listed if not (folder / str(file)).is_file()]
            if lost:
                raise CheckpointError(
                    f"{folder} is incomplete: {', '.join(map(str, lost[:10]))} of {name} is missing. "
                    "Download the rest."
                )
            return [folder / str(file) for file in listed]
    return next(([folder / name] for name in _WHOLE if (folder / name).is_file()), [])


def open_folder(folder: Path) -> Opened:
    """Opens all shards of a folder in the Hugging Face layout.

    Raises:
        CheckpointError: there are none, one cannot be read, or two hold the same tensor.
    """
    files = weight_files(folder)
    if not files:
        raise CheckpointError(f"{folder} holds no {' or '.join(_WHOLE)} and no index of shards.")
    shards = [open_file(file) for file in files]
    tensors: dict[str, Tensor] = {}
    for shard in shards:
        twice = sorted(tensors.keys() & shard.tensors.keys())
        if twice:
            raise CheckpointError(f"{shard.path} holds {twice[0]}, which another shard holds too.")
        tensors |= shard.tensors
    return Opened(folder, shards[0].container, tensors, files=tuple(files))
