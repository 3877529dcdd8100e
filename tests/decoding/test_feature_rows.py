"""Features on their way: sizes, what rounding takes, and that it takes it once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ciar.decoding.feature_rows import FORMATS, as_travelled, pack_rows, row_bytes, unpack_rows
from ciar.errors import ProtocolError

#: Largest error of a value, of the largest in its row.
ERRORS = {"float32": 0.0, "float16": 2.0**-11, "int8": 0.5 / 127 + 2.0**-11}


@given(st.sampled_from(FORMATS), st.integers(0, 10_000), st.floats(0.0, 1e4))
def test_what_travels_is_near_and_rounded_once(kind: str, seed: int, scale: float) -> None:
    features = scale * torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(seed))
    features[1, 2] = 0.0
    data = pack_rows(features, kind)
    assert len(data) == 2 * 3 * row_bytes(kind, 16)
    found = unpack_rows(data, 2, 16, kind)
    largest = features.abs().amax(-1, keepdim=True)
    assert ((found - features).abs() <= ERRORS[kind] * largest + 2.0**-14).all()
    assert torch.equal(as_travelled(features, kind), found)
    assert pack_rows(found, kind) == data or kind == "int8"
    assert torch.equal(as_travelled(found, kind), found)


def test_bytes_of_a_feature() -> None:
    assert [row_bytes(kind, 1280) for kind in ("float32", "float16", "int8")] == [5120, 2560, 1282]


@pytest.mark.parametrize("data", [b"abc", b"\x00\x7c" * 8])
def test_damaged_features_are_refused(data: bytes) -> None:
    """A length that is none, and an infinity."""
    with pytest.raises(ProtocolError, match="features"):
        unpack_rows(data, 1, 8, "float16")
