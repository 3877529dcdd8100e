"""Foreign checkpoints to one backbone folder: ``config.json``, safetensors, text encoder, manifest."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ciar.errors import InputError
from ciar.models.bundle import DTYPES, write_config
from ciar.models.chameleon import ChameleonConfig
from ciar.models.checkpoint import file_digest, write_manifest
from ciar.models.loading.chameleon_check import table_of
from ciar.models.loading.check import check_finite, check_gpt, check_vq
from ciar.models.loading.layout import Part
from ciar.models.loading.sources import Sources, find_sources
from ciar.models.loading.staging import staged
from ciar.models.loading.write import size_of, write_tensors
from ciar.models.text_features import INDEX, ROWS, PrecomputedTextEncoder
from ciar.models.text_kinds import TEXT_FOLDER, TextConfig, open_features
from ciar.models.token_text import TABLE, TOKENIZER, TokenTextEncoder, check_vocabulary

#: What is copied of a T5 folder beside the weights.
_T5_FILES = ("config.json", "tokenizer.json")
#: Says what is being done.
Say = Callable[[str], None]


def convert(
    paths: Sequence[Path],
    out: Path,
    preset: str | None = None,
    dtype: str = "bfloat16",
    text_dtype: str = "bfloat16",
    force: bool = False,
    say: Say = lambda words: None,
) -> dict[str, Any]:
    """Makes a backbone folder.

    Everything is checked before anything is written, but for NaN, which is looked for in each tensor as
    it is written. The folder's old content, if there is any, is replaced when all of the new is there.

    Args:
        paths: transformer, tokenizer and, if there is one, text encoder or features; files, folders,
            or a folder of them, in any order.
        out: the folder to make.
        preset: name of a preset; None finds it out where the sources tell.
        dtype: what the transformer is stored and run in, ``bfloat16`` or ``float32``.
        text_dtype: the same of the text encoder.
        force: the folder may hold an older backbone, which is replaced.
        say: called with a few words before each step that takes time.

    Returns:
        What was made, for a report: ``folder``, ``preset``, ``dtype``, ``text``, ``files`` with bytes.

    Raises:
        InputError: something is missing, doubled or to be named.
        CheckpointError: a source cannot be read or does not fit.
        DataError: the folder cannot be written.
    """
    if dtype not in DTYPES:
        raise InputError(f"The model cannot be stored in {dtype!r}. Use {' or '.join(DTYPES)}.")
    sources = find_sources(paths, preset)
    chosen = sources.preset
    check_gpt(sources.gpt.opened, sources.gpt.part, chosen)
    check_vq(sources.vq.opened, sources.vq.part, chosen)
    text, write_text, text_bytes = _text_of(sources, dtype, text_dtype)
    stored = {"gpt": (sources.gpt, DTYPES[dtype]), "vq": (sources.vq, torch.float32)}
    needed = text_bytes + sum(size_of(sources.stored(stem), kept) for stem, (_, kept) in stored.items())
    origin = {
        stem: {"file": weights.opened.path.name, "layout": weights.part.layout}
        for stem, (weights, _) in stored.items()
    }
    with staged(out, needed, force) as folder:
        for stem, (weights, kept) in stored.items():
            say(f"writing {stem}.safetensors")
            check = partial(check_finite, source=weights.opened.path)
            write_tensors(folder / f"{stem}.safetensors", sources.stored(stem), kept, check)
        if write_text is not None:
            say(f"writing the text encoder ({text.kind})")
            text = write_text(folder / TEXT_FOLDER)
        write_config(
            folder, chosen.name, chosen.gpt, chosen.vq, {}, chosen.defaults,
            family=chosen.family_name, dtype=dtype, text=text.to_dict(), origin=origin,
        )  # fmt: skip
        say("writing the manifest")
        write_manifest(folder)
        files = files_of(folder)
    return {"folder": str(out), "preset": chosen.name, "dtype": dtype, "text": text.kind, "files": files}


def files_of(folder: Path) -> dict[str, int]:
    """Bytes of every file in a folder."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths}


def _text_of(
    sources: Sources, dtype: str, text_dtype: str
) -> tuple[TextConfig, Callable[[Path], TextConfig] | None, int]:
    """The text part of the config, as far as it is known yet, what writes it, and how many bytes."""
    preset = sources.preset
    none = TextConfig("none", preset.gpt.text_len, preset.gpt.caption_dim)
    if sources.features is not None:
        open_features(sources.features, none)
        source = PrecomputedTextEncoder(sources.features).source
        config = replace(none, kind="features", dtype=source.dtype, encoder=source.encoder)
        size = sum((sources.features / name).stat().st_size for name in (ROWS, INDEX))
        return config, partial(_copy_features, sources.features, config), size
    if sources.t5 is not None:
        from ciar.models.t5 import T5TextEncoder, open_encoder

        T5TextEncoder(sources.t5, preset.gpt.text_len, text_dtype, caption_dim=preset.gpt.caption_dim)
        config = replace(none, kind="t5", dtype=text_dtype)
        part = open_encoder(sources.t5)
        size = size_of(part.tensors, DTYPES[text_dtype])
        return config, partial(_write_t5, sources.t5, part, config), size
    if sources.tokenizer is not None:
        token_text(sources)
        config = replace(none, kind="tokens", dtype=dtype)
        size = size_of({"table": table_of(sources.gpt.part.tensors)}, DTYPES[dtype])
        return config, partial(_write_tokens, sources, config), size
    return none, None, 0


def token_text(sources: Sources) -> TokenTextEncoder:
    """The text encoder of a model that reads text tokens, from its public files.

    Raises:
        CheckpointError: its tokenizer is missing, damaged or of another model.
    """
    preset, tokenizer = sources.preset, sources.tokenizer
    assert tokenizer is not None
    assert isinstance(preset.gpt, ChameleonConfig)
    encoder = TokenTextEncoder(tokenizer, table_of(sources.gpt.part.tensors), preset.gpt.text_len)
    check_vocabulary(encoder.vocabulary, preset.gpt, tokenizer)
    return encoder


def _write_tokens(sources: Sources, config: TextConfig, folder: Path) -> TextConfig:
    folder.mkdir(exist_ok=True)
    check = partial(check_finite, source=sources.gpt.opened.path)
    table = {"table": table_of(sources.gpt.part.tensors)}
    digest = write_tensors(folder / TABLE, table, DTYPES[config.dtype], check)
    assert sources.tokenizer is not None
    shutil.copyfile(sources.tokenizer, folder / TOKENIZER)
    both = hashlib.sha256((digest + file_digest(folder / TOKENIZER)).encode()).hexdigest()
    return replace(config, encoder=both)


def _write_t5(source: Path, part: Part, config: TextConfig, folder: Path) -> TextConfig:
    folder.mkdir(exist_ok=True)
    check = partial(check_finite, source=source)
    dtype = DTYPES[config.dtype]
    encoder = write_tensors(folder / "model.safetensors", part.tensors, dtype, check)
    for name in _T5_FILES:
        shutil.copyfile(source / name, folder / name)
    return replace(config, encoder=encoder)


def _copy_features(source: Path, config: TextConfig, folder: Path) -> TextConfig:
    folder.mkdir(exist_ok=True)
    for name in (ROWS, INDEX):
        shutil.copyfile(source / name, folder / name)
    return config
