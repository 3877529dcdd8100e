"""What a family of AR image models has to offer: the words that engine, bundle and loaders use.

A family is one file of models with a :class:`Family` at its end, and a line in ``models.families``.
Knows no family itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ciar.models.cache import KVCache
from ciar.models.gpt import GPTConfig
from ciar.models.text import TextFeatures
from ciar.models.vq import VQConfig


class Sizes(Protocol):
    """Sizes that the AR model of every family has.

    Attributes:
        dim: width of the residual stream.
        vocab_size: image codes, and so logits of a position.
        grid: tokens of a picture's edge.
        tokens: tokens of a picture, ``grid ** 2``.
        text_len: text slots before the first image token.
        caption_dim: width of the caption features.
    """

    @property
    def dim(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def grid(self) -> int: ...

    @property
    def tokens(self) -> int: ...

    @property
    def text_len(self) -> int: ...

    @property
    def caption_dim(self) -> int: ...

    def to_dict(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Prompt:
    """Prompts as a cloud model reads them: a row each and, under guidance, then each one's to steer from.

    Attributes:
        x: [rows, text, dim] embedded rows, left-padded to the longest.
        mask: bool [rows, text], True where there is text; None when no row has padding.
        cache: for these rows, the picture's tokens included; nothing is written yet.
    """

    x: Tensor
    mask: Tensor | None
    cache: KVCache


class CloudModel(Protocol):
    """A frozen cloud model, ready for decoding.

    Positions count text slots and then image tokens: ``config.text_len`` is the first image token, and
    text ends right before it. A cache is addressed by them, so a rollback is writing again from an
    earlier position. How a position turns into a rotation is the model's own affair.
    """

    @property
    def config(self) -> Sizes: ...

    @property
    def device(self) -> torch.device: ...

    def read(
        self, texts: Sequence[TextFeatures], negatives: Sequence[TextFeatures] | None, guided: bool
    ) -> Prompt:
        """The rows of some prompts, and a cache for them.

        Args:
            texts: features of each prompt.
            negatives: features to steer away from, one a prompt; None is the family's unconditional prompt.
            guided: whether there are rows to steer from at all; they stand behind all others.
        """
        ...

    def embed_tokens(self, ids: Tensor) -> Tensor:
        """Codes [...] to [..., dim]."""
        ...

    def forward(self, x: Tensor, start: int | Tensor, cache: KVCache, mask: Tensor | None = None) -> Tensor:
        """Runs a block of positions over the cache.

        Args:
            x: [rows, n, dim] embedded inputs.
            start: position of the first input; or int64 [rows]; or int64 [rows, n], one each.
            cache: holds what is attended to before; cells at the positions are overwritten.
            mask: bool [rows, 1, n, length], True where attention is allowed, over the cells up to the
                last input's. None is causal, and only for a whole number as ``start``.

        Returns:
            [rows, n, dim] hidden states, for :meth:`head`.
        """
        ...

    def head(self, hidden: Tensor) -> Tensor:
        """Logits over image codes, float32 [..., vocab_size]."""
        ...


class ImageTokenizer(Protocol):
    """What is needed of a family's image tokenizer to show a picture."""

    def decode(self, codes: Tensor) -> Tensor:
        """int64 [batch, tokens] to float [batch, 3, height, width], nominally in [-1, 1]."""
        ...


@dataclass(frozen=True)
class Family:
    """A family of models, as backbone folders and loaders know it.

    Attributes:
        name: in a folder's ``config.json``.
        title: for people.
        config: reads the model's sizes from their ``to_dict``.
        model: the AR model's class, made from its sizes.
        decoding: the model as it is decoded with.
        vq: the image tokenizer's class, made from its sizes.
        codes: the tokenizer's codes as they are decoded, float [codes, dim].
        pixels: decoded pictures to uint8 [batch, height, width, 3].
        stored: names and shapes of the AR model in a backbone folder.
        published: names and shapes of the AR model in the public files, once they bear our names.
        draft: sizes of the trunk of a device model for an AR model of these sizes.
        seeds: what such a trunk may begin with: tensors of the AR model under the trunk's names, its last
            layer as ``layers.0``, its head as ``output``; value projections alone as ``attention.wv``.
    """

    name: str
    title: str
    config: Callable[[dict[str, Any]], Sizes]
    model: type[nn.Module]
    decoding: Callable[[Any], CloudModel]
    vq: Callable[[VQConfig], nn.Module]
    codes: Callable[[Any], Tensor]
    pixels: Callable[[Tensor], Tensor]
    stored: Callable[[Any], Mapping[str, list[int]]]
    published: Callable[[Any], Mapping[str, list[int]]]
    draft: Callable[[Any], GPTConfig]
    seeds: Callable[[Any], Mapping[str, Tensor]]
