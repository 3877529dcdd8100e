"""Every layout of the same weights becomes the same tensors; code in a pickle is never run."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_llamagen import gpt_tensors, lantern, trainer_file, vq_tensors, write_t5

from ciar.errors import CheckpointError
from ciar.models.loading.layout import kind_of, quantised, read, understand
from ciar.models.loading.read import open_file, open_folder

Wrap = Callable[[dict[str, torch.Tensor]], Any]
LAYOUTS: dict[str, Wrap] = {
    "bare": lambda w: w,
    "model": lambda w: {"model": w},
    "module": lambda w: {"module": w, "global_steps": 3},
    "state_dict": lambda w: {"state_dict": w},
    "ema": lambda w: {"ema": w},
    "model before ema": lambda w: {"ema": {n: v * 0 for n, v in w.items()}, "model": w},
    "module prefix": lambda w: {"model": {f"module.{n}": v for n, v in w.items()}},
    "compiled": lambda w: {f"_orig_mod.{n}": v for n, v in w.items()},
    "compiled blocks": lambda w: {n.replace("layers.1.", "layers.1._orig_mod."): v for n, v in w.items()},
    "both prefixes": lambda w: {f"module._orig_mod.module.{n}": v for n, v in w.items()},
    "trainer": lambda w: trainer_file(w, image_size=256, gpt_model="GPT-XL"),
    "rotary table": lambda w: {"model": w | {"freqs_cis": torch.zeros(3)}},
    "used caches": lambda w: w | {f"layers.{i}.attention.kv_cache.k_cache": torch.zeros(2) for i in range(2)},
    "LANTERN": lantern,
}


#: What a safetensors file can hold: tensors by name, without a wrapper.
FLAT = ("bare", "compiled", "compiled blocks", "both prefixes", "used caches", "LANTERN")


@pytest.mark.parametrize(
    ("layout", "container"),
    [*((layout, kind) for layout in LAYOUTS for kind in ("pt", "legacy")), *((one, "safe") for one in FLAT)],
)
def test_layouts_of_the_transformer(tmp_path: Path, layout: str, container: str) -> None:
    weights = gpt_tensors()
    content = LAYOUTS[layout](weights)
    path = tmp_path / "weights.bin"
    if container == "safe":
        save_file(content, path)
    else:
        torch.save(content, path, _use_new_zipfile_serialization=container == "pt")
    part = understand(open_file(path).tensors)
    assert part.kind == "gpt"
    assert part.tensors.keys() == weights.keys()
    for name, value in weights.items():
        assert torch.equal(read(part.tensors[name]), value), name
        assert tuple(part.tensors[name].shape) == tuple(value.shape)


def test_what_lies_around_the_weights_is_told(tmp_path: Path) -> None:
    path = tmp_path / "trainer.pt"
    torch.save(trainer_file(gpt_tensors(), image_size=256), path)
    opened = open_file(path)
    assert (opened.wrapper, opened.beside) == ("model", ("args", "optimizer", "steps"))
    assert opened.arguments == {"image_size": 256}


def test_tokenizer_and_text_encoder(tmp_path: Path) -> None:
    part = understand(vq_tensors())
    assert (part.kind, part.ignored) == ("vq", ("quantize.codebook_used",))
    folder = write_t5(tmp_path / "t5", shards=3, decoder=True)
    text = understand(open_folder(folder).tensors)
    assert text.kind == "t5"
    assert "shared.weight" in text.tensors
    assert not [name for name in text.tensors if name.startswith(("decoder", "lm_head"))]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("cls_embedding.embedding_table.weight", "class-gpt"),
        ("model.vqmodel.quantize.embedding.weight", "chameleon"),
        ("layers.0.attention.q_normalization.weight", "chameleon"),
        ("decoder.mid.block_1.norm1.weight", "chameleon-vq"),
        ("trunk.tok_embeddings.weight", "device"),
        ("conv1.weight", "unknown"),
    ],
)
def test_other_families_are_told_apart(name: str, kind: str) -> None:
    assert kind_of({name: 0}) == kind


class Evil:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("touch ran",)


@pytest.mark.parametrize("legacy", [False, True])
def test_code_in_a_pickle_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, legacy: bool) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"model": gpt_tensors(), "x": Evil()}, "evil.pt", _use_new_zipfile_serialization=not legacy)
    with pytest.raises(CheckpointError, match=r"objects beside tensors \(\w+\.system\)"):
        open_file(Path("evil.pt"))
    assert not Path("ran").exists()


@pytest.mark.parametrize(
    "content", [[1, 2], {"model": 3}, {}, {"model": {"a": 1}}, {"a": torch.zeros(1), "b": 2}]
)
def test_what_holds_no_dict_of_weights(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="dict of weights"):
        open_file(tmp_path / "x.pt")


def test_a_name_with_and_without_its_prefix_is_refused() -> None:
    weights = {"norm.weight": torch.ones(2), "module.norm.weight": torch.ones(2)}
    with pytest.raises(CheckpointError, match=r"holds norm\.weight twice"):
        understand(weights)


def test_a_missing_projection_of_lantern_is_named() -> None:
    weights = lantern(gpt_tensors())
    del weights["model.layers.1.self_attn.k_proj.weight"]
    with pytest.raises(CheckpointError, match=r"lacks model\.layers\.1\.self_attn\.k_proj\.weight"):
        understand(weights)


def test_quantised_weights_are_seen() -> None:
    weights = gpt_tensors()
    assert quantised(weights) == ""
    assert quantised(weights | {"output.weight": torch.zeros(2, 2, dtype=torch.int8)}) == "output.weight"
    assert quantised(weights | {"output.weight.absmax": torch.zeros(2)}) == "output.weight.absmax"


def test_an_incomplete_download_of_shards(tmp_path: Path) -> None:
    folder = write_t5(tmp_path / "t5", shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors.* is missing"):
        open_folder(folder)
    (folder / "model.safetensors.index.json").write_text("{")
    with pytest.raises(CheckpointError, match="damaged"):
        open_folder(folder)
