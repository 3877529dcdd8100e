"""Captions of pictures as the stages read them, whatever text encoder made their features."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ciar.models.text import TextEncoder


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
        numbers = [int(i) for i in indices]
        texts = [self.encoder.encode(self.prompts[i]) for i in numbers]
        longest = max(int(text.mask.sum()) for text in texts)
        return (
            torch.stack([text.features[-longest:].float() for text in texts]).to(self.device),
            torch.stack([text.mask[-longest:] for text in texts]).to(self.device),
        )
