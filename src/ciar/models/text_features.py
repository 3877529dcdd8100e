"""Caption features that were made beforehand: one safetensors file and an index.

Written by ``ciar encode`` where the text encoder fits into memory, read where it does not. Knows
nothing of the encoder but its digest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ciar.errors import CheckpointError, InputError
from ciar.models.checkpoint import read_tensors
from ciar.models.loading.write import write_tensors
from ciar.models.text import TextFeatures, check_prompt, cut_prompt

INDEX, ROWS = "features.json", "features.safetensors"
#: Version of the index.
FORMAT = 1
_EXAMPLES = 3


def prompt_key(prompt: str) -> str:
    """SHA-256 of a prompt, in hex."""
    return hashlib.sha256(prompt.encode()).hexdigest()


def left_padded(rows: Tensor, text_len: int, warnings: tuple[str, ...] = ()) -> TextFeatures:
    """Features [n, caption_dim] of n text tokens in LlamaGen's layout: last, behind rows of zeros."""
    features = torch.zeros(text_len, rows.shape[1])
    mask = torch.zeros(text_len, dtype=torch.bool)
    if len(rows):
        features[-len(rows) :] = rows.float()
        mask[-len(rows) :] = True
    return TextFeatures(features, mask, warnings)


@dataclass(frozen=True)
class FeatureSource:
    """What made the features.

    Attributes:
        encoder: digest of the text encoder's weights.
        text_len, caption_dim: as of the AR model.
        dtype: ``bfloat16`` or ``float32``, in which the encoder ran.
    """

    encoder: str
    text_len: int
    caption_dim: int
    dtype: str


def write_features(
    folder: Path, source: FeatureSource, made: Iterable[tuple[str, TextFeatures]]
) -> dict[str, Any]:
    """Writes features, in the type that the encoder ran in. What the folder held of them is kept.

    Args:
        folder: made when it is missing.
        made: prompts, as ``check_prompt`` returns them, and their features.

    Returns:
        Counts for a report: ``prompts``, ``rows``, ``bytes``.

    Raises:
        CheckpointError: the folder holds features of another encoder.
    """
    dtype = getattr(torch, source.dtype)
    kept: dict[str, tuple[dict[str, Any], Tensor]] = {}
    if (folder / INDEX).is_file():
        before = PrecomputedTextEncoder(folder)
        if before.source != source:
            raise CheckpointError(
                f"{folder} holds features of another text encoder, text length or type. Choose "
                "another folder."
            )
        kept = {key: (entry, before.rows_of(entry)) for key, entry in before.entries.items()}
    for prompt, text in made:
        entry = {"prompt": prompt, "warnings": list(text.warnings)}
        kept[prompt_key(prompt)] = (entry, text.features[text.mask].to(dtype))
    entries: dict[str, Any] = {}
    start = 0
    for key, (entry, rows) in kept.items():
        entries[key] = {**entry, "start": start, "rows": len(rows)}
        start += len(rows)
    folder.mkdir(parents=True, exist_ok=True)
    rows = torch.cat([rows for _, rows in kept.values()]) if kept else torch.zeros(0, source.caption_dim)
    write_tensors(folder / ROWS, {"rows": rows}, dtype)
    index = {"format": FORMAT, **asdict(source), "prompts": entries}
    (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    return {"prompts": len(entries), "rows": start, "bytes": (folder / ROWS).stat().st_size}


class PrecomputedTextEncoder:
    """Serves the prompts that were encoded beforehand, and no others.

    Args:
        folder: holds what :func:`write_features` wrote.

    Raises:
        CheckpointError: the files are missing, damaged, or do not belong together.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / INDEX
        try:
            index = json.loads(path.read_text(encoding="utf-8"))
            if index["format"] != FORMAT:
                raise CheckpointError(f"{path} has format {index['format']}; this ciar reads {FORMAT}.")
            names = ("encoder", "text_len", "caption_dim", "dtype")
            self.source = FeatureSource(**{name: index[name] for name in names})
            self.entries: dict[str, dict[str, Any]] = dict(index["prompts"])
            total = sum(int(entry["rows"]) for entry in self.entries.values())
        except FileNotFoundError:
            raise CheckpointError(f"{path} does not exist. Make it with: ciar encode --help") from None
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} is damaged ({error}). Make it again with ciar encode.") from None
        self.text_len, self.caption_dim = self.source.text_len, self.source.caption_dim
        self._rows = read_tensors(folder / ROWS).get("rows", torch.zeros(0))
        if list(self._rows.shape) != [total, self.caption_dim]:
            raise CheckpointError(f"{folder / ROWS} does not belong to {path}. Run ciar encode again.")
        self.folder = folder

    def prepare(self, prompt: str) -> str:
        """See :class:`~ciar.models.text.TextEncoder`."""
        return check_prompt(prompt)

    def encode(self, prompt: str) -> TextFeatures:
        """Features of a prompt that was encoded beforehand.

        Raises:
            InputError: the prompt was not; the message shows some that were.
        """
        wanted, cut = cut_prompt(check_prompt(prompt))
        entry = self.entries.get(prompt_key(wanted))
        if entry is None:
            known = [repr(e["prompt"][:60]) for e in list(self.entries.values())[:_EXAMPLES]]
            shown = f", such as {', '.join(known)}" if known else ""
            raise InputError(
                f"This machine has no text encoder, only the features of {len(self.entries)} prompts{shown}. "
                f"{wanted[:60]!r} is not one of them: add it with ciar encode where the encoder is."
            )
        return left_padded(self.rows_of(entry), self.text_len, (*cut, *entry["warnings"]))

    def rows_of(self, entry: dict[str, Any]) -> Tensor:
        """Features [n, caption_dim] of one entry of the index."""
        return self._rows[entry["start"] : entry["start"] + entry["rows"]]


class NoTextEncoder:
    """Stands where a backbone has no text encoder yet, so that what needs none can be used.

    Args:
        folder: the backbone's.
        text_len, caption_dim: as of the AR model.
    """

    def __init__(self, folder: Path, text_len: int, caption_dim: int) -> None:
        self.folder, self.text_len, self.caption_dim = folder, text_len, caption_dim

    def prepare(self, prompt: str) -> str:
        """See :class:`~ciar.models.text.TextEncoder`."""
        return check_prompt(prompt)

    def encode(self, prompt: str) -> TextFeatures:
        """Always refuses.

        Raises:
            CheckpointError: always; says how to add an encoder or features.
        """
        raise CheckpointError(
            f"{self.folder} has no text encoder. Convert again with the folder of FLAN-T5-XL among the "
            "sources, or add features that were made elsewhere: ciar encode --help"
        )
