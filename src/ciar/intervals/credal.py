"""The discrete baseline: entropy bounds over a credal set of k classes and one pooled remainder.

The k most likely tokens keep their probability intervals; all others become one class whose bounds are
the sums of theirs, and whose mass is always spread evenly over its tokens. The score is the entropy that
the intervals leave open, upper minus lower. Two ways to compute it, at very different cost:

* :func:`entropy_gap`: the upper entropy exactly, the lower one by pouring the free mass into the largest
  bounds first. Two sorts of at most 2k numbers.
* :func:`vertex_gap`: the largest and smallest entropy among sampled extreme points of the set. O(samples
  * k). The maximum over a polytope's inside is not at an extreme point, so this gap is never the larger.

Enumerating all extreme points is exponential in k, which is the cost that the CIAR paper speaks of.
Everything is float32 over the last axis and vectorised over all others.

Sources: probability-interval approximation of the credal wrapper (Wang et al., arXiv 2405.15047); upper
entropy of interval credal sets (Abellan and Moral, 2003). The CIAR paper does not say how its "Discrete"
rows are computed.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ciar.errors import InputError
from ciar.intervals.interfuse import creinn
from ciar.intervals.scores import DraftLaw

#: Extreme points that :func:`vertex_gap` looks at.
VERTICES = 64


class PooledSet(NamedTuple):
    """Bounds of k classes and of the pooled rest, which is the last class; float32 [..., k + 1].

    Attributes:
        lower: lower probabilities; sum to at most 1.
        upper: upper probabilities; sum to at least 1.
        tokens: [k + 1] how many tokens a class stands for; 1 but for the last.
    """

    lower: Tensor
    upper: Tensor
    tokens: Tensor


def pooled(law: DraftLaw, k: int) -> PooledSet:
    """The k most likely tokens' intervals, and the rest as one class.

    Args:
        law: centre and radius, [..., vocab].
        k: classes that stay apart, at least 1; a k that leaves nothing to pool keeps every token.

    Raises:
        InputError: ``k`` is below 1.
    """
    if k < 1:
        raise InputError(f"k must be at least 1, not {k}.")
    interval = creinn(law.centre, law.radius)
    size = law.centre.shape[-1]
    k = min(k, size)
    top = law.centre.topk(k, dim=-1).indices
    lower, upper = interval.lower.gather(-1, top), interval.upper.gather(-1, top)
    tokens = torch.ones(k, device=lower.device)
    if k < size:
        # Summed without the k, and not as a difference of sums, which would lose a small rest.
        rest = [bound.scatter(-1, top, 0.0).sum(-1, keepdim=True) for bound in interval[:2]]
        lower = torch.cat([lower, rest[0]], dim=-1)
        upper = torch.cat([upper, rest[1].clamp_max(1.0)], dim=-1)
        tokens = torch.cat([tokens, tokens.new_tensor([size - k])])
    return PooledSet(lower, upper, tokens)


def pooled_entropy(probs: Tensor, tokens: Tensor) -> Tensor:
    """Entropy in nats of class probabilities whose mass is spread evenly over a class's tokens.

    Args:
        probs: [..., k + 1].
        tokens: [k + 1].

    Returns:
        float32 [...].
    """
    terms: Tensor = torch.special.entr(probs) + probs * tokens.log()
    return terms.sum(-1)


def upper_law(credal: PooledSet) -> Tensor:
    """The law of largest entropy in the set, [..., k + 1].

    It is the flattest one: every token at one level, cut off by its bounds. The mass under a level is a
    broken line that bends at the bounds; with these sorted, the level of mass 1 is read off.
    """
    lower, upper = (bound.double() / credal.tokens for bound in credal[:2])
    bends, order = torch.cat([lower, upper], dim=-1).sort(-1)
    slopes = torch.cat([credal.tokens, -credal.tokens]).double().expand(bends.shape)
    slopes = slopes.gather(-1, order).cumsum(-1)
    least = credal.lower.double().sum(-1, keepdim=True)
    mass = torch.cat([least, least + (slopes[..., :-1] * bends.diff(dim=-1)).cumsum(-1)], dim=-1)
    last = ((mass < 1.0).sum(-1, keepdim=True) - 1).clamp_min(0)  # the bend before mass 1 is reached
    short = 1.0 - mass.gather(-1, last)
    level = bends.gather(-1, last) + short / slopes.gather(-1, last).clamp_min(1e-30)
    return (torch.clamp(level, lower, upper) * credal.tokens).float()


def lower_law(credal: PooledSet) -> Tensor:
    """A law of small entropy in the set, [..., k + 1]: free mass goes to the largest upper bounds first.

    Of the smallest entropy where all lower bounds are equal; elsewhere an extreme point near it.
    """
    order = (credal.upper / credal.tokens).argsort(-1, descending=True)
    return _poured(credal, order)


def entropy_gap(law: DraftLaw, k: int) -> Tensor:
    """Upper minus lower entropy of the pooled set, in nats.

    Args:
        law: centre and radius, [..., vocab].
        k: classes that stay apart.

    Returns:
        float32 [...], >= 0.
    """
    credal = pooled(law, k)
    upper = pooled_entropy(upper_law(credal), credal.tokens)
    return (upper - pooled_entropy(lower_law(credal), credal.tokens)).clamp_min(0.0)


def vertex_gap(law: DraftLaw, k: int, samples: int = VERTICES) -> Tensor:
    """Largest minus smallest entropy among sampled extreme points of the pooled set, in nats.

    An extreme point comes from an order of the classes: the free mass goes to each in turn, up to its
    bound. The orders are the same at every position, so the score is a function of the law.

    Args:
        law: centre and radius, [..., vocab].
        k: classes that stay apart.
        samples: extreme points, at least 1.

    Returns:
        float32 [...], >= 0.
    """
    if samples < 1:
        raise InputError(f"samples must be at least 1, not {samples}.")
    credal = pooled(law, k)
    orders = _orders(credal.lower.shape[-1], samples).to(credal.lower.device)
    wide = PooledSet(credal.lower.unsqueeze(-2), credal.upper.unsqueeze(-2), credal.tokens)
    shape = (*credal.lower.shape[:-1], *orders.shape)
    entropies = pooled_entropy(_poured(wide, orders.expand(shape)), credal.tokens)
    return entropies.amax(-1) - entropies.amin(-1)


def _poured(credal: PooledSet, order: Tensor) -> Tensor:
    """Lower bounds plus the free mass, given to the classes in an order until it is used up."""
    room = (credal.upper - credal.lower).expand(order.shape).gather(-1, order)
    free = 1.0 - credal.lower.sum(-1, keepdim=True)
    given = torch.minimum((free - (room.cumsum(-1) - room)).clamp_min(0.0), room)
    return credal.lower.expand(order.shape).scatter_add(-1, order, given)


@lru_cache(maxsize=8)
def _orders(classes: int, samples: int) -> Tensor:
    """int64 [samples, classes] permutations, always the same."""
    generator = torch.Generator().manual_seed(0)
    return torch.rand(samples, classes, generator=generator).argsort(-1)
