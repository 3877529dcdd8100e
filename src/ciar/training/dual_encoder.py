"""Trains the dual encoder that judges pictures, on the real pictures of the training split only.

Pictures are shifted, blurred, re-coloured and made noisy a little, so that the judge reads what is
drawn and is blind to the slight blur of a tokenizer. They are never mirrored: letters and arrows
would no longer fit their captions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ciar.errors import DataError
from ciar.evaluation.features import caption_features, image_features, text_digest
from ciar.evaluation.retrieval import draw_distractors, retrieved
from ciar.models.dual_encoder import MAX_SCALE, DualEncoder, DualEncoderConfig
from ciar.models.text import StaticTextEncoder
from ciar.models.vq import from_uint8
from ciar.training.captions import CaptionBank, load_captions, plain_caption
from ciar.training.data.emoji import Icon, without_tone
from ciar.training.loop import LoopConfig, Task, batches, train
from ciar.training.tokenizer import load_pictures

#: Steps of the shipped judge: about 27 epochs, five to six minutes on one core.
DUAL_ENCODER_LOOP = LoopConfig(steps=1600, warmup=100, decay=0.5, log_every=50, eval_every=400)


@dataclass(frozen=True)
class DualEncoderTraining:
    """Settings of the dual-encoder stage.

    Attributes:
        batch: pictures a step; each is told from all the others of its batch.
        lr: AdamW's peak learning rate.
        weight_decay: of matrices and kernels.
        shift: largest shift in px, at the encoder's size.
        noise: largest standard deviation of the noise, pictures in [-1, 1].
        colour: largest change of a channel's gain, and half of it of its offset.
        held_pictures: pictures of each split that a held-out evaluation looks at.
    """

    batch: int = 128
    lr: float = 2e-3
    weight_decay: float = 0.05
    shift: int = 3
    noise: float = 0.06
    colour: float = 0.05
    held_pictures: int = 512


class DualEncoderTask(Task):
    """Tells the pictures of a batch from one another by their captions, and the other way round.

    Args:
        pictures: [pictures, edge, edge, 3] uint8, all splits; edge a multiple of the encoder's.
        icons: the pictures' icons, in the same order.
        text: whose word-piece rows stand for captions.
        model: sizes of the encoder.
        config: settings of the stage.
        loop: settings of the loop; its seed also seeds the weights.
    """

    def __init__(
        self,
        pictures: NDArray[np.uint8],
        icons: Sequence[Icon],
        text: StaticTextEncoder,
        model: DualEncoderConfig,
        config: DualEncoderTraining,
        loop: LoopConfig,
    ) -> None:
        self.config, self.loop, self.icons, self.text = config, loop, icons, text
        of_split = {
            split: np.array([i for i, icon in enumerate(icons) if icon.split == split], dtype=np.int64)
            for split in ("train", "held_pair", "held_name")
        }
        if len(of_split["train"]) < 2:
            raise DataError("The data set has no training pictures. Build it anew: ciar train data.")
        self._train = of_split["train"]
        self._pictures = torch.from_numpy(reduced(pictures, self._train, model.image_size))
        self._bank = CaptionBank(icons, text)
        kinds = {name: i for i, name in enumerate(dict.fromkeys(without_tone(icon.name) for icon in icons))}
        self._kinds = torch.tensor([kinds[without_tone(icon.name)] for icon in icons])
        self._held = {split: index[: config.held_pictures] for split, index in of_split.items() if len(index)}
        self._held_pictures = {
            split: reduced(pictures, index, model.image_size) for split, index in self._held.items()
        }
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(loop.seed)
            self.model = DualEncoder(replace(model, text_digest=text_digest(text)))
        self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.modules = {"dual_encoder": self.model}
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        vectors = [p for p in self.model.parameters() if p.dim() <= 1]
        groups = [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.optimizers = [torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.98))]

    def loss(self, step: int, generator: torch.Generator) -> tuple[Tensor, dict[str, Any]]:
        picked = batches(len(self._train), self.config.batch, self.loop.seed, step)
        index = torch.from_numpy(self._train)[picked]
        images = distort(from_uint8(self._pictures[picked]), self.config, generator)
        features, mask = self._bank.batch(index, generator)
        pictures = self.model.encode_pictures(images)
        captions = self.model.encode_captions(features, mask)
        loss, accuracy = contrastive_loss(pictures, captions, self.model.scale, self._kinds[index])
        return loss, {"accuracy": accuracy, "scale": self.model.scale.detach()}

    def after_step(self, step: int, generator: torch.Generator) -> None:
        with torch.no_grad():
            self.model.log_scale.clamp_(max=float(np.log(MAX_SCALE)))

    def evaluate(self) -> dict[str, float]:
        """Top-1 share among 100 captions of real pictures, by split, and of blurred ones."""
        plain = [plain_caption(icon) for icon in self.icons]
        kinds = [without_tone(icon.name) for icon in self.icons]
        pool = caption_features(self.model, self.text, plain)
        out: dict[str, float] = {}
        for split, index in self._held.items():
            names = [kinds[i] for i in index]
            count = min(99, len(set(kinds)) - 1)
            distractors = draw_distractors(names, kinds, count=count, seed=self.loop.seed)
            sharp = self._held_pictures[split]
            for suffix, pictures in (("", sharp), ("_blurred", blurred(sharp))):
                own = image_features(self.model, pictures)
                out[f"top1_{split}{suffix}"] = float(retrieved(own, pool[index], pool, distractors).mean())
        return out


def contrastive_loss(
    pictures: Tensor, captions: Tensor, scale: Tensor, kinds: Tensor
) -> tuple[Tensor, Tensor]:
    """Symmetric InfoNCE in which pictures of one name are no negatives of each other.

    A batch holds one thing in several styles, and three captions in ten name no style, so counting
    those pairs as wrong would punish a right answer.

    Args:
        pictures: float32 [batch, dim] unit vectors.
        captions: float32 [batch, dim] unit vectors, in the same order.
        scale: factor on the cosines.
        kinds: int64 [batch], equal where the names are equal.

    Returns:
        The loss, and the share of pictures whose own caption is the nearest of the batch.

    Source: CLIP, arXiv 2103.00020, figure 3.
    """
    own = torch.arange(len(kinds), device=kinds.device)
    same = (kinds[:, None] == kinds[None, :]) & (own[:, None] != own[None, :])
    logits = (scale * pictures @ captions.T).masked_fill(same, float("-inf"))
    loss = 0.5 * (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own))
    accuracy = (logits.detach().argmax(dim=1) == own).float().mean()
    return loss, accuracy


def distort(images: Tensor, config: DualEncoderTraining, generator: torch.Generator) -> Tensor:
    """Shifts, blurs, re-colours and adds noise to each picture by its own small amounts.

    Args:
        images: float32 [batch, 3, size, size] in [-1, 1], on white.
    """
    count, _, height, width = images.shape

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    shift = config.shift
    padded = F.pad(images, (shift,) * 4, value=1.0)
    tops = torch.randint(0, 2 * shift + 1, (count, 1), generator=generator) + torch.arange(height)
    lefts = torch.randint(0, 2 * shift + 1, (count, 1), generator=generator) + torch.arange(width)
    rows = torch.arange(count)[:, None, None]
    moved = padded.permute(0, 2, 3, 1)[rows, tops[:, :, None], lefts[:, None, :]].permute(0, 3, 1, 2)
    share = uniform(count, 1, 1, 1)
    soft = torch.lerp(moved, blur(moved), share)
    gain = 1.0 + config.colour * (2.0 * uniform(count, 3, 1, 1) - 1.0)
    offset = config.colour * (uniform(count, 3, 1, 1) - 0.5)
    noise = torch.randn(images.shape, generator=generator) * (config.noise * uniform(count, 1, 1, 1))
    return (soft * gain + offset + noise).clamp(-1.0, 1.0)


def blur(images: Tensor) -> Tensor:
    """Binomial 3x3 blur of float [batch, 3, height, width]; edges are repeated."""
    padded = F.pad(images, (1, 1, 1, 1), mode="replicate")
    across = 0.25 * padded[..., :-2] + 0.5 * padded[..., 1:-1] + 0.25 * padded[..., 2:]
    return 0.25 * across[..., :-2, :] + 0.5 * across[..., 1:-1, :] + 0.25 * across[..., 2:, :]


def blurred(pictures: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pictures [n, height, width, 3] uint8, each blurred once."""
    soft = blur(torch.from_numpy(pictures).permute(0, 3, 1, 2).float())
    return np.ascontiguousarray(soft.round().to(torch.uint8).permute(0, 2, 3, 1).numpy())


def reduced(pictures: NDArray[np.uint8], index: NDArray[np.int64], size: int) -> NDArray[np.uint8]:
    """Chosen pictures averaged down to ``size`` px: uint8 [chosen, size, size, 3].

    Raises:
        DataError: the pictures' edge is no multiple of ``size``.
    """
    edge = pictures.shape[1]
    if pictures.ndim != 4 or edge != pictures.shape[2] or edge % size:
        raise DataError(
            f"The pictures are {list(pictures.shape)}; their edge must be a multiple of {size}. "
            "Build the data set anew: ciar train data."
        )
    factor = edge // size
    out = np.empty((len(index), size, size, 3), dtype=np.uint8)
    for start in range(0, len(index), 256):  # the pictures are memory-mapped; blocks keep them so
        chosen = pictures[index[start : start + 256]]
        cells = chosen.reshape(len(chosen), size, factor, size, factor, 3)
        out[start : start + 256] = np.rint(cells.mean(axis=(2, 4), dtype=np.float32)).astype(np.uint8)
    return out


def train_dual_encoder(
    data: Path,
    text: Path,
    out: Path,
    loop: LoopConfig = DUAL_ENCODER_LOOP,
    *,
    config: DualEncoderTraining | None = None,
    model: DualEncoderConfig | None = None,
    resume: bool = True,
) -> dict[str, Any]:
    """Trains the judge and writes it to ``out``, where :meth:`DualEncoder.load` finds it.

    Args:
        data: folder of the data set (``images.npy``, ``captions.json``).
        text: folder of the text encoder.
        out: folder of the run; a stopped run goes on from there.

    Returns:
        The last line of the log, with the held-out figures.

    Raises:
        DataError: the data set is missing or malformed.
    """
    try:
        pictures = load_pictures(data)
    except FileNotFoundError:
        raise DataError(
            f"{data / 'images.npy'} does not exist. Build the data set first: ciar train data."
        ) from None
    icons = load_captions(data)
    if len(icons) != len(pictures):
        raise DataError(
            f"{data} has {len(pictures)} pictures and {len(icons)} captions. Build the data set anew: "
            "ciar train data."
        )
    encoder = StaticTextEncoder.load(text).without_registers()
    sizes = model or DualEncoderConfig(caption_dim=encoder.caption_dim)
    task = DualEncoderTask(pictures, icons, encoder, sizes, config or DualEncoderTraining(), loop)
    figures = train(task, loop, out, resume=resume)
    task.model.save(out)
    return figures
