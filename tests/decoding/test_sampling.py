"""Sampling laws: the reference filter with its ties, special temperatures, slack, residuals, NaN."""

from __future__ import annotations

import math

import pytest
import torch
from golden_data import tensors
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ciar.decoding.sampling import SamplingLaw, choose, filter_logits, guide, residual, slack, to_law
from ciar.errors import InputError, NumericalError
from ciar.noise import gumbel_table

GOLDEN = tensors("llamagen_sampling")
FINITE = st.floats(-30, 30, width=32)


def rows(low: int = 2, high: int = 12) -> st.SearchStrategy[Tensor]:
    return st.lists(FINITE, min_size=low, max_size=high).map(torch.tensor)


@pytest.mark.parametrize(
    ("name", "top_k", "top_p"),
    [
        ("filtered/k50_p1.0", 50, 1.0),
        ("filtered/k0_p0.9", 0, 0.9),
        ("filtered/k100_p0.8", 100, 0.8),
        ("filtered/k1_p1.0", 1, 1.0),
        ("filtered/k0_p0.001", 0, 0.001),
        ("filtered/k2000_p1.0", 2000, 1.0),
    ],
)
def test_reference_filter(name: str, top_k: int, top_p: float) -> None:
    assert torch.equal(filter_logits(GOLDEN["in/logits"], top_k, top_p), GOLDEN[name])


def test_ties_at_the_threshold_are_all_kept() -> None:
    kept = filter_logits(GOLDEN["in/logits"], top_k=50).isfinite().sum(-1)
    assert kept.tolist() == [52, 50]


@pytest.mark.parametrize(
    ("name", "law"),
    [("probs/t0.7_k50_p0.95", SamplingLaw(0.7, 50, 0.95)), ("probs/t0.0", SamplingLaw(0.0))],
)
def test_reference_law(name: str, law: SamplingLaw) -> None:
    torch.testing.assert_close(to_law(GOLDEN["in/logits"], law).exp(), GOLDEN[name], atol=1e-6, rtol=0)


def test_a_token_is_dropped_when_the_mass_before_it_exceeds_top_p_and_not_when_it_equals_it() -> None:
    logits = torch.tensor([0.5, 0.25, 0.25]).log()
    assert filter_logits(logits, top_p=0.5).isfinite().tolist() == [True, True, False]
    assert filter_logits(logits, top_p=0.49).isfinite().tolist() == [True, False, False]


def test_temperature_0_takes_the_most_likely_token_whatever_the_noise() -> None:
    logits = torch.tensor([[0.0, 5.0, 5.0 - 1e-4, -3.0]])
    law = to_law(logits, SamplingLaw(temperature=0.0))
    assert law.tolist() == [[-math.inf, 0.0, -math.inf, -math.inf]]
    noise = torch.from_numpy(gumbel_table(0, 0, range(1000), 4))
    assert (choose(law, noise) == 1).all()


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_p": math.nan},
    ],
)
def test_ranges(values: dict[str, float]) -> None:
    with pytest.raises(InputError, match=next(iter(values))):
        SamplingLaw(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_is_never_a_token(bad: float) -> None:
    """Known fault A3: NaN goes through argmax quietly."""
    logits = torch.zeros(3, 8)
    logits[1, 5] = bad
    with pytest.raises(NumericalError, match="the device model"):
        to_law(logits, SamplingLaw(), what="the device model")
    with pytest.raises(NumericalError, match="the cloud model"):
        to_law(torch.full((1, 4), -math.inf), SamplingLaw(), what="the cloud model")


def test_minus_infinity_masks_a_token() -> None:
    law = to_law(torch.tensor([0.0, -math.inf, 0.0]), SamplingLaw())
    torch.testing.assert_close(law.exp(), torch.tensor([0.5, 0.0, 0.5]))


@given(c=rows(4, 4), u=rows(4, 4), scale=st.sampled_from([0.0, 0.5, 1.0, 3.0, 7.5]))
def test_guidance_is_the_formula(c: Tensor, u: Tensor, scale: float) -> None:
    torch.testing.assert_close(guide(c, u, scale), u * (1 - scale) + c * scale, atol=1e-3, rtol=1e-4)


def test_guidance_is_computed_in_float32() -> None:
    c, u = torch.tensor([256.5], dtype=torch.bfloat16), torch.tensor([256.0], dtype=torch.bfloat16)
    assert guide(c, u, 7.5).dtype == torch.float32


@given(
    logits=rows(),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.integers(0, 14),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
)
def test_any_law_is_normalised_and_keeps_the_best(
    logits: Tensor, temperature: float, top_k: int, top_p: float
) -> None:
    law = to_law(logits, SamplingLaw(temperature, top_k, top_p))
    assert float(law.exp().sum()) == pytest.approx(1.0, abs=1e-5)
    assert law[logits.argmax()].isfinite()
    if 0 < top_k <= len(logits):
        tied = int((logits == logits.topk(top_k).values[-1]).sum())
        assert int(law.isfinite().sum()) < top_k + max(tied, 1)


@given(logits=rows(), seed=st.integers(0, 99))
def test_slack_is_zero_for_the_choice_alone(logits: Tensor, seed: int) -> None:
    law = to_law(logits, SamplingLaw(top_k=3))
    noise = torch.from_numpy(gumbel_table(seed, 0, [0], len(logits)))[0]
    every = torch.arange(len(logits))
    gaps = slack(law.expand(len(logits), -1), noise.expand(len(logits), -1), every)
    choice = int(choose(law, noise))
    assert gaps[choice] == 0
    assert (gaps >= 0).all()
    assert (gaps[law.isinf()] == math.inf).all()
    total = law + noise
    torch.testing.assert_close(gaps, total[choice] - total)


@given(p=rows(5, 5), q=rows(5, 5))
def test_residual_law(p: Tensor, q: Tensor) -> None:
    p_law, q_law = p.log_softmax(-1), q.log_softmax(-1)
    out = residual(p_law, q_law)
    assert float(out.exp().sum()) == pytest.approx(1.0, abs=1e-4)
    left = (p_law.exp() - q_law.exp()).clamp_min(0)
    if left.sum() > 1e-5:
        assert (out[q_law.exp() >= p_law.exp()] == -math.inf).all()
        torch.testing.assert_close(out.exp(), left / left.sum(), atol=1e-5, rtol=1e-3)


def test_residual_of_zero_mass_is_the_law_itself() -> None:
    """Known fault A4: p = q up to rounding makes the residual 0 / 0."""
    law = to_law(torch.tensor([1.0, 0.0, -1.0, 5.0]), SamplingLaw(top_k=3))
    torch.testing.assert_close(residual(law, law), law)
    near = (law.exp() * (1 + 1e-7)).log()
    assert not residual(law, near).isnan().any()
    assert residual(law, near)[2] == -math.inf


def test_residual_with_disjoint_supports() -> None:
    p, q = torch.tensor([0.0, -math.inf]), torch.tensor([-math.inf, 0.0])
    torch.testing.assert_close(residual(p, q), p)
