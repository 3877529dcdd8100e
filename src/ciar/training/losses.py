"""Losses of the device model, as pure functions.

Both see the teacher as a law on its most likely codes (the processed, guided law; mass one on those
codes) and the device as logits and radii over the whole vocabulary.

Sources: CIAR, arXiv 2603.25463 (Inter-DRO); the interval score of Gneiting and Raftery 2007,
doi 10.1198/016214506000001437, section 6.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Target(NamedTuple):
    """The teacher's law at some positions.

    Attributes:
        indices: int64 [positions, K] its codes.
        log_probs: float32 [positions, K], normalised over the K codes.
    """

    indices: Tensor
    log_probs: Tensor


@dataclass(frozen=True)
class CoverageWeights:
    """Weights of the ``coverage`` loss.

    Attributes:
        l1: of the total variation term, ``||p - q||_1``.
        cross_entropy: of ``CE(p, q)``.
        interval: of the interval score on log-odds.
        miss_rate: nominal share of teacher log-odds outside the interval.
    """

    l1: float = 1.0
    cross_entropy: float = 1.0
    interval: float = 0.1
    miss_rate: float = 0.2


@dataclass(frozen=True)
class InterDroWeights:
    """Weights of Inter-DRO.

    Attributes:
        value: lambda_v, of the L1 terms.
        probability: lambda_p, of the cross-entropy terms.
        mid: lambda_beta, of ``KL(p_cloud || p_mid)``.
        tilt: alpha, sharpness of the sample weights on the lower bound.
        bounds_train_radius_only: whether the bounds' terms leave the centre alone, which keeps the
            radius from being crushed by the centre's errors.
    """

    value: float = 1.0
    probability: float = 0.1
    mid: float = 1.0
    tilt: float = 0.5
    bounds_train_radius_only: bool = False


def centre_terms(centre: Tensor, target: Target) -> tuple[Tensor, Tensor]:
    """Mean ``||p - q||_1`` and ``CE(p, q)`` of the centre law against the target.

    Args:
        centre: [positions, vocab] logits.
        target: the teacher at these positions.
    """
    log_q = centre.gather(-1, target.indices) - centre.logsumexp(-1, keepdim=True)
    p, q = target.log_probs.exp(), log_q.exp()
    l1 = (p - q).abs().sum(-1) + (1.0 - q.sum(-1)).clamp_min(0.0)
    return l1.mean(), -(p * log_q).sum(-1).mean()


def interval_score(centre: Tensor, radius: Tensor, target: Target, miss_rate: float) -> Tensor:
    """Interval score of the teacher's log-odds, weighted by (p + q) / 2.

    ``2 r + (2 / miss_rate) * (|logit p - a| - r)+``; its minimiser has nominal coverage. The centre
    is not trained by it.
    """
    log_q = (centre.gather(-1, target.indices) - centre.logsumexp(-1, keepdim=True)).detach()
    own_radius = radius.gather(-1, target.indices)
    error = (log_odds_of(target.log_probs) - log_odds_of(log_q)).abs()
    score = 2.0 * own_radius + (2.0 / miss_rate) * (error - own_radius).clamp_min(0.0)
    weight = 0.5 * (target.log_probs.exp() + log_q.exp())
    return (weight * score).sum(-1).mean()


def log_odds_of(log_probs: Tensor) -> Tensor:
    """``logit(p)`` from log p, clamped to +-14 where float32 has no more to say."""
    return (log_probs - torch.log1p(-log_probs.exp().clamp_max(1.0 - 1e-6))).clamp(-14.0, 14.0)


def coverage_loss(
    centre: Tensor, radius: Tensor, target: Target, weights: CoverageWeights
) -> tuple[Tensor, dict[str, Tensor]]:
    """The ``coverage`` loss: distil the law, and give the radius nominal coverage."""
    l1, cross_entropy = centre_terms(centre, target)
    score = interval_score(centre, radius, target, weights.miss_rate)
    loss = weights.l1 * l1 + weights.cross_entropy * cross_entropy + weights.interval * score
    return loss, {"tv": 0.5 * l1.detach(), "ce": cross_entropy.detach(), "interval": score.detach()}


def inter_dro_loss(
    centre: Tensor, radius: Tensor, target: Target, weights: InterDroWeights
) -> tuple[Tensor, dict[str, Tensor]]:
    """Inter-DRO as the paper states it.

    ``L(b) = lambda_v ||b - p||_1 + lambda_p CE(p, b)`` for centre, upper and lower bounds, plus
    ``lambda_beta KL(p || p_mid)``, plus ``sum_n w_n CE(p, p_lower)`` with ``w = softmax(alpha CE)``
    over the batch, the weights not differentiated.
    """
    log_mid = centre.log_softmax(-1)
    base = log_mid.detach() if weights.bounds_train_radius_only else log_mid
    odds = base - torch.log1p(-base.exp().clamp_max(1.0 - 1e-6))
    bounds = {"mid": log_mid, "upper": F.logsigmoid(odds + radius), "lower": F.logsigmoid(odds - radius)}
    p = target.log_probs.exp()
    loss = centre.new_zeros(())
    lower_ce = centre.new_zeros(len(p))
    for name, log_bound in bounds.items():
        own = log_bound.gather(-1, target.indices)
        outside = log_bound.exp().sum(-1) - own.exp().sum(-1)
        l1 = (p - own.exp()).abs().sum(-1) + outside.clamp_min(0.0)
        cross_entropy = -(p * own).sum(-1)
        loss = loss + weights.value * l1.mean() + weights.probability * cross_entropy.mean()
        if name == "mid":
            entropy = -(p * target.log_probs).sum(-1)
            loss = loss + weights.mid * (cross_entropy - entropy).mean()
            tv = 0.5 * l1.mean().detach()
        if name == "lower":
            lower_ce = cross_entropy
    sample_weights = (weights.tilt * lower_ce.detach()).softmax(0)
    hard = (sample_weights * lower_ce).sum()
    return loss + hard, {"tv": tv, "hard": hard.detach(), "radius": radius.mean().detach()}
