"""Trains the AR backbone on codes and captions.

Next-code prediction alone teaches a small model to go on from the codes before, and hardly to read the
caption: a picture's caption is worth some ten nats of its thousand. So two things are added in
training, of which nothing remains in the model: a *plan* (``training.plan``), for which the text rows
alone must say the whole picture, and *noise* on the codes that are fed, which makes the caption worth
more and drawn pictures less brittle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ciar.errors import DataError
from ciar.models.gpt import GPT, GPTConfig
from ciar.training.captions import CaptionBank
from ciar.training.loop import LoopConfig, Task, batches
from ciar.training.optim import make_optimizers
from ciar.training.plan import CodeClusters, Plan

#: The backbone that ships as ``emoji``.
EMOJI_GPT = GPTConfig(
    dim=256,
    n_layer=8,
    n_head=8,
    vocab_size=4096,
    grid=16,
    text_len=48,
    caption_dim=128,
    text_rotary="identity",
)


@dataclass(frozen=True)
class BackboneConfig:
    """Settings of the backbone stage.

    Attributes:
        batch: pictures a step.
        lr: peak learning rate.
        caption_dropout: share of captions replaced by the null caption, for guidance.
        plan: weight of the plan's loss; 0 leaves it out.
        plan_batch: captions a step that the plan is learned from; they cost a tenth of a picture each.
        plan_first: steps at the start that learn the plan alone, from twice as many captions.
        plan_layers: blocks after which the plan is read, so that those behind it can use it.
        noise: half of the pictures have up to this share of their fed codes replaced by other ones.
        compile: compile the forward; a minute at the start, then about 1.5 times faster.
    """

    batch: int = 32
    lr: float = 2e-3
    caption_dropout: float = 0.1
    plan: float = 0.5
    plan_batch: int = 128
    plan_first: int = 0
    plan_layers: int = 4
    noise: float = 1.0
    compile: bool = True


class BackboneTask(Task):
    """Next-code prediction given a caption.

    Raises:
        DataError: the plan is to be learned first, and there is no plan or nowhere to read it.
    """

    def __init__(
        self,
        codes: Tensor,
        captions: CaptionBank,
        train_index: Tensor,
        held_index: Tensor,
        codebook: Tensor,
        gpt: GPTConfig,
        config: BackboneConfig,
        loop: LoopConfig,
    ) -> None:
        torch.manual_seed(loop.seed)
        self.codes, self.captions, self.config, self.loop = codes, captions, config, loop
        self.train_index, self.held_index = train_index, held_index
        self.model = GPT(gpt)
        start_from_codebook(self.model, codebook)
        self.modules: dict[str, nn.Module] = {"gpt": self.model}
        self.optimizers = make_optimizers(self.model, config.lr)
        registers = len(captions.encoder.registers)
        self.planned = bool(config.plan and registers)
        if config.plan_first and not self.planned:
            raise DataError(
                f"The first {config.plan_first} steps are to learn the plan alone, and there is none: it "
                "needs a weight above 0 and a text encoder with registers. Make one with ciar train text, or "
                "set plan_first to 0."
            )
        if self.planned:
            self.plan = Plan(gpt.dim, gpt.grid, registers, CodeClusters.of(codebook, codes[train_index]))
            self.modules["plan"] = self.plan
            self.optimizers += make_optimizers(self.plan, config.lr)
        self._loss, self._plan_loss = self.sequence_loss, self.plan_loss
        if config.compile:
            self._loss = torch.compile(self.sequence_loss, dynamic=True)
            self._plan_loss = torch.compile(self.plan_loss, dynamic=True)

    def sequence_loss(self, features: Tensor, mask: Tensor, codes: Tensor, fed: Tensor) -> Tensor:
        """Mean cross-entropy of pictures, nats a token.

        Args:
            codes: int64 [rows, tokens], what comes next.
            fed: int64 [rows, tokens], what the model reads instead of them.
        """
        hidden = self.model.train_hidden(features, mask, fed[:, :-1])
        return F.cross_entropy(self.model.head(hidden).flatten(0, 1), codes.flatten())

    def plan_loss(self, features: Tensor, mask: Tensor, codes: Tensor) -> Tensor:
        """Mean weighted cross-entropy of the plan, nats a token."""
        text = self.model.residual_of(self.model.embed_text(features), mask, self.config.plan_layers)
        return self.plan(text[:, -self.plan.registers :], codes)

    def loss(self, step: int, generator: torch.Generator) -> tuple[Tensor, dict[str, Any]]:
        config = self.config
        alone = self.planned and step < config.plan_first
        plan = torch.zeros(())
        if self.planned:
            count = config.plan_batch * (2 if alone else 1)
            index = self.train_index[batches(len(self.train_index), count, self.loop.seed + 1, step)]
            plan = self._plan_loss(*self.captions.batch(index, generator), self.codes[index])
        if alone:
            return plan, {"plan": plan.detach()}
        index = self.train_index[batches(len(self.train_index), config.batch, self.loop.seed, step)]
        features, mask = self.captions.batch(index, generator)
        features = drop_captions(self.model, features, config.caption_dropout, generator)
        codes = self.codes[index]
        own = self._loss(features, mask, codes, with_noise(codes, config.noise, generator))
        return own + config.plan * plan, {"next": own.detach(), "plan": plan.detach()}

    def evaluate(self) -> dict[str, float]:
        return {"loss": self.held_loss(self.held_index)}

    @torch.no_grad()
    def held_loss(self, index: Tensor, batch: int = 32) -> float:
        """Mean cross-entropy over pictures with their plain captions."""
        total = 0.0
        for part in index.split(batch):
            features, mask = self.captions.fixed(part)
            codes = self.codes[part]
            total += float(self.sequence_loss(features, mask, codes, codes)) * len(part)
        return total / len(index)


def drop_captions(model: GPT, features: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Replaces whole captions by the null caption, keeping the mask, as LlamaGen does.

    Args:
        features: [rows, text, caption_dim], left-padded and cropped on the left.
    """
    dropped = torch.rand(len(features), generator=generator) < share
    null = model.cls_embedding.uncond_embedding[-features.shape[1] :]
    return torch.where(dropped[:, None, None], null, features)


def with_noise(codes: Tensor, most: float, generator: torch.Generator) -> Tensor:
    """Codes in which every other picture has some replaced by codes from anywhere in the batch.

    Args:
        codes: int64 [rows, tokens].
        most: largest share of a picture's codes that is replaced.
    """
    if most <= 0.0:
        return codes
    share = most * (2.0 * torch.rand(len(codes), 1, generator=generator) - 1.0).clamp_min(0.0)
    other = codes.flatten()[torch.randint(codes.numel(), codes.shape, generator=generator)]
    return torch.where(torch.rand(codes.shape, generator=generator) < share, other, codes)


@torch.no_grad()
def start_from_codebook(model: GPT, codebook: Tensor) -> None:
    """Starts embedding and head from a random projection of the codes.

    Codes that look alike then start alike, which saves the model learning it token by token.

    Args:
        codebook: [codes, dim] unit rows, of any floating-point dtype (shipped weights are float16).
    """
    codebook = codebook.float()
    white = (codebook - codebook.mean(0)) / codebook.std(0).clamp_min(1e-6)
    dim = model.config.dim
    for weight in (model.tok_embeddings.weight, model.output.weight):
        projection = torch.randn(white.shape[1], dim) / white.shape[1] ** 0.5
        weight.copy_(0.02 * (white @ projection) + 0.01 * torch.randn_like(weight))


def fit_null_caption(tensors: dict[str, Tensor], model: GPT) -> dict[str, Tensor]:
    """Weights of a model with fewer text slots, for one with more: the null caption is longer there."""
    name = "cls_embedding.uncond_embedding"
    own = model.cls_embedding.uncond_embedding
    given = tensors.get(name)
    if given is None or given.shape[1:] != own.shape[1:] or len(given) >= len(own):
        return tensors
    return tensors | {name: torch.cat([own[: len(own) - len(given)], given.to(own)])}
