"""Trains the device model: distillation of the cloud's guided law into one layer with intervals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from ciar.models.device import DeviceConfig, DeviceModel
from ciar.models.gpt import GPT
from ciar.models.llamagen import seeds
from ciar.training.bank import Captions
from ciar.training.loop import LoopConfig, Task, batches
from ciar.training.losses import (
    CoverageWeights,
    InterDroWeights,
    Target,
    centre_terms,
    coverage_loss,
    inter_dro_loss,
)
from ciar.training.optim import make_optimizers
from ciar.training.teacher import TeacherSet

LossName = Literal["coverage", "inter-dro"]
#: Positions that agreement is measured on at a time; a logit of each code is in memory for every one.
_AGREED = 4096


@dataclass(frozen=True)
class DeviceTrainConfig:
    """Settings of the device stage.

    Attributes:
        batch: sequences a step.
        lr: peak learning rate.
        loss: which loss trains the radius.
        drift_share: share of each batch whose prefixes the device drew itself.
        train_trunk: False trains the radius alone, on a trained trunk.
        first: positions before it are not learned: for a device model that finishes what the cloud began.
    """

    batch: int = 16
    lr: float = 2e-3
    loss: LossName = "coverage"
    drift_share: float = 0.5
    train_trunk: bool = True
    first: int = 0
    compile: bool = True
    coverage: CoverageWeights = field(default_factory=CoverageWeights)
    inter_dro: InterDroWeights = field(default_factory=InterDroWeights)


@torch.no_grad()
def start_from_cloud(device: DeviceModel, cloud: GPT, layer: int = -1) -> None:
    """Starts a device model from the cloud's embeddings, head, caption MLP, norm and one layer.

    A wider feed-forward keeps the cloud's columns and adds fresh ones that start silent. The text reader
    is the cloud's lower layers.
    """
    start_from(device, seeds(cloud, layer))
    if device.reader is not None:
        reader, given = device.reader.trunk, cloud.state_dict()
        reader.load_state_dict({name: given[name] for name in reader.state_dict()})
        reader.norm.weight.fill_(1.0)


@torch.no_grad()
def start_from(device: DeviceModel, tensors: Mapping[str, Tensor]) -> None:
    """Starts a device model from tensors of a cloud model of the same width.

    Args:
        tensors: under the trunk's names, as ``Family.seeds`` gives them; what is not among them stays
            as it is. ``layers.0`` is for every layer. A wider feed-forward is filled up with silence.
    """
    own = {f"trunk.{name}": value for name, value in device.trunk.state_dict().items()}
    own["trunk.output.weight"] = device.head.centre.weight
    for name, given in tensors.items():
        for layer in range(device.config.trunk.n_layer if name.startswith("layers.0.") else 1):
            place = f"trunk.{name.replace('layers.0.', f'layers.{layer}.')}"
            if name.endswith("attention.wv.weight"):
                own[place.replace(".wv.", ".wqkv.")][-len(given) :] = given
            elif own[place].shape == given.shape:
                own[place].copy_(given)
            elif name.endswith("w2.weight"):
                own[place].zero_()
                own[place][:, : given.shape[1]] = given
            else:
                own[place][: given.shape[0]] = given


class DeviceTask(Task):
    """Distils the teacher into a device model."""

    def __init__(
        self,
        device: DeviceModel,
        real: TeacherSet,
        drifted: TeacherSet | None,
        held: TeacherSet,
        captions: Captions,
        config: DeviceTrainConfig,
        loop: LoopConfig,
    ) -> None:
        torch.manual_seed(loop.seed)
        self.place = device.head.centre.weight.device
        self.device, self.real, self.drifted, self.held = device, real, drifted, held
        self.captions, self.config, self.loop = captions, config, loop
        self.modules = {"device": device}
        # Of the text reader only what is added to the trunk: the rest is the cloud's, which knows.
        trained = ("head.",) if not config.train_trunk else ("trunk.", "head.", "reader.out.")
        for name, parameter in device.named_parameters():
            parameter.requires_grad_(name.startswith(trained) and not name.startswith("trunk.output"))
        if not config.train_trunk:
            device.head.centre.weight.requires_grad_(False)
        self.optimizers = make_optimizers(device, config.lr)
        self._step = torch.compile(self.batch_loss, dynamic=True) if config.compile else self.batch_loss

    def batch_loss(
        self, features: Tensor, mask: Tensor, codes: Tensor, indices: Tensor, log_probs: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss over the positions of a batch of sequences, from the first that is learned."""
        first, rows = self.config.first, len(codes)
        hidden = self.device.train_hidden(features, mask, codes[:, :-1])[:, first:].flatten(0, 1)
        law = self.device.head(hidden)
        if first:
            whole = (x.unflatten(0, (rows, -1)) for x in (indices, log_probs))
            indices, log_probs = (x[:, first:].flatten(0, 1) for x in whole)
        target = Target(indices, log_probs)
        if self.config.loss == "coverage":
            return coverage_loss(law.centre, law.radius, target, self.config.coverage)
        return inter_dro_loss(law.centre, law.radius, target, self.config.inter_dro)

    def loss(self, step: int, generator: torch.Generator) -> tuple[Tensor, dict[str, Any]]:
        config = self.config
        drift = round(config.batch * config.drift_share) if self.drifted is not None else 0
        sets = [(self.real, config.batch - drift)]
        if self.drifted is not None:
            sets.append((self.drifted, drift))
        rows = [(s, batches(len(s), n, self.loop.seed, step)) for s, n in sets if n]
        codes = torch.cat([s.codes[r] for s, r in rows])
        pictures = torch.cat([s.pictures[r] for s, r in rows])
        targets = [s.target(r) for s, r in rows]
        features, mask = self.captions.mixed(pictures)
        indices = torch.cat([t.indices for t in targets])
        log_probs = torch.cat([t.log_probs for t in targets])
        batch = (part.to(self.place) for part in (features, mask, codes, indices, log_probs))
        loss, figures = self._step(*batch)
        return loss, dict(figures)

    def evaluate(self) -> dict[str, float]:
        return agreement(self.device, self.held, self.captions)


@torch.no_grad()
def agreement(device: DeviceModel, held: TeacherSet, captions: Captions, batch: int = 16) -> dict[str, float]:
    """Teacher-forced agreement of a device model with the guided cloud law.

    Returns:
        greedy: share of positions with the same most likely code.
        tv: mean total variation.
        ce: mean cross-entropy, nats.
    """
    total = {"greedy": 0.0, "tv": 0.0, "ce": 0.0}
    place = device.head.centre.weight.device
    batch = max(1, min(batch, _AGREED // device.config.trunk.tokens))
    for rows in torch.arange(len(held)).split(batch):
        features, mask = (part.to(place) for part in captions.mixed(held.pictures[rows]))
        codes = held.codes[rows][:, :-1].to(place)
        hidden = device.train_hidden(features, mask, codes).flatten(0, 1)
        centre = device.head.centre_logits(hidden)
        target = Target(*(part.to(place) for part in held.target(rows)))
        l1, ce = centre_terms(centre, target)
        best = target.indices.gather(-1, target.log_probs.argmax(-1, keepdim=True)).squeeze(-1)
        same = (centre.argmax(-1) == best).float().mean()
        for name, value in (("greedy", same), ("tv", 0.5 * l1), ("ce", ce)):
            total[name] += float(value) * len(rows)
    return {name: value / len(held) for name, value in total.items()}


class FeatureTask(Task):
    """Trains the interval feature map against the cloud's clean-prefix law.

    The cloud reads a drifted prefix with features added; it should give the law that it gives after
    the clean (real) prefix. Only the map is trained; its output starts at zero.
    """

    def __init__(
        self,
        device: DeviceModel,
        cloud: GPT,
        clean: TeacherSet,
        captions: Captions,
        corrupt_share: float,
        guidance: float,
        config: DeviceTrainConfig,
        loop: LoopConfig,
    ) -> None:
        torch.manual_seed(loop.seed)
        self.device, self.cloud, self.clean = device, cloud, clean
        self.captions, self.config, self.loop = captions, config, loop
        self.corrupt_share, self.guidance = corrupt_share, guidance
        for name, parameter in device.named_parameters():
            parameter.requires_grad_(name.startswith("phi."))
        cloud.requires_grad_(False)
        # The map alone: a checkpoint of the whole device would bring back the trunk that it was made on.
        self.modules = {"phi": device.phi}
        self.optimizers = [torch.optim.AdamW(device.phi.parameters(), lr=config.lr, weight_decay=0.01)]

    def loss(self, step: int, generator: torch.Generator) -> tuple[Tensor, dict[str, Any]]:
        rows = batches(len(self.clean), self.config.batch, self.loop.seed, step)
        return self.rows_loss(rows, generator, features_on=True), {}

    def rows_loss(self, rows: Tensor, generator: torch.Generator, *, features_on: bool) -> Tensor:
        """Cross-entropy of the clean law under the law after a corrupted prefix."""
        codes = self.clean.codes[rows]
        features, mask = self.captions.mixed(self.clean.pictures[rows])
        with torch.no_grad():
            hidden = self.device.train_hidden(features, mask, codes[:, :-1])
            centre = self.device.head.centre_logits(hidden)
            noise = -torch.empty_like(centre).exponential_(generator=generator).log()
            drawn = (centre + noise).argmax(-1)
            swap = torch.rand(codes.shape, generator=generator) < self.corrupt_share
            seen = torch.where(swap, drawn, codes)
            # The device reads the corrupted prefix too: the feature is a function of the ids alone.
            states = self.device.train_hidden(features, mask, seen[:, :-1])
        extra = self.device.features(states[:, :-1]) if features_on else torch.zeros(())
        logits = self._cloud_logits(features, mask, seen, extra)
        return centre_terms(logits.flatten(0, 1), self.clean.target(rows))[1]

    def _cloud_logits(self, features: Tensor, mask: Tensor, codes: Tensor, extra: Tensor) -> Tensor:
        cloud, scale = self.cloud, self.guidance
        null = cloud.cls_embedding.uncond_embedding[-features.shape[1] :].to(features)
        text = cloud.embed_text(torch.cat([features, null.expand_as(features)]))
        x = torch.cat([text, (cloud.embed_tokens(codes[:, :-1]) + extra).repeat(2, 1, 1)], dim=1)
        hidden = cloud.hidden_of(x, mask.repeat(2, 1))[:, features.shape[1] - 1 :]
        conditional, unconditional = cloud.head(hidden).chunk(2)
        return unconditional + scale * (conditional - unconditional)

    def evaluate(self) -> dict[str, float]:
        rows = torch.arange(min(32, len(self.clean)))
        with_features = self.rows_loss(rows, torch.Generator().manual_seed(1), features_on=True)
        without = self.rows_loss(rows, torch.Generator().manual_seed(1), features_on=False)
        return {"with": float(with_features), "without": float(without)}


__all__ = [
    "DeviceConfig",
    "DeviceTask",
    "DeviceTrainConfig",
    "FeatureTask",
    "agreement",
    "start_from",
    "start_from_cloud",
]
