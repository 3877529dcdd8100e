"""Named sizes of public checkpoints, and how their authors sample from them.

Weights are not part of the package: ``ciar convert`` makes a backbone folder of files that the user
has. Class-conditional sizes are left out: they draw labels, not prompts.

Sources: LlamaGen, arXiv 2406.06525, https://github.com/FoundationVision/LlamaGen; Anole, arXiv
2407.06135, https://github.com/GAIR-NLP/anole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ciar.models.bundle import Defaults
from ciar.models.chameleon import ChameleonConfig
from ciar.models.checkpoint import shapes_of
from ciar.models.families import FAMILIES
from ciar.models.family import Family, Sizes
from ciar.models.gpt import GPTConfig
from ciar.models.vq import VQConfig


@dataclass(frozen=True)
class Preset:
    """One public model.

    Attributes:
        name: also the backbone's name.
        gpt: sizes of the transformer.
        vq: sizes of the tokenizer.
        stage: number of the training stage, which the public file names carry; the weights of the
            stages have the same shapes. 0 where there are no stages.
        files: what the public files are called: transformer, tokenizer, text encoder.
        defaults: the sampling law of the authors' own sampler.
        family_name: see ``models.families``.
    """

    name: str
    gpt: Sizes
    vq: VQConfig
    stage: int
    files: tuple[str, str, str]
    defaults: Defaults = Defaults(guidance=7.5, top_k=1000)  # noqa: RUF009  # frozen
    family_name: str = "llamagen"

    @property
    def family(self) -> Family:
        return FAMILIES[self.family_name]

    @property
    def gpt_shapes(self) -> Mapping[str, list[int]]:
        """Names and shapes of the public transformer's tensors, once they bear our names."""
        return self.family.published(self.gpt)

    @property
    def stored_shapes(self) -> Mapping[str, list[int]]:
        """Names and shapes of the transformer's tensors in a backbone folder."""
        return self.family.stored(self.gpt)

    @property
    def vq_shapes(self) -> Mapping[str, list[int]]:
        """Names and shapes of the tokenizer's tensors."""
        with torch.device("meta"):
            return shapes_of(self.family.vq(self.vq).state_dict())

    @property
    def command(self) -> str:
        """How to make a backbone folder of the public files."""
        sources = (
            f"{' '.join(self.files[:2])} flan-t5-xl/" if self.family_name == "llamagen" else self.files[0]
        )
        return f"ciar convert {sources} --preset {self.name} --out DIR"


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
        Preset(
            "anole-7b",
            ChameleonConfig(),
            VQConfig(image_size=512, codebook_size=8192, embed_dim=256),
            0,
            ("Anole-7b-v0.1-hf/", "Anole-7b-v0.1-vqvae-hf/ (or vqgan.ckpt)", "tokenizer.json"),
            # Two rows are enough: Anole's third, of pictures in the prompt alone, is the second here.
            Defaults(guidance=3.0, top_p=0.9),
            "chameleon",
        ),
    )
}
