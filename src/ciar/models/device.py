"""The device model: one transformer layer with an interval head, and the features it feeds back.

Same trunk as the cloud (models.gpt); the head gives centre and radius of the cloud's **guided**
logits, so the device runs one row where the cloud runs two. Source: CIAR, arXiv 2603.25463.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ciar.intervals.head import IntervalHead
from ciar.intervals.interfuse import width_at
from ciar.models.gpt import GPT, GPTConfig


@dataclass(frozen=True)
class DeviceConfig:
    """Sizes of a device model.

    Attributes:
        trunk: the transformer; usually the cloud's with ``n_layer`` 1.
        radius_rank: rank of the radius head; None is a full matrix.
        feature_top_k: codes that the interval feature looks at.
        feature_hidden: bottleneck of the interval feature.
        feature_dim: width of the cloud's embeddings, which the feature is added to.
    """

    trunk: GPTConfig
    radius_rank: int | None = 64
    feature_top_k: int = 32
    feature_hidden: int = 64
    feature_dim: int = 256

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> DeviceConfig:
        return cls(**{**values, "trunk": GPTConfig.from_dict(values["trunk"])})

    @classmethod
    def for_cloud(cls, cloud: GPTConfig, layers: int = 1, **values: Any) -> DeviceConfig:
        """A device model of the cloud's width."""
        return cls(trunk=replace(cloud, n_layer=layers), feature_dim=cloud.dim, **values)


class FeatureMap(nn.Module):
    """Interval feature injection: ``f = phi(concat(h, P))`` of DESIGN section 3.

    P is the interval of the most likely codes in brief: their expected embedding under the lower and
    the upper bounds, the widths' sum and spread, and the entropy with all other codes as one. The
    rest of the vocabulary has next to no width and would cost more than the device's layer. The
    output layer starts at zero, so an untrained map changes nothing.
    """

    def __init__(self, config: DeviceConfig) -> None:
        super().__init__()
        self.down = nn.Linear(3 * config.trunk.dim + 3, config.feature_hidden)
        self.up = nn.Linear(config.feature_hidden, config.feature_dim)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, hidden: Tensor, log_probs: Tensor, radius: Tensor, vectors: Tensor) -> Tensor:
        """Features to add to the cloud's embeddings.

        Args:
            hidden: [..., dim] state that predicted the token.
            log_probs: float32 [..., K] of the most likely codes, the first one first.
            radius: float32 [..., K] of the same codes.
            vectors: [..., K, dim] the device's embeddings of these codes.

        Returns:
            [..., feature_dim].
        """
        probs = log_probs.exp()
        # No mass may be left but a rounding error; both logarithms below stay finite.
        rest = (1.0 - probs.sum(-1, keepdim=True)).clamp_min(1e-7)
        odds = log_probs - torch.log1p(-probs.clamp_max(1.0 - 1e-7))
        lower, upper = torch.sigmoid(odds - radius), torch.sigmoid(odds + radius)
        width = width_at(odds, radius)
        bounds = torch.stack([lower, upper], dim=-2) @ vectors.float()  # [..., 2, dim]
        size = width.sum(-1, keepdim=True)
        spread = width.std(-1, keepdim=True, correction=0) * width.shape[-1] ** 0.5
        entropy = -(probs * log_probs).sum(-1, keepdim=True) - rest * rest.log()
        brief = torch.cat([hidden, bounds.flatten(-2).type_as(hidden), size, spread, entropy], dim=-1)
        return self.up(nn.functional.silu(self.down(brief)))


class DeviceModel(nn.Module):
    """Trunk, interval head and feature map."""

    def __init__(self, config: DeviceConfig) -> None:
        super().__init__()
        self.config = config
        self.trunk = GPT(config.trunk)
        self.trunk.add_module("output", nn.Identity())  # the interval head takes its place
        self.head = IntervalHead(config.trunk.dim, config.trunk.vocab_size, config.radius_rank)
        self.phi = FeatureMap(config)

    def features(self, hidden: Tensor) -> Tensor:
        """Interval features [..., feature_dim] of hidden states [..., dim]."""
        centre = self.head.centre_logits(hidden)
        top = centre.topk(min(self.config.feature_top_k, centre.shape[-1]), dim=-1)
        log_probs = top.values - centre.logsumexp(dim=-1, keepdim=True)
        radius = self.head.radius_at(hidden, top.indices)
        return self.phi(hidden, log_probs, radius, self.trunk.tok_embeddings(top.indices))
