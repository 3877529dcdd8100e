"""Which text encoder a backbone's ``config.json`` asks for. Opens it; knows nothing of how it works."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from ciar.errors import CheckpointError
from ciar.models.text import StaticTextEncoder, TextEncoder

#: Environment variable: a folder in which the features of prompts are kept between processes.
CACHE_VARIABLE = "CIAR_TEXT_CACHE"
#: Where a backbone folder holds its text encoder or features; a word-piece table lies in the folder itself.
TEXT_FOLDER = "text"

Kind = Literal["static", "t5", "tokens", "features", "none"]
KINDS = ("static", "t5", "tokens", "features", "none")


@dataclass(frozen=True)
class TextConfig:
    """The part ``text`` of a backbone's ``config.json``.

    Attributes:
        kind: ``static`` is a word-piece table, ``t5`` a FLAN-T5 folder in ``text/``, ``tokens``
            the AR model's own tokenizer and token table in ``text/``, ``features`` what ``ciar encode``
            wrote into ``text/``, ``none`` nothing yet.
        text_len, caption_dim: as of the AR model; not looked at for ``static``.
        dtype: what T5 runs in.
        encoder: digest of T5's weights, or of table and tokenizer.
    """

    kind: Kind = "static"
    text_len: int = 0
    caption_dim: int = 0
    dtype: str = "bfloat16"
    encoder: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TextConfig:
        """Raises ValueError for an unknown kind, TypeError for an unknown name."""
        config = cls(**values)
        if config.kind not in KINDS:
            raise ValueError(f"text.kind is {config.kind!r}; known: {', '.join(KINDS)}")
        return config


def open_text_encoder(folder: Path, config: TextConfig, device: torch.device | str = "cpu") -> TextEncoder:
    """The text encoder of a backbone folder.

    Raises:
        CheckpointError: its files are missing, damaged, or of another encoder.
    """
    if config.kind == "static":
        return StaticTextEncoder.load(folder)
    if config.kind == "t5":
        return open_t5(folder / TEXT_FOLDER, config, device)
    if config.kind == "tokens":
        from ciar.models.token_text import open_token_text

        return open_token_text(folder / TEXT_FOLDER, config)
    if config.kind == "features":
        return open_features(folder / TEXT_FOLDER, config)
    from ciar.models.text_features import NoTextEncoder

    return NoTextEncoder(folder, config.text_len, config.caption_dim)


def open_features(folder: Path, config: TextConfig) -> TextEncoder:
    """Features that were made beforehand, checked against what the backbone reads.

    Raises:
        CheckpointError: they are of another size or, where the config names one, of another encoder.
    """
    from ciar.models.text_features import PrecomputedTextEncoder

    encoder = PrecomputedTextEncoder(folder)
    own = (encoder.text_len, encoder.caption_dim)
    if own != (config.text_len, config.caption_dim):
        raise CheckpointError(
            f"The features in {folder} are of {own[0]} x {own[1]} and the model reads {config.text_len} x "
            f"{config.caption_dim}. Make them with the text encoder of this model."
        )
    if config.encoder and encoder.source.encoder != config.encoder:
        raise CheckpointError(f"The features in {folder} are of another text encoder than config.json names.")
    return encoder


def open_t5(folder: Path, config: TextConfig, device: torch.device | str = "cpu") -> TextEncoder:
    """FLAN-T5 from any folder, kept between processes where :data:`CACHE_VARIABLE` says."""
    from ciar.models.t5 import T5TextEncoder

    cache = os.environ.get(CACHE_VARIABLE)
    return T5TextEncoder(
        folder,
        config.text_len,
        config.dtype,
        device,
        Path(cache) if cache and config.encoder else None,  # without a digest, encoders would mix
        config.caption_dim,
        config.encoder,
    )
