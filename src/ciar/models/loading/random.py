"""Backbone folders of random weights: full sizes for benchmarks and tests, where no real ones are at hand.

Written one tensor at a time, so that seven billion weights take no more memory than the largest of them.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ciar.errors import InputError
from ciar.intervals.gates import share_threshold
from ciar.models.bundle import DTYPES, write_config
from ciar.models.checkpoint import shapes_of, write_manifest
from ciar.models.device import DeviceConfig, DeviceModel
from ciar.models.install import STORED
from ciar.models.loading.convert import files_of
from ciar.models.loading.layout import Stored
from ciar.models.loading.staging import staged
from ciar.models.loading.write import size_of, write_tensors
from ciar.models.presets import PRESETS
from ciar.models.text import TextFeatures
from ciar.models.text_features import FeatureSource, left_padded, write_features
from ciar.models.text_kinds import TEXT_FOLDER, TextConfig

#: Text tokens that a prompt has.
_TEXT_ROWS = 12
Say = Callable[[str], None]


@dataclass(frozen=True)
class Drawn:
    """A tensor that is drawn when it is read: the same numbers for the same name and seed.

    Norms do nothing, biases are zero, tables have unit variance, and matrices keep variance, so that
    laws differ from position to position and from prompt to prompt.
    """

    name: str
    shape: tuple[int, ...]
    seed: int

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def read(self) -> Tensor:
        """float32, of this shape."""
        last = self.name.rpartition(".")[2]
        if last == "bias":
            return torch.zeros(self.shape)
        if "norm" in self.name and last == "weight":
            return torch.ones(self.shape)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {self.name}".encode()))
        drawn = torch.randn(self.shape, generator=generator)
        table = "embed" in self.name or "null" in self.name
        return drawn if table else drawn.mul_(math.prod(self.shape[1:]) ** -0.5)


def drawn(shapes: Mapping[str, Sequence[int]], seed: int) -> dict[str, Stored]:
    """Random tensors of these names and shapes, not in memory yet."""
    return {name: Drawn(name, tuple(shape), seed) for name, shape in shapes.items()}


def write_random(
    preset: str,
    out: Path,
    prompts: Sequence[str],
    dtype: str = "bfloat16",
    seed: int = 0,
    force: bool = False,
    say: Say = lambda words: None,
) -> dict[str, Any]:
    """Makes a backbone folder of random weights, with a random device model and features of some prompts.

    Its pictures are noise; sizes, passes, memory and time are those of the real one. The gate asks about
    three tokens in ten.

    Args:
        preset: whose sizes it has.
        out: the folder to make.
        prompts: which it can draw.
        dtype: what the transformer is stored and run in, ``bfloat16`` or ``float32``.
        seed: of the weights.
        force: the folder may hold an older backbone, which is replaced.
        say: called with a few words before each step that takes time.

    Returns:
        What was made, as ``convert`` tells it.

    Raises:
        InputError: the preset or the type is not known.
        DataError: the folder cannot be written.
    """
    if preset not in PRESETS:
        raise InputError(f"There is no preset {preset!r}. Known: {', '.join(PRESETS)}.")
    if dtype not in DTYPES:
        raise InputError(f"The model cannot be stored in {dtype!r}. Use {' or '.join(DTYPES)}.")
    chosen = PRESETS[preset]
    config = DeviceConfig(chosen.family.draft(chosen.gpt), feature_dim=chosen.gpt.dim)
    with torch.device("meta"):
        device_shapes = shapes_of(DeviceModel(config).state_dict())
    parts = {
        "gpt": (drawn(chosen.stored_shapes, seed), DTYPES[dtype]),
        "vq": (drawn(chosen.vq_shapes, seed + 1), torch.float32),
        "device": (drawn(device_shapes, seed + 2), STORED),
    }
    defaults = chosen.defaults
    threshold = share_threshold("entropy", defaults.judged_share)
    defaults = replace(defaults, score="entropy", threshold=threshold, thresholds={}, injection=False)
    text = TextConfig("features", chosen.gpt.text_len, chosen.gpt.caption_dim, dtype, f"random {seed}")
    source = FeatureSource(text.encoder, text.text_len, text.caption_dim, text.dtype)
    with staged(out, sum(size_of(*part) for part in parts.values()), force) as folder:
        for stem, (tensors, kept) in parts.items():
            say(f"writing {stem}.safetensors")
            write_tensors(folder / f"{stem}.safetensors", tensors, kept)
        write_features(
            folder / TEXT_FOLDER, source, ((prompt, _features(text, prompt, seed)) for prompt in prompts)
        )
        write_config(
            folder, f"{preset}-random", chosen.gpt, chosen.vq, {"device": config}, defaults,
            family=chosen.family_name, dtype=dtype, text=text.to_dict(), origin={"random": seed},
        )  # fmt: skip
        say("writing the manifest")
        write_manifest(folder)
        files = files_of(folder)
    return {"folder": str(out), "preset": preset, "dtype": dtype, "text": "features", "files": files}


def _features(text: TextConfig, prompt: str, seed: int) -> TextFeatures:
    rows = min(_TEXT_ROWS, text.text_len)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {prompt}".encode()))
    return left_padded(torch.randn(rows, text.caption_dim, generator=generator), text.text_len)
