"""Acceptance rules against closed forms: what a position's law is, whatever was drafted."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ciar.decoding.acceptance import Annealed, Grouped, Neighbourhood, Speculative, judged
from ciar.decoding.codebook import Codebook
from ciar.decoding.sampling import SamplingLaw, draw, one_hot, residual, to_law
from ciar.errors import InputError

VOCAB = 8
LAWS = [SamplingLaw(), SamplingLaw(temperature=0.5, top_k=3), SamplingLaw(top_p=0.8), SamplingLaw(0.0)]
#: Codes on a line, a step apart: nearest are the neighbours, the lower one first.
LINE = Codebook(torch.arange(VOCAB)[:, None].float())


def random_law(seed: int, law: SamplingLaw = LAWS[0]) -> Tensor:
    return to_law(1.5 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)), law)


def tv(law: Tensor, p: Tensor) -> float:
    return float(0.5 * (law - p.double().exp()).abs().sum())


SEEDS = st.integers(0, 10_000)


@given(SEEDS, st.sampled_from(LAWS), st.sampled_from(LAWS))
def test_speculative_gives_exactly_p(seed: int, p_law: SamplingLaw, q_law: SamplingLaw) -> None:
    p, q = random_law(seed, p_law), random_law(seed + 1, q_law)
    torch.testing.assert_close(judged(Speculative(), p, q), p.double().exp(), atol=1e-6, rtol=0)


@given(SEEDS, st.floats(1.0, 3.0), st.floats(0.0, 2.0), st.integers(0, 4))
def test_annealed_drifts_by_its_formula(seed: int, relaxation: float, decay: float, depth: int) -> None:
    p, q = random_law(seed), random_law(seed + 1)
    rule = Annealed(relaxation, decay, 5)
    assert sum(rule.weights) / 5 == pytest.approx(relaxation)
    assert rule.weights == sorted(rule.weights, reverse=True)
    weight = rule.weights[depth]
    found = tv(judged(rule, p, q, depth), p)
    formula = float((torch.minimum(q.exp(), weight * p.exp()) - p.exp()).clamp_min(0).sum())
    assert found == pytest.approx(formula, abs=1e-5)
    assert found <= min(tv(q.double().exp(), p), weight - 1.0) + 1e-5


def counted(p: Tensor, token: int, count: int, bound: float) -> float:
    """Mass of the longest run of nearest codes within a bound, by hand on the line of codes."""
    near = sorted((i for i in range(VOCAB) if i != token), key=lambda i: (abs(i - token), i))[:count]
    mass = 0.0
    for code in near:
        if mass + math.exp(p[code]) > bound:
            break
        mass += math.exp(p[code])
    return mass


@given(SEEDS, st.integers(1, 7), st.floats(0.0, 1.0), st.booleans())
def test_lantern_moves_the_counted_mass_to_a_certain_draft(
    seed: int, count: int, bound: float, relative: bool
) -> None:
    """A draft without chance (q = 1): its law is p with the counted mass moved, so TV is that mass."""
    p, token = random_law(seed), seed % VOCAB
    own = math.exp(float(p[token]))
    limit = 3.0 * bound * own if relative else bound
    rule = Neighbourhood(
        LINE, count, 1.0 + 3.0 * bound if relative else bound, relative=relative, kind="paper"
    )
    mass = counted(p, token, count, limit)
    law = judged(rule, p, one_hot(token, VOCAB))
    assert float(law[token]) == pytest.approx(own + mass, abs=1e-5)
    assert tv(law, p) == pytest.approx(mass, abs=1e-5)
    assert mass <= limit + 1e-6


@given(SEEDS, st.integers(1, 7), st.floats(0.0, 1.0))
def test_lantern_with_the_optimal_redraw_drifts_by_its_formula(seed: int, count: int, bound: float) -> None:
    p, q = random_law(seed), random_law(seed + 1)
    rule = Neighbourhood(LINE, count, bound, relative=False, kind="optimal")
    wide = torch.tensor([math.exp(float(p[x])) + counted(p, x, count, bound) for x in range(VOCAB)])
    formula = float((torch.minimum(q.exp(), wide) - p.exp()).clamp_min(0).sum())
    assert tv(judged(rule, p, q), p) == pytest.approx(formula, abs=1e-5)


def test_the_redraw_of_the_public_code_drifts_more() -> None:
    p, q = random_law(3), random_law(4)
    rules = {
        kind: Neighbourhood(LINE, 4, 0.2, relative=False, kind=kind)  # type: ignore[arg-type]
        for kind in ("paper", "code", "optimal")
    }
    drifts = {kind: tv(judged(rule, p, q), p) for kind, rule in rules.items()}
    assert drifts["optimal"] < drifts["paper"] < drifts["code"]


@pytest.mark.parametrize("kind", ["paper", "code", "optimal"])
def test_lantern_never_redraws_from_nothing(kind: str) -> None:
    """Known fault A4: where everything is taken away, p is left, and nothing that p excludes."""
    p = to_law(torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)), SamplingLaw(top_k=2))
    rule = Neighbourhood(LINE, 7, 1.0, relative=False, kind=kind)  # type: ignore[arg-type]
    for token in range(VOCAB):
        law = rule.redraw(p, one_hot(token, VOCAB), token)
        assert law.exp().sum() == pytest.approx(1.0)
        assert not bool(((law > -torch.inf) & (p == -torch.inf)).any())


@given(SEEDS, st.integers(2, 8), st.floats(0.05, 1.0), st.floats(0.5, 4.0))
def test_gsd_accepts_by_the_mass_of_the_group(seed: int, size: int, near: float, reach: float) -> None:
    p, q = random_law(seed), random_law(seed + 1)
    rule = Grouped(LINE, size, near, reach)
    ranked = sorted(range(VOCAB), key=lambda x: -float(p[x]))
    for x in range(VOCAB):
        rank = ranked.index(x)
        group = [
            y
            for r, y in enumerate(ranked)
            if y == x
            or (
                abs(r - rank) <= size // 2
                and abs(math.exp(p[y]) - math.exp(p[x])) < near
                and abs(y - x) < reach
            )
        ]
        ours = sum(math.exp(p[y]) for y in group)
        theirs = sum(math.exp(q[y]) for y in group)
        assert rule.accept(p, q, x, 0) == pytest.approx(min(1.0, ours / theirs), abs=1e-5)


@pytest.mark.parametrize(
    "rule",
    [
        Speculative(),
        Annealed(2.0, 0.7, 4),
        Grouped(LINE, 4, 1.0, 9.0),
        Neighbourhood(LINE, 3, 0.2, relative=False, kind="paper"),
    ],
    ids=lambda rule: type(rule).__name__,
)
def test_what_the_drafter_cannot_have_drawn_is_refused(rule: Speculative) -> None:
    """Known fault A2: a token of probability 0 under q, whatever p says."""
    p = random_law(0)
    q = one_hot(2, VOCAB)
    assert rule.accept(p, q, 3, 0) == 0.0


@pytest.mark.parametrize("noise", [0.0, 1e-7])
def test_a_residual_without_mass_is_p(noise: float) -> None:
    """Known fault A4: p = q up to rounding, and a rejection is forced all the same."""
    generator = torch.Generator().manual_seed(5)
    p = to_law(torch.randn(64, generator=generator), SamplingLaw(top_k=9))
    q = (p.exp() + noise * torch.rand(64, generator=generator)).log()
    law = residual(p, q)
    torch.testing.assert_close(law, p)
    assert not law.isnan().any()


def test_draws_by_inversion_follow_the_law_and_stay_in_it() -> None:
    law = to_law(torch.randn(5, generator=torch.Generator().manual_seed(6)), SamplingLaw(top_k=3))
    uniform = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    counts = torch.bincount(draw(law.expand(20_000, 5), uniform), minlength=5)
    torch.testing.assert_close(counts.double() / 20_000, law.double().exp(), atol=1e-4, rtol=0)
    ends = torch.tensor([2.0**-33, 1.0 - 2.0**-33], dtype=torch.float64)
    assert (law[draw(law.expand(2, 5), ends)] > -torch.inf).all()


def test_neighbours_are_nearest_first_without_the_code_itself() -> None:
    codes = torch.randn(50, 8, generator=torch.Generator().manual_seed(7))
    book = Codebook(codes)
    for token in (0, 17, 49):
        away = torch.cdist(codes[token : token + 1], codes)[0]
        away[token] = math.inf
        assert book.nearest(token, 5).tolist() == away.argsort()[:5].tolist()
        assert float(book.distances(token)[token]) == 0.0
    with pytest.raises(InputError, match="must be 1 to 49"):
        book.nearest(0, 50)


def test_neighbours_are_kept_for_a_bounded_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ciar.decoding.codebook._KEPT", 3)
    book = Codebook(torch.arange(8)[:, None].float())
    for token in range(8):
        near = book.nearest(token, 7)
        assert torch.equal(book.nearest(token, 2), near[:2])
        assert len(book._orders) <= 3
