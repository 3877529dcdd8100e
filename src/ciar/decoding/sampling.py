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
        entropy_heat, entropy_scale, entropy_floor: entropy-adaptive temperature. With H the entropy,
            in nats, of the guided logits' own law, the temperature is multiplied by
            ``heat * exp(-H / scale) + floor``: sure positions are drawn hotter and flat ones cooler.
            A heat of 0 switches it off. Source: arXiv 2510.09012, section 3, with 2.5, 3 and 0.6 in
            https://github.com/krennic999/ARsample.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    entropy_heat: float = 0.0
    entropy_scale: float = 3.0
    entropy_floor: float = 0.6

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise InputError(f"temperature is {self.temperature}; it must be 0 or more.")
        if self.top_k < 0:
            raise InputError(f"top_k is {self.top_k}; it must be 0 (all tokens) or more.")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p is {self.top_p}; it must be above 0 and at most 1.")
        adaptive = (self.entropy_heat, self.entropy_scale, self.entropy_floor)
        if not all(map(math.isfinite, adaptive)) or self.entropy_heat < 0 or min(adaptive[1:]) <= 0:
            raise InputError(
                f"The entropy-adaptive temperature is {adaptive}; its heat must be 0 or more, its scale and "
                "floor above 0."
            )

    @property
    def plain(self) -> bool:
        """Whether the temperature is the same at every position."""
        return self.entropy_heat == 0.0


def guide(conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
    """Classifier-free guidance, ``u + scale * (c - u)``, in float32. Shapes [..., vocab]."""
    conditional, unconditional = conditional.float(), unconditional.float()
    return unconditional + scale * (conditional - unconditional)


def guide_rows(logits: Tensor, scale: float) -> Tensor:
    """What a model's rows say together: [1 or 2, ..., vocab] to [..., vocab].

    Args:
        logits: of the conditional row, and under guidance of the unconditional one.
        scale: guidance; nothing where there is one row.
    """
    return logits[0] if len(logits) == 1 else guide(logits[0], logits[1], scale)


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
    if not law.plain:
        logits = logits / (law.temperature * adaptive_temperature(logits, law)).clamp_min(1e-5)
    elif law.temperature != 1.0:
        logits = logits / max(law.temperature, 1e-5)
    return filter_logits(logits, law.top_k, law.top_p).log_softmax(dim=-1)


def adaptive_temperature(logits: Tensor, law: SamplingLaw) -> Tensor:
    """The factor that entropy puts on the temperature; float32 [..., vocab] to [..., 1]."""
    entropy = torch.special.entr(logits.softmax(dim=-1)).sum(dim=-1, keepdim=True)
    return law.entropy_heat * torch.exp(-entropy / law.entropy_scale) + law.entropy_floor


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


def draw(law: Tensor, uniform: Tensor) -> Tensor:
    """A draw by inversion: the first token whose cumulative mass exceeds the uniform variate.

    Args:
        law: float32 [n, vocab].
        uniform: float64 [n] in (0, 1).

    Returns:
        int64 [n]; never a token outside the support.
    """
    mass = law.double().exp().cumsum(dim=-1)
    return torch.searchsorted(mass, uniform.unsqueeze(-1) * mass[:, -1:], right=True).squeeze(-1)


def one_hot(token: int, vocab_size: int) -> Tensor:
    """float32 [vocab] law of a token that was chosen without chance."""
    law = torch.full((vocab_size,), -math.inf)
    law[token] = 0.0
    return law
