"""Weights are loaded strictly or not at all, and each refusal says why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny import tiny_gpt
from torch import nn

from ciar.errors import CheckpointError
from ciar.models.checkpoint import (
    check_manifest,
    file_digest,
    folder_digest,
    load_strict,
    read_tensors,
    save_tensors,
    write_manifest,
)


def layer() -> nn.Linear:
    return nn.Linear(3, 2)


def test_round_trip_keeps_every_bit(tmp_path: Path) -> None:
    model, other = tiny_gpt(1), tiny_gpt(2)
    save_tensors(model, tmp_path / "w.safetensors")
    load_strict(other, read_tensors(tmp_path / "w.safetensors"), "w")
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name


def test_weights_may_be_stored_narrower(tmp_path: Path) -> None:
    model = layer()
    save_tensors(model, tmp_path / "w.safetensors", torch.bfloat16)
    assert read_tensors(tmp_path / "w.safetensors")["weight"].dtype == torch.bfloat16
    other = layer()
    load_strict(other, read_tensors(tmp_path / "w.safetensors"), "w")
    assert other.weight.dtype == torch.float32
    torch.testing.assert_close(other.weight, model.weight, atol=0.01, rtol=0.01)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("bias"), "missing: bias"),
        (lambda t: t.update(extra=torch.zeros(1)), "unexpected: extra"),
        (lambda t: t.update(bias=torch.zeros(5)), r"misshapen: bias is \[5\] and should be \[2\]"),
        (lambda t: t.update({f"n{i:02}": torch.zeros(1) for i in range(13)}), "n09 and 3 more"),
    ],
)
def test_nothing_is_loaded_in_part(change, message: str) -> None:
    model = layer()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    tensors = {name: torch.zeros_like(value) for name, value in before.items()}
    change(tensors)
    with pytest.raises(CheckpointError, match=message):
        load_strict(model, tensors, "file.safetensors")
    for name, value in before.items():
        assert torch.equal(model.state_dict()[name], value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        (b"  <!DOCTYPE html><html>", "web page"),
        (b"\x00" * 100, "damaged"),
        (b"", "is empty"),
    ],
)
def test_what_is_no_weights_file(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "w.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        read_tensors(path)


def test_a_cut_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_file({"a": torch.randn(100)}, path)
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(CheckpointError, match="truncated"):
        read_tensors(path)


def test_manifest(tmp_path: Path) -> None:
    assert check_manifest(tmp_path)[0].endswith("no readable manifest.json.")
    assert folder_digest(tmp_path) == ""
    (tmp_path / "a.bin").write_bytes(b"a")
    (tmp_path / "b.bin").write_bytes(b"b")
    write_manifest(tmp_path)
    assert check_manifest(tmp_path) == []
    entries = json.loads((tmp_path / "manifest.json").read_text())
    assert entries["a.bin"] == {"sha256": file_digest(tmp_path / "a.bin"), "bytes": 1}
    digest = folder_digest(tmp_path)
    assert len(digest) == 16
    (tmp_path / "a.bin").write_bytes(b"c")
    (tmp_path / "b.bin").unlink()
    problems = check_manifest(tmp_path)
    assert [p.split("/")[-1] for p in problems] == ["a.bin differs from the manifest.", "b.bin is missing."]
    assert folder_digest(tmp_path) == digest
    write_manifest(tmp_path)
    assert folder_digest(tmp_path) != digest
