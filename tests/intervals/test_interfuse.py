"""Interval operators: valid for any input, exact where there is a closed form."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ciar.errors import InputError
from ciar.intervals.interfuse import (
    OPERATORS,
    Interval,
    creinn,
    creinn_width,
    ibp,
    interval_operator,
    log_odds,
    reachable,
    top_log_odds,
)

#: float32 sums of a soft-max over up to 16,384 classes stay this close to 1.
SUM_TOLERANCE = 2e-5

logits = st.one_of(st.floats(-1e4, 1e4, width=32), st.floats(-8, 8, width=32))
radii = st.one_of(st.floats(0, 60, width=32), st.floats(0, 3, width=32), st.just(0.0))


@st.composite
def laws(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Centre and radius of up to 24 classes; some may be masked, one never is."""
    size = draw(st.integers(1, 24))
    centre = torch.tensor(draw(st.lists(logits, min_size=size, max_size=size)))
    masked = torch.tensor(draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    masked[draw(st.integers(0, size - 1))] = False
    radius = torch.tensor(draw(st.lists(radii, min_size=size, max_size=size)))
    return centre.masked_fill(masked, -torch.inf), radius


def check_valid(interval: Interval) -> None:
    lower, upper, probs = interval
    for tensor in interval:
        assert tensor.dtype == torch.float32
        assert tensor.isfinite().all()
    assert (lower >= 0).all()
    assert (lower <= probs).all()
    assert (probs <= upper).all()
    assert (upper <= 1).all()
    assert (lower.double().sum(-1) <= 1 + SUM_TOLERANCE).all()
    assert (upper.double().sum(-1) >= 1 - SUM_TOLERANCE).all()


def exact_log_odds(centre: np.ndarray) -> np.ndarray:
    """In float64, one class at a time: each against the log-sum-exp of the others."""
    with np.errstate(divide="ignore"):
        others = [np.logaddexp.reduce(np.delete(centre, i)) for i in range(centre.size)]
    return centre - np.array(others)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return np.exp(-np.logaddexp(0.0, -x))


@pytest.mark.parametrize("name", OPERATORS)
@given(law=laws())
def test_valid_for_any_input(name: str, law: tuple[Tensor, Tensor]) -> None:
    interval = OPERATORS[name](*law)
    check_valid(interval)
    masked = law[0] == -torch.inf
    assert (interval.lower[masked] == 0).all()
    assert (interval.upper[masked] == 0).all()


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("scale", [0.0, 0.1, 3.0, 100.0, 1e4])
def test_valid_in_any_dtype_on_a_large_vocabulary(name: str, dtype: torch.dtype, scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    centre = (scale * torch.randn(3, 16384, generator=generator)).to(dtype)
    radius = (4.0 * torch.rand(3, 16384, generator=generator)).to(dtype)
    check_valid(OPERATORS[name](centre, radius))


@pytest.mark.parametrize("name", OPERATORS)
def test_float32_inside_whatever_comes_in(name: str) -> None:
    centre, radius = torch.randn(2, 300).bfloat16(), torch.rand(2, 300).bfloat16()
    for got, expected in zip(
        OPERATORS[name](centre, radius), OPERATORS[name](centre.float(), radius.float()), strict=True
    ):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("name", OPERATORS)
@given(law=laws(), more=st.floats(0, 5, width=32))
def test_wider_radii_give_wider_intervals(name: str, law: tuple[Tensor, Tensor], more: float) -> None:
    centre, radius = law
    narrow, wide = OPERATORS[name](centre, radius), OPERATORS[name](centre, radius + more)
    assert (wide.lower <= narrow.lower + 1e-6).all()
    assert (wide.upper >= narrow.upper - 1e-6).all()


@pytest.mark.parametrize("name", OPERATORS)
@given(law=laws())
def test_no_radius_no_width(name: str, law: tuple[Tensor, Tensor]) -> None:
    centre, radius = law
    interval = OPERATORS[name](centre, torch.zeros_like(radius))
    # Soft-max and the sigmoid of its log-odds agree to float32 rounding, larger where the logits are.
    slack = 1e-6
    torch.testing.assert_close(interval.width, torch.zeros_like(radius), atol=slack, rtol=0)
    torch.testing.assert_close(interval.lower, centre.softmax(-1), atol=slack, rtol=0)
    assert torch.equal(creinn_width(centre, torch.zeros_like(radius)), torch.zeros_like(radius))


@given(laws(), st.floats(0, 20, width=32))
def test_with_one_radius_ibp_is_creinn_with_twice_that(law: tuple[Tensor, Tensor], radius: float) -> None:
    centre, _ = law
    same = torch.full_like(centre, radius)
    for got, expected in zip(ibp(centre, same), creinn(centre, 2 * same), strict=True):
        torch.testing.assert_close(got, expected, atol=2e-6, rtol=2e-4)


def test_ibp_contains_every_law_of_the_box_and_is_attained() -> None:
    generator = torch.Generator().manual_seed(3)
    centre = 2.0 * torch.randn(6, generator=generator)
    radius = 2.0 * torch.rand(6, generator=generator)
    lower, upper, _ = ibp(centre, radius)
    shifts = 2.0 * torch.rand(20_000, 6, generator=generator) - 1.0
    inside = (centre + shifts * radius).softmax(-1)
    assert (inside >= lower - 1e-6).all()
    assert (inside <= upper + 1e-6).all()
    for i in range(6):
        corner = centre + radius
        corner[i] = centre[i] - radius[i]
        assert corner.softmax(-1)[i].item() == pytest.approx(lower[i].item(), rel=1e-5)
        corner = centre - radius
        corner[i] = centre[i] + radius[i]
        assert corner.softmax(-1)[i].item() == pytest.approx(upper[i].item(), rel=1e-5)


@given(st.lists(st.floats(-30, 30, width=32), min_size=2, max_size=16), st.floats(0, 30, width=32))
def test_bounds_are_the_textbook_form(values: list[float], radius: float) -> None:
    centre = np.array(values)
    lower, upper, probs = creinn(torch.tensor(values), torch.tensor(radius))
    odds = exact_log_odds(centre)
    np.testing.assert_allclose(lower.numpy(), sigmoid(odds - radius), rtol=3e-5, atol=1e-37)
    np.testing.assert_allclose(upper.numpy(), sigmoid(odds + radius), rtol=3e-5, atol=1e-37)
    np.testing.assert_allclose(probs.numpy(), sigmoid(odds), rtol=3e-5, atol=1e-37)


@given(st.lists(st.floats(-30, 30, width=32), min_size=2, max_size=16), st.floats(0, 30, width=32))
def test_width_is_the_closed_form(values: list[float], radius: float) -> None:
    odds = exact_log_odds(np.array(values))
    expected = math.sinh(radius) / (math.cosh(radius) + np.cosh(odds))
    got = creinn_width(torch.tensor(values), torch.tensor(radius))
    np.testing.assert_allclose(got.numpy(), expected, rtol=3e-5, atol=1e-37)


def test_width_keeps_its_precision_near_zero_and_one() -> None:
    centre = torch.tensor([40.0, 0.0])
    width = creinn_width(centre, torch.tensor([1.0, 1e-4]))
    assert width[0].item() == pytest.approx(math.sinh(1) / (math.cosh(1) + math.cosh(40)), rel=1e-5)
    assert width[1].item() == pytest.approx(math.sinh(1e-4) / (math.cosh(1e-4) + math.cosh(40)), rel=1e-5)
    assert creinn(centre, torch.ones(2)).width[0].item() == 0.0  # the difference of bounds cannot tell


@given(laws())
def test_width_is_that_of_the_bounds(law: tuple[Tensor, Tensor]) -> None:
    torch.testing.assert_close(creinn_width(*law), creinn(*law).width, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("operator", [creinn, ibp])
@given(law=laws())
def test_reachable_lies_inside_and_is_reached(operator: object, law: tuple[Tensor, Tensor]) -> None:
    assert callable(operator)
    outer: Interval = operator(*law)
    inner = reachable(outer)
    check_valid(inner)
    assert (inner.lower >= outer.lower).all()
    assert (inner.upper <= outer.upper).all()
    # Every bound is attained by a law: with class i at its bound the others can fill up to 1.
    lower, upper = (x.double() for x in inner[:2])
    at_upper = upper + (lower.sum() - lower)
    at_lower = lower + (upper.sum() - upper)
    assert (at_upper <= 1 + SUM_TOLERANCE).all()
    assert (at_lower >= 1 - SUM_TOLERANCE).all()


def test_reachable_tightens_and_stays_put_the_second_time() -> None:
    # The first two hold at least .3 each, so the third can have at most .4 of its .9.
    outer = Interval(
        torch.tensor([0.3, 0.3, 0.0]), torch.tensor([0.5, 0.5, 0.9]), torch.tensor([0.45, 0.45, 0.1])
    )
    inner = reachable(outer)
    torch.testing.assert_close(inner.lower, torch.tensor([0.3, 0.3, 0.0]))
    torch.testing.assert_close(inner.upper, torch.tensor([0.5, 0.5, 0.4]))
    again = reachable(inner)
    torch.testing.assert_close(again.upper, inner.upper)
    torch.testing.assert_close(again.lower, inner.lower)


def test_extreme_logits_have_exact_odds() -> None:
    centre = torch.tensor([1e4, -1e4, 9990.0, -torch.inf])
    expected = [10.0, -2e4, -10.0, -math.inf]
    assert log_odds(centre).tolist() == pytest.approx(expected, rel=1e-6)
    assert top_log_odds(centre).item() == pytest.approx(10.0, rel=1e-6)
    # Sure to 40 digits: 1 - p is 0 in float32 and float64, its logarithm is not.
    assert log_odds(torch.tensor([95.0, 0.0]))[0].item() == pytest.approx(95.0, rel=1e-6)


def test_the_only_token_left_is_certain() -> None:
    centre = torch.tensor([-torch.inf, 3.0, -torch.inf])
    for operator in OPERATORS.values():
        interval = operator(centre, torch.full((3,), 2.0))
        assert interval.lower.tolist() == interval.upper.tolist() == [0.0, 1.0, 0.0]
    assert creinn_width(centre, torch.full((3,), 2.0)).tolist() == [0.0, 0.0, 0.0]


def test_a_row_of_masked_tokens_is_not_a_number() -> None:
    assert creinn(torch.full((4,), -torch.inf), torch.ones(4)).centre_probs.isnan().all()
    assert creinn_width(torch.full((4,), -torch.inf), torch.ones(4)).isnan().any()


@pytest.mark.parametrize("name", OPERATORS)
def test_gradients_are_finite_and_right(name: str) -> None:
    rows = [
        [0.0, 0.5, -1.0, 2.0],
        [200.0, 0.0, -200.0, 1.0],
        [0.0, 0.0, 0.0, 0.0],
        [5.0, 1.0, -torch.inf, -3.0],
    ]
    centre = torch.tensor(rows, requires_grad=True)
    radius = torch.tensor([[0.5, 1.0, 0.1, 2.0]] * 4, requires_grad=True)
    weights = torch.tensor([1.0, -2.0, 3.0, 0.5])

    def value(centre: Tensor, radius: Tensor) -> Tensor:
        interval = OPERATORS[name](centre, radius)
        return ((interval.lower + interval.upper.square()) * weights).sum()

    value(centre, radius).backward()
    assert centre.grad is not None
    assert radius.grad is not None
    assert centre.grad.isfinite().all()
    assert radius.grad.isfinite().all()
    step = 1e-2
    for i in range(4):  # central differences on the first row
        for point, gradient in ((centre, centre.grad), (radius, radius.grad)):
            moved = torch.zeros_like(point)
            moved[0, i] = step
            with torch.no_grad():
                ends = [
                    value(*(x + sign * moved if x is point else x for x in (centre, radius)))
                    for sign in (1, -1)
                ]
            slope = (ends[0] - ends[1]) / (2 * step)
            assert slope.item() == pytest.approx(gradient[0, i].item(), abs=5e-3)


@settings(max_examples=10)
@given(st.integers(2, 40))
def test_one_unmasked_token_has_finite_gradients(size: int) -> None:
    centre = torch.full((size,), -torch.inf)
    centre[size // 2] = 1.0
    centre.requires_grad_()
    radius = torch.ones(size, requires_grad=True)
    creinn_width(centre, radius).sum().backward()
    creinn(centre, radius).upper.sum().backward()
    assert centre.grad is not None
    assert radius.grad is not None
    assert centre.grad.isfinite().all()
    assert radius.grad.isfinite().all()


def test_operators_by_name() -> None:
    assert list(OPERATORS) == ["creinn", "ibp", "reachable"]
    assert interval_operator("ibp") is ibp
    with pytest.raises(InputError, match="creinn, ibp, reachable"):
        interval_operator("naive")
