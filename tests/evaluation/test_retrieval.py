"""Retrieval: which captions a picture chooses among, and what chance and perfection give."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ciar.errors import InputError
from ciar.evaluation.retrieval import draw_distractors, retrieval_accuracy, retrieved


def unit(seed: int, count: int, dim: int = 32) -> np.ndarray:
    values = np.random.default_rng(seed).normal(size=(count, dim))
    return values / np.linalg.norm(values, axis=1, keepdims=True)


@given(seed=st.integers(0, 2**32), styles=st.integers(1, 4), count=st.integers(1, 11))
@settings(max_examples=40, deadline=None)
def test_distractors_have_other_names_and_no_two_the_same(seed: int, styles: int, count: int):
    pool_names = [f"thing-{i}" for i in range(12)] * styles
    names = ["thing-3", "thing-0", "thing-11", "something-else"]
    drawn = draw_distractors(names, pool_names, count=count, seed=seed)
    assert drawn.shape == (4, count)
    for name, row in zip(names, drawn, strict=True):
        chosen = [pool_names[i] for i in row]
        assert name not in chosen
        assert len(set(chosen)) == count


def test_every_other_caption_is_drawn_equally_often():
    pool_names = [name for name in "abcdef" for _ in range(2)]
    drawn = draw_distractors(["c"] * 3000, pool_names, count=2, seed=1)
    counts = np.bincount(drawn.ravel(), minlength=12)
    assert counts[4] == counts[5] == 0
    others = np.delete(counts, [4, 5])
    assert np.all(np.abs(others - 600) < 5 * np.sqrt(600))


def test_distractors_depend_on_seed_and_place_alone():
    pool = [str(i) for i in range(300)]
    names = [str(i) for i in range(50)]
    first = draw_distractors(names, pool, seed=4)
    np.testing.assert_array_equal(draw_distractors(names[:10], pool, seed=4), first[:10])
    assert (draw_distractors(names, pool, seed=5) != first).any()


def test_too_small_pools_are_refused():
    with pytest.raises(InputError, match="3 names other than 'a', and 4 are needed"):
        draw_distractors(["a"], list("abcd"), count=4)
    assert sorted(draw_distractors(["z"], list("abcd"), count=4)[0]) == [0, 1, 2, 3]
    with pytest.raises(InputError, match="count"):
        draw_distractors(["a"], list("abcd"), count=0)


def test_perfect_and_chance_features():
    count, names = 600, [str(i) for i in range(600)]
    captions = unit(0, count)
    perfect = retrieval_accuracy(
        pictures=captions, own_captions=captions, names=names, pool=captions, pool_names=names
    )
    assert perfect.accuracy.value == perfect.accuracy.low == 1.0
    assert perfect.captions == 100
    chance = retrieval_accuracy(
        pictures=unit(1, count), own_captions=captions, names=names, pool=captions, pool_names=names
    )
    assert chance.accuracy.value < 0.03
    assert chance.correct.mean() == chance.accuracy.value


def test_half_right_has_an_interval_of_the_binomial_width():
    count, names = 400, [str(i) for i in range(400)]
    captions = unit(0, count)
    pictures = captions.copy()
    pictures[::2] *= -1.0
    found = retrieval_accuracy(
        pictures=pictures, own_captions=captions, names=names, pool=captions, pool_names=names
    )
    assert found.correct.tolist() == [False, True] * 200
    assert found.accuracy.value == 0.5
    width = found.accuracy.high - found.accuracy.low
    assert width == pytest.approx(2 * 1.96 * 0.5 / np.sqrt(count), rel=0.1)


def test_a_tie_is_a_miss():
    own = unit(0, 1)
    pool = np.concatenate([own, unit(1, 1)])
    assert retrieved(own, own, pool, np.array([[1]])).tolist() == [True]
    assert retrieved(own, own, pool, np.array([[0, 1]])).tolist() == [False]


def test_shapes_that_do_not_fit_are_refused():
    pictures, pool = unit(0, 3), unit(1, 5)
    with pytest.raises(InputError, match="fit together"):
        retrieved(pictures, pictures[:2], pool, np.zeros((3, 2), dtype=np.int64))
    with pytest.raises(InputError, match="fit together"):
        retrieved(pictures, pictures, unit(1, 5, dim=8), np.zeros((3, 2), dtype=np.int64))
    with pytest.raises(InputError, match="one name for each picture"):
        retrieval_accuracy(
            pictures=pictures, own_captions=pictures, names=["a"], pool=pool, pool_names=list("abcde")
        )
