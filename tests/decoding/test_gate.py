"""Scores on the fast path equal those over the whole vocabulary when every code is looked at."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ciar.decoding.gate import LAW_SCORES, SCORE_NAMES, gate_score, law_summary, needs_radius, top_logits
from ciar.errors import InputError
from ciar.intervals.scores import SCORES, DraftLaw


def laws(seed: int, vocab: int, rows: int = 6) -> DraftLaw:
    generator = torch.Generator().manual_seed(seed)
    centre = 3.0 * torch.randn(rows, vocab, generator=generator)
    return DraftLaw(centre, torch.rand(rows, vocab, generator=generator) * 2)


def test_both_registries_know_the_same_names() -> None:
    assert set(LAW_SCORES) == set(SCORES) < set(SCORE_NAMES)


@pytest.mark.parametrize("name", LAW_SCORES)
@given(seed=st.integers(0, 50), vocab=st.sampled_from([2, 64, 128]))
def test_exact_up_to_128_codes(name: str, seed: int, vocab: int) -> None:
    law = laws(seed, vocab)
    top = top_logits(law.centre)
    found = gate_score(name, top, law.radius.gather(-1, top.indices))
    torch.testing.assert_close(found, SCORES[name](law), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("name", LAW_SCORES)
def test_close_and_in_order_beyond(name: str) -> None:
    """With 1,024 codes of a sharp law, what lies outside the top 128 hardly counts."""
    law = laws(0, 1024, rows=32)
    law = DraftLaw(law.centre * 1.5, law.radius * 0.3)
    top = top_logits(law.centre)
    found = gate_score(name, top, law.radius.gather(-1, top.indices))
    full = SCORES[name](law)
    torch.testing.assert_close(found, full, atol=0.05, rtol=0.15)
    pair = torch.stack([found.argsort().argsort().float(), full.argsort().argsort().float()])
    assert torch.corrcoef(pair)[0, 1] > 0.99


def test_which_scores_read_the_radius() -> None:
    law = laws(1, 32)
    top = top_logits(law.centre)
    radius = law.radius.gather(-1, top.indices)
    for name in LAW_SCORES:
        changed = not torch.equal(gate_score(name, top, radius), gate_score(name, top, radius * 2))
        assert changed == needs_radius(name), name


def test_the_summary_is_every_score_of_the_law() -> None:
    law = laws(2, 64)
    top = top_logits(law.centre)
    radius = law.radius.gather(-1, top.indices)
    summary = law_summary(top, radius)
    assert summary.shape == (6, len(LAW_SCORES))
    for column, name in enumerate(LAW_SCORES):
        torch.testing.assert_close(summary[:, column], gate_score(name, top, radius))


def test_unknown_score_lists_the_known() -> None:
    with pytest.raises(InputError, match="entropy, interval,"):
        gate_score("nothing", top_logits(torch.zeros(1, 4)))
