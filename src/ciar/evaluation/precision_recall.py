"""Improved precision and recall, and their harmonic mean F1.

Each set is seen as the union of balls around its features, each reaching to its k-th neighbour.
Precision: the share of generated pictures inside the real set's balls. Recall: the share of real
pictures inside the generated set's balls. Knows nothing of the network that made the features.

Source: Kynkaanniemi et al., arXiv 1904.06991, section 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ciar.errors import InputError
from ciar.evaluation.checks import Features, as_pair

#: Whether a point on a ball's surface is inside it: tools differ, and the figure with them.
BallRule = Literal["strict", "inclusive"]

#: Squared distances below this share of the two squared lengths are rounding noise of equal features.
_NOISE = 1e-13


@dataclass(frozen=True)
class PrecisionRecall:
    """Precision, recall and F1, each in [0, 1], higher is better; and the preset behind them.

    Attributes:
        precision: share of generated pictures that look like real ones.
        recall: share of real pictures that the generated ones cover.
        k: neighbour that a ball reaches to.
        rule: whether a ball's surface is inside it.
        generated_count: generated pictures.
        real_count: real pictures.
    """

    precision: float
    recall: float
    k: int
    rule: BallRule
    generated_count: int
    real_count: int

    @property
    def f1(self) -> float:
        """Harmonic mean of precision and recall; 0 when both are 0."""
        total = self.precision + self.recall
        return 2.0 * self.precision * self.recall / total if total else 0.0


def precision_recall(
    *,
    generated: ArrayLike,
    real: ArrayLike,
    k: int = 3,
    rule: BallRule = "strict",
    block_bytes: int = 64 * 2**20,
) -> PrecisionRecall:
    """Improved precision and recall of a generated against a real feature set.

    Args:
        generated: [pictures, dim] features.
        real: [pictures, dim] features.
        k: neighbour that a ball reaches to.
        rule: ``strict`` counts a point whose distance is below the radius, ``inclusive`` also one at it.
        block_bytes: largest size of one block of distances; memory does not grow with N squared.

    Raises:
        InputError: a set has fewer than k + 2 pictures, or a setting is out of range.
        NumericalError: a set holds NaN or infinity.
    """
    if k < 1:
        raise InputError(f"k is {k}; it must be at least 1 (3 is usual).")
    if rule not in ("strict", "inclusive"):
        raise InputError(f"rule is {rule!r}; it must be 'strict' or 'inclusive'.")
    if block_bytes < 1:
        raise InputError(f"block_bytes is {block_bytes}; it must be at least 1.")
    made, true = as_pair(generated, real)
    for name, features in (("generated", made), ("real", true)):
        if len(features) < k + 2:
            raise InputError(
                f"Precision and recall with k = {k} need at least {k + 2} pictures in each set; there are "
                f"{len(features)} {name} ones. Use more pictures or a smaller k."
            )
    return PrecisionRecall(
        precision=_covered_share(made, true, k, rule, block_bytes),
        recall=_covered_share(true, made, k, rule, block_bytes),
        k=k,
        rule=rule,
        generated_count=len(made),
        real_count=len(true),
    )


def _covered_share(points: Features, centres: Features, k: int, rule: BallRule, block_bytes: int) -> float:
    """Share of points that lie inside a ball of the centres."""
    # The k-th neighbour, where a picture itself is number 0. A copy, for a view would keep its block alive.
    radii = np.concatenate(
        [
            np.partition(block, k, axis=1)[:, k].copy()
            for block in _squared_distances(centres, centres, block_bytes)
        ]
    )
    inside = np.less if rule == "strict" else np.less_equal
    covered = sum(
        int(inside(block, radii[None, :]).any(axis=1).sum())
        for block in _squared_distances(points, centres, block_bytes)
    )
    return covered / len(points)


def _squared_distances(a: Features, b: Features, block_bytes: int) -> Iterator[NDArray[np.float64]]:
    """Squared distances of a's rows from b's, float64 [block, len(b)], block after block."""
    others = b.astype(np.float64)
    others_squared = np.square(others).sum(axis=1)
    rows = max(1, block_bytes // (8 * len(b)))
    for start in range(0, len(a), rows):
        own = a[start : start + rows].astype(np.float64)
        lengths = np.square(own).sum(axis=1)[:, None] + others_squared[None, :]
        block = own @ others.T
        block *= -2.0
        block += lengths
        lengths *= _NOISE
        # Equal features must be at distance 0 exactly, or copies of a picture would be told apart.
        block[block < lengths] = 0.0
        yield block
