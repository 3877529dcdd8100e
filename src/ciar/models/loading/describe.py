"""What a weights file or folder is, for ``ciar inspect``. Headers are read, weights are not."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import torch

from ciar.models.checkpoint import misfits, named
from ciar.models.loading.check import expected, fitting, nearest, shapes, sizes, stage_of
from ciar.models.loading.layout import DESCRIPTIONS, PARTS, Part, quantised, understand
from ciar.models.loading.read import Opened, open_file, open_folder
from ciar.models.loading.sources import folder_kind
from ciar.models.presets import PRESETS

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def describe(path: Path) -> dict[str, Any]:
    """What is known of a weights file, or of a folder of shards.

    Returns:
        ``kind``, ``layout``, ``container``, ``wrapper``, ``tensors``, ``parameters``, ``types``, what
        the shapes say (``sizes``), the presets that fit, or else the nearest one and what is missing,
        unexpected or misshapen against it, what is ignored, what else it holds, and ``shapes`` with layers
        folded.

    Raises:
        CheckpointError: the file cannot be read.
    """
    opened = open_folder(path) if path.is_dir() else open_file(path)
    part = understand(opened.tensors)
    found: dict[str, Any] = {
        "kind": DESCRIPTIONS[part.kind],
        "layout": part.layout,
        "container": opened.container,
        "wrapper": opened.wrapper,
        "beside": list(opened.beside),
        "tensors": len(opened.tensors),
        "parameters": sum(math.prod(value.shape) for value in opened.tensors.values()),
        "types": sorted({_type_name(value.dtype) for value in opened.tensors.values()}),
        "quantised": bool(quantised(part.tensors)) if part.kind in (*PARTS, "t5") else None,
        "sizes": sizes(part),
        "ignored": list(part.ignored),
        "holds also": _others(part),
        **_against_presets(opened, part),
        "shapes": folded(part),
    }
    return {name: value for name, value in found.items() if value not in ("", None, [], {})}


def _against_presets(opened: Opened, part: Part) -> dict[str, Any]:
    if part.kind not in PARTS:
        return {}
    fits = fitting(part)
    if fits:
        stage = stage_of(opened) if part.kind == "gpt" else None
        told = [name for name in fits if PRESETS[name].stage == stage] or fits
        return {"presets": told}
    close = nearest(part)
    if close is None:
        return {"presets": "none is near"}
    wrong = misfits(expected(close, part), shapes(part.tensors))
    return {"presets": f"none fits; the nearest is {close.name}"} | {
        kind: named(names) for kind, names in wrong.items()
    }


def _others(part: Part) -> list[str]:
    """Further parts in the same file or folder, or that one which is often there is not."""
    if part.kind == "chameleon" and part.layout == "Hugging Face" and not part.others:
        return ["no image decoder, which must come from another file"]
    fits = [", ".join(fitting(other)) or "no preset" for other in part.others]
    return [f"{DESCRIPTIONS[o.kind]} (fits {fit})" for o, fit in zip(part.others, fits, strict=True)]


def folded(part: Part) -> dict[str, str]:
    """Shapes by name, with the numbers of layers folded: ``layers.{}.ffn_norm.weight``."""
    groups: dict[str, dict[str, int]] = {}
    for name, value in part.tensors.items():
        pattern = re.sub(r"\.\d+(?=\.)", ".{}", name)
        shape = " x ".join(map(str, value.shape)) or "number"
        counts = groups.setdefault(pattern, {})
        counts[shape] = counts.get(shape, 0) + 1
    return {
        pattern: ", ".join(
            shape + (f" ({count} times)" if count > 1 else "") for shape, count in counts.items()
        )
        for pattern, counts in groups.items()
    }


def _type_name(dtype: torch.dtype) -> str:
    return _NAMES.get(dtype, str(dtype).removeprefix("torch."))


def is_weights_folder(path: Path) -> bool:
    """Whether a folder holds one model in the Hugging Face layout."""
    return path.is_dir() and folder_kind(path) in ("t5", "weights")
