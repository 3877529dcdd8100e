"""Bootstrap intervals: of a mean, and of the change between two sets made with the same prompts and seeds.

The unit is the picture. In a paired comparison both sets are resampled with the same indices, so
what prompts and seeds contribute to both cancels out. Knows nothing of how the figures were made.

Source: Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapters 10 and 13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ciar.errors import InputError, NumericalError
from ciar.evaluation.checks import as_pair
from ciar.evaluation.frechet import (
    Gaussian,
    frechet_of_gaussians,
    frechet_with_root,
    gaussian_of,
    symmetric_root,
    weighted_gaussian,
)

#: Resamples whose counts are held at a time.
_BLOCK = 64


@dataclass(frozen=True)
class Estimate:
    """A figure with its bootstrap interval.

    Attributes:
        value: the figure of the whole set.
        low: lower end of the interval.
        high: upper end of the interval.
        level: nominal coverage, in (0, 1).
        count: pictures (or pairs) behind it.
        replicates: resamples behind the interval.
        seed: of the resampling.
    """

    value: float
    low: float
    high: float
    level: float
    count: int
    replicates: int
    seed: int


def mean_estimate(
    values: ArrayLike, *, level: float = 0.95, replicates: int = 2000, seed: int = 0
) -> Estimate:
    """Mean of one figure a picture, with a percentile interval.

    Args:
        values: [pictures], numbers or booleans.

    Raises:
        InputError: there are no values, or a setting is out of range.
        NumericalError: a value is NaN or infinite.
    """
    figures = _column("values", values)
    count = len(figures)
    drawn = [counts @ figures / count for counts in _resamples(count, level, replicates, seed)]
    return _estimate(float(figures.mean()), np.concatenate(drawn), level, count, seed)


def paired_mean_difference(
    before: ArrayLike,
    after: ArrayLike,
    *,
    scale: float = 1.0,
    level: float = 0.95,
    replicates: int = 2000,
    seed: int = 0,
) -> Estimate:
    """``scale * (mean(after) - mean(before))`` over pairs made with the same prompt and seed.

    Args:
        before: [pairs] figures of the reference set.
        after: [pairs] figures of the set under test, in the same order.
        scale: 100 gives points for booleans such as "its caption was retrieved".

    Raises:
        InputError: the sets have different lengths, or a setting is out of range.
        NumericalError: a value is NaN or infinite.
    """
    a, b = _column("before", before), _column("after", after)
    if len(a) != len(b):
        raise InputError(
            f"A paired comparison needs sets of one length; these have {len(a)} and {len(b)} pictures. Make "
            "both with the same prompts and seeds, in the same order."
        )
    return mean_estimate(scale * (b - a), level=level, replicates=replicates, seed=seed)


def paired_retrieval_difference(
    before: ArrayLike, after: ArrayLike, *, level: float = 0.95, replicates: int = 2000, seed: int = 0
) -> Estimate:
    """Change of the retrieval accuracy in points (hundredths); negative is a loss.

    Args:
        before: bool [pairs], whether the reference picture's own caption was retrieved.
        after: bool [pairs], the same of the set under test.
    """
    return paired_mean_difference(before, after, scale=100.0, level=level, replicates=replicates, seed=seed)


def paired_frechet_change(
    *,
    before: ArrayLike,
    after: ArrayLike,
    real: ArrayLike,
    level: float = 0.95,
    replicates: int = 500,
    seed: int = 0,
) -> Estimate:
    """Relative change of the Frechet distance, ``after / before - 1``; positive is a loss.

    A resample repeats pictures, so its distance is biased upwards a second time. Each set's
    replicates are therefore shifted to centre on its own distance before the ratio is taken;
    otherwise the larger denominator would hide part of a loss.

    Args:
        before: [pairs, dim] features of the reference set.
        after: [pairs, dim] features of the set under test, in the same order.
        real: [pictures, dim] features of the real pictures, not resampled.

    Raises:
        InputError: the sets have different shapes or fewer than two pictures, the reference set is
            at distance 0, or a setting is out of range.
        NumericalError: a set holds NaN or infinity.
    """
    a, true = as_pair(before, real)
    b, _ = as_pair(after, real)
    if len(a) != len(b):
        raise InputError(
            f"A paired comparison needs sets of one length; these have {len(a)} and {len(b)} pictures. Make "
            "both with the same prompts and seeds, in the same order."
        )
    target = gaussian_of(true)
    root = symmetric_root(target.covariance)
    points = [frechet_of_gaussians(gaussian_of(features), target) for features in (a, b)]
    if points[0] <= 0.0:
        raise InputError("The reference set is at distance 0 from the real one; no relative change exists.")

    def distance(gaussian: Gaussian) -> float:
        return frechet_with_root(gaussian, target, root)

    rows = [
        (distance(weighted_gaussian(a, row)), distance(weighted_gaussian(b, row)))
        for counts in _resamples(len(a), level, replicates, seed)
        for row in counts
    ]
    drawn = np.array(rows)
    centred = drawn - drawn.mean(axis=0) + np.array(points)
    # Far from normal only when N is tiny; a centred distance may then fall to 0 or below.
    if (centred[:, 0] <= 0.0).any():
        raise InputError("The reference distance is within its own noise of 0. Use more pictures.")
    return _estimate(points[1] / points[0] - 1.0, centred[:, 1] / centred[:, 0] - 1.0, level, len(a), seed)


def statistic_estimate(
    statistic: Callable[[NDArray[np.float64]], float],
    count: int,
    *,
    level: float = 0.95,
    replicates: int = 500,
    seed: int = 0,
) -> Estimate:
    """Any statistic of ``count`` units, with a percentile interval.

    Args:
        statistic: takes how often each unit occurs, float64 [count], and returns the figure.
    """
    whole = float(statistic(np.ones(count)))
    drawn = [float(statistic(row)) for counts in _resamples(count, level, replicates, seed) for row in counts]
    return _estimate(whole, np.array(drawn), level, count, seed)


def _resamples(count: int, level: float, replicates: int, seed: int) -> Iterator[NDArray[np.float64]]:
    """How often each of ``count`` units occurs, float64 [block, count], for all replicates."""
    if count < 2:
        raise InputError(f"An interval needs at least two pictures; there are {count}.")
    if not 0.0 < level < 1.0:
        raise InputError(f"level is {level}; it must lie between 0 and 1 (0.95 is usual).")
    if replicates < 100:
        raise InputError(f"replicates is {replicates}; an interval needs at least 100.")
    generator = np.random.default_rng(seed)
    shares = np.full(count, 1.0 / count)
    for start in range(0, replicates, _BLOCK):
        size = min(_BLOCK, replicates - start)
        yield generator.multinomial(count, shares, size=size).astype(np.float64)


def _estimate(value: float, drawn: NDArray[np.float64], level: float, count: int, seed: int) -> Estimate:
    low, high = np.quantile(drawn, [(1.0 - level) / 2.0, (1.0 + level) / 2.0])
    return Estimate(value, float(low), float(high), level, count, len(drawn), seed)


def _column(name: str, values: ArrayLike) -> NDArray[np.float64]:
    column = np.asarray(values, dtype=np.float64)
    if column.ndim != 1:
        raise InputError(f"{name} must be one figure a picture; it has the shape {list(column.shape)}.")
    if not np.isfinite(column).all():
        raise NumericalError(f"{name} holds NaN or infinity. Find out which picture made it first.")
    return column
