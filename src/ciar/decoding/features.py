"""Interval features on the wire: int8 with one float16 scale a row (payload ``features``)."""

from __future__ import annotations

import torch
from torch import Tensor


def feature_bytes(dim: int) -> int:
    """Bytes of one packed feature row."""
    return dim + 2


def pack_feature(feature: Tensor) -> bytes:
    """An interval feature [dim] as int8 with one float16 scale in front."""
    scale = feature.abs().max().clamp_min(1e-8) / 127.0
    codes = (feature / scale).round().to(torch.int8)
    return scale.half().numpy().tobytes() + codes.numpy().tobytes()


def unpack_feature(row: bytes) -> Tensor:
    """What :func:`pack_feature` packed, float32 [dim]."""
    data = bytearray(row)
    scale = torch.frombuffer(data, dtype=torch.float16, count=1).float()
    return torch.frombuffer(data, dtype=torch.int8, offset=2).float() * scale
