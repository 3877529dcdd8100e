"""Trains the AR backbone on codes and captions.

Next-code prediction alone teaches a small model to go on from the codes before, and hardly to read the
caption: a picture's caption is worth some ten nats of its thousand. So two things are added in
training, of which nothing remains in the model: a *plan*, which reads the codes of every region off the
last text position, and *noise* on the codes that are fed, which makes the caption worth more and drawn
pictures less brittle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
        plan: weight of the plan's loss; 0 leaves it out.
        noise: half of the pictures have up to this share of their fed codes replaced by other ones.
        compile: compile the forward; a minute at the start, then about 1.5 times faster.
    """

    batch: int = 32
    lr: float = 2e-3
    caption_dropout: float = 0.1
    plan: float = 0.5
    noise: float = 1.0
    compile: bool = True


class Plan(nn.Module):
    """What is where, as the last text position says it: a law of codes for each region of the picture.

    Args:
        dim: width of the backbone.
        vocab_size: codes.
        grid: tokens of the picture's edge.
        regions: regions along an edge.
        width: numbers that a region is said in.
    """

    def __init__(self, dim: int, vocab_size: int, grid: int, regions: int = 4, width: int = 64) -> None:
        super().__init__()
        self.regions, self.cell = min(regions, grid), max(1, grid // regions)
        self.say = nn.Linear(dim, self.regions**2 * width)
        self.codes = nn.Linear(width, vocab_size)

    def forward(self, hidden: Tensor, codes: Tensor, weights: Tensor) -> Tensor:
        """Mean weighted cross-entropy of a region's codes, nats.

        Args:
            hidden: [rows, dim] of the last text position.
            codes: int64 [rows, tokens].
            weights: float32 [vocab] of each code.
        """
        rows, edge = len(codes), self.regions * self.cell
        said = self.say(hidden).view(rows, self.regions**2, -1)
        log_probs = self.codes(F.silu(said)).log_softmax(-1)  # [rows, regions, vocab]
        grid = round(codes.shape[1] ** 0.5)
        square = codes.view(rows, grid, grid)[:, :edge, :edge]
        parts = square.unflatten(2, (self.regions, -1)).unflatten(1, (self.regions, -1))
        inside = parts.transpose(2, 3).reshape(rows, self.regions**2, -1)  # [rows, regions, tokens in one]
        weight = weights[inside]
        return -(weight * log_probs.gather(-1, inside)).sum() / weight.sum()


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
        self.modules: dict[str, nn.Module] = {"gpt": self.model}
        self.optimizers = make_optimizers(self.model, config.lr)
        self.plan = Plan(gpt.dim, gpt.vocab_size, gpt.grid)
        # Common codes, most of them white, are worth less.
        counts = torch.bincount(codes[train_index].flatten(), minlength=gpt.vocab_size).float()
        self.weights = counts.clamp_min(1.0).rsqrt()
        if config.plan:
            self.modules["plan"] = self.plan
            self.optimizers += make_optimizers(self.plan, config.lr)
        self._loss = torch.compile(self.train_loss, dynamic=True) if config.compile else self.train_loss

    def sequence_loss(self, features: Tensor, mask: Tensor, codes: Tensor) -> Tensor:
        """Mean cross-entropy, nats a token."""
        hidden = self.model.train_hidden(features, mask, codes[:, :-1])
        return F.cross_entropy(self.model.head(hidden).flatten(0, 1), codes.flatten())

    def train_loss(
        self, features: Tensor, mask: Tensor, codes: Tensor, fed: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The loss that is trained, the next codes' cross-entropy, and the plan's."""
        hidden = self.model.train_hidden(features, mask, fed[:, :-1])
        own = F.cross_entropy(self.model.head(hidden).flatten(0, 1), codes.flatten())
        if not self.config.plan:
            return own, own, own.new_zeros(())
        plan = self.plan(hidden[:, 0], codes, self.weights)
        return own + self.config.plan * plan, own, plan

    def loss(self, step: int, generator: torch.Generator) -> tuple[Tensor, dict[str, Any]]:
        index = self.train_index[batches(len(self.train_index), self.config.batch, self.loop.seed, step)]
        features, mask = self.captions.batch(index, generator)
        features = drop_captions(self.model, features, self.config.caption_dropout, generator)
        codes = self.codes[index]
        fed = with_noise(codes, self.config.noise, generator)
        loss, own, plan = self._loss(features, mask, codes, fed)
        return loss, {"next": own.detach(), "plan": plan.detach()}

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
