"""What kind of file lies at a path, from its first bytes and its length. Reads no weights.

Each way in which a download goes wrong has its own sentence.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Literal

from ciar.errors import CheckpointError

Container = Literal["safetensors", "torch", "torch-legacy"]
#: A longer safetensors header than this is no header (the format's own limit).
_MAX_HEADER_BYTES = 100_000_000
_AGAIN = "Download or copy it again."


def sniff(path: Path) -> Container:
    """The container format of a weights file.

    Returns:
        ``safetensors``; ``torch`` for a zip archive of ``torch.save``, which can be memory-mapped;
        ``torch-legacy`` for the pickle format before torch 1.6, which cannot.

    Raises:
        CheckpointError: the file is missing, a folder, empty, a Git LFS pointer, a web page, some
            other text, a quantised GGUF file, truncated, or nothing that holds weights.
    """
    if path.is_dir():
        raise CheckpointError(f"{path} is a folder, not a weights file. Name a file in it.")
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist. Check the path.")
    size = path.stat().st_size
    if size == 0:
        raise CheckpointError(f"{path} is empty (0 bytes): its download did not begin. {_AGAIN}")
    with path.open("rb") as file:
        head = file.read(256)
    start = head.lstrip().lower()
    if head.startswith(b"version https://git-lfs"):
        raise CheckpointError(f"{path} is a Git LFS pointer, not weights. Run in its folder: git lfs pull")
    if start.startswith((b"<!doctype", b"<html", b"<?xml")):
        raise CheckpointError(
            f"{path} is a web page saved under a weights file's name. Download the file itself, not the "
            "page about it."
        )
    if head.startswith(b"GGUF"):
        raise CheckpointError(
            f"{path} is a quantised file (GGUF). ciar reads weights in float32, bfloat16 or float16: "
            "download the original file."
        )
    if head.startswith(b"PK\x03\x04"):
        return _torch_archive(path)
    if _is_safetensors(head):
        _check_safetensors(path, size)
        return "safetensors"
    if head[:1] == b"\x80" and path.suffix != ".safetensors":
        return "torch-legacy"
    if path.suffix == ".safetensors":
        raise CheckpointError(f"{path} is damaged or no safetensors file. {_AGAIN}")
    raise CheckpointError(
        f"{path} holds no weights that ciar can read. It reads .safetensors files and .pt files of "
        "torch.save."
    )


def _torch_archive(path: Path) -> Container:
    # The directory of a zip archive is at its end, so a file that was cut off has none.
    if not zipfile.is_zipfile(path):
        raise CheckpointError(f"{path} is truncated: the end of the archive is missing. {_AGAIN}")
    with zipfile.ZipFile(path) as archive:
        if not any(name.endswith("data.pkl") for name in archive.namelist()):
            raise CheckpointError(f"{path} is a zip archive without a checkpoint in it. Unpack it first.")
    return "torch"


def _is_safetensors(head: bytes) -> bool:
    length = int.from_bytes(head[:8], "little")
    return len(head) > 8 and head[8:9] == b"{" and 2 <= length <= _MAX_HEADER_BYTES


def _check_safetensors(path: Path, size: int) -> None:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(length)
    if len(header) < length:
        raise CheckpointError(f"{path} is truncated: its header is incomplete. {_AGAIN}")
    try:
        entries = json.loads(header)
        ends = [entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"]
        whole = 8 + length + max(ends, default=0)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        raise CheckpointError(f"{path} is damaged or no safetensors file. {_AGAIN}") from None
    if size < whole:
        raise CheckpointError(f"{path} is truncated: it has {size} of {whole} bytes. {_AGAIN}")
