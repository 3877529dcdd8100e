"""From scores and losses on calibration pictures to thresholds, and how good a score is.

NumPy only. "Losses" are what keeping a token costs, usually the total variation between the device's and
the cloud's law; "events" are whether the cloud would have decided otherwise. Tokens of one picture are
not independent, so where a guarantee or an interval is given, the picture is the unit.

Knows nothing of models; a score is any number that is larger where the device is less certain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ciar.errors import InputError


def quantile_threshold(scores: ArrayLike, share: float) -> float:
    """The threshold under which a given share of the tokens is uploaded.

    A token is uploaded when its score is not below the threshold. Equal scores stay together, so the
    nearest share that they allow is taken.

    Args:
        scores: any shape, at least one; no NaN.
        share: 0 to 1.

    Returns:
        The threshold; infinity uploads nothing.

    Raises:
        InputError: no scores, NaN among them, or ``share`` out of range.
    """
    values = _numbers(scores, "scores")
    _check_share(share, "share")
    distinct, counts = np.unique(values, return_counts=True)
    # uploaded[i]: tokens at or above distinct[i]; the last entry is the threshold above them all.
    uploaded = np.append(values.size - np.cumsum(counts) + counts, 0)
    best = int(np.argmin(np.abs(uploaded - share * values.size)))
    if best == distinct.size:
        return float("inf")
    if best == 0:
        return float(distinct[0])
    middle = 0.5 * (distinct[best - 1] + distinct[best])  # a new score is on neither value exactly
    return float(middle) if distinct[best - 1] < middle else float(distinct[best])


def conformal_threshold(
    scores_by_image: Sequence[ArrayLike],
    losses_by_image: Sequence[ArrayLike],
    epsilon: float,
    bound: float = 1.0,
) -> float:
    """The largest threshold whose expected loss on a new picture is at most epsilon.

    A picture's loss at threshold t is the sum of the losses of the tokens with scores below t over the
    number of all its tokens: it rises with t. With n calibration pictures exchangeable with the new one,
    the largest t with ``(n * mean loss(t) + bound) / (n + 1) <= epsilon`` has expected loss at most
    epsilon, the expectation being over calibration and new picture together.

    Source: conformal risk control (Angelopoulos et al., arXiv 2208.02814), theorem 1.

    Args:
        scores_by_image: for each picture the scores of its tokens.
        losses_by_image: for each picture the losses of the same tokens, 0 to ``bound``.
        epsilon: allowed loss a token of a picture, 0 to ``bound``.
        bound: largest loss that a token can have.

    Returns:
        The threshold; infinity keeps every token, -infinity none: then the pictures are too few for so
        small an epsilon.

    Raises:
        InputError: shapes disagree, there is no picture, or a number is out of range.
    """
    if len(scores_by_image) != len(losses_by_image):
        raise InputError(
            f"Scores of {len(scores_by_image)} pictures do not go with losses of {len(losses_by_image)}."
        )
    if not scores_by_image:
        raise InputError("Calibration needs at least one picture.")
    if not 0.0 <= epsilon <= bound:
        raise InputError(f"epsilon must lie between 0 and {bound}, not {epsilon}.")
    pairs = [_paired(*image) for image in zip(scores_by_image, losses_by_image, strict=True)]
    scores = np.concatenate([score for score, _ in pairs])
    weighted = np.concatenate([loss / loss.size for _, loss in pairs])
    if min(loss.min() for _, loss in pairs) < 0.0 or max(loss.max() for _, loss in pairs) > bound:
        raise InputError(f"Losses must lie between 0 and {bound}; raise bound if they may be larger.")

    distinct, where = np.unique(scores, return_inverse=True)
    # kept[i]: loss of the tokens below distinct[i]; the last entry is the loss of all, at infinity.
    kept = np.concatenate([[0.0], np.cumsum(np.bincount(where, weights=weighted))])
    allowed = (kept + bound) / (len(pairs) + 1) <= epsilon
    if not allowed[0]:
        return float("-inf")
    return float(np.append(distinct, np.inf)[np.flatnonzero(allowed)[-1]])


def conformal_allowance(slacks_by_image: Sequence[ArrayLike], epsilon: float) -> float:
    """The largest allowance under which few tokens of a new picture are other than the cloud's choice.

    A token that stands with slack costs 1 and one without costs nothing, which is the unit of a picture's
    budget (:mod:`ciar.decoding.budget`). The share of them on a new picture is at most epsilon in
    expectation, for guesses like those whose slacks are given: an allowance changes later guesses, so
    measure the slacks under an allowance near the one that comes out. See :func:`conformal_threshold`.

    Args:
        slacks_by_image: for each picture the slacks of its guesses where each was judged, in nats; 0 where
            the guess was the cloud's choice, infinite where the cloud's law gives it no mass.
        epsilon: share of a picture's tokens, 0 to 1.

    Returns:
        Nats; 0, which is always allowed, where the pictures are too few for so small an epsilon, and
        infinity where every guess may stand.

    Raises:
        InputError: there is no picture, or a number is out of range.
    """
    slacks = [_numbers(image, "slacks") for image in slacks_by_image]
    if any(image.min() < 0.0 for image in slacks):
        raise InputError("A slack is never below 0.")
    threshold = conformal_threshold(slacks, [(image > 0.0).astype(float) for image in slacks], epsilon)
    # What stands is at most the allowance, and was below the threshold.
    return max(0.0, float(np.nextafter(threshold, -np.inf))) if threshold < np.inf else threshold


def risk_curve(scores: ArrayLike, losses: ArrayLike, knots: int = 32) -> tuple[tuple[float, float], ...]:
    """Expected loss as a rising function of the score, for :class:`ciar.intervals.thresholds.RiskThreshold`.

    The tokens are sorted by score and cut into groups of equal size; a knot is a group's median score
    and mean loss; means that fall are pooled (isotonic regression, pool adjacent violators). Tokens with
    equal scores share their mean loss, so that their order does not count.

    Args:
        scores: any shape; finite.
        losses: same shape, >= 0.
        knots: at most so many; fewer where scores coincide.

    Returns:
        (score, loss), scores strictly rising, losses not falling.

    Raises:
        InputError: shapes disagree, nothing is given, scores are not finite, or ``knots`` is below 1.
    """
    values, costs = _paired(scores, losses)
    if not np.isfinite(values).all():
        raise InputError("A risk curve needs finite scores; leave infinite ones out.")
    if knots < 1:
        raise InputError(f"knots must be at least 1, not {knots}.")
    _, where, counts = np.unique(values, return_inverse=True, return_counts=True)
    costs = (np.bincount(where, weights=costs) / counts)[where]
    order = np.argsort(values, kind="stable")
    groups = np.array_split(order, min(knots, values.size))
    means = [
        (float(values[group[group.size // 2]]), float(costs[group].mean()), group.size) for group in groups
    ]

    pools: list[list[tuple[float, float, int]]] = []
    for knot in means:
        pools.append([knot])
        while len(pools) > 1 and _mean_loss(pools[-2]) >= _mean_loss(pools[-1]):
            pools[-2:] = [pools[-2] + pools[-1]]
    curve: dict[float, float] = {}
    for pool in pools:
        for score, _, _ in pool:
            # Of groups at one score the last counts, which has the largest loss. A mean of ones may round up.
            curve[score] = min(_mean_loss(pool), float(costs.max()))
    return tuple(curve.items())


def _mean_loss(pool: Sequence[tuple[float, float, int]]) -> float:
    return sum(loss * size for _, loss, size in pool) / sum(size for _, _, size in pool)


def auroc(scores: ArrayLike, events: ArrayLike) -> float:
    """Chance that a token with the event has a larger score than one without; ties count half.

    Args:
        scores: any shape; no NaN.
        events: same shape, booleans or 0 and 1.

    Returns:
        0 to 1; 0.5 says nothing. NaN when all tokens or none have the event.

    Raises:
        InputError: shapes disagree, nothing is given, or NaN among the scores.
    """
    values, happened = _paired(scores, events)
    positive = happened > 0
    positives = int(positive.sum())
    negatives = values.size - positives
    if positives == 0 or negatives == 0:
        return float("nan")
    _, where, counts = np.unique(values, return_inverse=True, return_counts=True)
    middle_rank = np.cumsum(counts) - 0.5 * (counts - 1)
    rank_sum = float(middle_rank[where][positive].sum())
    return (rank_sum - 0.5 * positives * (positives + 1)) / (positives * negatives)


def kept_mean(scores: ArrayLike, losses: ArrayLike, keep: float = 0.7) -> float:
    """Mean loss of the tokens that a gate keeps when it keeps the lowest share by score.

    Tokens that tie at the cut are kept in part, each alike, so neither their order nor luck counts.

    Args:
        scores: any shape; no NaN.
        losses: same shape.
        keep: share kept, above 0, up to 1.

    Returns:
        Mean loss of the kept tokens.

    Raises:
        InputError: shapes disagree, nothing is given, or ``keep`` is out of range.
    """
    values, costs = _paired(scores, losses)
    if not 0.0 < keep <= 1.0:
        raise InputError(f"keep must be above 0 and at most 1, not {keep}.")
    wanted = keep * values.size
    _, where, counts = np.unique(values, return_inverse=True, return_counts=True)
    totals = np.bincount(where, weights=costs)
    before = np.cumsum(counts) - counts
    taken = np.clip(wanted - before, 0.0, counts)  # how many of each group of equal scores
    return float((totals / counts * taken).sum() / wanted)


class Estimate(NamedTuple):
    """A number with its interval.

    Attributes:
        value: on the pictures themselves.
        lower: lower end of the interval.
        upper: upper end of the interval.
    """

    value: float
    lower: float
    upper: float


def bootstrap(
    statistic: Callable[..., float],
    *by_image: Sequence[ArrayLike],
    resamples: int = 1000,
    seed: int = 0,
    level: float = 0.95,
) -> Estimate:
    """Percentile bootstrap interval, resampling whole pictures.

    For the difference of two scores give both and let the statistic subtract: the pictures are the same.

    Args:
        statistic: takes as many arrays as are given, tokens of all pictures joined, and gives a number.
            Resamples on which it is NaN are left out.
        by_image: one sequence a quantity, each with one array a picture.
        resamples: how often pictures are drawn, at least 1.
        seed: of the draws; nothing else is random.
        level: coverage of the interval, between 0 and 1.

    Returns:
        The statistic and its interval.

    Raises:
        InputError: the sequences disagree in length or are empty, or a number is out of range.
    """
    lengths = {len(sequence) for sequence in by_image}
    if len(lengths) != 1 or lengths == {0}:
        raise InputError("Every quantity needs the same number of pictures, at least one.")
    if resamples < 1 or not 0.0 < level < 1.0:
        raise InputError(f"resamples must be at least 1 and level in (0, 1), not {resamples} and {level}.")
    images = lengths.pop()
    columns = [[np.asarray(image).reshape(-1) for image in sequence] for sequence in by_image]

    def value_of(chosen: Sequence[int] | NDArray[np.int64]) -> float:
        return float(statistic(*(np.concatenate([column[i] for i in chosen]) for column in columns)))

    draws = np.random.default_rng(seed).integers(images, size=(resamples, images))
    values = np.array([value_of(draw) for draw in draws])
    values = values[~np.isnan(values)]
    if not values.size:
        return Estimate(value_of(range(images)), float("nan"), float("nan"))
    lower, upper = np.quantile(values, [0.5 * (1.0 - level), 0.5 * (1.0 + level)])
    return Estimate(value_of(range(images)), float(lower), float(upper))


def _numbers(values: ArrayLike, name: str) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64).reshape(-1)
    if not array.size:
        raise InputError(f"There are no {name}; give at least one.")
    if np.isnan(array).any():
        raise InputError(f"There is NaN among the {name}; leave those tokens out.")
    return array


def _paired(scores: ArrayLike, others: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    first, second = np.asarray(scores), np.asarray(others)
    if first.shape != second.shape:
        raise InputError(f"Scores of shape {first.shape} do not go with values of shape {second.shape}.")
    return _numbers(first, "scores"), _numbers(second, "values")


def _check_share(share: float, name: str) -> None:
    if not 0.0 <= share <= 1.0:
        raise InputError(f"{name} must lie between 0 and 1, not {share}.")
