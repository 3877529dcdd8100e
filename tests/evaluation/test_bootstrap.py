"""Bootstrap: its intervals cover as often as they say, and pairs make them narrower."""

import numpy as np
import pytest

from ciar.errors import InputError, NumericalError
from ciar.evaluation.bootstrap import (
    mean_estimate,
    paired_frechet_change,
    paired_mean_difference,
    paired_retrieval_difference,
    statistic_estimate,
)
from ciar.evaluation.frechet import frechet_distance


def cloud(seed: int, count: int, dim: int = 6, shift: float = 0.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, dim)) + shift


def test_interval_of_a_mean_is_the_normal_one_for_many_pictures():
    values = np.random.default_rng(0).normal(loc=3.0, scale=2.0, size=1000)
    found = mean_estimate(values, replicates=4000)
    error = values.std() / np.sqrt(1000)
    assert found.value == pytest.approx(values.mean())
    assert found.low == pytest.approx(values.mean() - 1.96 * error, abs=0.15 * error)
    assert found.high == pytest.approx(values.mean() + 1.96 * error, abs=0.15 * error)
    assert (found.count, found.replicates, found.level) == (1000, 4000, 0.95)


def test_intervals_cover_the_truth_as_often_as_they_say():
    covered = 0
    for seed in range(200):
        hits = np.random.default_rng(seed).random(150) < 0.3
        found = mean_estimate(hits, level=0.9, replicates=300, seed=seed)
        covered += found.low <= 0.3 <= found.high
    # 90 % of 200, within four standard deviations.
    assert 163 <= covered <= 197


def test_the_seed_decides_the_interval():
    values = cloud(1, 50)[:, 0]
    assert mean_estimate(values, seed=3) == mean_estimate(values, seed=3)
    assert mean_estimate(values, seed=3).low != mean_estimate(values, seed=4).low


def test_pairs_make_the_interval_narrow():
    before = np.random.default_rng(0).normal(scale=5.0, size=400)
    after = before + np.random.default_rng(1).normal(loc=0.1, scale=0.1, size=400)
    found = paired_mean_difference(before, after)
    assert found.low > 0.08
    assert found.high < 0.12
    unpaired = paired_mean_difference(before, np.random.default_rng(2).permutation(after))
    assert unpaired.high - unpaired.low > 20 * (found.high - found.low)


def test_retrieval_difference_is_in_points():
    before = np.array([True] * 80 + [False] * 20)
    after = before.copy()
    after[:5] = False
    found = paired_retrieval_difference(before, after)
    assert found.value == pytest.approx(-5.0)
    assert -11.0 < found.low < -7.0
    assert -3.0 < found.high < 0.0
    same = paired_retrieval_difference(before, before)
    assert (same.value, same.low, same.high) == (0.0, 0.0, 0.0)


def test_frechet_change_of_equal_sets_is_zero():
    features, real = cloud(0, 120, shift=0.2), cloud(1, 150)
    found = paired_frechet_change(before=features, after=features, real=real, replicates=100)
    assert found.value == pytest.approx(0.0, abs=1e-9)
    assert found.low == pytest.approx(0.0, abs=1e-9)
    assert found.high == pytest.approx(0.0, abs=1e-9)


def test_frechet_change_is_that_of_the_two_distances_and_its_interval_holds_it():
    real, before = cloud(1, 400), cloud(0, 300, shift=0.5)
    after = before + 0.05
    found = paired_frechet_change(before=before, after=after, real=real, replicates=200)
    one = frechet_distance(generated=before, real=real).value
    two = frechet_distance(generated=after, real=real).value
    assert found.value == pytest.approx(two / one - 1.0, rel=1e-9)
    assert 0.0 < found.low < found.value < found.high < 2 * found.value
    assert found.count == 300


def test_frechet_interval_of_equally_good_sets_holds_zero():
    real = cloud(1, 400)
    inside = 0
    for seed in range(12):
        before, after = cloud(10 + seed, 150, shift=0.4), cloud(50 + seed, 150, shift=0.4)
        found = paired_frechet_change(before=before, after=after, real=real, replicates=100, seed=seed)
        inside += found.low <= 0.0 <= found.high
    assert inside >= 9


def test_any_statistic_takes_counts():
    values = np.random.default_rng(3).normal(size=80)
    found = statistic_estimate(lambda counts: float(counts @ values / counts.sum()), 80, replicates=2000)
    plain = mean_estimate(values, replicates=2000)
    assert (found.value, found.low, found.high) == pytest.approx((plain.value, plain.low, plain.high))


def test_sets_that_are_no_pairs_are_refused():
    with pytest.raises(InputError, match="3 and 4 pictures"):
        paired_mean_difference(np.zeros(3), np.zeros(4))
    with pytest.raises(InputError, match="20 and 21 pictures"):
        paired_frechet_change(before=cloud(0, 20), after=cloud(1, 21), real=cloud(2, 30))
    with pytest.raises(InputError, match="distance 0"):
        paired_frechet_change(before=np.ones((9, 2)), after=cloud(0, 9, 2), real=np.ones((9, 2)))


@pytest.mark.parametrize("options", [{"level": 0.0}, {"level": 1.0}, {"replicates": 99}])
def test_settings_out_of_range_are_refused(options: dict):
    with pytest.raises(InputError, match=next(iter(options))):
        mean_estimate(np.arange(9.0), **options)


@pytest.mark.parametrize("values", [[], [1.0], [[1.0, 2.0]]])
def test_sets_without_an_interval_are_refused(values: list):
    with pytest.raises(InputError):
        mean_estimate(values)


def test_broken_values_are_refused():
    with pytest.raises(NumericalError, match="NaN"):
        mean_estimate([1.0, np.nan, 2.0])
