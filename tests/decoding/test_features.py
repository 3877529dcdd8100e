"""Interval features on the wire: one byte a number, off by at most half a step."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from ciar.decoding.features import feature_bytes, pack_feature, unpack_feature


@given(st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=40))
def test_round_trip(values: list[float]) -> None:
    feature = torch.tensor(values)
    row = pack_feature(feature)
    assert len(row) == feature_bytes(len(values))
    back = unpack_feature(row)
    # Half a step of int8 and float16's rounding of the scale (subnormal below 6e-5).
    largest = float(feature.abs().max())
    bound = largest * (0.5 / 127 + 2**-10) + 127 * 2**-25 + 1e-7
    assert (back - feature).abs().max() <= bound


def test_zero_stays_zero() -> None:
    assert (unpack_feature(pack_feature(torch.zeros(5))) == 0).all()
