"""Features made beforehand: the encoder's own, prompt by prompt, and a clear no for every other prompt."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_llamagen
import torch
from tiny_llamagen import write_sources, write_t5

from ciar.errors import CheckpointError, InputError
from ciar.models import presets
from ciar.models.bundle import load_bundle
from ciar.models.checkpoint import check_manifest
from ciar.models.encode import encode_prompts
from ciar.models.loading.convert import convert
from ciar.models.t5 import T5TextEncoder
from ciar.models.text_features import PrecomputedTextEncoder
from ciar.pipeline import Pipeline

PROMPTS = ["a red cat", " a blue car on the house ", "cat " * 130]


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_t5(tmp_path_factory.mktemp("t5") / "flan-t5")


@pytest.fixture(scope="module")
def features(t5: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("features")
    encode_prompts(PROMPTS, t5, folder)
    return folder


@pytest.fixture
def tiny_presets() -> Iterator[None]:
    before = dict(presets.PRESETS)
    presets.PRESETS.update(tiny_llamagen.PRESETS)
    yield
    presets.PRESETS.clear()
    presets.PRESETS.update(before)


def test_they_are_the_encoders_own(t5: Path, features: Path) -> None:
    own, made = T5TextEncoder(t5), PrecomputedTextEncoder(features)
    assert (made.text_len, made.caption_dim) == (120, 24)
    for prompt in PROMPTS:
        expected, got = own.encode(prompt), made.encode(prompt)
        assert torch.equal(got.features, expected.features)
        assert torch.equal(got.mask, expected.mask)
        assert got.warnings == expected.warnings
    assert "the limit is 120" in made.encode(PROMPTS[2]).warnings[0]


def test_another_prompt_is_refused_with_examples(features: Path) -> None:
    with pytest.raises(InputError, match=r"features of 3 prompts, such as 'a red cat'.*'a dog' is not"):
        PrecomputedTextEncoder(features).encode("a dog")
    with pytest.raises(InputError, match="prompt is empty"):
        PrecomputedTextEncoder(features).encode(" ")


def test_prompts_are_added(t5: Path, tmp_path: Path) -> None:
    encode_prompts(["a red cat"], t5, tmp_path / "f")
    counts = encode_prompts(["a dog", "a red cat"], t5, tmp_path / "f")
    assert (counts["prompts"], counts["rows"]) == (2, 7)
    made = PrecomputedTextEncoder(tmp_path / "f")
    for prompt in ("a dog", "a red cat"):
        assert torch.equal(made.encode(prompt).features, T5TextEncoder(t5).encode(prompt).features)
    with pytest.raises(CheckpointError, match="another text encoder, text length or type"):
        encode_prompts(["a fox"], t5, tmp_path / "f", dtype="float32")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "features.json").unlink(), "ciar encode"),
        (lambda f: (f / "features.json").write_text("{}"), "damaged"),
        (lambda f: (f / "features.json").write_text('{"format": 9}'), "format 9"),
        (lambda f: (f / "features.safetensors").unlink(), "does not exist"),
    ],
)
def test_damaged_features(t5: Path, tmp_path: Path, damage, message: str) -> None:
    encode_prompts(["a red cat"], t5, tmp_path / "f")
    damage(tmp_path / "f")
    with pytest.raises(CheckpointError, match=message):
        PrecomputedTextEncoder(tmp_path / "f")


def test_an_index_of_other_rows(t5: Path, features: Path, tmp_path: Path) -> None:
    encode_prompts(["a red cat"], t5, tmp_path / "f")
    (tmp_path / "f/features.json").write_text((features / "features.json").read_text())
    with pytest.raises(CheckpointError, match="does not belong to"):
        PrecomputedTextEncoder(tmp_path / "f")


@pytest.mark.usefixtures("tiny_presets")
def test_a_small_machine_draws_what_a_large_one_draws(features: Path, t5: Path, tmp_path: Path) -> None:
    """Features among the sources, or added to a folder without an encoder; and both get along on a wire."""
    sources = write_sources(tmp_path / "downloads")
    large, small, added = (tmp_path / name for name in ("large", "small", "added"))
    convert(sources, large)
    encode_prompts(PROMPTS, large, tmp_path / "f")
    convert([*sources[:2], tmp_path / "f"], small)
    convert(sources[:2], added)
    encode_prompts(PROMPTS[:1], large, added)
    assert check_manifest(added) == []
    bundles = [load_bundle(folder) for folder in (large, small, added)]
    assert len({bundle.weights for bundle in bundles}) == 1
    assert bundles[0].weights
    pictures = [Pipeline(bundle)("a red cat", strategy="base", seed=1).tokens for bundle in bundles]
    assert pictures[0] == pictures[1] == pictures[2]
    with pytest.raises(InputError, match="no text encoder, only the features of 1 prompts"):
        Pipeline(bundles[2])("a dog", strategy="base")
    with pytest.raises(InputError, match="has a text encoder of its own"):
        encode_prompts(["a dog"], t5, large)
    other = write_t5(tmp_path / "wide", d_model=16)
    with pytest.raises(
        CheckpointError, match="reads features of 120 x 24 and the text encoder gives 120 x 16"
    ):
        encode_prompts(["a dog"], other, added)
    config = json.loads((small / "config.json").read_text())
    config["text"]["encoder"] = "0" * 64
    (small / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="another text encoder"):
        _ = load_bundle(small).text
