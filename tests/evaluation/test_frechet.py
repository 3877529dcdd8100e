"""Frechet distance: against closed forms, against SciPy's matrix root, and in singular cases."""

import builtins
import warnings

import numpy as np
import pytest
import scipy.linalg
from hypothesis import given, settings
from hypothesis import strategies as st

from ciar.errors import InputError, NumericalError
from ciar.evaluation import frechet
from ciar.evaluation.frechet import (
    FewPicturesWarning,
    Gaussian,
    frechet_distance,
    frechet_of_gaussians,
    gaussian_of,
    symmetric_root,
    weighted_gaussian,
)


def random_features(seed: int, count: int, dim: int, shift: float = 0.0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    mix = generator.normal(size=(dim, dim)) / np.sqrt(dim)
    return (generator.normal(size=(count, dim)) @ mix + shift).astype(np.float32)


def reference(a: np.ndarray, b: np.ndarray) -> float:
    """The usual formula, with SciPy's root of the non-symmetric product."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    one, two = np.cov(a, rowvar=False), np.cov(b, rowvar=False)
    root = scipy.linalg.sqrtm(one @ two)
    apart = a.mean(axis=0) - b.mean(axis=0)
    return float(apart @ apart + np.trace(one) + np.trace(two) - 2 * np.trace(root).real)


@pytest.mark.parametrize("dim", [2, 16, 64, 128])
def test_agrees_with_the_matrix_root_of_scipy(dim: int):
    """clean-fid #53: SciPy's root changed its interface and returns imaginary parts; ours needs none."""
    a, b = random_features(1, 4 * dim + 40, dim), random_features(2, 4 * dim + 90, dim, shift=0.1)
    ours = frechet_distance(generated=a, real=b).value
    assert ours == pytest.approx(reference(a, b), rel=1e-4)


def test_agrees_with_scipy_on_unit_features():
    a, b = random_features(3, 600, 32), random_features(4, 700, 32)
    a, b = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (a, b))
    assert frechet_distance(generated=a, real=b).value == pytest.approx(reference(a, b), rel=1e-4)


@given(
    scales=st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10), st.floats(-5, 5)), min_size=1, max_size=6),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_gaussians_with_shared_axes_have_a_closed_form(scales, seed: int):
    """With common axes the distance is the sum of (s1 - s2)^2 and of the squared shift."""
    one, two, shift = (np.array(column) for column in zip(*scales, strict=True))
    axes = np.linalg.qr(np.random.default_rng(seed).normal(size=(len(one), len(one))))[0]
    a = Gaussian(axes @ shift, (axes * one**2) @ axes.T, 10)
    b = Gaussian(np.zeros(len(one)), (axes * two**2) @ axes.T, 10)
    expected = float(((one - two) ** 2).sum() + (shift**2).sum())
    # Where both sets vanish along an axis, the root of the rounding error is what remains.
    largest = max(1.0, float((one**2).max()), float((two**2).max()))
    assert frechet_of_gaussians(a, b) == pytest.approx(expected, rel=1e-4, abs=1e-6 * largest)


def test_one_dimension_by_hand():
    a = np.array([[0.0], [2.0], [4.0], [6.0]])  # mean 3, variance 20/3
    b = np.array([[1.0], [1.0], [3.0], [3.0]])  # mean 2, variance 4/3
    expected = 1.0 + (np.sqrt(20 / 3) - np.sqrt(4 / 3)) ** 2
    assert frechet_distance(generated=a, real=b).value == pytest.approx(expected, rel=1e-12)


def test_equal_sets_are_at_distance_zero_and_the_order_does_not_matter():
    a, b = random_features(5, 400, 16), random_features(6, 300, 16)
    assert 0.0 <= frechet_distance(generated=a, real=a[::-1]).value < 1e-6
    forth = frechet_distance(generated=a, real=b).value
    assert frechet_distance(generated=b, real=a).value == pytest.approx(forth, rel=1e-9)


def test_singular_covariances_give_a_real_finite_figure():
    """With fewer pictures than dimensions the covariance is singular: no NaN, and a warning."""
    a, b = random_features(7, 20, 64), random_features(8, 30, 64)
    with (
        pytest.warns(FewPicturesWarning, match="20 generated pictures for features 64 wide"),
        pytest.warns(FewPicturesWarning, match="30 real pictures for features 64 wide"),
    ):
        ours = frechet_distance(generated=a, real=b)
    assert ours.value == pytest.approx(reference(a, b), rel=1e-4)
    assert len(ours.notes) == 3


def test_warns_below_twice_the_width_and_not_at_it():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        enough = frechet_distance(generated=random_features(1, 16, 8), real=random_features(2, 16, 8))
    assert len(enough.notes) == 1
    assert "biased upwards" in enough.notes[0]
    assert (enough.generated_count, enough.real_count, enough.dim) == (16, 16, 8)
    with pytest.warns(FewPicturesWarning, match="15 real"):
        frechet_distance(generated=random_features(1, 16, 8), real=random_features(2, 15, 8))


def test_blocks_do_not_change_the_moments(monkeypatch: pytest.MonkeyPatch):
    features = random_features(9, 101, 12, shift=50.0)
    whole = gaussian_of(features)
    monkeypatch.setattr(frechet, "BLOCK_ROWS", 7)
    blocked = gaussian_of(features)
    np.testing.assert_allclose(blocked.covariance, whole.covariance, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(whole.covariance, np.cov(features.astype(np.float64), rowvar=False), rtol=1e-9)
    np.testing.assert_allclose(whole.mean, features.astype(np.float64).mean(axis=0))
    assert whole.count == 101


def test_weights_stand_for_repeated_pictures():
    features = random_features(10, 9, 4)
    counts = np.array([0, 1, 2, 0, 3, 1, 1, 0, 1])
    weighted = weighted_gaussian(features, counts.astype(np.float64))
    repeated = gaussian_of(np.repeat(features, counts, axis=0))
    np.testing.assert_allclose(weighted.covariance, repeated.covariance, rtol=1e-9)
    np.testing.assert_allclose(weighted.mean, repeated.mean, rtol=1e-9)
    assert weighted.count == repeated.count == 9


def test_root_squares_to_the_matrix():
    covariance = gaussian_of(random_features(11, 100, 10)).covariance
    root = symmetric_root(covariance)
    np.testing.assert_allclose(root @ root, covariance, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(root, root.T, rtol=1e-9, atol=1e-12)


def test_needs_no_scipy(monkeypatch: pytest.MonkeyPatch):
    real_import = builtins.__import__

    def without_scipy(name, *args, **kwargs):
        if name.split(".")[0] == "scipy":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_scipy)
    value = frechet_distance(generated=random_features(1, 40, 4), real=random_features(2, 40, 4)).value
    assert value > 0.1


@pytest.mark.parametrize("bad", [np.zeros((1, 4)), np.zeros((0, 4)), np.zeros(4), np.zeros((8, 5))])
@pytest.mark.filterwarnings("ignore::ciar.evaluation.frechet.FewPicturesWarning")
def test_sets_that_do_not_fit_are_refused(bad: np.ndarray):
    with pytest.raises(InputError):
        frechet_distance(generated=bad, real=random_features(1, 40, 4))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_broken_features_are_named(value: float):
    features = random_features(1, 40, 4)
    features[17, 2] = value
    with pytest.raises(NumericalError, match=r"real features hold NaN or infinity in 1 of 40 rows.*row 17"):
        frechet_distance(generated=random_features(2, 40, 4), real=features)


def test_arguments_are_keywords_only():
    with pytest.raises(TypeError):
        frechet_distance(np.zeros((8, 2)), np.zeros((8, 2)))
