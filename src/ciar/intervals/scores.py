"""How uncertain a draft is: one number a position, larger = less certain (DESIGN section 3, "Score").

Pure functions over the last axis, vectorised over all others, float32 whatever the input's dtype. The
registry :data:`SCORES` gives every gate the same shape, law in and score out, so that gates are compared
on equal terms. Knows nothing of thresholds, nor of what a score is used for.
"""

from __future__ import annotations

from collections.abc import Callable
from math import log, sqrt
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from ciar.errors import InputError
from ciar.intervals.interfuse import creinn_width, interval_operator, log_odds, top_log_odds, width_at


class DraftLaw(NamedTuple):
    """What the interval head says of the next token.

    Attributes:
        centre: [..., vocab] logits of the device's law, before temperature, top-k and top-p.
        radius: [..., vocab], finite and >= 0: how far each logit may be off.
    """

    centre: Tensor
    radius: Tensor


#: A gate's score: law [..., vocab] in, float32 [...] out; larger = more uncertain.
Score: TypeAlias = Callable[[DraftLaw], Tensor]


def uncertainty(width: Tensor) -> Tensor:
    """U of the CIAR paper: ``||delta||_1 * std(delta)``, population standard deviation.

    It shrinks with the square root of the vocabulary; :func:`scaled_uncertainty` does not.

    Args:
        width: [..., vocab] widths of the intervals.

    Returns:
        float32 [...], >= 0.
    """
    return scaled_uncertainty(width) / sqrt(width.shape[-1])


def scaled_uncertainty(width: Tensor) -> Tensor:
    """``U * sqrt(vocab) = ||delta||_1 * ||delta - mean(delta)||_2``.

    Tokens of width 0 (padding, masked tokens) leave the first factor alone, and add to the square of
    the second ``||delta||_1**2 * (1 / before - 1 / after)``, before and after being the vocabulary
    sizes: nothing to speak of in a large vocabulary, and at most ``||delta||_1**2 / before``.

    Args:
        width: [..., vocab] widths of the intervals.

    Returns:
        float32 [...], >= 0.
    """
    width = width.float()
    # Centred before squaring: the difference of two sums of squares would lose the variance to rounding.
    centred = width - width.mean(-1, keepdim=True)
    return l1_width(width) * centred.square().sum(-1).sqrt()


def l1_width(width: Tensor) -> Tensor:
    """Total width ``||delta||_1``: imprecision of the credal set. [..., vocab] to float32 [...]."""
    return width.float().sum(-1)


def entropy(logits: Tensor) -> Tensor:
    """Shannon entropy of the soft-max, in nats. [..., vocab] logits to float32 [...], 0 to log(vocab)."""
    terms: Tensor = torch.special.entr(logits.float().softmax(-1))
    return terms.sum(-1)


def normalised_entropy(logits: Tensor) -> Tensor:
    """Entropy over ``log(vocab)``, masked tokens counted. [..., vocab] logits to float32 [...], 0 to 1."""
    size = logits.shape[-1]
    return entropy(logits) / log(size) if size > 1 else entropy(logits)


def one_minus_max_prob(logits: Tensor) -> Tensor:
    """Mass of all tokens but the most likely one, exact when tiny. [..., vocab] logits to float32 [...]."""
    return torch.sigmoid(-top_log_odds(logits))


def margin(logits: Tensor) -> Tensor:
    """Second largest logit minus the largest: 0 for a tie, -inf when there is but one token.

    Args:
        logits: [..., vocab].

    Returns:
        float32 [...], <= 0; larger = more uncertain.
    """
    logits = logits.float()
    if logits.shape[-1] == 1:
        return torch.full(logits.shape[:-1], -torch.inf, device=logits.device)
    top = logits.topk(2, dim=-1).values
    return top[..., 1] - top[..., 0]


def collision(logits: Tensor) -> Tensor:
    """Chance that two draws differ, ``1 - sum(p**2)``. [..., vocab] logits to float32 [...], 0 to 1."""
    return (logits.float().softmax(-1) * torch.sigmoid(-log_odds(logits))).sum(-1)


def total_variation(p: Tensor, q: Tensor) -> Tensor:
    """Total variation distance ``||p - q||_1 / 2`` of two laws.

    Args:
        p: [..., vocab] probabilities.
        q: [..., vocab] probabilities.

    Returns:
        float32 [...], 0 to 1.
    """
    return 0.5 * (p.float() - q.float()).abs().sum(-1)


def interval_uncertainty(law: DraftLaw, operator: str = "creinn") -> Tensor:
    """Scaled U of a law's intervals under any InterFuse operator.

    Args:
        law: centre and radius, [..., vocab].
        operator: a name of :data:`ciar.intervals.interfuse.OPERATORS`.

    Returns:
        float32 [...].

    Raises:
        InputError: there is no such operator.
    """
    if operator == "creinn":
        return scaled_uncertainty(creinn_width(law.centre, law.radius))
    return scaled_uncertainty(interval_operator(operator)(law.centre, law.radius).width)


def _interval_frozen(law: DraftLaw) -> Tensor:
    return interval_uncertainty(DraftLaw(law.centre, torch.ones_like(law.centre)))


def _interval_l1(law: DraftLaw) -> Tensor:
    return l1_width(creinn_width(law.centre, law.radius))


#: Every gate by name.
SCORES: dict[str, Score] = {
    "interval": interval_uncertainty,  # the paper's: scaled U, learned radius
    "interval-frozen": _interval_frozen,  # the ablation: every radius is 1, so only the centre speaks
    "interval-l1": _interval_l1,  # total width, learned radius
    "entropy": lambda law: entropy(law.centre),
    "max-prob": lambda law: one_minus_max_prob(law.centre),
    "margin": lambda law: margin(law.centre),
    "collision": lambda law: collision(law.centre),
}


def score_named(name: str) -> Score:
    """The score of that name.

    Raises:
        InputError: there is none; the message lists those that exist.
    """
    if name not in SCORES:
        raise InputError(f"No score is called {name!r}; choose one of {', '.join(SCORES)}.")
    return SCORES[name]


class TopKUncertainty(NamedTuple):
    """Scaled U from the most likely tokens alone; both float32 [...].

    Attributes:
        score: scaled U with the width of every other token taken as 0.
        error_bound: the full score lies within this of ``score`` as long as no other radius exceeds the cap.
    """

    score: Tensor
    error_bound: Tensor


def topk_uncertainty(
    centre: Tensor, radius: Callable[[Tensor], Tensor] | Tensor, k: int, radius_cap: float
) -> TopKUncertainty:
    """Scaled U that needs only k radii a position, and how far off it can be.

    The centre logits are needed anyway; the radii of the whole vocabulary are a second product with the
    head, which this spares. A width grows with its radius, so the cap bounds every width left out, and
    with these both factors of U.

    Args:
        centre: [..., vocab] logits.
        radius: radii [..., k] of the k most likely tokens in falling order, or a function that gives them
            for token indices int64 [..., k] (``IntervalHead.radius_at`` with its hidden state bound).
        k: tokens to evaluate, at least 1; more than the vocabulary means all.
        radius_cap: no radius outside the k tokens exceeds this, >= 0.

    Returns:
        Score and error bound, each [...].

    Raises:
        InputError: ``k`` or ``radius_cap`` is out of range.
    """
    if k < 1:
        raise InputError(f"k must be at least 1, not {k}.")
    if not radius_cap >= 0:
        raise InputError(f"radius_cap must be at least 0, not {radius_cap}.")
    size = centre.shape[-1]
    odds = log_odds(centre)
    top = centre.topk(min(k, size), dim=-1).indices
    kept = width_at(odds.gather(-1, top), radius(top) if callable(radius) else radius)
    capped = width_at(odds, torch.full_like(odds, radius_cap)).scatter(-1, top, 0.0)  # of the others, at most
    total, rest = kept.sum(-1), capped.sum(-1)
    # ||delta - mean||**2 with the zeros of the others, without building them.
    mean = total / size
    spread = (kept - mean.unsqueeze(-1)).square().sum(-1) + (size - kept.shape[-1]) * mean.square()
    score = total * spread.sqrt()
    # n others of widths w and sum s change it by sum(w**2) - s * (2 * total + s) / size, where sum(w**2) is
    # at most that of the caps and at least s**2 / n; the latter makes the change least at s = total * n / k.
    highest = (total + rest) * (spread + capped.square().sum(-1)).sqrt()
    others = max(size - kept.shape[-1], 1)
    least = torch.minimum(rest, total * (others / kept.shape[-1]))
    change = least.square() * (1.0 / others - 1.0 / size) - 2.0 * total * least / size
    lowest = total * (spread + change).clamp_min(0.0).sqrt()
    return TopKUncertainty(score, torch.maximum(highest - score, score - lowest))
