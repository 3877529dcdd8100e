"""Calibration: against brute force, and its guarantees by simulation."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciar.errors import InputError
from ciar.intervals.calibration import (
    auroc,
    bootstrap,
    conformal_allowance,
    conformal_threshold,
    kept_mean,
    quantile_threshold,
    risk_curve,
)
from ciar.intervals.thresholds import RiskThreshold, ThresholdConfig

# Coarse numbers, so that ties are common.
coarse = st.integers(-4, 4).map(lambda x: x / 2)


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=200, unique=True), st.floats(0, 1))
def test_quantile_uploads_the_share(scores: list[float], share: float) -> None:
    uploaded = sum(score >= quantile_threshold(scores, share) for score in scores)
    assert abs(uploaded - share * len(scores)) <= 0.5 + 1e-9


@given(st.lists(coarse, min_size=1, max_size=60), st.floats(0, 1))
def test_quantile_with_ties_is_the_nearest_possible(scores: list[float], share: float) -> None:
    def gap(threshold: float) -> float:
        return abs(sum(score >= threshold for score in scores) - share * len(scores))

    best = min(gap(threshold) for threshold in [*scores, math.inf])
    assert gap(quantile_threshold(scores, share)) == pytest.approx(best)


def test_quantile_at_its_ends_and_on_new_scores() -> None:
    rng = np.random.default_rng(0)
    scores = rng.gamma(1.0, 0.2, (40, 256))
    assert quantile_threshold(scores, 0.0) == math.inf
    assert (scores >= quantile_threshold(scores, 1.0)).all()
    threshold = quantile_threshold(scores, 0.3)
    assert (rng.gamma(1.0, 0.2, 100_000) >= threshold).mean() == pytest.approx(0.3, abs=0.015)
    assert quantile_threshold([1.0, np.nextafter(1.0, 2.0)], 0.5) == np.nextafter(1.0, 2.0)


@given(
    st.lists(st.lists(st.tuples(coarse, st.floats(0, 1)), min_size=1, max_size=6), min_size=1, max_size=8),
    st.floats(0, 1),
)
def test_conformal_is_the_largest_threshold_that_the_formula_allows(
    images: list[list[tuple[float, float]]], epsilon: float
) -> None:
    def bounded_risk(threshold: float) -> float:
        risks = [sum(loss for s, loss in image if s < threshold) / len(image) for image in images]
        return (sum(risks) + 1.0) / (len(images) + 1)

    candidates = [-math.inf, *sorted({s for image in images for s, _ in image}), math.inf]
    allowed = [t for t in candidates if bounded_risk(t) <= epsilon + 1e-12]
    strictly = [t for t in candidates if bounded_risk(t) <= epsilon - 1e-12]
    got = conformal_threshold(
        [[s for s, _ in image] for image in images], [[x for _, x in image] for image in images], epsilon
    )
    assert max(strictly, default=-math.inf) <= got <= max(allowed, default=-math.inf)


@pytest.mark.parametrize("epsilon", [0.1, 0.2])
def test_conformal_guarantee_by_simulation(epsilon: float) -> None:
    """Pictures differ, tokens of one picture are alike: the mean loss on new ones is still <= epsilon."""
    rng = np.random.default_rng(1)
    calibration, tokens, repeats, fresh = 40, 32, 400, 40

    def draw(images: int) -> tuple[np.ndarray, np.ndarray]:
        hard = rng.beta(1.0, 2.0, (images, 1))
        losses = np.clip(hard + 0.15 * rng.standard_normal((images, tokens)), 0, 1)
        return losses + 0.2 * rng.standard_normal((images, tokens)), losses

    risks = np.empty(repeats)
    for i in range(repeats):
        threshold = conformal_threshold(*(list(x) for x in draw(calibration)), epsilon)
        scores, losses = draw(fresh)
        risks[i] = (losses * (scores < threshold)).mean()
    error = risks.std() / math.sqrt(repeats)
    assert risks.mean() <= epsilon + 3 * error
    assert (
        risks.mean() >= epsilon - 2.0 / (calibration + 1) - 3 * error
    )  # and not more careful than the theorem


def test_conformal_at_its_ends() -> None:
    scores, losses = [[0.1, 0.9]] * 9, [[0.2, 0.6]] * 9
    assert conformal_threshold(scores, losses, 1.0) == math.inf
    assert conformal_threshold(scores, losses, 0.05) == -math.inf  # (9 * 0 + 1) / 10 is 0.1 already
    assert conformal_threshold(scores, losses, 0.2) == 0.9  # .1 for the first token of each, (.9 + 1) / 10
    assert conformal_threshold(scores, losses, 0.15) == 0.1


@pytest.mark.parametrize("epsilon", [0.1, 0.3])
def test_a_calibrated_allowance_keeps_its_promise_on_new_pictures(epsilon: float) -> None:
    """Pictures are harder or easier as a whole; a tenth of the guesses are the cloud's choice."""
    rng = np.random.default_rng(2)

    def draw(images: int) -> np.ndarray:
        scale = rng.gamma(2.0, 1.0, (images, 1)) + 0.1
        return np.where(rng.random((images, 32)) < 0.1, 0.0, scale * rng.exponential(1.0, (images, 32)))

    shares = np.empty(400)
    for i in range(400):
        allowance = conformal_allowance(list(draw(40)), epsilon)
        slacks = draw(40)
        shares[i] = ((slacks > 0) & (slacks <= allowance)).mean()
    error = 3 * shares.std() / 20
    assert epsilon - 2.0 / 41 - error <= shares.mean() <= epsilon + error


def test_a_calibrated_allowance_at_its_ends() -> None:
    slacks = [[0.0, 0.5, 2.0, math.inf]] * 9
    assert conformal_allowance(slacks, 0.05) == 0.0  # too few pictures to promise anything but lossless
    assert 0.5 <= conformal_allowance(slacks, 0.5) < 2.0  # (9 / 4 + 1) / 10 is 0.325; with 2.0 it is 0.55
    assert conformal_allowance(slacks, 1.0) == math.inf
    for images, message in (([], "at least one picture"), ([[-1.0]], "below 0"), ([[math.nan]], "NaN")):
        with pytest.raises(InputError, match=message):
            conformal_allowance(images, 0.5)


def test_conformal_weighs_pictures_alike_whatever_their_length() -> None:
    scores, losses = [[0.1] * 100, [0.2]], [[1.0] * 100, [0.0]]
    # At infinity: (1 + 0 + 1) / 3, the short picture counting as much as the long one.
    assert conformal_threshold(scores, losses, 0.67) == math.inf
    assert conformal_threshold(scores, losses, 0.66) == 0.1


@given(st.lists(st.tuples(coarse, st.booleans()), min_size=1, max_size=40))
def test_auroc_is_the_brute_force(pairs: list[tuple[float, bool]]) -> None:
    positive = [s for s, event in pairs if event]
    negative = [s for s, event in pairs if not event]
    got = auroc([s for s, _ in pairs], [event for _, event in pairs])
    if not positive or not negative:
        assert math.isnan(got)
    else:
        wins = [(p > n) + 0.5 * (p == n) for p in positive for n in negative]
        assert got == pytest.approx(sum(wins) / len(wins))


def test_auroc_takes_infinite_scores() -> None:
    assert auroc([-math.inf, 0.0, math.inf], [False, False, True]) == 1.0


@given(
    st.lists(st.tuples(coarse, st.floats(0, 1)), min_size=1, max_size=30), st.floats(0.01, 1), st.randoms()
)
def test_kept_mean_is_the_average_over_all_ways_to_break_ties(
    pairs: list[tuple[float, float]], keep: float, random: object
) -> None:
    wanted = keep * len(pairs)
    # Each tie in turn: the share of it that still fits, at its mean loss.
    left, total = wanted, 0.0
    for score in sorted({s for s, _ in pairs}):
        tied = [loss for s, loss in pairs if s == score]
        take = min(left, len(tied))
        total += take * sum(tied) / len(tied)
        left -= take
    got = kept_mean([s for s, _ in pairs], [x for _, x in pairs], keep)
    assert got == pytest.approx(total / wanted, abs=1e-9)
    random.shuffle(pairs)  # type: ignore[attr-defined]
    assert kept_mean([s for s, _ in pairs], [x for _, x in pairs], keep) == pytest.approx(got, abs=1e-9)


def test_kept_mean_of_known_orders() -> None:
    losses = np.arange(10) / 10
    assert kept_mean(losses, losses, 0.7) == pytest.approx(0.3)  # the oracle
    assert kept_mean(-losses, losses, 0.7) == pytest.approx(0.6)
    assert kept_mean(np.zeros(10), losses, 0.7) == pytest.approx(0.45)  # says nothing: the mean of all
    assert kept_mean(losses, losses, 1.0) == pytest.approx(0.45)


@given(st.lists(st.tuples(coarse, st.floats(0, 1)), min_size=1, max_size=80), st.integers(1, 40))
def test_a_risk_curve_rises_and_fits_a_threshold(pairs: list[tuple[float, float]], knots: int) -> None:
    curve = risk_curve([s for s, _ in pairs], [x for _, x in pairs], knots)
    assert 1 <= len(curve) <= knots
    ThresholdConfig(kind="risk", curve=curve)  # which checks that it rises


def test_a_risk_curve_recovers_the_truth() -> None:
    rng = np.random.default_rng(2)
    scores = rng.random(200_000)
    losses = np.clip(scores**2 + 0.1 * rng.standard_normal(scores.size), 0, None)
    gate = RiskThreshold(0.1, 100, risk_curve(scores, losses, 64))
    for score in (0.3, 0.5, 0.9):
        expected = np.clip(score**2 + 0.1 * rng.standard_normal(100_000), 0, None).mean()
        assert gate.expected(score) == pytest.approx(expected, abs=0.01)
    # A score that says nothing is worth the mean loss, whatever the order of the tokens.
    assert risk_curve(np.zeros(100), np.sort(losses[:100])) == ((0.0, pytest.approx(losses[:100].mean())),)


def test_bootstrap_covers_at_its_level_and_takes_pictures_as_units() -> None:
    rng = np.random.default_rng(3)
    hits, widths, repeats = 0, [], 200
    for i in range(repeats):
        images = rng.standard_normal((40, 1)) + 0.1 * rng.standard_normal((40, 16))
        estimate = bootstrap(np.mean, list(images), resamples=200, seed=i, level=0.9)
        assert estimate.value == pytest.approx(images.mean())
        hits += estimate.lower <= 0.0 <= estimate.upper
        widths.append(estimate.upper - estimate.lower)
    assert 0.82 <= hits / repeats <= 0.96
    # 2 * 1.645 / sqrt(40) = 0.52; with tokens as units it would be a quarter of that.
    assert np.mean(widths) == pytest.approx(0.52, abs=0.05)


def test_bootstrap_pairs_its_quantities_and_repeats() -> None:
    rng = np.random.default_rng(4)
    base = [rng.standard_normal(rng.integers(1, 9)) for _ in range(30)]
    shifted = [image + 0.01 for image in base]

    def difference(a: np.ndarray, b: np.ndarray) -> float:
        return float(b.mean() - a.mean())

    first = bootstrap(difference, base, shifted, resamples=100, seed=7)
    assert first.lower == pytest.approx(0.01)
    assert first.upper == pytest.approx(0.01)
    spread = [bootstrap(np.mean, base, resamples=100, seed=seed) for seed in (7, 7, 8)]
    assert spread[0] == spread[1] != spread[2]


def test_bootstrap_leaves_resamples_out_on_which_the_statistic_is_undefined() -> None:
    scores, events = [[0.1, 0.2], [0.8, 0.9], [0.3, 0.4]], [[0, 0], [1, 1], [0, 0]]
    estimate = bootstrap(auroc, scores, events, resamples=50)
    assert estimate == (1.0, 1.0, 1.0)
    undefined = bootstrap(auroc, scores, [[0, 0]] * 3, resamples=5)
    assert all(math.isnan(x) for x in undefined)


def test_bad_input_is_refused() -> None:
    refused = [
        (lambda: quantile_threshold([], 0.5), "no scores"),
        (lambda: quantile_threshold([1.0, math.nan], 0.5), "NaN"),
        (lambda: quantile_threshold([1.0], 1.5), "share"),
        (lambda: conformal_threshold([], [], 0.1), "at least one picture"),
        (lambda: conformal_threshold([[1.0]], [[0.1], [0.2]], 0.1), "do not go with"),
        (lambda: conformal_threshold([[1.0]], [[0.1, 0.2]], 0.1), "shape"),
        (lambda: conformal_threshold([[1.0]], [[1.5]], 0.1), "bound"),
        (lambda: conformal_threshold([[1.0]], [[0.5]], 1.5), "epsilon"),
        (lambda: auroc([1.0, 2.0], [True]), "shape"),
        (lambda: kept_mean([1.0], [1.0], 0.0), "keep"),
        (lambda: risk_curve([math.inf], [0.5]), "finite"),
        (lambda: risk_curve([1.0], [0.5], 0), "knots"),
        (lambda: bootstrap(np.mean, [[1.0]], [[1.0], [2.0]]), "same number"),
        (lambda: bootstrap(np.mean, []), "at least one"),
        (lambda: bootstrap(np.mean, [[1.0]], level=1.0), "level"),
    ]
    for call, words in refused:
        with pytest.raises(InputError, match=words):
            call()


def test_it_does_not_import_torch() -> None:
    code = "import sys, ciar.intervals.calibration; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
