"""SoftmaxCorr over windows: against the class correlation matrix itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ciar.errors import InputError
from ciar.intervals.correlation import softmax_correlation, square_window, temporal_window


@given(st.integers(0, 200), st.integers(1, 9), st.integers(2, 30), st.floats(0.1, 8))
def test_equals_the_cosine_with_the_identity(seed: int, rows: int, classes: int, scale: float) -> None:
    z = scale * np.random.default_rng(seed).standard_normal((rows, classes))
    p = np.exp(z - np.logaddexp.reduce(z, 1, keepdims=True))
    correlation = p.T @ p / rows
    identity = np.eye(classes)
    published = (correlation * identity).sum() / np.linalg.norm(correlation) / np.linalg.norm(identity)
    found = softmax_correlation(torch.tensor(p)).item()
    assert found == pytest.approx(1 - published * np.sqrt(classes / rows), abs=1e-5)
    assert 0 <= found < 1


def test_limits() -> None:
    eye = torch.eye(8)
    assert softmax_correlation(eye[:5]).item() == pytest.approx(0, abs=1e-6)  # sure, all different
    assert softmax_correlation(eye[[2] * 4]).item() == pytest.approx(0.5)  # sure, all the same
    assert softmax_correlation(torch.full((4, 8), 1 / 8)).item() == pytest.approx(0.5)  # flat
    one = torch.rand(20, 1, 8)
    assert softmax_correlation(one / one.sum(-1, keepdim=True)).max() < 1e-6  # one row says nothing


def test_windows() -> None:
    assert temporal_window(0) == [0]
    assert temporal_window(20) == list(range(5, 21))
    assert temporal_window(5, 2) == [4, 5]
    assert square_window(0, 4) == [0]
    assert square_window(9, 4) == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert square_window(11, 4, 1) == [6, 7, 10, 11]
    assert len(square_window(8 * 16 + 8, 16)) == 13
    for position in range(16):
        assert max(square_window(position, 4)) == position
    with pytest.raises(InputError, match="window"):
        temporal_window(3, 0)
