"""Named sizes of public checkpoints, and how their authors sample from them.

Weights are not part of the package: ``ciar convert`` makes a backbone folder of files that the user
has. Class-conditional sizes are left out: they draw labels, not prompts.

Source: LlamaGen, arXiv 2406.06525, https://github.com/FoundationVision/LlamaGen.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ciar.models.bundle import Defaults
from ciar.models.checkpoint import shapes_of
from ciar.models.gpt import GPT, GPTConfig
from ciar.models.vq import VQConfig, VQModel


@dataclass(frozen=True)
class Preset:
    """One public model.

    Attributes:
        name: also the backbone's name.
        gpt: sizes of the transformer.
        vq: sizes of the tokenizer.
        stage: number of the training stage, which the public file names carry; the weights of the
            stages have the same shapes.
        files: what the public files are called: transformer, tokenizer, text encoder.
        defaults: the sampling law of the authors' own sampler.
    """

    name: str
    gpt: GPTConfig
    vq: VQConfig
    stage: int
    files: tuple[str, str, str]
    defaults: Defaults = Defaults(guidance=7.5, top_k=1000)  # noqa: RUF009  # frozen

    @property
    def gpt_shapes(self) -> dict[str, list[int]]:
        """Names and shapes of the transformer's tensors."""
        with torch.device("meta"):
            return shapes_of(GPT(self.gpt).state_dict())

    @property
    def vq_shapes(self) -> dict[str, list[int]]:
        """Names and shapes of the tokenizer's tensors."""
        with torch.device("meta"):
            return shapes_of(VQModel(self.vq).state_dict())


_TEXT = "google/flan-t5-xl"

PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(
            "llamagen-xl-256",
            GPTConfig(grid=16),
            VQConfig(image_size=256),
            1,
            ("t2i_XL_stage1_256.pt", "vq_ds16_t2i.pt", _TEXT),
        ),
        Preset(
            "llamagen-xl-512",
            GPTConfig(grid=32),
            VQConfig(image_size=512),
            2,
            ("t2i_XL_stage2_512.pt", "vq_ds16_t2i.pt", _TEXT),
        ),
    )
}
