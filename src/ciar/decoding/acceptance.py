"""Acceptance rules: with which probability a drafted token stands, and what is drawn when it does not.

A rule knows the cloud's law p and the law q that the token was drawn from, both after all processing,
and nothing of windows, caches or noise; the same rule serves chains and Jacobi windows. Whatever the
rule, a position's law is ``q(x) accept(x)`` plus the mass that was not accepted times ``redraw``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Literal

import torch
from torch import Tensor

from ciar.decoding.codebook import Codebook
from ciar.decoding.sampling import residual

RedrawKind = Literal["paper", "code", "optimal"]


class Rule(ABC):
    """How a drafted token is judged. ``p`` and ``q`` are laws, float32 [vocab]."""

    @abstractmethod
    def accept(self, p: Tensor, q: Tensor, token: int, depth: int) -> float:
        """Probability that the token stands; 0 where q cannot have given it.

        Args:
            depth: how many tokens of the same draft came before it.
        """

    def redraw(self, p: Tensor, q: Tensor, token: int) -> Tensor:
        """The law after a rejection, float32 [vocab]."""
        return residual(p, q)


def ratio(p: float, q: float) -> float:
    """``min(1, exp(p - q))`` of log-probabilities; 0 where q excludes the token."""
    # A token that was not drawn from q is refused, even where both laws exclude it.
    return math.exp(min(0.0, p - q)) if q > -math.inf else 0.0


class Speculative(Rule):
    """``min(1, p / q)`` and the residual: exact. Source: arXiv 2211.17192, section 2.3."""

    def accept(self, p: Tensor, q: Tensor, token: int, depth: int) -> float:
        return ratio(float(p[token]), float(q[token]))


class Annealed(Rule):
    """``min(1, w p / q)`` with w >= 1 falling along the draft. Source: COOL-SD, arXiv 2601.09212.

    With w >= 1 the redraw that moves the law least is the plain residual. One step drifts by
    ``sum((min(q, w p) - p)+) <= min(TV(p, q), w - 1)``.

    Args:
        relaxation: mean of w along a whole draft.
        decay: w - 1 falls by ``exp(-decay)`` a token; 0 keeps it level.
        length: tokens of a whole draft.
    """

    def __init__(self, relaxation: float, decay: float, length: int) -> None:
        shape = [math.exp(-decay * i) for i in range(length)]
        mean = sum(shape) / length
        self.weights = [1.0 + (relaxation - 1.0) * value / mean for value in shape]

    def accept(self, p: Tensor, q: Tensor, token: int, depth: int) -> float:
        weight = self.weights[min(depth, len(self.weights) - 1)]
        return ratio(float(p[token]) + math.log(weight), float(q[token]))


class Neighbourhood(Rule):
    """LANTERN: a token may count the mass of its nearest codes as its own.

    A is the longest run of the nearest codes whose mass is within a bound; the token stands with
    ``min(1, (p(x) + p(A)) / q(x))``. Source: LANTERN, arXiv 2410.03355; LANTERN++, arXiv 2502.06352.

    Args:
        codebook: the tokenizer's codes.
        count: nearest codes that are looked at.
        bound: the most mass of A: absolute, or, where ``relative``, a multiple of p(x) less one.
        relative: whether the bound is LANTERN++'s, ``p(A) <= (bound - 1) p(x)``.
        kind: what is drawn after a rejection: ``paper``, p without the token and A; ``code``, p
            without the token and all ``count`` nearest codes, as in the public code; ``optimal``, the
            residual, which moves the law least. Where nothing is left it is p itself (the public code
            falls back to all codes alike).
    """

    def __init__(
        self, codebook: Codebook, count: int, bound: float, *, relative: bool, kind: RedrawKind
    ) -> None:
        self.codebook, self.count, self.bound = codebook, count, bound
        self.relative, self.kind = relative, kind

    def group(self, p: Tensor, token: int) -> tuple[Tensor, float]:
        """A, int64, and its mass under p."""
        near = self.codebook.nearest(token, self.count).to(p.device)
        mass = p[near].double().exp().cumsum(dim=0)
        bound = (self.bound - 1.0) * math.exp(float(p[token])) if self.relative else self.bound
        inside = int((mass <= bound).sum())
        return near[:inside], float(mass[inside - 1]) if inside else 0.0

    def accept(self, p: Tensor, q: Tensor, token: int, depth: int) -> float:
        mass = math.exp(float(p[token])) + self.group(p, token)[1]
        return ratio(math.log(mass), float(q[token])) if mass > 0 else 0.0

    def redraw(self, p: Tensor, q: Tensor, token: int) -> Tensor:
        if self.kind == "optimal":
            return residual(p, q)
        gone = self.group(p, token)[0]
        if self.kind == "code":
            gone = self.codebook.nearest(token, self.count).to(p.device)
        left = p.clone()
        left[gone] = -math.inf
        left[token] = -math.inf
        return left.log_softmax(dim=-1) if bool((left > -math.inf).any()) else p


class Grouped(Rule):
    """GSD: a token stands for the tokens of nearly its rank.

    C holds the token and those within ``size // 2`` ranks of it in the order of p, as far as their
    probability and their code are near; the token stands with ``min(1, p(C) / q(C))``.
    Source: GSD, arXiv 2508.07747, section 4.

    Args:
        codebook: the tokenizer's codes.
        size: tokens of a full group beside the token itself.
        near: largest difference in probability.
        reach: largest distance of codes.
    """

    def __init__(self, codebook: Codebook, size: int, near: float, reach: float) -> None:
        self.codebook, self.half, self.near, self.reach = codebook, size // 2, near, reach

    def group(self, p: Tensor, token: int) -> Tensor:
        """C, int64, the token among it."""
        order = p.argsort(descending=True, stable=True)
        rank = int((order == token).nonzero())
        around = order[max(0, rank - self.half) : rank + self.half + 1]
        alike = (p[around].exp() - p[token].exp()).abs() < self.near
        close = self.codebook.distances(token).to(p.device)[around] < self.reach
        return around[(alike & close) | (around == token)]

    def accept(self, p: Tensor, q: Tensor, token: int, depth: int) -> float:
        if float(q[token]) == -math.inf:
            return 0.0
        group = self.group(p, token)
        return min(1.0, float(p[group].double().exp().sum() / q[group].double().exp().sum()))


def judged(rule: Rule, p: Tensor, q: Tensor, depth: int = 0) -> Tensor:
    """Exact law of a position that a rule judges: float64 [vocab] probabilities.

    Every token that q gives is judged, and what is redrawn is summed: the yard-stick of a rule's drift.
    """
    out = torch.zeros(len(p), dtype=torch.float64)
    for token in (q > -math.inf).nonzero()[:, 0].tolist():
        given = math.exp(float(q[token]))
        stands = rule.accept(p, q, token, depth)
        out[token] += given * stands
        out += given * (1.0 - stands) * rule.redraw(p, q, token).double().exp()
    return out
