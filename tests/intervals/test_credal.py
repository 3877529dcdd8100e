"""The discrete gate: bounds of entropy against brute force, and what each form costs."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from ciar.errors import InputError
from ciar.intervals.credal import (
    PooledSet,
    entropy_gap,
    lower_law,
    pooled,
    pooled_entropy,
    upper_law,
    vertex_gap,
)
from ciar.intervals.interfuse import creinn
from ciar.intervals.scores import DraftLaw


def some_law(seed: int, size: int, rows: int = 1, scale: float = 2.0) -> DraftLaw:
    generator = torch.Generator().manual_seed(seed)
    centre = scale * torch.randn(rows, size, generator=generator)
    return DraftLaw(centre, 1.5 * torch.rand(rows, size, generator=generator))


def entropy(p: np.ndarray, tokens: np.ndarray) -> float:
    return float(sum(-x * np.log(x / m) for x, m in zip(p, tokens, strict=True) if x > 0))


def naive_set(law: DraftLaw, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bounds of one law's pooled set, class by class."""
    c, r = law.centre[0].double().numpy(), law.radius[0].double().numpy()
    lower, upper = [], []
    for i in range(c.size):
        others = np.logaddexp.reduce(np.delete(c, i))
        lower.append(1 / (1 + np.exp(-(c[i] - r[i] - others))))
        upper.append(1 / (1 + np.exp(-(c[i] + r[i] - others))))
    order = np.argsort(-c)
    low, high = np.array(lower)[order], np.array(upper)[order]
    if k >= c.size:
        return low, high, np.ones(c.size)
    tokens = np.append(np.ones(k), c.size - k)
    return (
        np.append(low[:k], low[k:].sum()),
        np.append(high[:k], min(1.0, high[k:].sum())),
        tokens,
    )


def extreme_points(lower: np.ndarray, upper: np.ndarray) -> list[np.ndarray]:
    """Every point of the set that has all classes but one at a bound."""
    points = []
    for free in range(lower.size):
        rest = [i for i in range(lower.size) if i != free]
        for sides in product((0, 1), repeat=len(rest)):
            p = lower.copy()
            for i, side in zip(rest, sides, strict=True):
                p[i] = (lower[i], upper[i])[side]
            p[free] = 1.0 - np.delete(p, free).sum()
            if lower[free] - 1e-12 <= p[free] <= upper[free] + 1e-12:
                points.append(p)
    return points


@given(st.integers(0, 500), st.integers(3, 12), st.integers(1, 6))
def test_pooled_bounds_are_sums(seed: int, size: int, k: int) -> None:
    law = some_law(seed, size)
    lower, upper, tokens = naive_set(law, k)
    found = pooled(law, k)
    np.testing.assert_allclose(found.lower[0], lower, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(found.upper[0], upper, rtol=1e-4, atol=1e-7)
    np.testing.assert_array_equal(found.tokens, tokens)
    assert found.lower.sum() <= 1 + 1e-6 <= found.upper.sum() + 2e-6


@given(st.integers(0, 500), st.integers(4, 12), st.integers(1, 5))
def test_upper_entropy_beats_every_member(seed: int, size: int, k: int) -> None:
    law = some_law(seed, size)
    credal = pooled(law, k)
    best = upper_law(credal)[0].double().numpy()
    lower, upper, tokens = naive_set(law, k)
    assert best.sum() == pytest.approx(1.0, abs=1e-5)
    assert ((lower - 1e-6 <= best) & (best <= upper + 1e-6)).all()
    highest = entropy(best, tokens)
    assert pooled_entropy(torch.from_numpy(best).float(), credal.tokens).item() == pytest.approx(
        highest, abs=1e-4
    )
    # Members between extreme points; none has more entropy.
    generator = np.random.default_rng(seed)
    corners = np.array(extreme_points(lower, upper))
    for weights in generator.dirichlet(np.ones(len(corners)), 20):
        assert entropy(weights @ corners, tokens) <= highest + 1e-5


@given(st.integers(0, 500), st.integers(4, 9), st.integers(2, 6))
def test_lower_entropy_is_at_an_extreme_point_near_the_least(seed: int, size: int, k: int) -> None:
    law = some_law(seed, size)
    lower, upper, tokens = naive_set(law, k)
    found = lower_law(pooled(law, k))[0].double().numpy()
    points = extreme_points(lower, upper)
    assert min(np.abs(found - p).max() for p in points) < 1e-5
    least, most = min(entropy(p, tokens) for p in points), max(entropy(p, tokens) for p in points)
    assert least - 1e-5 <= entropy(found, tokens) <= least + 0.25 * (most - least) + 1e-5


@given(st.lists(st.floats(0.02, 0.9), min_size=3, max_size=6))
def test_lower_entropy_is_exact_where_lower_bounds_are_equal(tops: list[float]) -> None:
    upper = np.array([*tops, 1.0])
    lower = np.full(upper.size, 0.01)
    tokens = np.ones(upper.size)
    credal = PooledSet(torch.tensor(lower).float(), torch.tensor(upper).float(), torch.ones(upper.size))
    least = min(entropy(p, tokens) for p in extreme_points(lower, upper))
    assert entropy(lower_law(credal).double().numpy(), tokens) == pytest.approx(least, abs=1e-4)


@given(st.integers(0, 300), st.integers(4, 8), st.integers(2, 5))
def test_the_gap_of_vertices_is_within_the_whole_gap(seed: int, size: int, k: int) -> None:
    law = some_law(seed, size)
    lower, upper, tokens = naive_set(law, k)
    entropies = [entropy(p, tokens) for p in extreme_points(lower, upper)]
    sampled = vertex_gap(law, k).item()
    assert 0 <= sampled <= max(entropies) - min(entropies) + 1e-4
    # With many orders of few classes every extreme point is met.
    assert vertex_gap(law, k, samples=3000).item() == pytest.approx(max(entropies) - min(entropies), abs=1e-3)
    assert vertex_gap(law, k).item() == sampled


def test_known_gaps() -> None:
    sure = DraftLaw(torch.tensor([[1.0, 0.0, -1.0]]), torch.zeros(1, 3))
    for gap in (entropy_gap, vertex_gap):
        assert gap(sure, 2).item() == pytest.approx(0.0, abs=1e-5)
        wide = gap(DraftLaw(sure.centre, torch.full((1, 3), 30.0)), 3)
        assert wide.item() == pytest.approx(np.log(3) if gap is entropy_gap else 0.0, abs=1e-3)
    narrow, wider = (entropy_gap(DraftLaw(sure.centre, torch.full((1, 3), r)), 2) for r in (0.5, 1.0))
    assert wider > narrow > 0


def test_rows_do_not_mix_and_masked_tokens_do_not_count() -> None:
    law = some_law(3, 64, rows=4)
    law.centre[:, 40:] = -torch.inf
    for gap in (entropy_gap, vertex_gap):
        together = gap(law, 10)
        alone = torch.stack([gap(DraftLaw(c, r), 10) for c, r in zip(*law, strict=True)])
        torch.testing.assert_close(together, alone, atol=1e-4, rtol=1e-4)
        assert together.isfinite().all()


def test_bad_numbers_are_refused() -> None:
    with pytest.raises(InputError, match="k must"):
        entropy_gap(some_law(0, 4), 0)
    with pytest.raises(InputError, match="samples must"):
        vertex_gap(some_law(0, 4), 2, 0)


class Elements(TorchDispatchMode):
    """Counts the elements that operations write: a cost that no clock disturbs."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, tuple | list) else (out,):
            self.count += one.numel() if isinstance(one, torch.Tensor) else 0
        return out


def written(k: int, form: Any) -> int:
    """Elements that a form writes beyond the intervals and the pooling, at 4,096 tokens."""
    law = some_law(0, 4096)
    form(law, k)  # the orders of the vertices are made once
    with Elements() as pooling:
        pooled(law, k)
    with Elements() as whole:
        form(law, k)
    return whole.count - pooling.count


def test_what_both_forms_cost() -> None:
    """docs/gates.md quotes these counts."""
    documented = {
        (entropy_gap, 100): 6_500,
        (entropy_gap, 300): 19_300,
        (vertex_gap, 100): 84_500,
        (vertex_gap, 300): 252_000,
    }
    for (form, k), count in documented.items():
        assert written(k, form) == pytest.approx(count, rel=0.05), (form.__name__, k)
    with Elements() as intervals:
        creinn(*some_law(0, 4096))
    # The intervals of the whole vocabulary, which both need, dwarf what the efficient form adds to them.
    assert intervals.count == pytest.approx(86_000, rel=0.05)
