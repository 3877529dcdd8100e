"""The device model: one transformer layer with an interval head, and the features it feeds back.

Same trunk as the cloud (models.gpt); the head gives centre and radius of the cloud's **guided**
logits, so the device runs one row where the cloud runs two. One layer is too few to work out what a
prompt asks for, so a reader of some layers does, once a picture. Source: CIAR, arXiv 2603.25463.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ciar.intervals.head import IntervalHead
from ciar.intervals.interfuse import width_at
from ciar.models.family import Prompt
from ciar.models.gpt import GPT, GPTConfig
from ciar.models.llamagen import LlamaGen, caption_rows
from ciar.models.text import TextFeatures


@dataclass(frozen=True)
class DeviceConfig:
    """Sizes of a device model.

    Attributes:
        trunk: the transformer; usually the cloud's with ``n_layer`` 1.
        radius_rank: rank of the radius head; None is a full matrix.
        feature_top_k: codes that the interval feature looks at.
        feature_hidden: bottleneck of the interval feature.
        feature_dim: width of the cloud's embeddings, which the feature is added to.
        reader: sizes of the text reader, the cloud's with fewer layers; None is none.
    """

    trunk: GPTConfig
    radius_rank: int | None = 64
    feature_top_k: int = 32
    feature_hidden: int = 64
    feature_dim: int = 256
    reader: GPTConfig | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> DeviceConfig:
        reader = values.get("reader")  # files of older device models have none
        read = None if reader is None else GPTConfig.from_dict(reader)
        return cls(**{**values, "trunk": GPTConfig.from_dict(values["trunk"]), "reader": read})

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


class TextReader(nn.Module):
    """Reads a prompt as the cloud's lower layers do; runs over the text rows alone, once a picture.

    What it finds is added to the device's own text rows; its output starts at zero.

    Args:
        config: sizes; ``n_layer`` of the cloud's layers.
        dim: width of the device's trunk.
    """

    def __init__(self, config: GPTConfig, dim: int) -> None:
        super().__init__()
        self.trunk = GPT(config)
        for unused in ("tok_embeddings", "output"):
            self.trunk.add_module(unused, nn.Identity())
        self.out = nn.Linear(config.dim, dim, bias=False)
        nn.init.zeros_(self.out.weight)

    def forward(self, features: Tensor, mask: Tensor) -> Tensor:
        """[rows, text, dim] to add, of features [rows, text, caption_dim] and bool mask [rows, text]."""
        return self.out(self.trunk.hidden_of(self.trunk.embed_text(features), mask))


class DeviceModel(nn.Module):
    """Trunk, interval head, feature map and, if there is one, text reader."""

    def __init__(self, config: DeviceConfig) -> None:
        super().__init__()
        self.config = config
        self.trunk = GPT(config.trunk)
        self.trunk.add_module("output", nn.Identity())  # the interval head takes its place
        self.head = IntervalHead(config.trunk.dim, config.trunk.vocab_size, config.radius_rank)
        self.phi = FeatureMap(config)
        self.reader = None if config.reader is None else TextReader(config.reader, config.trunk.dim)

    def embed_text(self, features: Tensor, mask: Tensor) -> Tensor:
        """Text rows [rows, text, dim] of caption features [rows, text, caption_dim].

        Args:
            mask: bool [rows, text], True where there is text; features are left-padded.
        """
        own = self.trunk.embed_text(features)
        return own if self.reader is None else own + self.reader(features, mask)

    def train_hidden(self, features: Tensor, mask: Tensor, tokens: Tensor) -> Tensor:
        """Teacher-forced pass of the trunk over whole sequences; as ``GPT.train_hidden``."""
        x = torch.cat([self.embed_text(features, mask), self.trunk.embed_tokens(tokens)], dim=1)
        return self.trunk.hidden_of(x, mask)[:, features.shape[1] - 1 :]

    def features(self, hidden: Tensor) -> Tensor:
        """Interval features [..., feature_dim] of hidden states [..., dim]."""
        centre = self.head.centre_logits(hidden)
        top = centre.topk(min(self.config.feature_top_k, centre.shape[-1]), dim=-1)
        log_probs = top.values - centre.logsumexp(dim=-1, keepdim=True)
        radius = self.head.radius_at(hidden, top.indices)
        return self.phi(hidden, log_probs, radius, self.trunk.tok_embeddings(top.indices))


class DeviceTrunk(LlamaGen):
    """A device model's trunk as it is decoded with."""

    def __init__(self, model: DeviceModel) -> None:
        super().__init__(model.trunk)
        self._embed = model.embed_text

    def read(
        self, texts: Sequence[TextFeatures], negatives: Sequence[TextFeatures] | None, guided: bool
    ) -> Prompt:
        """See :class:`~ciar.models.family.CloudModel`."""
        rows, mask = caption_rows(self.caption.uncond_embedding, texts, negatives, guided)
        mask = mask.to(self.device)
        x = self._embed(rows.to(self.embedding), mask)
        return Prompt(x, None if bool(mask.all()) else mask, self.new_cache(mask.shape[1], len(mask)))
