"""Trains an EAGLE drafter: one layer that continues the frozen cloud model's features.

The features are made on the fly, a forward of the cloud a step: kept on disk they would take two bytes a
width and token, gigabytes for a few thousand pictures. Source: EAGLE, arXiv 2401.15077, section 3.3; the
share of null captions and the rate are those of the port to LlamaGen in https://github.com/jadohu/LANTERN.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ciar.decoding.sampling import guide
from ciar.models.bundle import check_device
from ciar.models.checkpoint import save_tensors
from ciar.models.eagle import EagleModel
from ciar.training.distil import Inputs, load_inputs
from ciar.training.loop import LoopConfig, Task, batches, train

#: Loop of the emoji drafter; the warm-up is 3 % of the steps.
EAGLE_LOOP = LoopConfig(steps=3000, warmup=90, decay=0.5, eval_every=250, grad_clip=0.5)


@dataclass(frozen=True)
class EagleTrainConfig:
    """Settings of the EAGLE stage.

    Attributes:
        batch: sequences a step.
        lr: peak learning rate.
        law_weight: weight of the laws' cross-entropy beside the features' smooth L1 distance.
        noise: uniform noise on the features that are read, as wide as this at 512 positions and wider in
            proportion at fewer.
        null_share: share of sequences under the null caption, the row that guidance steers from.
        guidance: scale of the laws that held-out figures compare.
        held: held-out sequences that figures are measured on.
    """

    batch: int = 16
    lr: float = 1e-4
    law_weight: float = 0.1
    noise: float = 0.2
    null_share: float = 0.1
    guidance: float = 3.0
    held: int = 32
    compile: bool = True


class EagleTask(Task):
    """Continues the cloud's features on real pictures."""

    def __init__(
        self,
        eagle: EagleModel,
        inputs: Inputs,
        config: EagleTrainConfig,
        loop: LoopConfig,
        device: torch.device | str = "cpu",
    ) -> None:
        torch.manual_seed(loop.seed)
        self.config, self.loop, self.device = config, loop, torch.device(device)
        self.eagle, self.inputs = eagle.to(self.device), inputs
        self.cloud = inputs.cloud.to(self.device).eval().requires_grad_(False)
        self.modules = {"eagle": self.eagle}
        self.optimizers = [
            torch.optim.AdamW(self.eagle.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=0.01)
        ]
        self._losses = torch.compile(self.losses, dynamic=True) if config.compile else self.losses

    def loss(self, step: int, generator: torch.Generator) -> tuple[Tensor, dict[str, Any]]:
        config = self.config
        pictures = self.inputs.train_index[
            batches(len(self.inputs.train_index), config.batch, self.loop.seed, step)
        ]
        null = torch.rand(len(pictures), generator=generator) < config.null_share
        x, hidden, mask = self.read(pictures, null)
        noise = torch.rand(hidden.shape, generator=generator).to(hidden) - 0.5
        near, law = self._losses(x, hidden, mask, noise * (config.noise * 512 / hidden.shape[1]))
        return near + config.law_weight * law, {"feature": near.detach(), "law": law.detach()}

    def losses(self, x: Tensor, hidden: Tensor, mask: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Smooth L1 distance of estimated features, and cross-entropy of the laws that follow from them.

        Args:
            x, hidden, mask: of :meth:`read`.
            noise: added to the features that are read, like ``hidden``.
        """
        estimate = self.eagle.estimate(self.cloud, x, hidden + noise, mask)
        target = hidden[:, mask.shape[1] :]
        near = F.smooth_l1_loss(estimate, target)
        law = self.cloud.head(target).softmax(dim=-1)
        return near, -(law * self.cloud.head(estimate).log_softmax(dim=-1)).sum(dim=-1).mean()

    @torch.no_grad()
    def read(self, pictures: Tensor, null: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the cloud reads and makes of some pictures' sequences.

        Args:
            pictures: int64 [rows].
            null: bool [rows], which have the null caption.

        Returns:
            Embedded sequences [rows, text + tokens - 1, dim], the features of all of them, and the text's
            mask, bool [rows, text].
        """
        cloud = self.cloud
        features, mask = (part.to(self.device) for part in self.inputs.captions.mixed(pictures))
        nothing = cloud.cls_embedding.uncond_embedding[-features.shape[1] :].to(features)
        # The null caption has the prompt's mask, as when it is decoded with.
        features = torch.where(null.to(self.device)[:, None, None], nothing, features)
        codes = self.inputs.codes[pictures].to(self.device)
        x = torch.cat([cloud.embed_text(features), cloud.embed_tokens(codes[:, :-1])], dim=1)
        return x, cloud.hidden_of(x, mask), mask

    def evaluate(self) -> dict[str, float]:
        """On held-out pictures: agreement with the cloud's guided law, and distance of the features."""
        total = {"greedy": 0.0, "tv": 0.0, "feature": 0.0}
        held = self.inputs.held_index[: self.config.held]
        for part in held.split(self.config.batch):
            logits: list[Tensor] = []
            for null in (False, True):
                x, hidden, mask = self.read(part, torch.full((len(part),), null))
                estimate = self.eagle.estimate(self.cloud, x, hidden, mask)
                target = hidden[:, mask.shape[1] :]
                logits += [self.cloud.head(estimate), self.cloud.head(target)]
                if not null:
                    total["feature"] += float(F.smooth_l1_loss(estimate, target)) * len(part)
            own, cloud = (guide(logits[i], logits[i + 2], self.config.guidance) for i in (0, 1))
            total["greedy"] += float((own.argmax(-1) == cloud.argmax(-1)).float().mean()) * len(part)
            apart = 0.5 * (own.softmax(-1) - cloud.softmax(-1)).abs().sum(-1)
            total["tv"] += float(apart.mean()) * len(part)
        return {name: value / len(held) for name, value in total.items()}


def train_eagle(
    *,
    data: Path,
    text: Path,
    codes: Path,
    backbone: Path,
    out: Path,
    loop: LoopConfig = EAGLE_LOOP,
    config: EagleTrainConfig | None = None,
    resume: bool = True,
    device: torch.device | str = "cpu",
) -> dict[str, Any]:
    """Trains a drafter of a run folder's cloud model and writes ``eagle.safetensors`` into ``out``.

    Returns:
        The last figures.
    """
    check_device(device)
    inputs = load_inputs(data, text, codes, backbone)
    torch.manual_seed(loop.seed)
    eagle = EagleModel(inputs.cloud.config)
    eagle.start_from(inputs.cloud)
    task = EagleTask(eagle, inputs, config or EagleTrainConfig(), loop, device)
    figures = train(task, loop, out, resume=resume)
    eagle.eval()
    with torch.no_grad():
        figures |= {f"held_{name}": value for name, value in task.evaluate().items()}
    save_tensors(eagle, out / "eagle.safetensors")
    return figures
