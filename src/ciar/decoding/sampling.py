"""Sampling laws: from raw logits to the law that a token is drawn from, and the draw itself.

Pure functions on torch tensors. A *law* is float32 log-probabilities, minus infinity outside the
support, after guidance, temperature, top-k and top-p; every function that compares device and cloud
takes laws, never raw logits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ciar.errors import InputError, NumericalError


@dataclass(frozen=True)
class SamplingLaw:
    """How logits become a law.

    Attributes:
        temperature: divides the logits; 0 puts all mass on the most likely token.
        top_k: tokens kept; 0 keeps all. Ties at the threshold are all kept.
        top_p: probability mass kept, in (0, 1]; the token that crosses it is kept.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise InputError(f"temperature is {self.temperature}; it must be 0 or more.")
        if self.top_k < 0:
            raise InputError(f"top_k is {self.top_k}; it must be 0 (all tokens) or more.")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p is {self.top_p}; it must be above 0 and at most 1.")


def guide(conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
    """Classifier-free guidance, ``u + scale * (c - u)``, in float32. Shapes [..., vocab]."""
    conditional, unconditional = conditional.float(), unconditional.float()
    return unconditional + scale * (conditional - unconditional)


def filter_logits(logits: Tensor, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Logits [..., vocab] with everything outside top-k, then top-p, set to minus infinity.

    Source: LlamaGen's sampler; ties at the k-th value are all kept, and the first token whose
    preceding mass exceeds ``top_p`` is dropped.
    """
    if 0 < top_k < logits.shape[-1]:
        threshold = logits.topk(top_k, dim=-1, sorted=False).values.amin(dim=-1, keepdim=True)
        logits = torch.where(logits < threshold, -math.inf, logits)
    if top_p < 1.0:
        ordered, order = logits.sort(dim=-1, descending=True)
        before = ordered.softmax(dim=-1).cumsum(dim=-1).roll(1, dims=-1)
        before[..., 0] = 0.0
        drop = torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before > top_p)
        logits = logits.masked_fill(drop, -math.inf)
    return logits


def to_law(logits: Tensor, law: SamplingLaw, *, what: str = "the model") -> Tensor:
    """The law of raw logits: float32 log-probabilities [..., vocab].

    Args:
        what: named in the error message.

    Raises:
        NumericalError: a row holds NaN or plus infinity.
    """
    logits = logits.float()
    # NaN counts as the largest value, so the largest alone tells of NaN and of plus infinity.
    if not bool(logits.amax(dim=-1).sum().isfinite()):
        raise NumericalError(
            f"The logits of {what} hold NaN or infinity. Check the weights with ciar inspect, or use "
            "dtype float32."
        )
    if law.temperature == 0.0:
        best = logits.argmax(dim=-1, keepdim=True)
        return torch.full_like(logits, -math.inf).scatter(-1, best, 0.0)
    if law.temperature != 1.0:
        logits = logits / max(law.temperature, 1e-5)
    return filter_logits(logits, law.top_k, law.top_p).log_softmax(dim=-1)


def choose(law: Tensor, noise: Tensor) -> Tensor:
    """``argmax_k(law + noise)``: a draw from the law. Both [..., vocab]; returns int64 [...]."""
    return (law + noise).argmax(dim=-1)


def slack(law: Tensor, noise: Tensor, proposal: Tensor) -> Tensor:
    """How far a proposal is from the law's own choice under the same noise (DESIGN section 2).

    Args:
        law: float32 [..., vocab].
        noise: float32 [..., vocab], Gumbel variates.
        proposal: int64 [...].

    Returns:
        float32 [...], >= 0; 0 exactly when the proposal is the choice; infinite outside the support.
    """
    total = law + noise
    return total.amax(dim=-1) - total.gather(-1, proposal.unsqueeze(-1)).squeeze(-1)


def residual(p_law: Tensor, q_law: Tensor) -> Tensor:
    """The law of speculative sampling after a rejection, ``norm((p - q)+)``; [..., vocab].

    Where p <= q everywhere (p and q equal up to rounding) the law is p itself.
    Source: arXiv 2211.17192, section 2.3.
    """
    left = (p_law.exp() - q_law.exp()).clamp_min(0.0)
    mass = left.sum(dim=-1, keepdim=True)
    return torch.where(mass > 1e-6, (left / mass.clamp_min(1e-30)).log(), p_law)
