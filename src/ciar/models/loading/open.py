"""Backbones of public files as they are, without a converted folder: ``from_pretrained(weights=...)``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ciar.errors import InputError
from ciar.models.bundle import Bundle, config_document, load_bundle
from ciar.models.loading.check import check_finite, check_gpt, check_vq
from ciar.models.loading.convert import token_text
from ciar.models.loading.layout import read
from ciar.models.loading.sources import Sources, find_sources
from ciar.models.presets import PRESETS
from ciar.models.text import TextEncoder
from ciar.models.text_features import NoTextEncoder
from ciar.models.text_kinds import TextConfig, open_features, open_t5

#: A file or folder, or several.
Paths = str | Path | Sequence[str | Path]


class SourceBundle(Bundle):
    """A backbone read from public files. There is no manifest, so the wire checks sizes alone.

    Args:
        sources: what was found.
        device: where the models are put.
        dtype: what cloud model and text encoder run in; None is ``bfloat16``, as in the authors'
            sampler.
    """

    def __init__(
        self, sources: Sources, device: torch.device | str = "cpu", dtype: str | None = None
    ) -> None:
        preset = sources.preset
        check_gpt(sources.gpt.opened, sources.gpt.part, preset)
        check_vq(sources.vq.opened, sources.vq.part, preset)
        text = TextConfig("none", preset.gpt.text_len, preset.gpt.caption_dim, dtype or "bfloat16")
        if sources.t5 is not None or sources.features is not None:
            text = replace(text, kind="t5" if sources.t5 is not None else "features")
        elif sources.tokenizer is not None:
            text = replace(text, kind="tokens")
            self._tokens = token_text(sources)
        document = config_document(
            preset.name, preset.gpt, preset.vq, {}, preset.defaults,
            family=preset.family_name, text=text.to_dict(), dtype="bfloat16",
        )  # fmt: skip
        place = sources.gpt.opened.path.parent
        self._configure(document, place, device, dtype, sources.gpt.opened.path)
        self._sources = sources
        self.weights = ""

    def _open_text(self) -> TextEncoder:
        if self._sources.t5 is not None:
            return open_t5(self._sources.t5, self.text_config, self.device)
        if self._sources.features is not None:
            return open_features(self._sources.features, self.text_config)
        if self._sources.tokenizer is not None:
            return self._tokens
        return NoTextEncoder(self.folder, self.text_config.text_len, self.text_config.caption_dim)

    def _tensors(self, part: str) -> tuple[dict[str, Tensor], Path]:
        weights = self._sources.gpt if part == "gpt" else self._sources.vq
        tensors = {name: read(value) for name, value in self._sources.stored(part).items()}
        for name, value in tensors.items():
            check_finite(name, value, weights.opened.path)
        return tensors, weights.opened.path


def open_bundle(
    name_or_folder: str | Path,
    weights: Paths | None = None,
    device: torch.device | str = "cpu",
    dtype: str | None = None,
) -> Bundle:
    """A backbone: embedded, in a folder, or a preset with the public files as ``weights``.

    Args:
        name_or_folder: name, folder, or with ``weights`` the name of a preset.
        weights: transformer, tokenizer and text encoder (or text tokenizer, or features): files, folders,
            or a folder of them.
        device: where the models are put.
        dtype: what the cloud model runs in; see :class:`~ciar.models.bundle.Bundle`.

    Raises:
        InputError: the name is not known, or a source is missing.
        CheckpointError: a file cannot be read or does not fit.
    """
    if weights is None:
        return load_bundle(name_or_folder, device, dtype)
    if name_or_folder not in PRESETS:
        raise InputError(
            f"weights are for a preset ({', '.join(PRESETS)}), not for {str(name_or_folder)!r}, which brings "
            "its own."
        )
    paths = [weights] if isinstance(weights, str | Path) else list(weights)
    return SourceBundle(find_sources([Path(path) for path in paths], str(name_or_folder)), device, dtype)
