"""Reading and writing weights: safetensors only, strict, with a manifest of digests."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from torch import Tensor, nn

from ciar.errors import CheckpointError

MANIFEST = "manifest.json"
#: Names listed in an error before it says "and N more".
_NAMED = 10


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Tensors of a safetensors file, memory-mapped.

    Raises:
        CheckpointError: the file is missing, a Git LFS pointer, a web page, or damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.is_file():
        raise CheckpointError(f"{path} does not exist. Check the folder, or reinstall the package.")
    with path.open("rb") as file:
        head = file.read(64)
    if head.startswith(b"version https://git-lfs"):
        raise CheckpointError(f"{path} is a Git LFS pointer, not weights. Run: git lfs pull.")
    if head.lstrip().lower().startswith((b"<!doctype", b"<html")):
        raise CheckpointError(f"{path} is a web page saved as weights. Download the file itself.")
    try:
        return load_file(path)
    except (SafetensorError, ValueError, OSError) as error:
        raise CheckpointError(
            f"{path} is damaged or no safetensors file ({error}). Download or copy it again."
        ) from None


def load_strict(module: nn.Module, tensors: dict[str, Tensor], source: Path | str) -> None:
    """Copies tensors into a module; every name and shape must match.

    Raises:
        CheckpointError: names up to ten missing, unexpected or misshapen tensors.
    """
    own = module.state_dict()
    missing = [name for name in own if name not in tensors]
    extra = [name for name in tensors if name not in own]
    misshapen = [
        f"{name} is {list(tensors[name].shape)} and should be {list(own[name].shape)}"
        for name in own
        if name in tensors and tensors[name].shape != own[name].shape
    ]
    problems = [
        f"{kind}: {', '.join(names[:_NAMED])}"
        + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
        for kind, names in (("missing", missing), ("unexpected", extra), ("misshapen", misshapen))
        if names
    ]
    if problems:
        raise CheckpointError(
            f"{source} does not fit the model it is loaded into; {'; '.join(problems)}. "
            "Check that the file belongs to this config."
        )
    module.load_state_dict({name: tensors[name].to(own[name].dtype) for name in own})


def save_tensors(module: nn.Module, path: Path, dtype: torch.dtype | None = None) -> None:
    """Writes a module's weights; floating-point tensors are stored as ``dtype``."""
    from safetensors.torch import save_file

    tensors = {
        name: (value.to(dtype) if dtype and value.is_floating_point() else value).contiguous()
        for name, value in module.state_dict().items()
    }
    save_file(tensors, path)


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(folder: Path) -> None:
    """Writes the digests and sizes of every file of a folder."""
    files = sorted(p for p in folder.iterdir() if p.is_file() and p.name != MANIFEST)
    entries = {p.name: {"sha256": file_digest(p), "bytes": p.stat().st_size} for p in files}
    (folder / MANIFEST).write_text(json.dumps(entries, indent=2) + "\n")


def check_manifest(folder: Path) -> list[str]:
    """Sentences about files that are missing or differ from the manifest; empty when all is well."""
    try:
        entries = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        return [f"{folder} has no readable {MANIFEST}."]
    out = []
    for name, entry in entries.items():
        path = folder / name
        if not path.is_file():
            out.append(f"{path} is missing.")
        elif file_digest(path) != entry["sha256"]:
            out.append(f"{path} differs from the manifest.")
    return out


def folder_digest(folder: Path) -> str:
    """First 16 hex digits of the manifest's SHA-256: names a set of weights on the wire."""
    path = folder / MANIFEST
    return file_digest(path)[:16] if path.is_file() else ""
