"""Scores: their formulas, their limits, and how they change with the vocabulary."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ciar.errors import InputError
from ciar.intervals import scores
from ciar.intervals.interfuse import creinn, creinn_width, reachable
from ciar.intervals.scores import SCORES, DraftLaw, score_named, topk_uncertainty

NAMES = ["interval", "interval-frozen", "interval-l1", "entropy", "max-prob", "margin", "collision"]

values = st.lists(st.floats(-20, 20, width=32), min_size=2, max_size=32)


def some_law(rows: int = 5, size: int = 4096, scale: float = 3.0, seed: int = 0) -> DraftLaw:
    generator = torch.Generator().manual_seed(seed)
    centre = scale * torch.randn(rows, size, generator=generator)
    return DraftLaw(centre, 3.0 * torch.rand(rows, size, generator=generator))


@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=64))
def test_uncertainty_is_total_width_times_population_deviation(widths: list[float]) -> None:
    width = np.array(widths)
    expected = width.sum() * width.std()
    assert scores.uncertainty(torch.tensor(widths)).item() == pytest.approx(expected, rel=1e-4, abs=1e-6)
    scaled = scores.scaled_uncertainty(torch.tensor(widths)).item()
    assert scaled == pytest.approx(expected * math.sqrt(width.size), rel=1e-4, abs=1e-6)


def test_uncertainty_does_not_drown_in_rounding_on_a_large_vocabulary() -> None:
    # Nearly flat widths: the deviation is a thousandth of the mean, and comes in as bf16.
    width = 1e-4 + 1e-7 * torch.randn(16384, generator=torch.Generator().manual_seed(0)).double()
    exact = (width.sum() * width.std(correction=0)).item()
    assert scores.uncertainty(width).item() == pytest.approx(exact, rel=1e-3)
    coarse = width.bfloat16()
    exact = (coarse.double().sum() * coarse.double().std(correction=0)).item()
    assert scores.uncertainty(coarse).item() == pytest.approx(exact, rel=1e-3)


@given(values, st.integers(1, 5000))
def test_padding_the_vocabulary(centre: list[float], padding: int) -> None:
    """The total is untouched, and the square of the norm grows by exactly what the docstring says."""
    plain = creinn_width(torch.tensor(centre), torch.tensor(1.5))
    padded = creinn_width(torch.tensor(centre + [-math.inf] * padding), torch.tensor(1.5))
    before, after = len(centre), len(centre) + padding
    total = plain.double().sum().item()
    assert scores.l1_width(padded).item() == pytest.approx(total, rel=1e-5)
    squares = [(scores.scaled_uncertainty(w).item() / total) ** 2 for w in (plain, padded)]
    added = total**2 * (1 / before - 1 / after)
    assert squares[1] - squares[0] == pytest.approx(added, rel=1e-3, abs=1e-5 * (1 + total**2))
    assert scores.scaled_uncertainty(padded).item() <= total * plain.double().norm().item() * (1 + 1e-5)


def test_scaled_uncertainty_hardly_knows_the_vocabulary_and_raw_does() -> None:
    law = some_law(size=4096)
    pad = torch.full((5, 16384 - 4096), -torch.inf)
    padded = DraftLaw(torch.cat([law.centre, pad], 1), torch.cat([law.radius, pad.exp()], 1))
    assert torch.allclose(SCORES["interval"](padded), SCORES["interval"](law), rtol=0.01)
    raw = [scores.uncertainty(creinn_width(*x)) for x in (law, padded)]
    assert torch.allclose(raw[1] * 2.0, raw[0], rtol=0.01)


@given(values)
def test_scores_of_the_centre_match_their_definitions(centre: list[float]) -> None:
    logits = torch.tensor(centre)
    p = np.exp(np.array(centre) - np.logaddexp.reduce(np.array(centre)))
    entropy = -(p * np.log(p)).sum()
    assert scores.entropy(logits).item() == pytest.approx(entropy, rel=1e-4, abs=1e-6)
    assert scores.normalised_entropy(logits).item() == pytest.approx(
        entropy / math.log(p.size), rel=1e-4, abs=1e-6
    )
    rest = np.delete(p, p.argmax()).sum()
    assert scores.one_minus_max_prob(logits).item() == pytest.approx(rest, rel=1e-4)
    ordered = sorted(centre)
    assert scores.margin(logits).item() == pytest.approx(ordered[-2] - ordered[-1], rel=1e-5, abs=1e-5)
    without = np.array([np.delete(p, i).sum() for i in range(p.size)])
    assert scores.collision(logits).item() == pytest.approx((p * without).sum(), rel=1e-4)


def test_known_values() -> None:
    flat = torch.zeros(2, 1024)
    assert scores.entropy(flat).tolist() == pytest.approx([math.log(1024)] * 2, rel=1e-5)
    assert scores.normalised_entropy(flat).tolist() == pytest.approx([1.0] * 2, rel=1e-5)
    assert scores.one_minus_max_prob(flat).tolist() == pytest.approx([1023 / 1024] * 2)
    assert scores.collision(flat).tolist() == pytest.approx([1023 / 1024] * 2)
    assert scores.margin(flat).tolist() == [0.0, 0.0]
    # Perfectly flat widths have no deviation: U calls a flat law certain, as the paper means it to.
    assert scores.scaled_uncertainty(creinn_width(flat, torch.ones(1024))).tolist() == pytest.approx(
        [0, 0], abs=1e-4
    )
    # Two equal tokens of four, the others masked, r = 1: widths are tanh(1/2), tanh(1/2), 0, 0.
    pair = torch.tensor([0.0, 0.0, -torch.inf, -torch.inf])
    width = math.tanh(0.5)
    assert SCORES["interval"](DraftLaw(pair, torch.ones(4))).item() == pytest.approx(2 * width * width)


def test_tiny_doubt_is_not_rounded_to_none() -> None:
    logits = torch.tensor([30.0, 0.0])
    assert scores.one_minus_max_prob(logits).item() == pytest.approx(math.exp(-30), rel=1e-5)
    assert scores.collision(logits).item() == pytest.approx(2 * math.exp(-30), rel=1e-5)


def test_total_variation() -> None:
    p, q = (
        torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]),
        torch.tensor([[0.25, 0.25, 0.5], [0.0, 0.0, 1.0]]),
    )
    assert scores.total_variation(p, q).tolist() == [0.5, 1.0]
    assert scores.total_variation(p, p).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_score_is_float32_over_the_last_axis(name: str, dtype: torch.dtype) -> None:
    law = some_law(6, 512)
    law = DraftLaw(*(x.to(dtype).reshape(2, 3, 512) for x in law))
    score = score_named(name)(law)
    assert score.shape == (2, 3)
    assert score.dtype == torch.float32
    alone = score_named(name)(DraftLaw(law.centre[1, 2], law.radius[1, 2]))
    assert alone.item() == pytest.approx(score[1, 2].item(), rel=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_every_score_calls_a_sharp_law_surer_than_a_torn_one(name: str) -> None:
    sharp = torch.full((2048,), -5.0)
    sharp[7] = 20.0
    torn = sharp.clone()
    torn[9] = 20.0
    radius = torch.ones(2048)
    assert SCORES[name](DraftLaw(sharp, radius)) < SCORES[name](DraftLaw(torn, radius))
    # Masked tokens and a shift of all logits change nothing.
    masked = sharp.clone()
    masked[100:200] = -torch.inf
    assert SCORES[name](DraftLaw(masked, radius)).isfinite()
    shifted = SCORES[name](DraftLaw(torn + 50.0, radius))
    assert shifted.item() == pytest.approx(SCORES[name](DraftLaw(torn, radius)).item(), rel=1e-3, abs=1e-5)


def test_interval_scores_use_the_radius_they_say() -> None:
    law = some_law()
    ones = DraftLaw(law.centre, torch.ones_like(law.centre))
    assert torch.equal(SCORES["interval-frozen"](law), SCORES["interval"](ones))
    assert torch.equal(SCORES["interval"](law), scores.scaled_uncertainty(creinn_width(*law)))
    torch.testing.assert_close(SCORES["interval-l1"](law), creinn(*law).width.sum(-1), rtol=1e-4, atol=1e-5)
    wider = DraftLaw(law.centre, law.radius * 2)
    assert (SCORES["interval-l1"](wider) > SCORES["interval-l1"](law)).all()
    tight = scores.interval_uncertainty(law, "reachable")
    torch.testing.assert_close(tight, scores.scaled_uncertainty(reachable(creinn(*law)).width))
    assert (scores.interval_uncertainty(law, "ibp") != SCORES["interval"](law)).any()
    with pytest.raises(InputError, match="creinn"):
        scores.interval_uncertainty(law, "other")


def test_scores_by_name() -> None:
    assert list(SCORES) == NAMES
    with pytest.raises(InputError, match="interval-frozen"):
        score_named("u")


def test_one_token_is_certain() -> None:
    law = DraftLaw(torch.tensor([[2.0]]), torch.tensor([[1.0]]))
    expected = {"margin": -math.inf}
    for name in NAMES:
        assert SCORES[name](law).tolist() == [expected.get(name, 0.0)]
    assert scores.normalised_entropy(law.centre).tolist() == [0.0]


@pytest.mark.parametrize("scale", [0.0, 1.0, 3.0, 10.0, 1000.0])
@pytest.mark.parametrize("k", [1, 8, 200, 4095])
def test_top_k_is_within_its_bound(scale: float, k: int) -> None:
    law = some_law(8, scale=scale, seed=k)
    # As a learned radius is: anything among the likely, bounded by the cap among the others.
    result = topk_uncertainty(law.centre, lambda index: law.radius.gather(-1, index), k, radius_cap=3.0)
    full = SCORES["interval"](law)
    assert ((full - result.score).abs() <= result.error_bound * (1 + 1e-4) + 1e-5).all()
    assert (result.error_bound >= 0).all()


@given(values, st.integers(1, 6), st.floats(0, 4, width=32), st.randoms(use_true_random=False))
def test_top_k_is_within_its_bound_for_any_law(
    centre: list[float], k: int, cap: float, random: object
) -> None:
    logits = torch.tensor(centre)
    draw = random.random  # type: ignore[attr-defined]
    radius = torch.tensor([cap * draw() for _ in centre])
    top = logits.topk(min(k, logits.numel())).indices
    radius[top] = torch.tensor([8.0 * draw() for _ in top])  # the cap does not bind those that are evaluated
    result = topk_uncertainty(logits, radius[top], k, cap)
    full = SCORES["interval"](DraftLaw(logits, radius)).item()
    assert abs(full - result.score.item()) <= result.error_bound.item() * (1 + 1e-4) + 2e-5 * (1 + full)


@pytest.mark.parametrize(
    ("centre", "radius", "k"),
    [
        # Three widths near 1 look uneven next to a 0 that is .4 in truth: the score is too high by a third.
        ([0.0, 0.0, 0.0, -0.001], [8.0, 8.0, 8.0, 1.1], 3),
        # All of the width is in the token left out: the score is 0, and the bound barely above the truth.
        ([0.0, -0.001] + [-math.inf] * 62, [0.0, 2.0] + [0.0] * 62, 1),
    ],
)
def test_top_k_bound_where_it_is_tight(centre: list[float], radius: list[float], k: int) -> None:
    law = DraftLaw(torch.tensor(centre), torch.tensor(radius))
    top = law.centre.topk(k).indices
    cap = law.radius.scatter(-1, top, 0.0).max().item()
    result = topk_uncertainty(law.centre, law.radius[top], k, cap)
    error = abs(SCORES["interval"](law).item() - result.score.item())
    assert 0.8 * result.error_bound.item() <= error <= result.error_bound.item() * (1 + 1e-5)


def test_top_k_with_all_tokens_is_the_full_score() -> None:
    law = some_law(3, 64)
    for k in (64, 1000):
        result = topk_uncertainty(law.centre, lambda index: law.radius.gather(-1, index), k, 3.0)
        torch.testing.assert_close(result.score, SCORES["interval"](law), rtol=1e-4, atol=1e-6)
        assert result.error_bound.tolist() == [0.0, 0.0, 0.0]


def test_top_k_bound_shrinks_with_more_tokens_and_a_tighter_cap() -> None:
    law = some_law(4)

    def bound(k: int, cap: float) -> Tensor:
        return topk_uncertainty(law.centre, lambda index: torch.ones_like(index).float(), k, cap).error_bound

    assert (bound(400, 1.0) < bound(20, 1.0)).all()
    assert (bound(20, 1.0) < bound(20, 3.0)).all()
    sharp = topk_uncertainty(10.0 * law.centre, lambda index: torch.ones_like(index).float(), 64, 1.0)
    assert (sharp.error_bound < 1e-3).all()


def test_top_k_refuses_bad_numbers() -> None:
    with pytest.raises(InputError, match="k must"):
        topk_uncertainty(torch.zeros(4), torch.ones(4), 0, 1.0)
    with pytest.raises(InputError, match="radius_cap"):
        topk_uncertainty(torch.zeros(4), torch.ones(4), 4, -1.0)
