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
from ciar.intervals.interfuse import creinn, creinn_width
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

    P is the interval in brief: the expected embedding under the lower and the upper bounds of the
    most likely codes, the interval's total width, its spread and the entropy. The output layer
    starts at zero, so an untrained map changes nothing.
    """

    def __init__(self, config: DeviceConfig) -> None:
        super().__init__()
        self.top_k = config.feature_top_k
        self.down = nn.Linear(3 * config.trunk.dim + 3, config.feature_hidden)
        self.up = nn.Linear(config.feature_hidden, config.feature_dim)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, hidden: Tensor, centre: Tensor, radius: Tensor, embedding: Tensor) -> Tensor:
        """Features to add to the cloud's embeddings.

        Args:
            hidden: [..., dim] state that predicted the token.
            centre: [..., vocab] centre logits.
            radius: [..., vocab].
            embedding: [vocab, dim] the device's code embeddings.

        Returns:
            [..., feature_dim].
        """
        interval = creinn(centre, radius)
        width = creinn_width(centre, radius)
        probs = interval.centre_probs
        entropy = -(probs * probs.clamp_min(1e-12).log()).sum(-1, keepdim=True)
        top = centre.topk(min(self.top_k, centre.shape[-1]), dim=-1).indices
        vectors = embedding[top]  # [..., K, dim]
        lower = (interval.lower.gather(-1, top).unsqueeze(-1) * vectors).sum(-2)
        upper = (interval.upper.gather(-1, top).unsqueeze(-1) * vectors).sum(-2)
        size = width.sum(-1, keepdim=True)
        spread = width.std(-1, keepdim=True, correction=0) * width.shape[-1] ** 0.5
        brief = torch.cat([hidden, lower, upper, size, spread, entropy], dim=-1)
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
        law = self.head(hidden)
        return self.phi(hidden, law.centre, law.radius, self.trunk.tok_embeddings.weight)
