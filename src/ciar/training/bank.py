"""Captions of pictures as the stages read them, whatever text encoder made their features."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ciar.models.text import TextEncoder, side_by_side


class Captions(Protocol):
    """Features of the captions of a data set, in batches."""

    def mixed(self, indices: Iterable[int] | Tensor) -> tuple[Tensor, Tensor]:
        """Features of the captions of some pictures; the same at every call.

        Returns:
            features: float32 [batch, text, caption_dim], left-padded with zeros and cropped to the
                longest caption of the batch.
            mask: bool [batch, text], True where there is text.
        """
        ...


class PromptBank:
    """Prompts and the text encoder that they are read with, one prompt a picture.

    Nothing is kept: features of thousands of prompts are gigabytes, and whoever makes them slowly keeps
    them itself.

    Args:
        prompts: the prompts, in the order of the pictures.
        encoder: makes their features.
        device: where the features are put.
    """

    def __init__(
        self, prompts: Sequence[str], encoder: TextEncoder, device: torch.device | str = "cpu"
    ) -> None:
        self.prompts, self.encoder, self.device = list(prompts), encoder, torch.device(device)

    def __len__(self) -> int:
        return len(self.prompts)

    def mixed(self, indices: Iterable[int] | Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`Captions`."""
        features, mask = side_by_side([self.encoder.encode(self.prompts[int(i)]) for i in indices])
        return features.to(self.device), mask.to(self.device)
