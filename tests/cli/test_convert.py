"""``convert``, ``encode`` and ``inspect`` of public checkpoints, as a user runs them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tiny_chameleon
import tiny_llamagen
import torch
from tiny_llamagen import gpt_tensors, lantern, trainer_file, vq_tensors, write_sources

from ciar.models import presets

Ciar = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def tiny_presets() -> Iterator[None]:
    before = dict(presets.PRESETS)
    presets.PRESETS.clear()
    presets.PRESETS.update(tiny_llamagen.PRESETS)
    yield
    presets.PRESETS.clear()
    presets.PRESETS.update(before)


@pytest.fixture(scope="module")
def downloads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("downloads")
    write_sources(folder)
    return folder


def test_from_files_to_a_picture(ciar: Ciar, folder: Path, downloads: Path) -> None:
    code, out, err = ciar("convert", str(downloads), "--out", "one")
    assert code == 0, err
    assert "tiny-one in bfloat16: one" in out
    assert "text/model.safetensors" in out
    assert "no device model yet" in err
    code, out, err = ciar(
        "generate", "a red cat", "--backbone", "one", "--strategy", "base", "--out", "cat.png"
    )
    assert code == 0, err
    assert Path("cat.png").stat().st_size > 0
    code, _, err = ciar("generate", "a red cat", "--backbone", "one", "--out", "dog.png")
    assert code == 4
    assert "--strategy base" in err
    assert "unexpected" not in err


def test_anole_from_files_to_a_picture(ciar: Ciar, folder: Path, tmp_path: Path) -> None:
    presets.PRESETS[tiny_chameleon.PRESET.name] = tiny_chameleon.PRESET
    source = tiny_chameleon.write_hf(tmp_path / "anole-hf")
    code, out, err = ciar("convert", str(source), "--out", "anole")
    assert code == 0, err
    assert "tiny-anole in bfloat16: anole" in out
    assert "text/table.safetensors" in out
    assert "text encoder yet" not in err
    options = ("--backbone", "anole", "--strategy", "scd", "--force", "--out", "cat.png")
    code, out, err = ciar("generate", "a red cat", *options)
    assert code == 0, err
    assert Path("cat.png").stat().st_size > 0
    code, _, err = ciar("generate", "<eoss>", *options)
    assert code == 2
    assert "Describe the picture in words" in err
    code, _, err = ciar("encode", "a cat", "--text", "anole", "--out", "features")
    assert code == 4
    assert "unexpected" not in err


def test_features_are_made_on_one_machine_and_used_on_another(
    ciar: Ciar, folder: Path, downloads: Path
) -> None:
    files = [str(downloads / "stage1.pt"), str(downloads / "vq_t2i.pt")]
    code, out, err = ciar("convert", *files, "--out", "small", "--json")
    assert (code, json.loads(out)["text"]) == (0, "none")
    prompt = "a red cat " + "fox " * 130
    text = str(downloads / "flan-t5")
    code, out, err = ciar("encode", "a red cat", prompt, "--text", text, "--out", "small", "--json")
    assert (code, json.loads(out)["prompts"]) == (0, 2)
    assert "prompt 2: The prompt has 134 text tokens and the limit is 120" in err
    code, _, err = ciar(
        "generate", "a red cat", "--backbone", "small", "--strategy", "base", "--out", "a.png"
    )
    assert code == 0, err
    code, _, err = ciar("generate", "a dog", "--backbone", "small", "--strategy", "base", "--out", "b.png")
    assert code == 2
    assert "add it with ciar encode" in err
    code, out, _ = ciar("encode", "a fox", "--text", text, "--out", "features")
    assert code == 0
    assert "1 prompts, 3 text tokens" in out


def test_inspect_says_what_a_file_is(ciar: Ciar, folder: Path, downloads: Path) -> None:
    found = json.loads(ciar("inspect", str(downloads / "stage1.pt"), "--json")[1])
    assert found["kind"] == "text-to-image transformer of the LlamaGen family"
    assert (found["wrapper"], found["presets"], found["types"]) == ("model", ["tiny-one"], ["F32"])
    assert found["parameters"] == sum(value.numel() for value in gpt_tensors().values())
    assert found["sizes"] == {
        "layers": 2,
        "dim": 32,
        "codes": 128,
        "ffn_hidden": 256,
        "text_len": 120,
        "caption_dim": 24,
    }
    assert found["shapes"]["layers.{}.attention.wqkv.weight"] == "96 x 32 (2 times)"
    torch.save({"model": vq_tensors()}, "vq.pt")
    found = json.loads(ciar("inspect", "vq.pt", "--json")[1])
    assert found["presets"] == ["tiny-one", "tiny-two"]
    assert found["ignored"] == ["quantize.codebook_used"]
    text = json.loads(ciar("inspect", str(downloads / "flan-t5"), "--json")[1])
    assert text["kind"] == "T5 text encoder"
    code, out, _ = ciar("inspect", str(downloads / "stage1.pt"))
    assert code == 0
    assert "tiny-one" in out


def test_inspect_says_what_is_missing(ciar: Ciar, folder: Path) -> None:
    weights = lantern(gpt_tensors())
    del weights["model.norm.weight"]
    weights["lm_head.weight"] = torch.zeros(3, 32)
    torch.save(trainer_file(weights), "broken.pt")
    found = json.loads(ciar("inspect", "broken.pt", "--json")[1])
    assert (found["layout"], found["wrapper"]) == ("LANTERN", "model")
    assert found["beside"] == ["args", "optimizer", "steps"]
    assert found["presets"] == "none fits; the nearest is tiny-one"
    assert found["missing"] == "norm.weight"
    assert found["misshapen"] == "output.weight is [3, 32] and should be [128, 32]"
    torch.save({"conv1.weight": torch.zeros(2)}, "other.pt")
    assert json.loads(ciar("inspect", "other.pt", "--json")[1])["kind"] == "unknown weights"
    quantised = gpt_tensors() | {"output.weight": torch.zeros(128, 32, dtype=torch.int8)}
    torch.save(quantised, "int8.pt")
    assert json.loads(ciar("inspect", "int8.pt", "--json")[1])["quantised"] is True


@pytest.mark.parametrize(
    "content", [b"", b"<html>", b"version https://git-lfs.github.com/spec/v1\n", b"PK\x03\x04"]
)
@pytest.mark.parametrize("command", ["inspect", "convert"])
def test_bad_files_are_sentences(ciar: Ciar, folder: Path, content: bytes, command: str) -> None:
    Path("x.pt").write_bytes(content)
    code, out, err = ciar(command, "x.pt", *(("--out", "out") if command == "convert" else ()))
    assert (code, out) == (4, "")
    assert err.startswith("error: x.pt is ")
    assert "unexpected" not in err
