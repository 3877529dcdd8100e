"""Scores of one law on the fast path: from the most likely codes alone.

Sampling needs the top-k logits anyway, so the score is computed from those: a few hundred numbers
in place of a vocabulary, and radii for these codes only. The rest of the vocabulary counts as width
zero (intervals.scores.topk_uncertainty bounds the error). Scores that need more than one law (a window,
the seed, the trunk) are in decoding.scorer, which runs all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ciar.errors import InputError
from ciar.intervals.gates import BY_NAME
from ciar.intervals.interfuse import width_at

#: Codes that a score looks at.
SCORE_TOP_K = 128


class TopLogits(NamedTuple):
    """The most likely codes of a position.

    Attributes:
        values: float32 [..., K] centre logits in falling order.
        indices: int64 [..., K].
        log_mass: float32 [...] log-sum-exp of the whole vocabulary.
        vocab_size: codes in all.
    """

    values: Tensor
    indices: Tensor
    log_mass: Tensor
    vocab_size: int


def top_logits(centre: Tensor, k: int = SCORE_TOP_K) -> TopLogits:
    """The ``k`` most likely codes of centre logits [..., vocab]."""
    values, indices = centre.topk(min(k, centre.shape[-1]), dim=-1)
    return TopLogits(values, indices, centre.logsumexp(dim=-1), centre.shape[-1])


def needs_radius(name: str) -> bool:
    """Whether a score reads the learned radius."""
    return name in ("interval", "interval-l1")


def gate_score(name: str, top: TopLogits, radius: Tensor | None = None) -> Tensor:
    """Uncertainty of a position; larger is less certain.

    Args:
        name: one of :data:`LAW_SCORES`.
        top: its most likely codes.
        radius: float32 [..., K] radii of these codes, where the score needs them.

    Returns:
        float32 [...].

    Raises:
        InputError: there is no such score.
    """
    score = _SCORES.get(name)
    if score is None:
        raise InputError(f"There is no score {name!r} of one law. Those are: {', '.join(sorted(_SCORES))}.")
    return score(top, radius)


def law_summary(top: TopLogits, radius: Tensor) -> Tensor:
    """Every score of one law: what the learned gate reads beside the hidden state.

    Args:
        top: [..., K].
        radius: [..., K] of the same codes.

    Returns:
        float32 [..., len(LAW_SCORES)].
    """
    return torch.stack([score(top, radius) for score in _SCORES.values()], dim=-1)


def _log_probs(top: TopLogits) -> Tensor:
    return top.values - top.log_mass.unsqueeze(-1)


def _widths(top: TopLogits, radius: Tensor | None) -> Tensor:
    log_p = _log_probs(top)
    # The first class may hold all mass but a rounding error: its odds come from the others themselves.
    others = log_p[..., 1:]
    tail = torch.log1p(-log_p.exp().sum(-1).clamp_max(1.0 - 1e-7))  # mass outside the K codes
    rest = (
        torch.logaddexp(others.logsumexp(-1), tail)
        if others.shape[-1] < top.vocab_size - 1
        else others.logsumexp(-1)
    )
    first = log_p[..., 0] - rest
    odds = torch.cat([first.unsqueeze(-1), others - torch.log1p(-others.exp())], dim=-1)
    return width_at(odds, torch.ones_like(odds) if radius is None else radius)


def _scaled(width: Tensor, vocab_size: int) -> Tensor:
    total = width.sum(-1)
    spread = (width.square().sum(-1) - total.square() / vocab_size).clamp_min(0.0).sqrt()
    return total * spread


def _entropy(top: TopLogits, radius: Tensor | None) -> Tensor:
    log_p = _log_probs(top)
    p = log_p.exp()
    tail = (1.0 - p.sum(-1)).clamp_min(1e-9)
    others = max(1, top.vocab_size - p.shape[-1])
    return -(p * log_p).sum(-1) - tail * (tail / others).log()


_SCORES: dict[str, Callable[[TopLogits, Tensor | None], Tensor]] = {
    "interval": lambda top, radius: _scaled(_widths(top, radius), top.vocab_size),
    "interval-frozen": lambda top, _: _scaled(_widths(top, None), top.vocab_size),
    "interval-l1": lambda top, radius: _widths(top, radius).sum(-1),
    "entropy": _entropy,
    "max-prob": lambda top, _: 1.0 - _log_probs(top)[..., 0].exp(),
    "margin": lambda top, _: top.values[..., 1] - top.values[..., 0],
    "collision": lambda top, _: 1.0 - (2.0 * _log_probs(top)).exp().sum(-1),
}
#: Scores that are a function of one position's law.
LAW_SCORES = tuple(_SCORES)
#: Every score that a gate can use; decoding.scorer makes them.
SCORE_NAMES = tuple(BY_NAME)
