"""Puts a device model into a backbone folder, so that an error leaves the folder as it was."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from ciar.errors import CheckpointError, DataError
from ciar.models.bundle import Bundle, Defaults
from ciar.models.checkpoint import MANIFEST, file_digest, save_tensors
from ciar.models.device import DeviceModel

#: What the stored weights of a device model are; see ``training.assemble``.
STORED = torch.float16


def install_device(bundle: Bundle, device: DeviceModel, defaults: Defaults) -> list[str]:
    """Writes a device model, the config that names it, and the manifest.

    All three are written beside what they replace, and take its place one after the other once all are
    whole. A stop in that moment leaves files that do not fit the manifest; the same call mends them. A gate
    that was learned for an older device model of the name is taken away.

    Args:
        bundle: the backbone, in a folder of its own.
        device: the model.
        defaults: of the backbone from now on; ``defaults.device`` is the model's name.

    Returns:
        Names of the files that were replaced.

    Raises:
        CheckpointError: the folder has no readable manifest.
        DataError: the folder cannot be written.
    """
    folder, stem = bundle.folder, defaults.device
    try:
        entries = dict(json.loads((folder / MANIFEST).read_text()))
    except (OSError, ValueError, TypeError):
        raise CheckpointError(f"{folder} has no readable {MANIFEST}. Convert it again.") from None
    devices = {**bundle.config.get("devices", {}), stem: device.config.to_dict()}
    config = {**bundle.config, "devices": devices, "defaults": defaults.to_dict()}
    old_gate = f"{stem}-gate.safetensors"
    weights = f"{stem}.safetensors"
    beside = {name: folder / f"{name}.partial" for name in (weights, "config.json", MANIFEST)}
    try:
        save_tensors(device, beside[weights], STORED)
        _write_json(beside["config.json"], config, 2)
        entries.pop(old_gate, None)
        for name in (weights, "config.json"):
            path = beside[name]
            entries[name] = {"sha256": file_digest(path), "bytes": path.stat().st_size}
        _write_json(beside[MANIFEST], dict(sorted(entries.items())), 2)
        for name, path in beside.items():
            path.replace(folder / name)
        (folder / old_gate).unlink(missing_ok=True)
    except OSError as error:
        raise DataError(
            f"{folder} cannot be written ({error.strerror}). Make room there, or make it writable."
        ) from None
    finally:
        for path in beside.values():
            path.unlink(missing_ok=True)
    return list(beside)


def _write_json(path: Path, document: Mapping[str, object], indent: int) -> None:
    path.write_text(json.dumps(document, indent=indent) + "\n")
