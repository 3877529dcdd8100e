"""Trains the AR backbone on codes and captions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ciar.models.gpt import GPT, GPTConfig
from ciar.training.captions import CaptionBank
from ciar.training.loop import LoopConfig, Task, batches
from ciar.training.optim import make_optimizers

#: The backbone that ships as ``emoji``.
EMOJI_GPT = GPTConfig(
    dim=256,
    n_layer=8,
    n_head=8,
    vocab_size=4096,
    grid=16,
    text_len=32,
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
        compile: compile the forward; a minute at the start, then about 1.5 times faster.
    """

    batch: int = 32
    lr: float = 2e-3
    caption_dropout: float = 0.1
    compile: bool = True


class BackboneTask(Task):
    """Next-code prediction given a caption."""

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
        self.modules = {"gpt": self.model}
        self.optimizers = make_optimizers(self.model, config.lr)
        self._loss = torch.compile(self.sequence_loss, dynamic=True) if config.compile else self.sequence_loss

    def sequence_loss(self, features: Tensor, mask: Tensor, codes: Tensor) -> Tensor:
        """Mean cross-entropy, nats a token."""
        hidden = self.model.train_hidden(features, mask, codes[:, :-1])
        return F.cross_entropy(self.model.head(hidden).flatten(0, 1), codes.flatten())

    def loss(self, step: int, generator: torch.Generator) -> tuple[Tensor, dict[str, Any]]:
        index = self.train_index[batches(len(self.train_index), self.config.batch, self.loop.seed, step)]
        features, mask = self.captions.batch(index, generator)
        features = drop_captions(self.model, features, self.config.caption_dropout, generator)
        return self._loss(features, mask, self.codes[index]), {}

    def evaluate(self) -> dict[str, float]:
        return {"loss": self.held_loss(self.held_index)}

    @torch.no_grad()
    def held_loss(self, index: Tensor, batch: int = 32) -> float:
        """Mean cross-entropy over pictures with their plain captions."""
        total = 0.0
        for part in index.split(batch):
            features, mask = self.captions.fixed(part)
            total += float(self.sequence_loss(features, mask, self.codes[part])) * len(part)
        return total / len(index)


def drop_captions(model: GPT, features: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Replaces whole captions by the null caption, keeping the mask, as LlamaGen does.

    Args:
        features: [rows, text, caption_dim], left-padded and cropped on the left.
    """
    dropped = torch.rand(len(features), generator=generator) < share
    null = model.cls_embedding.uncond_embedding[-features.shape[1] :]
    return torch.where(dropped[:, None, None], null, features)


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
