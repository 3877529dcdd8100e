"""Checks that every metric makes of its feature sets. Knows nothing of where features come from."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ciar.errors import InputError, NumericalError

Features = NDArray[np.floating[Any]]


def as_features(name: str, values: ArrayLike) -> Features:
    """A feature set as a floating array [pictures, dim].

    Args:
        name: what messages call the set.
        values: [pictures, dim]; at least one of each.

    Raises:
        InputError: it has another shape, or is empty.
        NumericalError: it holds NaN or infinity; the message names the first such row.
    """
    features = np.asarray(values)
    if features.ndim != 2 or 0 in features.shape:
        raise InputError(
            f"The {name} features must be an array [pictures, dim] with at least one of each; they are "
            f"{list(features.shape)}."
        )
    if not np.issubdtype(features.dtype, np.floating):
        features = features.astype(np.float64)
    bad = ~np.isfinite(np.abs(features).max(axis=1))
    if bad.any():
        raise NumericalError(
            f"The {name} features hold NaN or infinity in {int(bad.sum())} of {len(features)} rows, the "
            f"first being row {int(bad.argmax())}. Find out which picture made it before measuring."
        )
    return features


def as_pair(generated: ArrayLike, real: ArrayLike) -> tuple[Features, Features]:
    """Both feature sets checked, and of one width.

    Raises:
        InputError: a set has a wrong shape, or their widths differ.
        NumericalError: a set holds NaN or infinity.
    """
    a, b = as_features("generated", generated), as_features("real", real)
    if a.shape[1] != b.shape[1]:
        raise InputError(
            f"The generated features are {a.shape[1]} wide and the real ones {b.shape[1]}. Make both with "
            "the same encoder."
        )
    return a, b
