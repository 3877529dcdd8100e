"""The LlamaGen family; the emoji model belongs to it."""

from __future__ import annotations

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

    def read(self, text: TextFeatures, negative: TextFeatures | None, guided: bool) -> Prompt:
        """See :class:`~ciar.models.family.CloudModel`. Unconditional is the null caption."""
        features, mask = [text.features], [text.mask]
        if guided:
            # The null caption has the prompt's mask, as in training.
            null = self.caption.uncond_embedding
            features.append(null.to(text.features) if negative is None else negative.features)
            mask.append(text.mask if negative is None else negative.mask)
        stacked = torch.stack(mask).to(self.device)
        valid = int(stacked.sum(dim=1).max())
        rows = torch.stack(features)[:, -valid:].to(self.embedding)
        text_mask: Tensor | None = stacked[:, -valid:]
        if bool(stacked[:, -valid:].all()):
            text_mask = None
        return Prompt(self.embed_text(rows), text_mask, self.new_cache(valid, len(features)))


def _shapes(config: GPTConfig) -> dict[str, list[int]]:
    with torch.device("meta"):
        return shapes_of(GPT(config).state_dict())


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
)
