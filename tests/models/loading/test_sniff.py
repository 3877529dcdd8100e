"""Each way in which a download goes wrong has its own sentence."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ciar.errors import CheckpointError
from ciar.models.loading.sniff import sniff


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        (b"", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n", "git lfs pull"),
        (b"\n<!DOCTYPE html>\n<html>", "web page"),
        (b"<?xml version='1.0'?><Error>", "web page"),
        (b"GGUF\x03\x00\x00\x00", "quantised"),
        (b"PK\x03\x04" + b"\x00" * 99, "truncated"),
        (b"Entry not found", "holds no weights"),
        (b"\x00" * 100, "holds no weights"),
        ((9999).to_bytes(8, "little") + b'{"a":', "header is incomplete"),
        ((6).to_bytes(8, "little") + b'{"a":1', "damaged"),
        ((8).to_bytes(8, "little") + b'{"a":{}}', "damaged"),
    ],
)
@pytest.mark.parametrize("suffix", [".pt", ".bin"])
def test_what_is_refused(tmp_path: Path, content: bytes | None, message: str, suffix: str) -> None:
    path = tmp_path / f"model{suffix}"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        sniff(path)


def test_folders_and_other_archives(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is a folder"):
        sniff(tmp_path)
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("readme.txt", "weights are elsewhere")
    with pytest.raises(CheckpointError, match="without a checkpoint"):
        sniff(tmp_path / "a.pt")


def test_the_name_does_not_matter_and_the_length_does(tmp_path: Path) -> None:
    save_file({"a": torch.randn(100)}, tmp_path / "one.pt")
    torch.save({"a": torch.randn(100)}, tmp_path / "two.safetensors")
    torch.save({"a": torch.randn(100)}, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    assert sniff(tmp_path / "one.pt") == "safetensors"
    assert sniff(tmp_path / "two.safetensors") == "torch"
    assert sniff(tmp_path / "old.bin") == "torch-legacy"
    for name in ("one.pt", "two.safetensors"):
        whole = (tmp_path / name).read_bytes()
        for size in (len(whole) - 1, len(whole) // 2):
            (tmp_path / name).write_bytes(whole[:size])
            with pytest.raises(CheckpointError, match="truncated"):
                sniff(tmp_path / name)
