"""``ciar train``: the stages find what earlier ones left, and say what to run when they do not."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ciar.cli.train import STAGES
from ciar.cli.train.stage import load_config, load_module, report
from ciar.models.gpt import GPT, GPTConfig
from ciar.models.text import StaticTextEncoder
from ciar.models.vq import VQConfig, VQModel
from ciar.training.data.emoji import Icon

Ciar = Callable[..., tuple[int, str, str]]
LOOP_STAGES = ("tokenizer", "backbone", "device", "eagle", "dual-encoder")


@pytest.fixture
def work(folder: Path) -> Path:
    """A run folder with twelve random pictures of 16 px and a text encoder of few words."""
    generator = np.random.default_rng(0)
    data = folder / "run" / "data"
    data.mkdir(parents=True)
    np.save(data / "images.npy", generator.integers(0, 256, (12, 16, 16, 3), dtype=np.uint8))
    words = ("cat", "dog", "sun", "car", "red", "blue")
    icons = [
        Icon(words[i % 6], "flat" if i < 6 else "noto", "held_name" if i % 6 == 5 else "train", ("pet",))
        for i in range(12)
    ]
    (data / "captions.json").write_text(json.dumps([asdict(icon) for icon in icons]))
    text = folder / "run" / "text"
    text.mkdir()
    vocabulary = ["[UNK]", *words, "flat", "noto", "pet", "a", "an"]
    table = torch.randn(len(vocabulary), 8, generator=torch.Generator().manual_seed(0))
    StaticTextEncoder(vocabulary, table, text_len=6).save(text)
    return folder / "run"


def last_figures(out: str) -> dict[str, float]:
    assert out.count("\n") == 1, "one JSON line on standard output"
    figures: dict[str, float] = json.loads(out)
    return figures


def test_a_text_encoder_has_room_beside_its_registers(ciar: Ciar, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen of the text slots are registers, so the command asks for more, and for 48 by itself."""
    asked: list[tuple[Any, ...]] = []
    made = SimpleNamespace(vocabulary=["a"], caption_dim=128, text_len=48)

    def distil(*values: Any) -> SimpleNamespace:
        asked.append(values)
        return made

    monkeypatch.setattr("ciar.training.text.distil_text_encoder", distil)
    code, _, err = ciar("train", "text", "--model", "folder", "--text-len", "16")
    assert code == 2
    assert "from 17 to 512" in err
    code, out, _ = ciar("train", "text", "--model", "folder", "--work", "run")
    assert (code, last_figures(out)["text_len"]) == (0, 48)
    assert asked == [(Path("folder"), Path("run/text"), 128, 48)]


def test_tokenizer_codes_backbone(ciar: Ciar, work: Path) -> None:
    tiny = ("--work", str(work), "--profile", "tiny", "--threads", str(torch.get_num_threads()))
    code, out, _ = ciar("train", "tokenizer", *tiny, "--steps", "2")
    assert code == 0
    assert last_figures(out)["step"] == 2
    code, out, _ = ciar("train", "codes", "--work", str(work), "--batch", "5")
    assert code == 0
    found = last_figures(out)
    assert (found["pictures"], found["tokens"]) == (12, 4)
    codes = np.load(work / "codes" / "codes.npy")
    assert codes.shape == (12, 4)
    assert codes.dtype == np.uint16
    vq = load_module(
        work / "tokenizer", "vq", VQModel(VQConfig.from_dict(load_config(work / "tokenizer", "vq")))
    )
    assert codes.max() < vq.config.codebook_size
    code, out, _ = ciar("train", "backbone", *tiny)
    assert code == 0
    assert last_figures(out)["held_loss"] > 0
    config = GPTConfig.from_dict(load_config(work / "backbone", "gpt"))
    assert (config.vocab_size, config.grid, config.text_len) == (vq.config.codebook_size, 2, 6)
    load_module(work / "backbone", "gpt", GPT(config))


def test_device_gate_and_judge(ciar: Ciar, work: Path) -> None:
    tiny = ("--work", str(work), "--profile", "tiny")
    for stage in ("tokenizer", "codes", "backbone"):
        assert ciar("train", stage, *(tiny if stage != "codes" else tiny[:2]))[0] == 0
    code, out, _ = ciar("train", "device", *tiny, "--loss", "inter-dro")
    assert code == 0
    assert 0.0 <= last_figures(out)["held_tv"] <= 1.0
    code, out, _ = ciar("train", "gate", "--work", str(work), "--pictures", "4", "--budget", "0.5")
    assert code == 0
    assert json.loads((work / "gate" / "gate.json").read_text())["score"] in last_figures(out)["scores"]  # type: ignore[operator]
    code, out, _ = ciar("train", "dual-encoder", *tiny)
    assert code == 0
    assert 0.0 <= last_figures(out)["held_top1_held_name"] <= 1.0
    assert (work / "dual-encoder" / "dual_encoder.safetensors").exists()


def test_undefined_figures_are_null(ciar: Ciar, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert report({"a": float("nan"), "b": {"c": [1, float("inf")]}, "d": 0.5, "e": "x"}) == 0
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": {"c": [1, None]}, "d": 0.5, "e": "x"}


def test_a_stage_goes_on_where_it_was(ciar: Ciar, work: Path) -> None:
    tiny = ("train", "tokenizer", "--work", str(work), "--profile", "tiny")
    for words, logged in (((), [1, 2]), (("--steps", "3"), [1, 2, 3]), (("--no-resume",), [1, 2, 3, 1, 2])):
        assert ciar(*tiny, "--steps", "2", *words)[0] == 0
        lines = (work / "tokenizer" / "log.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == logged
    code, _, err = ciar(*tiny, "--seed", "1")
    assert code == 3
    assert "seed 0, not 1" in err


@pytest.mark.parametrize("stage", [name for name in STAGES if name not in ("data", "text")])
def test_a_stage_says_what_to_run_first(ciar: Ciar, folder: Path, stage: str) -> None:
    code, out, err = ciar("train", stage, "--work", "nowhere")
    assert (code, out) == (3, "")
    assert "Run first: ciar train " in err
    assert "--work nowhere" in err
    assert not (folder / "nowhere").exists()


def test_data_and_text_say_what_is_missing(ciar: Ciar, folder: Path) -> None:
    code, _, err = ciar("train", "data")
    assert code == 3
    assert "npm install --prefix recipes/emoji" in err
    code, _, err = ciar("train", "text", "--model", "nowhere")
    assert code == 3
    assert "vocab.txt" in err


@pytest.mark.parametrize("stage", LOOP_STAGES)
@pytest.mark.parametrize(("option", "value"), [("--steps", "0"), ("--seed", "-1"), ("--profile", "huge")])
def test_ranges(ciar: Ciar, stage: str, option: str, value: str) -> None:
    code, _, err = ciar("train", stage, option, value)
    assert code == 2
    assert err.startswith(f"error: {option}: ")


def test_damaged_settings_are_a_data_error(ciar: Ciar, work: Path) -> None:
    (work / "tokenizer").mkdir()
    (work / "tokenizer" / "vq.safetensors").write_bytes(b"")
    (work / "tokenizer" / "vq.json").write_text("{")
    code, _, err = ciar("train", "codes", "--work", str(work))
    assert code == 3
    assert "Run the stage that writes it again" in err
