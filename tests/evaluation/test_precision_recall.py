"""Precision, recall and F1: which is which, against a plain reference, and within bounded memory."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ciar.errors import InputError, NumericalError
from ciar.evaluation.precision_recall import precision_recall


def cloud(seed: int, count: int, dim: int = 8, shift: float = 0.0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=(count, dim)) + shift).astype(np.float32)


def reference(points: np.ndarray, centres: np.ndarray, k: int, inclusive: bool) -> float:
    """Every distance one by one."""
    points, centres = points.astype(np.float64), centres.astype(np.float64)
    radii = [sorted(np.square(centres - c).sum(axis=1))[k] for c in centres]
    hits = 0
    for point in points:
        distances = np.square(centres - point).sum(axis=1)
        hits += any(d <= r if inclusive else d < r for d, r in zip(distances, radii, strict=True))
    return hits / len(points)


@pytest.mark.parametrize("rule", ["strict", "inclusive"])
def test_copies_of_one_picture_are_precise_and_recall_nothing(rule):
    """torch-fidelity #58: precision and recall were swapped by the order of the arguments."""
    real = cloud(0, 100)
    generated = np.repeat(real[:1], 100, axis=0)
    found = precision_recall(generated=generated, real=real, rule=rule)
    assert found.precision == 1.0
    assert found.recall <= 0.01
    swapped = precision_recall(generated=real, real=generated, rule=rule)
    assert (swapped.precision, swapped.recall) == (found.recall, found.precision)
    assert swapped.f1 == found.f1  # F1 is symmetrical


def test_the_rule_decides_about_the_surface():
    real = np.array([[0.0], [1.0], [2.0], [3.0]])
    generated = np.array([[-1.0], [10.0], [11.0], [12.0]])
    # k = 1: every real ball has radius 1, and -1 lies exactly at the surface of the first.
    assert precision_recall(generated=generated, real=real, k=1, rule="strict").precision == 0.0
    assert precision_recall(generated=generated, real=real, k=1, rule="inclusive").precision == 0.25


def test_positional_arguments_are_refused():
    with pytest.raises(TypeError):
        precision_recall(cloud(0, 10), cloud(1, 10))


@given(seed=st.integers(0, 10_000), k=st.integers(1, 5), inclusive=st.booleans(), shift=st.floats(0, 2))
@settings(max_examples=25, deadline=None)
def test_agrees_with_every_distance_one_by_one(seed: int, k: int, inclusive: bool, shift: float):
    generated, real = cloud(seed, 23, 3, shift), cloud(seed + 1, 31, 3)
    rule = "inclusive" if inclusive else "strict"
    found = precision_recall(generated=generated, real=real, k=k, rule=rule)
    assert found.precision == reference(generated, real, k, inclusive)
    assert found.recall == reference(real, generated, k, inclusive)
    assert 0.0 <= found.f1 <= 1.0


@pytest.mark.parametrize("block_bytes", [1, 900, 10_000])
def test_blocks_do_not_change_the_figures(block_bytes: int):
    generated, real = cloud(2, 57, shift=0.5), cloud(3, 83)
    whole = precision_recall(generated=generated, real=real)
    assert precision_recall(generated=generated, real=real, block_bytes=block_bytes) == whole
    assert 0.0 < whole.precision < 1.0


def test_memory_does_not_grow_with_the_square_of_the_pictures():
    """prdc keeps all distances at once: 20 GB at 50,000 pictures. A block is bounded here."""
    count = 4000
    generated, real = cloud(4, count), cloud(5, count)
    tracemalloc.start()
    precision_recall(generated=generated, real=real, block_bytes=2**20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 * 2**20  # all distances of one pair of sets would take 128 MB


def test_equal_far_and_disjoint_sets():
    a = cloud(6, 50)
    same = precision_recall(generated=a, real=a)
    assert (same.precision, same.recall, same.f1) == (1.0, 1.0, 1.0)
    apart = precision_recall(generated=a, real=cloud(7, 50, shift=100.0))
    assert (apart.precision, apart.recall, apart.f1) == (0.0, 0.0, 0.0)


def test_copies_far_from_the_origin_are_still_copies():
    """Squared distances by the scalar product lose digits far out; copies must stay at distance 0."""
    real = cloud(8, 40, shift=1000.0)
    generated = np.repeat(real[3:4], 40, axis=0)
    found = precision_recall(generated=generated, real=real, rule="inclusive")
    assert found.precision == 1.0
    assert found.recall == 1 / 40


@pytest.mark.parametrize(("generated", "real", "name"), [(4, 9, "generated"), (9, 4, "real")])
def test_too_few_pictures_are_refused(generated: int, real: int, name: str):
    """prdc: k + 2 pictures are needed; it fails inside a sort otherwise."""
    with pytest.raises(InputError, match=f"at least 5 pictures in each set; there are 4 {name}"):
        precision_recall(generated=cloud(0, generated), real=cloud(1, real), k=3)
    assert precision_recall(generated=cloud(0, 5), real=cloud(1, 5), k=3).k == 3


@pytest.mark.parametrize("options", [{"k": 0}, {"rule": "loose"}, {"block_bytes": 0}])
def test_settings_out_of_range_are_refused(options: dict):
    with pytest.raises(InputError, match=next(iter(options))):
        precision_recall(generated=cloud(0, 9), real=cloud(1, 9), **options)


def test_widths_and_broken_features_are_refused():
    with pytest.raises(InputError, match="8 wide and the real ones 6"):
        precision_recall(generated=cloud(0, 9), real=cloud(1, 9, dim=6))
    broken = cloud(0, 9)
    broken[4, 4] = np.nan
    with pytest.raises(NumericalError, match="row 4"):
        precision_recall(generated=broken, real=cloud(1, 9))
