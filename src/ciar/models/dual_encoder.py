"""The dual encoder: a picture and a caption as unit vectors that are close when they belong together.

It judges generated pictures (Frechet distance and caption retrieval) and takes no part in making
them. A picture is averaged down to 64 px first, so what counts is what is drawn, and not the texture
that a tokenizer leaves. Knows nothing of training or of the metrics.

Source of the objective's shape: CLIP, arXiv 2103.00020, section 2.3.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ciar.errors import CheckpointError, InputError

WEIGHTS_FILE = "dual_encoder.safetensors"
CONFIG_FILE = "dual_encoder.json"
#: Largest factor on the cosines; a larger one makes the loss chase single pairs (CLIP, section 2.5).
MAX_SCALE = 100.0


@dataclass(frozen=True)
class DualEncoderConfig:
    """Sizes of a dual encoder.

    Attributes:
        image_size: edge in px that pictures are averaged down to; a multiple of 16.
        channels: widths at 1/2, 1/4, 1/8 and 1/16 of that edge.
        feature_dim: width of the unit vectors.
        caption_dim: width of a word-piece row.
        caption_hidden: hidden width of the caption side.
        text_digest: digest of the text encoder whose rows it was trained on; empty before training.
    """

    image_size: int = 64
    channels: tuple[int, int, int, int] = (16, 32, 64, 128)
    feature_dim: int = 128
    caption_dim: int = 128
    caption_hidden: int = 256
    text_digest: str = ""


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions around a skip."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(self.conv1(x)))
        return F.relu(x + self.norm2(self.conv2(h)))


class DualEncoder(nn.Module):
    """Maps pictures and captions to unit vectors [batch, feature_dim]."""

    def __init__(self, config: DualEncoderConfig) -> None:
        super().__init__()
        self.config = config
        stages: list[nn.Module] = []
        before = 3
        for stage, width in enumerate(config.channels):
            stages += [nn.Conv2d(before, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
            if stage > 0:  # a block at 1/2 size would cost as much as all the others together
                stages.append(ResidualBlock(width))
            before = width
        self.picture = nn.Sequential(*stages)
        self.picture_out = nn.Linear(before, config.feature_dim)
        self.caption = nn.Sequential(
            nn.Linear(config.caption_dim, config.caption_hidden),
            nn.GELU(),
            nn.Linear(config.caption_hidden, config.caption_hidden),
            nn.GELU(),
            nn.Linear(config.caption_hidden, config.feature_dim),
        )
        #: Logarithm of the factor on the cosines (the inverse temperature); starts as in CLIP.
        self.log_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    @property
    def scale(self) -> Tensor:
        """Factor on the cosines, at most ``MAX_SCALE``."""
        return self.log_scale.exp().clamp(max=MAX_SCALE)

    def reduce(self, images: Tensor) -> Tensor:
        """Averages pictures down to the encoder's size.

        Args:
            images: float [batch, 3, edge, edge] in [-1, 1]; edge a multiple of ``image_size``.

        Raises:
            InputError: the pictures have another shape.
        """
        size = self.config.image_size
        shape = tuple(images.shape)
        if len(shape) != 4 or shape[1] != 3 or shape[2] != shape[3] or shape[2] % size or not shape[2]:
            raise InputError(
                f"The dual encoder takes square RGB pictures [batch, 3, edge, edge] whose edge is a multiple "
                f"of {size}; these are {list(shape)}. Resize them first."
            )
        return F.avg_pool2d(images, shape[2] // size) if shape[2] > size else images

    def encode_pictures(self, images: Tensor) -> Tensor:
        """Unit vectors float32 [batch, feature_dim] of pictures float [batch, 3, edge, edge] in [-1, 1]."""
        x = self.reduce(images).contiguous(memory_format=torch.channels_last)
        pooled = self.picture(x).mean(dim=(2, 3))
        return F.normalize(self.picture_out(pooled), dim=-1)

    def encode_captions(self, features: Tensor, mask: Tensor) -> Tensor:
        """Unit vectors float32 [batch, feature_dim] of captions.

        Args:
            features: float32 [batch, text, caption_dim], rows of the text encoder's table.
            mask: bool [batch, text], True where there is text; at least one a caption.
        """
        weights = mask.to(features.dtype)[:, :, None]
        mean = (features * weights).sum(dim=1) / weights.sum(dim=1).clamp_min(1.0)
        # A mean of many rows is shorter than one row; its direction is what carries the meaning.
        direction = F.normalize(mean, dim=-1) * math.sqrt(self.config.caption_dim)
        return F.normalize(self.caption(direction), dim=-1)

    def save(self, folder: Path) -> None:
        """Writes ``dual_encoder.safetensors`` and ``dual_encoder.json``."""
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        save_file({k: v.contiguous() for k, v in self.state_dict().items()}, folder / WEIGHTS_FILE)
        (folder / CONFIG_FILE).write_text(json.dumps(asdict(self.config), indent=2) + "\n")

    @classmethod
    def load(cls, folder: Path) -> DualEncoder:
        """Reads what :meth:`save` wrote, ready to judge (evaluation mode, no gradients).

        Raises:
            CheckpointError: a file is missing, damaged, or does not fit the other.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            settings: dict[str, Any] = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
            unknown = set(settings) - {field.name for field in fields(DualEncoderConfig)}
            if unknown:
                raise CheckpointError(f"{folder / CONFIG_FILE} has unknown settings: {sorted(unknown)}.")
            settings["channels"] = tuple(settings["channels"])
            model = cls(DualEncoderConfig(**settings))
            model.load_state_dict(load_file(folder / WEIGHTS_FILE))
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{error.filename} does not exist. Train the dual encoder first: ciar train dual-encoder."
            ) from None
        except (ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
            raise CheckpointError(
                f"The dual encoder in {folder} is damaged or incomplete ({error}). Train it anew: "
                "ciar train dual-encoder."
            ) from None
        return model.eval().requires_grad_(False).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
