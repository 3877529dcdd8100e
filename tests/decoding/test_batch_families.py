"""Batches of a model of another family than LlamaGen: every picture equals its lone run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_chameleon
import torch

from ciar.decoding.batch import Batch
from ciar.decoding.gate import top_logits
from ciar.decoding.oracle import Oracle
from ciar.decoding.sampling import SamplingLaw, to_law
from ciar.decoding.scorer import Reading, Scoring
from ciar.decoding.strategy import get_strategy
from ciar.errors import InputError
from ciar.intervals.thresholds import ThresholdConfig
from ciar.models import presets
from ciar.models.bundle import Bundle, Defaults, load_bundle
from ciar.models.device import DeviceConfig, DeviceModel
from ciar.models.install import install_device
from ciar.models.loading.convert import convert
from ciar.pipeline import Pipeline
from ciar.protocol.messages import Settings
from ciar.quality import Run, make_pictures, text_features
from ciar.training.device import start_from

#: Prompts of 4, 12 and 5 text tokens, frame included.
PROMPTS = ["c", "a red cat", "ab"]
SEEDS = [7, 8, 9]


@pytest.fixture(scope="module")
def anole(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A tiny Anole with a device model that starts from it."""
    before = dict(presets.PRESETS)
    presets.PRESETS[tiny_chameleon.PRESET.name] = tiny_chameleon.PRESET
    folder = tmp_path_factory.mktemp("anole")
    convert([tiny_chameleon.write_hf(folder / "hf")], folder / "anole", dtype="float32")
    presets.PRESETS.clear()
    presets.PRESETS.update(before)
    bundle = load_bundle(folder / "anole")
    trunk = bundle.family.draft(bundle.gpt_config)
    torch.manual_seed(0)
    device = DeviceModel(DeviceConfig(trunk, radius_rank=4, feature_hidden=4, feature_dim=32))
    start_from(device, bundle.family.seeds(bundle.model))
    defaults = Defaults(
        guidance=3.0, top_p=0.9, window=4, score="entropy", threshold=ThresholdConfig("fixed", value=2.5)
    )
    install_device(bundle, device, defaults)
    return load_bundle(folder / "anole")


CASES: list[dict[str, Any]] = [
    {"strategy": "base"},
    {"strategy": "base", "guidance": 1.0},
    {"strategy": "lossless", "window": 5},
    {"strategy": "zipar"},
    {"strategy": "sjd"},
    {"strategy": "ciar"},
    {"strategy": "ciar", "guidance": 1.0, "prefix_rate": 0.0},
    {"strategy": "device-only"},
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_each_picture_equals_its_lone_run(anole: Bundle, case: dict[str, Any]) -> None:
    """Rows whose prompts differ in length count their own positions, in a batch as alone."""
    values = {"guidance": 3.0, "window": 4, "top_p": 0.9} | case
    strategy = get_strategy(values["strategy"])
    settings = [Settings(**values, seed=seed) for seed in SEEDS]
    gates = [ThresholdConfig("fixed", value=2.5).start(16) for _ in SEEDS]
    features, mask = text_features(anole, PROMPTS)
    assert mask.sum(1).tolist() == [4, 12, 5]
    device = anole.device_model if strategy.uses_device else None
    made = Batch(anole.model, device, features, mask, settings, strategy, list(gates), "entropy").run()
    pipe = Pipeline(anole)
    asked = {name: value for name, value in case.items() if name != "guidance"}
    for prompt, seed, picture in zip(PROMPTS, SEEDS, made, strict=True):
        alone = pipe(
            prompt, seed=seed, guidance_scale=values["guidance"], threshold=2.5, score="entropy",
            output_type="tokens", **asked,
        )  # fmt: skip
        assert picture.tokens == alone.tokens[0]
        assert picture.ledger.decided == alone.ledgers[0].decided
    assert len({tuple(picture.tokens) for picture in made}) == 3


def test_quality_makes_the_pictures_of_the_pipeline(anole: Bundle) -> None:
    made = make_pictures(anole, PROMPTS, Run("ciar", {"strategy": "ciar"}), seed=3)
    pipe = Pipeline(anole)
    for i, prompt in enumerate(PROMPTS):
        alone = pipe(prompt, seed=3 + i, output_type="np")
        assert made.tokens[i].tolist() == alone.tokens[0]
        assert (made.pixels[i] == alone.images[0]).all()


def test_the_oracle_knows_the_law_of_the_family(anole: Bundle) -> None:
    """A gate that keeps a token where device and cloud agree; the distance is that of the cloud's own law."""
    features, mask = text_features(anole, PROMPTS)
    law = SamplingLaw(top_p=0.9)
    oracle = Oracle(anole.model, features, mask, 3.0, law)
    first = oracle.trunk.model.head(oracle.last)
    conditional, unconditional = first[:3], first[3:]
    expected = to_law(unconditional + 3.0 * (conditional - unconditional), law, what="it").exp()
    settings = [Settings("ciar", guidance=3.0, top_p=0.9, seed=s, prefix_rate=0.0) for s in SEEDS]
    gates = [ThresholdConfig("fixed", value=0.5).start(16) for _ in SEEDS]
    strategy = get_strategy("ciar")
    batch = Batch(
        anole.model, anole.device_model, features, mask, settings, strategy, list(gates),
        Scoring("oracle", oracle=oracle),
    )  # fmt: skip
    torch.testing.assert_close(to_law(batch.prefill, law, what="it").exp(), expected)
    states = batch.device_trunk.first_hidden
    centre = anole.device_model.head.centre_logits(states)
    drawn = to_law(centre, law, what="it").exp()
    true = 0.5 * (expected - drawn).abs().sum(-1)
    reading = Reading(
        list(range(3)),
        [[], [], []],
        [0, 0, 0],
        states,
        centre,
        top_logits(centre),
        [states[i : i + 1] for i in range(3)],
    )
    torch.testing.assert_close(torch.tensor(batch.scorer(reading)), true, atol=1e-4, rtol=0)
    # A token is asked about where the distance is above the threshold, and from the first on it is told.
    for picture, distance in zip(batch.run(), true.tolist(), strict=True):
        assert len(picture.tokens) == 16
        assert (picture.ledger.decided[0] == "device") == (distance <= 0.5)


def test_trees_are_refused_with_a_sentence(anole: Bundle) -> None:
    features, mask = text_features(anole, PROMPTS[:1])
    settings = [Settings("eagle2", guidance=3.0, top_p=0.9)]
    strategy = get_strategy(settings[0].strategy)
    gates = [ThresholdConfig("fixed", value=0.5).start(16)]
    with pytest.raises(InputError, match="LlamaGen family"):
        Batch(anole.model, None, features, mask, settings, strategy, list(gates)).run()


def test_nothing_is_left_of_a_folder_that_was_written(anole: Bundle) -> None:
    assert not list(Path(anole.folder).rglob("*.partial"))
