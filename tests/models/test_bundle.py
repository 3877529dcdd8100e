"""Backbone folders: what is found, what is refused, and that loading is lazy."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from tiny import TINY_GPT, TINY_VQ, tiny_device

from ciar.errors import CheckpointError, CiarError, InputError
from ciar.intervals.thresholds import ThresholdConfig
from ciar.models.bundle import Bundle, Defaults, load_bundle, write_config


@pytest.fixture
def copy(tiny_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_folder, tmp_path / "copy"))


def test_a_folder_is_read_back(tmp_path: Path) -> None:
    defaults = Defaults(
        guidance=2.5, top_k=7, score="entropy", threshold=ThresholdConfig("fixed", value=0.25)
    )
    device = tiny_device().config
    write_config(tmp_path, "mine", TINY_GPT, TINY_VQ, {"device": device}, defaults)
    bundle = load_bundle(tmp_path)
    assert (bundle.name, bundle.gpt_config, bundle.vq_config) == ("mine", TINY_GPT, TINY_VQ)
    assert bundle.defaults == defaults
    assert bundle.total == 16
    assert bundle.weights == ""


def test_parts_of_the_tiny_backbone(tiny_bundle: Bundle) -> None:
    assert tiny_bundle.gpt.config == TINY_GPT
    assert tiny_bundle.vq.config == TINY_VQ
    assert tiny_bundle.device_model.config.trunk == replace(TINY_GPT, n_layer=1)
    assert (tiny_bundle.text.text_len, tiny_bundle.text.caption_dim) == (8, 16)
    assert len(tiny_bundle.weights) == 16
    assert not any(p.requires_grad for p in tiny_bundle.gpt.parameters())
    assert not tiny_bundle.gpt.training


def test_only_what_is_asked_for_is_loaded(copy: Path) -> None:
    (copy / "gpt.safetensors").unlink()
    bundle = load_bundle(copy)
    assert bundle.vq.config == TINY_VQ
    with pytest.raises(CheckpointError, match=r"gpt\.safetensors does not exist"):
        _ = bundle.gpt


def test_unknown_name_lists_the_known(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no backbone 'nothing'.*embedded ones are"):
        load_bundle("nothing")
    with pytest.raises(CheckpointError, match="no backbone folder"):
        load_bundle(tmp_path)


def test_damaged_config(copy: Path) -> None:
    (copy / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="no JSON"):
        load_bundle(copy)


@pytest.mark.parametrize("content", ["{}", "[]", '{"name": "x", "gpt": {"dims": 3}, "vq": {}}'])
def test_incomplete_config_is_one_of_our_errors(copy: Path, content: str) -> None:
    (copy / "config.json").write_text(content)
    with pytest.raises(CiarError):
        load_bundle(copy)


def test_another_size_is_refused(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    config["gpt"]["dim"] = 64
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="misshapen"):
        _ = load_bundle(copy).gpt


def test_a_missing_device_model_says_how_to_go_on(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    config["devices"] = {}
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="--strategy base"):
        _ = load_bundle(copy).device_model
