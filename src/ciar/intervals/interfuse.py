"""InterFuse: from centre logits and radii to lower and upper probabilities (DESIGN section 3).

Every operator takes centre logits c and radii r >= 0 over the last axis and gives an
:class:`Interval` with ``0 <= lower <= softmax(c) <= upper <= 1``, element by element; since the
soft-max sums to 1, the lower bounds sum to at most 1 and the upper bounds to at least 1.

All of it works on log-odds, ``a = logit(softmax(c))``: a class against the log-sum-exp of the others.
The rest mass of the most likely class is summed and not subtracted from 1, so a law that is sure to
30 digits still has the right odds. Whatever the input's dtype, the maths is float32.

A logit of -inf masks a token: its interval is [0, 0], whatever its (finite) radius. A row needs at
least one finite logit; a row of nothing but -inf, or with NaN or +inf, gives NaN, which no threshold
calls certain. Knows nothing of where centre and radius come from, nor of scores.

Sources: Interval SoftMax of CreINN (Wang et al., arXiv 2401.05043) and Credal Deep Ensembles; interval
bound propagation for ``ibp``; reachable probability intervals (de Campos, Huete, Moral, 1994).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ciar.errors import InputError


class Interval(NamedTuple):
    """Probability intervals; all float32 [..., vocab].

    Attributes:
        lower: lower probabilities; sum to at most 1.
        upper: upper probabilities; sum to at least 1.
        centre_probs: soft-max of the centre logits; always inside.
    """

    lower: Tensor
    upper: Tensor
    centre_probs: Tensor

    @property
    def width(self) -> Tensor:
        """``delta = upper - lower``, float32 [..., vocab]. :func:`creinn_width` is exact near 0 and 1."""
        return self.upper - self.lower


def creinn(centre: Tensor, radius: Tensor) -> Interval:
    """Interval SoftMax: each class moves by its own radius while the others stay at their centres.

    ``lower = sigmoid(a - r)``, ``upper = sigmoid(a + r)``: a class's width depends on no other radius.

    Args:
        centre: [..., vocab] logits, any float dtype.
        radius: [..., vocab], finite and >= 0; broadcasts with ``centre``.

    Returns:
        The intervals.
    """
    centre, radius = centre.float(), radius.float()
    odds = log_odds(centre)
    return _around(centre.softmax(-1), torch.sigmoid(odds - radius), torch.sigmoid(odds + radius))


def ibp(centre: Tensor, radius: Tensor) -> Interval:
    """Interval bound propagation: the exact range of each probability when logits roam the whole box.

    ``lower_i = sigmoid(l_i - LSE_{j != i}(u_j))`` and ``upper_i`` the other way round, with l = c - r and
    u = c + r. With one radius r for all classes this is :func:`creinn` at 2r.

    Args:
        centre: [..., vocab] logits, any float dtype.
        radius: [..., vocab], finite and >= 0; broadcasts with ``centre``.

    Returns:
        The intervals.
    """
    centre, radius = centre.float(), radius.float()
    # Large logits have coarse float32 neighbours; around 0 the radius is not rounded away.
    shifted = centre - centre.amax(-1, keepdim=True).detach()
    # l_i - LSE_{j != i}(u_j) is u's log-odds, less the 2r between l_i and u_i.
    lower = torch.sigmoid(log_odds(shifted + radius) - 2.0 * radius)
    upper = torch.sigmoid(log_odds(shifted - radius) + 2.0 * radius)
    return _around(centre.softmax(-1), lower, upper)


def reachable(interval: Interval) -> Interval:
    """Tightens bounds that no law in the credal set attains; the set itself does not change.

    ``lower*_i = max(lower_i, 1 - sum_{j != i} upper_j)`` and
    ``upper*_i = min(upper_i, 1 - sum_{j != i} lower_j)``.

    Args:
        interval: any valid intervals.

    Returns:
        The tightest intervals of the same credal set; they lie inside.
    """
    lower, upper, probs = interval
    # 1 - sum_{j != i} upper_j = p_i - sum_{j != i} (upper_j - p_j), since p sums to 1. All terms of the sum
    # are >= 0, so nothing cancels, and the new bound cannot cross p.
    above, below = upper - probs, probs - lower
    lower = torch.maximum(lower, probs - (above.sum(-1, keepdim=True) - above))
    upper = torch.minimum(upper, probs + (below.sum(-1, keepdim=True) - below))
    return Interval(lower, upper, probs)


def reachable_creinn(centre: Tensor, radius: Tensor) -> Interval:
    """:func:`reachable` of :func:`creinn`, with the same arguments."""
    return reachable(creinn(centre, radius))


#: Operators by name; each takes centre logits and radii.
OPERATORS: dict[str, Callable[[Tensor, Tensor], Interval]] = {
    "creinn": creinn,
    "ibp": ibp,
    "reachable": reachable_creinn,
}


def interval_operator(name: str) -> Callable[[Tensor, Tensor], Interval]:
    """The operator of that name.

    Raises:
        InputError: there is none; the message lists those that exist.
    """
    if name not in OPERATORS:
        raise InputError(f"No interval operator is called {name!r}; choose one of {', '.join(OPERATORS)}.")
    return OPERATORS[name]


def creinn_width(centre: Tensor, radius: Tensor) -> Tensor:
    """Width of :func:`creinn`'s intervals, with full relative precision however small it is.

    ``delta = sinh r / (cosh r + cosh a) = (1 - exp(-2r)) * sigmoid(r - a) * sigmoid(r + a)``.

    Args:
        centre: [..., vocab] logits, any float dtype.
        radius: [..., vocab], finite and >= 0; broadcasts with ``centre``.

    Returns:
        float32 [..., vocab], in [0, 1].
    """
    return width_at(log_odds(centre), radius)


def width_at(odds: Tensor, radius: Tensor) -> Tensor:
    """:func:`creinn_width` of classes whose log-odds are known.

    Args:
        odds: [...] log-odds; -inf and inf allowed.
        radius: [...], finite and >= 0.

    Returns:
        float32 [...], in [0, 1].
    """
    odds, radius = odds.float(), radius.float()
    return -torch.expm1(-2.0 * radius) * torch.sigmoid(radius - odds) * torch.sigmoid(radius + odds)


def log_odds(logits: Tensor) -> Tensor:
    """``logit(softmax(x))``: every class against the log-sum-exp of all others.

    Args:
        logits: [..., vocab], any float dtype; -inf masks a token.

    Returns:
        float32 [..., vocab]: -inf at masked tokens, about 3e38 where all others are masked.
    """
    logits = logits.float()
    log_probs = logits.log_softmax(-1)
    top = logits.argmax(-1, keepdim=True)
    # Every other class has at most half of the mass, so 1 - p is exact enough for it. The most likely
    # one may hold all of it: there 0 stands in, which also keeps the gradient of log1p finite.
    others = log_probs - torch.log1p(-log_probs.exp().scatter(-1, top, 0.0))
    return others.scatter(-1, top, top_log_odds(logits).unsqueeze(-1))


def top_log_odds(logits: Tensor) -> Tensor:
    """Log-odds of the most likely class.

    Args:
        logits: [..., vocab], any float dtype; -inf masks a token.

    Returns:
        float32 [...]; about 3e38 where all others are masked.
    """
    logits = logits.float()
    top = logits.argmax(-1, keepdim=True)
    # The most negative float32 in place of -inf: the gradient of log-sum-exp over nothing is NaN.
    nothing = torch.finfo(torch.float32).min
    behind = (logits - logits.gather(-1, top)).clamp_min(nothing).scatter(-1, top, nothing)
    return -behind.logsumexp(-1)


def _around(probs: Tensor, lower: Tensor, upper: Tensor) -> Interval:
    """Intervals that hold their centre even where rounding put a bound on its other side."""
    return Interval(torch.minimum(lower, probs), torch.maximum(upper, probs), probs)
