"""The LlamaGen family; the emoji model belongs to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ciar.models.checkpoint import shapes_of
from ciar.models.family import Family, Prompt
from ciar.models.gpt import GPT, GPTConfig
from ciar.models.inference import InferenceGPT
from ciar.models.text import TextFeatures
from ciar.models.vq import VQModel, to_uint8


class LlamaGen(InferenceGPT):
    """The transformer as the cloud decodes with it; a :class:`~ciar.models.family.CloudModel`."""

    def read(
        self, texts: Sequence[TextFeatures], negatives: Sequence[TextFeatures] | None, guided: bool
    ) -> Prompt:
        """See :class:`~ciar.models.family.CloudModel`. Unconditional is the null caption."""
        rows, mask = caption_rows(self.caption.uncond_embedding, texts, negatives, guided)
        text_mask = None if bool(mask.all()) else mask.to(self.device)
        x = self.embed_text(rows.to(self.embedding))
        return Prompt(x, text_mask, self.new_cache(mask.shape[1], len(mask)))


def caption_rows(
    null: Tensor, texts: Sequence[TextFeatures], negatives: Sequence[TextFeatures] | None, guided: bool
) -> tuple[Tensor, Tensor]:
    """Caption features of some prompts' rows, without padding that all of them have.

    Args:
        null: [text, caption_dim] the null caption.
        texts, negatives, guided: see :class:`~ciar.models.family.CloudModel`.

    Returns:
        [rows, valid, caption_dim] features, and bool [rows, valid], where there is text.
    """
    features, mask = [text.features for text in texts], [text.mask for text in texts]
    if guided and negatives is None:
        # The null caption has the prompt's mask, as in training.
        features += [null.to(text.features) for text in texts]
        mask += mask
    elif guided and negatives is not None:
        features += [text.features for text in negatives]
        mask += [text.mask for text in negatives]
    stacked = torch.stack(mask)
    valid = int(stacked.sum(dim=1).max())
    return torch.stack([rows[-valid:] for rows in features]), stacked[:, -valid:]


def _shapes(config: GPTConfig) -> dict[str, list[int]]:
    with torch.device("meta"):
        return shapes_of(GPT(config).state_dict())


def seeds(model: GPT, layer: int = -1) -> Mapping[str, Tensor]:
    """See :class:`~ciar.models.family.Family`; the layer may be another than the last."""
    own = model.state_dict()
    whole = {name: value for name, value in own.items() if not name.startswith("layers.")}
    block = model.blocks[layer].state_dict()
    return whole | {f"layers.0.{name}": value for name, value in block.items()}


LLAMAGEN = Family(
    name="llamagen",
    title="LlamaGen",
    config=GPTConfig.from_dict,
    model=GPT,
    decoding=LlamaGen,
    vq=VQModel,
    codes=lambda vq: vq.quantize.unit_codes(),
    pixels=to_uint8,
    stored=_shapes,
    published=_shapes,
    draft=lambda config: replace(config, n_layer=1),
    seeds=seeds,
)
