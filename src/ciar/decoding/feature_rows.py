"""The cloud's features on their way to a drafter on the device: whole, in float16, or int8 with a scale.

Both sides' drafters read features as they travel, so what travels is packed without a further loss. (The
interval features of the device, which go the other way, are in ``decoding.features``.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ciar.errors import ProtocolError

#: Smallest scale of an int8 row, float16's smallest normal number: a row of zeros has a scale as well.
_LEAST_SCALE = 2.0**-14
_LARGEST_HALF = 65504.0


class _Format(NamedTuple):
    """How one row [dim] travels."""

    row_bytes: Callable[[int], int]
    pack: Callable[[Tensor], np.ndarray]  # float32 [n, dim] -> uint8 [n, row_bytes]
    unpack: Callable[[np.ndarray, int], Tensor]  # uint8 [n, row_bytes] -> float32 [n, dim]


def _plain(dtype: str) -> _Format:
    size = np.dtype(dtype).itemsize

    def pack(rows: Tensor) -> np.ndarray:
        inside = rows.clamp(-_LARGEST_HALF, _LARGEST_HALF) if size == 2 else rows
        return np.ascontiguousarray(inside.numpy().astype(dtype)).view(np.uint8)

    def unpack(data: np.ndarray, dim: int) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(data).view(dtype).astype(np.float32))

    return _Format(lambda dim: size * dim, pack, unpack)


def _as_int8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Codes, int8 [..., dim], and scales, float16 [..., 1], of float32 rows."""
    scales = (rows.abs().amax(dim=-1, keepdim=True) / 127.0).clamp(_LEAST_SCALE, _LARGEST_HALF).half()
    return (rows / scales.float()).round().clamp(-127, 127).to(torch.int8), scales


def _pack_int8(rows: Tensor) -> np.ndarray:
    codes, scales = _as_int8(rows)
    return np.concatenate([scales.numpy().astype("<f2").view(np.uint8), codes.numpy().view(np.uint8)], axis=1)


def _unpack_int8(data: np.ndarray, dim: int) -> Tensor:
    scales = np.ascontiguousarray(data[:, :2]).view("<f2").astype(np.float32)
    codes = np.ascontiguousarray(data[:, 2:]).view(np.int8).astype(np.float32)
    return torch.from_numpy(codes * scales)


_FORMATS = {
    "float32": _plain("<f4"),
    "float16": _plain("<f2"),
    "int8": _Format(lambda dim: dim + 2, _pack_int8, _unpack_int8),
}
#: Names of the formats.
FORMATS = tuple(_FORMATS)


def row_bytes(kind: str, dim: int) -> int:
    """Bytes of one feature of width ``dim``."""
    return _FORMATS[kind].row_bytes(dim)


def pack_rows(features: Tensor, kind: str) -> bytes:
    """Features as they travel.

    Args:
        features: [rows, n, dim]; rows of the conditional and the unconditional prompt.
        kind: one of :data:`FORMATS`.

    Returns:
        n after n, and of each all rows.
    """
    flat = features.transpose(0, 1).flatten(0, 1).float().cpu()
    return _FORMATS[kind].pack(flat).tobytes()


def unpack_rows(data: bytes, rows: int, dim: int, kind: str) -> Tensor:
    """What :func:`pack_rows` packed: float32 [rows, n, dim].

    Raises:
        ProtocolError: the bytes are no whole number of features, or one is not finite.
    """
    size = row_bytes(kind, dim)
    if len(data) % (size * rows):
        raise ProtocolError(f"{len(data)} bytes are no features of width {dim} in {kind}.")
    flat = _FORMATS[kind].unpack(np.frombuffer(data, dtype=np.uint8).reshape(-1, size), dim)
    if not bool(flat.isfinite().all()):
        raise ProtocolError("The cloud's features hold NaN or infinity. Open a new session.")
    return flat.view(-1, rows, dim).transpose(0, 1)


def as_travelled(features: Tensor, kind: str) -> Tensor:
    """Features [rows, n, dim] with what packing takes from them, where they are.

    ``float32`` leaves them as they are.
    """
    if kind == "float32":
        return features
    wide = features.float()
    if kind == "float16":
        return wide.clamp(-_LARGEST_HALF, _LARGEST_HALF).half().to(features.dtype)
    codes, scales = _as_int8(wide)
    return (codes.float() * scales.float()).to(features.dtype)
