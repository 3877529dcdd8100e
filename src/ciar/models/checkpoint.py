"""Reading and writing weights: safetensors only, strict, memory-mapped, with a manifest of digests."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ciar.errors import CheckpointError
from ciar.models.loading.sniff import sniff

Module = TypeVar("Module", bound=nn.Module)

MANIFEST = "manifest.json"
#: Names listed in an error before it says "and N more".
_NAMED = 10


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Tensors of a safetensors file, memory-mapped: a page is read when it is first touched.

    Raises:
        CheckpointError: the file is missing, empty, a Git LFS pointer, a web page, cut off, or damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if sniff(path) != "safetensors":
        raise CheckpointError(f"{path} is no safetensors file. Convert it first: ciar convert --help")
    try:
        return load_file(path)
    except (SafetensorError, ValueError, OSError) as error:
        raise CheckpointError(f"{path} is damaged ({error}). Download or copy it again.") from None


def named(names: Sequence[str]) -> str:
    """Up to ten names, then how many more there are."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def misfits(own: Mapping[str, Sequence[int]], found: Mapping[str, Sequence[int]]) -> dict[str, list[str]]:
    """What does not fit between the shapes of a model and those of a file.

    Returns:
        ``missing`` and ``unexpected`` names and ``misshapen`` phrases; without the kinds that are
        empty.
    """
    kinds = {
        "missing": [name for name in own if name not in found],
        "unexpected": [name for name in found if name not in own],
        "misshapen": [
            f"{name} is {list(found[name])} and should be {list(own[name])}"
            for name in own
            if name in found and list(found[name]) != list(own[name])
        ],
    }
    return {kind: names for kind, names in kinds.items() if names}


def check_fit(
    own: Mapping[str, Sequence[int]],
    found: Mapping[str, Sequence[int]],
    source: Path | str,
    advice: str = "Check that the file belongs to this config.",
) -> None:
    """Every name and every shape must match.

    Raises:
        CheckpointError: names up to ten missing, unexpected or misshapen tensors; ends with ``advice``.
    """
    problems = [f"{kind}: {named(names)}" for kind, names in misfits(own, found).items()]
    if problems:
        raise CheckpointError(
            f"{source} does not fit the model it is loaded into; {'; '.join(problems)}. {advice}"
        )


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, list[int]]:
    """Name to shape."""
    return {name: list(value.shape) for name, value in tensors.items()}


def load_strict(module: nn.Module, tensors: dict[str, Tensor], source: Path | str) -> None:
    """Copies tensors into a module; every name and shape must match.

    Raises:
        CheckpointError: names up to ten missing, unexpected or misshapen tensors.
    """
    own = module.state_dict()
    check_fit(shapes_of(own), shapes_of(tensors), source)
    module.load_state_dict({name: tensors[name].to(own[name].dtype) for name in own})


class _Uninitialised(TorchFunctionMode):
    """Leaves weights as they are made: drawing them, even without memory, loads torch's compiler."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


def build_from(
    build: Callable[[], Module],
    tensors: Mapping[str, Tensor],
    source: Path | str,
    dtype: torch.dtype = torch.float32,
) -> Module:
    """Builds a module around tensors: nothing is initialised, and tensors of ``dtype`` are not copied.

    Args:
        build: makes the module. Buffers that no file holds must be made by its ``fill_buffers``, a
            method that is called on every submodule that has one.
        tensors: every name and shape must match.
        dtype: of the module; other floating-point tensors are converted.

    Raises:
        CheckpointError: names up to ten missing, unexpected or misshapen tensors.
    """
    with torch.device("meta"), _Uninitialised():
        module = build()
    check_fit(shapes_of(module.state_dict()), shapes_of(tensors), source)
    module.load_state_dict({name: value.to(dtype) for name, value in tensors.items()}, assign=True)
    for child in module.modules():
        fill = getattr(child, "fill_buffers", None)
        if fill is not None:
            fill()
    return module


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
    """Writes the digests and sizes of every file of a folder and its sub-folders."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)
    entries = {p.relative_to(folder).as_posix(): _entry(p) for p in files}
    (folder / MANIFEST).write_text(json.dumps(entries, indent=2) + "\n")


def update_manifest(folder: Path, changed: Sequence[Path]) -> None:
    """Writes the entries of some files anew, without reading the others.

    Raises:
        CheckpointError: there is no readable manifest.
    """
    path = folder / MANIFEST
    try:
        entries = dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        raise CheckpointError(f"{folder} has no readable {MANIFEST}. Convert it again.") from None
    entries |= {p.relative_to(folder).as_posix(): _entry(p) for p in changed}
    path.write_text(json.dumps(dict(sorted(entries.items())), indent=2) + "\n")


def _entry(path: Path) -> dict[str, str | int]:
    return {"sha256": file_digest(path), "bytes": path.stat().st_size}


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


def models_digest(folder: Path, encoder: str) -> str:
    """Like :func:`folder_digest`, of the models and the text encoder's digest alone.

    So a machine with the text encoder and one with its features made beforehand get along.
    """
    try:
        entries = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        return ""
    models = {n: e["sha256"] for n, e in entries.items() if n.endswith(".safetensors") and "/" not in n}
    return hashlib.sha256(json.dumps([models, encoder], sort_keys=True).encode()).hexdigest()[:16]
