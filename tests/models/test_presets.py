"""The presets of public models: their sizes, and that the public file names lead to them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from golden_data import described

from ciar.errors import CheckpointError, InputError
from ciar.models.device import DeviceConfig, DeviceModel
from ciar.models.loading.check import check_vq, choose_preset, fitting, sizes, stage_of
from ciar.models.loading.layout import Part, understand
from ciar.models.loading.read import Opened
from ciar.models.presets import PRESETS


def full_size(name: str) -> dict[str, list[int]]:
    """Names and shapes of the public checkpoint, as listed from the reference implementation."""
    listed = described("full_size_shapes")[name]
    layers = range(listed.get("n_layer", 1))
    return {
        key.replace("{i}", str(i)): shape
        for key, shape in listed["keys"].items()
        for i in (layers if "{i}" in key else [0])
    }


def part_of(shapes: dict[str, list[int]]) -> Part:
    return understand({name: torch.empty(shape, device="meta") for name, shape in shapes.items()})


GPT, VQ = part_of(full_size("llamagen_gpt_xl_t2i")), part_of(full_size("llamagen_vq16"))


def opened(name: str, **arguments: object) -> Opened:
    return Opened(Path(name), "torch", {}, arguments=dict(arguments))


def test_full_size_checkpoints_fit() -> None:
    assert (GPT.kind, VQ.kind) == ("gpt", "vq")
    assert fitting(GPT) == fitting(VQ) == ["llamagen-xl-256", "llamagen-xl-512"]
    assert sizes(GPT) == {
        "layers": 36,
        "dim": 1280,
        "codes": 16384,
        "ffn_hidden": 3584,
        "text_len": 120,
        "caption_dim": 2048,
    }
    assert sizes(VQ) == {"levels": 5, "codes": 16384, "embed_dim": 8}


@pytest.mark.parametrize(("name", "tokens"), [("llamagen-xl-256", 256), ("llamagen-xl-512", 1024)])
def test_recipes(name: str, tokens: int) -> None:
    preset = PRESETS[name]
    assert preset.gpt.tokens == tokens
    assert preset.vq.grid == preset.gpt.grid
    assert preset.gpt.text_rotary == "zero"
    assert (preset.defaults.guidance, preset.defaults.top_k) == (7.5, 1000)
    assert (preset.defaults.top_p, preset.defaults.temperature) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("file", "arguments", "preset"),
    [
        ("t2i_XL_stage1_256.pt", {}, "llamagen-xl-256"),
        ("t2i_XL_stage2_512.pt", {}, "llamagen-xl-512"),
        ("0050000.pt", {"image_size": 512}, "llamagen-xl-512"),
        ("t2i_XL_stage1_256.pt", {"image_size": 512}, "llamagen-xl-512"),
    ],
)
def test_names_and_arguments_tell_the_stage(file: str, arguments: dict[str, int], preset: str) -> None:
    assert choose_preset(opened(file, **arguments), GPT, None).name == preset


def test_without_a_hint_it_is_asked_for() -> None:
    assert stage_of(opened("model.pt")) is None
    with pytest.raises(InputError, match="fits llamagen-xl-256 and llamagen-xl-512"):
        choose_preset(opened("model.pt"), GPT, None)
    with pytest.raises(CheckpointError, match=r"stage 2 .* of stage 1\. Use --preset llamagen-xl-512"):
        choose_preset(opened("t2i_XL_stage2_512.pt"), GPT, "llamagen-xl-256")


def test_other_tokenizers_are_refused() -> None:
    preset = PRESETS["llamagen-xl-256"]
    with pytest.raises(CheckpointError, match=r"class-conditional.*needs vq_ds16_t2i\.pt"):
        check_vq(opened("vq_ds16_c2i.pt"), VQ, preset)
    vq8 = {n: s for n, s in full_size("llamagen_vq16").items() if not n.startswith("decoder.conv_blocks.4.")}
    with pytest.raises(CheckpointError, match=r"wrong tokenizer.*has 4 levels and should have 5"):
        check_vq(opened("vq_ds8.pt"), part_of(vq8), preset)


@pytest.mark.parametrize(
    ("name", "width", "reader", "millions"),
    [
        ("llamagen-xl-256", 1280, 4, 155),
        ("llamagen-xl-512", 1280, 4, 155),
        ("llamagen-xl-256", 1280, 0, 68),
        ("llamagen-xl-256", 640, 0, 29),
        ("anole-7b", 4096, 0, 305),
        ("anole-7b", 1024, 0, 36),
    ],
)
def test_device_models_have_the_documented_sizes(name: str, width: int, reader: int, millions: int) -> None:
    """docs/backbones: parameters of device models, built without memory."""
    preset = PRESETS[name]
    trunk = preset.family.draft(preset.gpt)
    assert (trunk.grid, trunk.vocab_size) == (preset.gpt.grid, preset.gpt.vocab_size)
    if width != trunk.dim:
        trunk = replace(trunk, dim=width, n_head=width // 64)
    read = replace(trunk, n_layer=reader) if reader else None
    with torch.device("meta"):
        model = DeviceModel(DeviceConfig(trunk, feature_dim=preset.gpt.dim, reader=read))
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6) == millions
