"""SoftmaxCorr as a gate: are the last predictions confident and of different classes?

Published as a score of a whole data set: with N soft-max rows P, the class correlation ``C = P.T P / N``
is compared to the identity by its cosine, ``tr(C) / (sqrt(K) * ||C||_F)``. One row alone always gives
``1 / sqrt(K)``, so as a gate it needs a window of positions. The K x K matrix is never built:
``N * tr(C) = sum_s ||p_s||^2`` and ``N * ||C||_F = ||P P.T||_F``, an N x N Gram matrix.

Source: Tu, Deng, Zheng, Gedeon, "What does softmax probability tell us about classifiers ranking across
diverse test conditions?", arXiv 2406.09908.
"""

from __future__ import annotations

from math import sqrt

from torch import Tensor

from ciar.errors import InputError

#: Rows of the temporal window, the position's own among them.
WINDOW = 16
#: The two-dimensional window reaches so many rows up and so many columns to either side.
REACH = 2


def softmax_correlation(probs: Tensor) -> Tensor:
    """``1 - tr(C) / (sqrt(N) * ||C||_F)`` of windows of soft-max rows; larger = less certain.

    ``sqrt(N)`` in place of the published ``sqrt(K)``: the order of windows of one size is the same, and
    the score is 0 for N one-hot rows of different classes whatever the vocabulary. It is 0 for one row,
    and ``1 - 1 / sqrt(N)`` for N equal rows, confident or not.

    Args:
        probs: [..., N, K].

    Returns:
        float32 [...], 0 to 1.
    """
    probs = probs.float()
    gram = probs @ probs.transpose(-1, -2)
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    norm = gram.square().sum((-2, -1)).sqrt().clamp_min(1e-30)
    return (1.0 - trace / (sqrt(probs.shape[-2]) * norm)).clamp_min(0.0)


def temporal_window(position: int, size: int = WINDOW) -> list[int]:
    """The last ``size`` positions up to and with ``position``; fewer at the start."""
    if size < 1:
        raise InputError(f"A window holds at least its own position, not {size}.")
    return list(range(max(0, position - size + 1), position + 1))


def square_window(position: int, grid: int, reach: int = REACH) -> list[int]:
    """The decided neighbours of a position in the picture, in raster order, and the position itself.

    Args:
        position: in raster order.
        grid: tokens a row of the picture.
        reach: rows up and columns to either side.
    """
    row, column = divmod(position, grid)
    return [
        r * grid + c
        for r in range(max(0, row - reach), row + 1)
        for c in range(max(0, column - reach), min(grid, column + reach + 1))
        if r * grid + c <= position
    ]
