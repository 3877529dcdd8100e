"""What a user pointed at: files and folders, told apart by their content."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ciar.errors import CheckpointError, InputError
from ciar.models.chameleon import ChameleonConfig
from ciar.models.loading.chameleon_check import kept
from ciar.models.loading.check import choose_preset, stage_of
from ciar.models.loading.layout import DESCRIPTIONS, PARTS, Part, Stored, understand
from ciar.models.loading.read import Opened, open_file, open_folder, weight_files
from ciar.models.presets import PRESETS, Preset
from ciar.models.text_features import INDEX

_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
#: What a tokenizer of text is called: Hugging Face's name and Meta's.
_TOKENIZERS = ("tokenizer.json", "text_tokenizer.json")
FolderKind = Literal["backbone", "features", "t5", "weights", "collection"]


@dataclass(frozen=True)
class Weights:
    """A transformer or a tokenizer that was found."""

    opened: Opened
    part: Part

    def is_part(self, name: str) -> bool:
        """Whether it is a ``gpt`` or a ``vq``, of whatever family."""
        return self.part.kind in PARTS and PARTS[self.part.kind][1] == name


@dataclass(frozen=True)
class Sources:
    """What is needed for a backbone.

    Attributes:
        preset: what it becomes.
        gpt, vq: transformer and tokenizer, not checked yet.
        t5: folder of a text encoder, or None.
        features: folder of features that were made beforehand, or None.
        tokenizer: file of the text tokenizer, for a model that reads text tokens; or None.
    """

    preset: Preset
    gpt: Weights
    vq: Weights
    t5: Path | None
    features: Path | None
    tokenizer: Path | None = None

    def stored(self, part: str) -> dict[str, Stored]:
        """Tensors of ``gpt`` or ``vq`` as a backbone folder has them; of what was checked."""
        if part == "vq":
            return self.vq.part.tensors
        if isinstance(self.preset.gpt, ChameleonConfig):
            return kept(self.gpt.part.tensors, self.preset.gpt)
        return self.gpt.part.tensors


@dataclass
class _Found:
    """What was found so far."""

    weights: list[Weights] = field(default_factory=list)
    texts: list[tuple[FolderKind, Path]] = field(default_factory=list)
    tokenizers: list[Path] = field(default_factory=list)

    def add(self, opened: Opened) -> None:
        part = understand(opened.tensors)
        self.weights += [Weights(opened, one) for one in (part, *part.others)]

    def add_tokenizers(self, folder: Path) -> None:
        self.tokenizers += [folder / name for name in _TOKENIZERS if (folder / name).is_file()]


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
    """Finds transformer, tokenizer and text encoder (or text tokenizer) among files and folders.

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
    found = _Found()
    for path in paths:
        if path.is_dir():
            _look_into(path, found, deeper=True)
        elif path.suffix == ".json" and path.is_file():
            found.tokenizers.append(path)
        else:
            found.add(open_file(path))
    weights, texts = found.weights, found.texts
    gpts = [one for one in weights if one.is_part("gpt")]
    if wanted is not None and len(gpts) > 1:
        gpts = [one for one in gpts if _may_be(one, PRESETS[wanted])]
    vqs = [one for one in weights if one.is_part("vq")]
    if len(vqs) > 1:
        vqs = [one for one in vqs if "c2i" not in one.opened.path.name.lower()] or vqs
    others = [one for one in weights if one.part.kind not in PARTS]
    if others:
        other = others[0]
        held = f"{other.opened.path} is {DESCRIPTIONS[other.part.kind]}"
        hint = ". Pass its folder, with config.json and tokenizer.json." if other.part.kind == "t5" else ""
        raise CheckpointError(f"{held}{hint or ', which is no part of a backbone.'}")
    gpt = _only("transformer", gpts, wanted, 0)
    preset = choose_preset(gpt.opened, gpt.part, wanted)
    if len(vqs) > 1:
        # The decoder that lies beside the transformer's own weights goes before another copy of it.
        own = [one for one in vqs if PARTS[one.part.kind][0] == preset.family_name]
        vqs = [one for one in own if one.opened is gpt.opened] or own or vqs
    vq = _only("tokenizer", vqs, preset.name, 1)
    if len(texts) > 1:
        named = ", ".join(str(path) for _, path in texts)
        raise InputError(f"There is more than one text encoder among the sources: {named}. Pass one.")
    t5 = next((path for kind, path in texts if kind == "t5"), None)
    features = next((path for kind, path in texts if kind == "features"), None)
    if preset.family_name != "chameleon":
        return Sources(preset, gpt, vq, t5, features)
    if t5 is not None:
        raise InputError(f"{preset.name} reads its prompts itself. Leave {t5} out.")
    return Sources(preset, gpt, vq, None, features, _tokenizer_of(preset, found, features))


def _may_be(weights: Weights, preset: Preset) -> bool:
    """Whether a transformer can be of a preset, by its family and its stage."""
    if PARTS[weights.part.kind][0] != preset.family_name:
        return False
    return stage_of(weights.opened) in (None, preset.stage)


def _tokenizer_of(preset: Preset, found: _Found, features: Path | None) -> Path | None:
    files = list(dict.fromkeys(found.tokenizers))
    if len(files) > 1:
        named = ", ".join(map(str, files))
        raise InputError(f"There is more than one text tokenizer among the sources: {named}. Pass one.")
    if not files and features is None:
        raise InputError(
            f"{preset.name} needs its text tokenizer. Add {' or '.join(_TOKENIZERS)}, published with the "
            "weights."
        )
    return files[0] if files else None


def _meta_folders(folder: Path) -> list[Path]:
    """The folders with sources in a download of Meta's layout: ``models/7b`` and ``tokenizer``."""
    tokenizer, models = folder / "tokenizer", folder / "models"
    if not (tokenizer / "text_tokenizer.json").is_file() or not models.is_dir():
        return []
    return [tokenizer, *sorted(path for path in models.iterdir() if path.is_dir())]


def _look_into(folder: Path, found: _Found, *, deeper: bool) -> None:
    kind = folder_kind(folder)
    if kind == "backbone":
        raise InputError(f"{folder} is a backbone folder already. Use it: --backbone {folder}")
    if kind in ("t5", "features"):
        found.texts.append((kind, folder))
    elif kind == "weights":
        found.add(open_folder(folder))
        found.add_tokenizers(folder)
    else:
        files = sorted(path for path in folder.iterdir() if path.suffix in _SUFFIXES and path.is_file())
        folders = sorted(path for path in folder.iterdir() if path.is_dir()) if deeper else []
        folders = [path for path in folders if folder_kind(path) != "collection"]
        folders += _meta_folders(folder) if deeper else []
        tokenizers = len(found.tokenizers)
        found.add_tokenizers(folder)
        if deeper and not files and not folders and len(found.tokenizers) == tokenizers:
            raise InputError(
                f"{folder} holds nothing that a backbone is made of: no {', '.join(_SUFFIXES)} file, no "
                "folder of FLAN-T5-XL, no features of ciar encode."
            )
        for path in files:
            found.add(open_file(path))
        for path in folders:
            _look_into(path, found, deeper=False)


def _only(what: str, found: list[Weights], preset: str | None, file: int) -> Weights:
    if len(found) == 1:
        return found[0]
    names = " or ".join(dict.fromkeys(p.files[file] for p in PRESETS.values() if preset in (None, p.name)))
    if not found:
        raise InputError(f"There is no {what} among the sources. Add the file that is published as {names}.")
    listed = ", ".join(str(one.opened.path) for one in found)
    raise InputError(f"There is more than one {what} among the sources: {listed}. Pass one, or --preset.")
