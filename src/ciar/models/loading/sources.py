"""What a user pointed at: files and folders, told apart by their content."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ciar.errors import CheckpointError, InputError
from ciar.models.loading.check import choose_preset, stage_of
from ciar.models.loading.layout import DESCRIPTIONS, Part, understand
from ciar.models.loading.read import Opened, open_file, open_folder, weight_files
from ciar.models.presets import PRESETS, Preset
from ciar.models.text_features import INDEX

_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
FolderKind = Literal["backbone", "features", "t5", "weights", "collection"]


@dataclass(frozen=True)
class Weights:
    """A transformer or a tokenizer that was found."""

    opened: Opened
    part: Part


@dataclass(frozen=True)
class Sources:
    """What is needed for a backbone.

    Attributes:
        preset: what it becomes.
        gpt, vq: transformer and tokenizer, not checked yet.
        t5: folder of a text encoder, or None.
        features: folder of features that were made beforehand, or None.
    """

    preset: Preset
    gpt: Weights
    vq: Weights
    t5: Path | None
    features: Path | None


def folder_kind(folder: Path) -> FolderKind:
    """What kind of folder it is; ``collection`` is one that may hold sources."""
    if (folder / INDEX).is_file():
        return "features"
    config = folder / "config.json"
    if config.is_file():
        try:
            values = json.loads(config.read_text(encoding="utf-8"))
        except ValueError:
            raise CheckpointError(f"{config} is no JSON. Download it again.") from None
        if isinstance(values, dict) and "gpt" in values and "vq" in values:
            return "backbone"
        if isinstance(values, dict) and values.get("model_type") == "t5":
            return "t5"
    return "weights" if weight_files(folder) else "collection"


def find_sources(paths: Sequence[Path], wanted: str | None) -> Sources:
    """Finds transformer, tokenizer and text encoder among files and folders.

    Args:
        paths: files, folders of one model, or a folder that holds such.
        wanted: name of the preset; None finds it out where the sources tell.

    Raises:
        InputError: something is needed that is not there, there is more than one of it, or the preset
            must be named.
        CheckpointError: a file cannot be read, or is of a kind that is not used here.
    """
    if wanted is not None and wanted not in PRESETS:
        raise InputError(f"There is no preset {wanted!r}. Known: {', '.join(PRESETS)}.")
    weights: list[Weights] = []
    texts: list[tuple[FolderKind, Path]] = []
    for path in paths:
        if path.is_dir():
            _look_into(path, weights, texts, deeper=True)
        else:
            opened = open_file(path)
            weights.append(Weights(opened, understand(opened.tensors)))
    gpts = [one for one in weights if one.part.kind == "gpt"]
    if wanted is not None and len(gpts) > 1:
        gpts = [one for one in gpts if stage_of(one.opened) in (None, PRESETS[wanted].stage)]
    vqs = [one for one in weights if one.part.kind in ("vq", "chameleon-vq")]
    if len(vqs) > 1:
        vqs = [one for one in vqs if "c2i" not in one.opened.path.name.lower()] or vqs
    others = [one for one in weights if one.part.kind not in ("gpt", "vq", "chameleon-vq")]
    if others:
        other = others[0]
        held = f"{other.opened.path} is {DESCRIPTIONS[other.part.kind]}"
        hint = ". Pass its folder, with config.json and tokenizer.json." if other.part.kind == "t5" else ""
        raise CheckpointError(f"{held}{hint or ', which is no part of a LlamaGen backbone.'}")
    gpt = _only("transformer", gpts, wanted, 0)
    preset = choose_preset(gpt.opened, gpt.part, wanted)
    vq = _only("tokenizer", vqs, preset.name, 1)
    if len(texts) > 1:
        named = ", ".join(str(path) for _, path in texts)
        raise InputError(f"There is more than one text encoder among the sources: {named}. Pass one.")
    t5 = next((path for kind, path in texts if kind == "t5"), None)
    features = next((path for kind, path in texts if kind == "features"), None)
    return Sources(preset, gpt, vq, t5, features)


def _look_into(
    folder: Path, weights: list[Weights], texts: list[tuple[FolderKind, Path]], *, deeper: bool
) -> None:
    kind = folder_kind(folder)
    if kind == "backbone":
        raise InputError(f"{folder} is a backbone folder already. Use it: --backbone {folder}")
    if kind in ("t5", "features"):
        texts.append((kind, folder))
    elif kind == "weights":
        opened = open_folder(folder)
        weights.append(Weights(opened, understand(opened.tensors)))
    else:
        files = sorted(path for path in folder.iterdir() if path.suffix in _SUFFIXES and path.is_file())
        folders = sorted(path for path in folder.iterdir() if path.is_dir()) if deeper else []
        folders = [path for path in folders if folder_kind(path) != "collection"]
        if deeper and not files and not folders:
            raise InputError(
                f"{folder} holds nothing that a backbone is made of: no {', '.join(_SUFFIXES)} file, no "
                "folder of FLAN-T5-XL, no features of ciar encode."
            )
        for path in files:
            opened = open_file(path)
            weights.append(Weights(opened, understand(opened.tensors)))
        for path in folders:
            _look_into(path, weights, texts, deeper=False)


def _only(what: str, found: list[Weights], preset: str | None, file: int) -> Weights:
    if len(found) == 1:
        return found[0]
    names = " or ".join(dict.fromkeys(p.files[file] for p in PRESETS.values() if preset in (None, p.name)))
    if not found:
        raise InputError(f"There is no {what} among the sources. Add the file that is published as {names}.")
    listed = ", ".join(str(one.opened.path) for one in found)
    raise InputError(f"There is more than one {what} among the sources: {listed}. Pass one, or --preset.")
