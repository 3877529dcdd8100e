"""Writes safetensors files one tensor at a time, so that no second copy of a model is in memory.

Source of the format: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ciar.models.loading.layout import Stored, read

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
#: Looks at each tensor before it is written.
Check = Callable[[str, Tensor], None]


def _chunks(tensors: Mapping[str, Stored], dtype: torch.dtype, check: Check | None) -> Iterator[Any]:
    """The bytes of the file, tensors in the order of their names."""
    header: dict[str, Any] = {}
    end = 0
    for name in sorted(tensors):
        shape = list(tensors[name].shape)
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [begin, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    yield len(encoded).to_bytes(8, "little")
    yield encoded
    for name in sorted(tensors):
        value = read(tensors[name])
        if check is not None:
            check(name, value)
        yield value.to(dtype).contiguous().flatten().view(torch.uint8).numpy().data


def write_tensors(
    path: Path, tensors: Mapping[str, Stored], dtype: torch.dtype, check: Check | None = None
) -> str:
    """Writes a safetensors file. A file that was there is replaced only when the new one is whole.

    Args:
        dtype: of every tensor in the file.
        check: raises when a tensor is not fit to be written.

    Returns:
        SHA-256 of the file, in hex.
    """
    digest = hashlib.sha256()
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            for chunk in _chunks(tensors, dtype, check):
                file.write(chunk)
                digest.update(chunk)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return digest.hexdigest()


def tensors_digest(tensors: Mapping[str, Stored], dtype: torch.dtype) -> str:
    """SHA-256 of the file that :func:`write_tensors` would write."""
    digest = hashlib.sha256()
    for chunk in _chunks(tensors, dtype, None):
        digest.update(chunk)
    return digest.hexdigest()


def size_of(tensors: Mapping[str, Stored], dtype: torch.dtype) -> int:
    """Bytes that the tensors take in a file, without its header."""
    return sum(math.prod(value.shape) for value in tensors.values()) * dtype.itemsize
