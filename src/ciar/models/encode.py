"""Makes the features of prompts beforehand, for machines without room for the text encoder."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ciar.errors import CheckpointError, InputError
from ciar.models.bundle import Bundle, check_device
from ciar.models.checkpoint import update_manifest
from ciar.models.loading.write import tensors_digest
from ciar.models.t5 import T5TextEncoder, dtype_of, open_encoder
from ciar.models.text import TextFeatures, check_prompt, cut_prompt
from ciar.models.text_features import INDEX, ROWS, FeatureSource, write_features
from ciar.models.text_kinds import TEXT_FOLDER, TextConfig

#: Called with the number of finished prompts and the warnings of the last one.
Progress = Callable[[int, tuple[str, ...]], None]


def encode_prompts(
    prompts: Sequence[str],
    encoder_folder: Path,
    out: Path,
    *,
    dtype: str = "bfloat16",
    text_len: int = 120,
    device: str = "cpu",
    progress: Progress = lambda done, warnings: None,
) -> dict[str, Any]:
    """Runs the text encoder over prompts and keeps what it gives.

    Args:
        prompts: any number; those that ``out`` has already are made anew.
        encoder_folder: a folder of FLAN-T5-XL, or a backbone folder that holds it.
        out: a folder for the features, or a backbone folder without a text encoder of its own, which
            then serves these prompts.
        dtype: what the encoder runs in; a backbone folder's own setting goes before it.
        text_len: text slots of the AR model; likewise.
        device: where the encoder runs.

    Returns:
        Counts for a report: ``folder``, ``prompts``, ``rows``, ``bytes``.

    Raises:
        InputError: a prompt or a setting is not usable.
        CheckpointError: a folder is damaged, or is of another model.
    """
    check_device(device)
    wanted = [cut_prompt(check_prompt(prompt))[0] for prompt in prompts]
    target = _target(out)
    encoder, source = _open(encoder_folder, dtype, text_len, device)
    if target is not None:
        _check_target(target, source)
    folder = out if target is None else out / TEXT_FOLDER

    def made() -> Iterator[tuple[str, TextFeatures]]:
        for done, prompt in enumerate(wanted, 1):
            text = encoder.encode(prompt)
            progress(done, text.warnings)
            yield prompt, text

    counts = write_features(folder, source, made())
    if target is not None:
        _point(target, source)
    return {"folder": str(folder), **counts}


def _open(folder: Path, dtype: str, text_len: int, device: str) -> tuple[T5TextEncoder, FeatureSource]:
    config = TextConfig("t5", text_len, 0, dtype)
    if (folder / TEXT_FOLDER / "tokenizer.json").is_file():
        bundle = Bundle(folder)
        if bundle.text_config.kind != "t5":
            raise CheckpointError(f"{folder} names no text encoder in its config.json. Convert it again.")
        config, folder = bundle.text_config, folder / TEXT_FOLDER
    kind = dtype_of(config.dtype)
    encoder = T5TextEncoder(folder, config.text_len, config.dtype, device)
    digest = config.encoder or tensors_digest(open_encoder(folder).tensors, kind)
    return encoder, FeatureSource(digest, config.text_len, encoder.caption_dim, config.dtype)


def _target(out: Path) -> Bundle | None:
    """The backbone that the features are for, when ``out`` is one."""
    if out.is_file():
        raise InputError(f"{out} is a file. Choose a folder with --out.")
    if not (out / "config.json").is_file():
        return None
    bundle = Bundle(out)
    if bundle.text_config.kind not in ("none", "features"):
        raise InputError(
            f"{out} has a text encoder of its own ({bundle.text_config.kind}), so it needs no features. "
            "Choose another folder with --out."
        )
    return bundle


def _check_target(bundle: Bundle, source: FeatureSource) -> None:
    own, config = bundle.text_config, (source.text_len, source.caption_dim)
    if (own.text_len, own.caption_dim) != config:
        raise CheckpointError(
            f"{bundle.folder} reads features of {own.text_len} x {own.caption_dim} and the text encoder "
            f"gives {config[0]} x {config[1]}. Use the text encoder of this model."
        )


def _point(bundle: Bundle, source: FeatureSource) -> None:
    """Makes the backbone's config name the features."""
    text = replace(bundle.text_config, kind="features", dtype=source.dtype, encoder=source.encoder)
    path = bundle.folder / "config.json"
    path.write_text(json.dumps(bundle.config | {"text": text.to_dict()}, indent=2) + "\n")
    written = [bundle.folder / TEXT_FOLDER / name for name in (ROWS, INDEX)]
    update_manifest(bundle.folder, [path, *written])
