"""Frechet distance between two feature sets, each seen as a Gaussian.

Needs NumPy alone: the trace of the matrix root comes from eigenvalues of a symmetric matrix, which
cannot become complex. Knows nothing of the network that made the features.

Source: Heusel et al., arXiv 1706.08500, equation 6; bias with N: Chong and Forsyth, arXiv 1911.07023.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ciar.errors import InputError
from ciar.evaluation.checks import Features, as_features, as_pair

#: Rows that are turned to float64 at a time; bounds the working memory.
BLOCK_ROWS = 4096


class FewPicturesWarning(UserWarning):
    """A feature set is too small for its width, so the Frechet distance is badly biased."""


@dataclass(frozen=True)
class Gaussian:
    """Moments of a feature set.

    Attributes:
        mean: float64 [dim].
        covariance: float64 [dim, dim], unbiased (divided by ``count - 1``).
        count: pictures behind them.
    """

    mean: NDArray[np.float64]
    covariance: NDArray[np.float64]
    count: int


@dataclass(frozen=True)
class Frechet:
    """A Frechet distance and what must be known to read it.

    Attributes:
        value: squared distance, as it is always reported; >= 0, lower is better.
        generated_count: generated pictures.
        real_count: real pictures.
        dim: width of the features.
        notes: sentences that belong beside the figure.
    """

    value: float
    generated_count: int
    real_count: int
    dim: int
    notes: tuple[str, ...]


def frechet_distance(*, generated: ArrayLike, real: ArrayLike) -> Frechet:
    """Frechet distance of a generated from a real feature set.

    Args:
        generated: [pictures, dim] features.
        real: [pictures, dim] features.

    Raises:
        InputError: a set has fewer than two pictures, or the widths differ.
        NumericalError: a set holds NaN or infinity.

    Warns:
        FewPicturesWarning: a set has fewer than twice as many pictures as the features are wide.
    """
    a, b = as_pair(generated, real)
    dim = a.shape[1]
    notes = [
        f"The distance of finite sets is biased upwards, by about 1/N; N here is {len(a)} generated and "
        f"{len(b)} real. Compare it only with distances at the same N."
    ]
    for name, features in (("generated", a), ("real", b)):
        if len(features) < 2 * dim:
            note = (
                f"There are {len(features)} {name} pictures for features {dim} wide; under {2 * dim} the "
                "covariance is close to singular and the Frechet distance mostly bias. Use more pictures."
            )
            warnings.warn(note, FewPicturesWarning, stacklevel=2)
            notes.append(note)
    value = frechet_of_gaussians(gaussian_of(a), gaussian_of(b))
    return Frechet(value, len(a), len(b), dim, tuple(notes))


def gaussian_of(features: ArrayLike) -> Gaussian:
    """Mean and covariance of features [pictures, dim], in float64, block by block.

    Raises:
        InputError: fewer than two pictures.
        NumericalError: the features hold NaN or infinity.
    """
    checked = as_features("given", features)
    if len(checked) < 2:
        raise InputError("A covariance needs at least two pictures; there is one. Use more pictures.")
    return weighted_gaussian(checked, np.ones(len(checked)))


def weighted_gaussian(features: Features, counts: NDArray[np.float64]) -> Gaussian:
    """Moments of a set in which picture i occurs ``counts[i]`` times (a bootstrap resample).

    Args:
        features: [pictures, dim].
        counts: float64 [pictures], whole numbers >= 0 that sum to at least 2.
    """
    total = float(counts.sum())
    dim = features.shape[1]
    mean = np.zeros(dim)
    for start in range(0, len(features), BLOCK_ROWS):
        mean += counts[start : start + BLOCK_ROWS] @ features[start : start + BLOCK_ROWS].astype(np.float64)
    mean /= total
    # A second pass around the mean: one pass would subtract two large squares.
    scatter = np.zeros((dim, dim))
    for start in range(0, len(features), BLOCK_ROWS):
        centred = features[start : start + BLOCK_ROWS].astype(np.float64) - mean
        scatter += (centred * counts[start : start + BLOCK_ROWS, None]).T @ centred
    return Gaussian(mean, scatter / (total - 1.0), round(total))


def frechet_of_gaussians(a: Gaussian, b: Gaussian) -> float:
    """``|m1 - m2|^2 + tr(S1) + tr(S2) - 2 tr((S1^0.5 S2 S1^0.5)^0.5)``.

    ``S1 S2`` and the symmetric product have the same eigenvalues, so this is the usual formula with
    no root of a non-symmetric matrix.
    """
    return frechet_with_root(a, b, symmetric_root(b.covariance))


def frechet_with_root(a: Gaussian, b: Gaussian, root: NDArray[np.float64]) -> float:
    """As :func:`frechet_of_gaussians`, with the symmetric root of b's covariance already known."""
    product = root @ a.covariance @ root
    eigenvalues = np.linalg.eigvalsh((product + product.T) / 2)
    shared = float(np.sqrt(eigenvalues.clip(min=0.0)).sum())
    apart = float(np.square(a.mean - b.mean).sum())
    traces = float(np.trace(a.covariance) + np.trace(b.covariance))
    # Equal sets give a rounding error of either sign.
    return max(0.0, apart + traces - 2.0 * shared)


def symmetric_root(matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    """Symmetric square root of a symmetric positive semi-definite matrix [dim, dim]."""
    values, vectors = np.linalg.eigh(matrix)
    root: NDArray[np.float64] = (vectors * np.sqrt(values.clip(min=0.0))) @ vectors.T
    return root
