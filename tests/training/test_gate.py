"""Choosing the gate: what is recorded, how scores are compared, where the threshold comes to lie."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny import tiny_device, tiny_gpt, tiny_text
from torch import Tensor

from ciar.decoding.batch import Batch
from ciar.decoding.gate import SCORE_NAMES
from ciar.decoding.sampling import SamplingLaw, to_law
from ciar.decoding.strategy import get_strategy
from ciar.intervals.thresholds import ThresholdConfig
from ciar.models.device import DeviceConfig, DeviceModel
from ciar.protocol.messages import Settings
from ciar.training.captions import CaptionBank, indices_of
from ciar.training.data.emoji import Icon
from ciar.training.distil import Inputs
from ciar.training.gate import (
    GateRecords,
    calibrate_threshold,
    calibration_split,
    record,
    score_table,
)
from ciar.training.teacher import guided_logits

NAMES = ("red-cat", "smiling-dog", "red-car", "sun", "cat-sunglasses", "dog", "red-sun", "car")
ICONS = [
    Icon(name, style, "held_name" if i in (3, 6) else "train", ())
    for style in ("a", "with")
    for i, name in enumerate(NAMES)
]
DEVICE = tiny_device().requires_grad_(False)
LAW = SamplingLaw(top_k=20)


@pytest.fixture(scope="module")
def inputs() -> Inputs:
    codes = torch.randint(64, (len(ICONS), 16), generator=torch.Generator().manual_seed(0))
    return Inputs(
        tiny_gpt().requires_grad_(False),
        codes,
        CaptionBank(ICONS, tiny_text()),
        indices_of(ICONS, "train"),
        indices_of(ICONS, "held_name"),
    )


def laws(inputs: Inputs, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Processed laws [rows, 16, 64] of cloud and device."""
    features, mask = inputs.captions.mixed(rows)
    codes = inputs.codes[rows]
    cloud = guided_logits(inputs.cloud, features, mask, codes, 2.0)
    hidden = DEVICE.trunk.train_hidden(features, mask, codes[:, :-1])
    return to_law(cloud, LAW), to_law(DEVICE.head.centre_logits(hidden), LAW)


def test_records_are_the_definitions(inputs: Inputs) -> None:
    rows = torch.arange(len(ICONS))
    found = record(inputs, DEVICE, rows, guidance=2.0, law=LAW, seed=3, batch=5)
    assert set(found.scores) == set(SCORE_NAMES)
    assert all(score.shape == (16, 16) for score in found.scores.values())
    p, q = laws(inputs, rows)
    tv = 0.5 * (p.exp() - q.exp()).abs().sum(-1).numpy()
    np.testing.assert_allclose(found.tv, tv, atol=1e-5)
    np.testing.assert_array_equal(found.greedy, (p.argmax(-1) == q.argmax(-1)).numpy())
    # Two laws under the same Gumbel noise differ with probability between TV and 2 TV / (1 + TV)
    # (arXiv 2408.07978); 256 positions, four standard deviations.
    share = found.differs.mean()
    assert tv.mean() - 0.12 < share < (2 * tv / (1 + tv)).mean() + 0.12
    again = record(inputs, DEVICE, rows, guidance=2.0, law=LAW, seed=3, batch=5)
    np.testing.assert_array_equal(again.differs, found.differs)
    other = record(inputs, DEVICE, rows, guidance=2.0, law=LAW, seed=4, batch=5)
    assert (other.differs != found.differs).any()


def test_a_device_that_is_the_cloud_never_differs(inputs: Inputs) -> None:
    twin = DeviceModel(DeviceConfig(trunk=inputs.cloud.config, radius_rank=4, feature_dim=32))
    weights = {k: v for k, v in inputs.cloud.state_dict().items() if not k.startswith("output")}
    twin.trunk.load_state_dict(weights)
    with torch.no_grad():
        twin.head.centre.weight.copy_(inputs.cloud.output.weight)
    found = record(inputs, twin.eval(), torch.arange(4), guidance=1.0, law=LAW)
    assert not found.differs.any()
    assert found.greedy.all()
    assert found.tv.max() < 1e-4


def synthetic() -> GateRecords:
    """40 pictures: one score that knows the distance, one that guesses, one that is upside down."""
    generator = np.random.default_rng(0)
    tv = generator.random((40, 16)) ** 2
    scores = {name: generator.random((40, 16)) for name in SCORE_NAMES}
    scores["interval"] = tv + 0.05 * generator.random((40, 16))
    scores["margin"] = -tv
    differs = generator.random((40, 16)) < tv
    return GateRecords(scores, differs, tv, ~differs)


def test_scores_are_told_apart() -> None:
    records = synthetic()
    table = score_table(records, resamples=100)
    assert set(table) == {*SCORE_NAMES, "oracle"}
    assert table["interval"]["auroc"] > 0.75
    assert table["entropy"]["auroc"] == pytest.approx(0.5, abs=0.1)
    assert table["margin"]["auroc"] == pytest.approx(1 - table["oracle"]["auroc"], abs=1e-6)
    best = np.sort(records.tv.reshape(-1))[: int(0.7 * 640)].mean()
    assert table["oracle"]["kept_tv"] == pytest.approx(best, rel=0.01)
    assert table["oracle"]["kept_tv"] <= table["interval"]["kept_tv"] < table["entropy"]["kept_tv"]
    assert table["interval"]["gain_low"] > 0 > table["margin"]["gain_high"]
    assert "gain" not in table["entropy"]
    for row in table.values():
        if "kept_tv_low" in row:
            assert row["kept_tv_low"] <= row["kept_tv"] <= row["kept_tv_high"]


@pytest.mark.parametrize("score", ["interval", "entropy", "margin"])
@pytest.mark.parametrize("share", [0.3, 0.6])
def test_the_threshold_gives_the_share_on_the_methods_own_pictures(
    inputs: Inputs, score: str, share: float
) -> None:
    chosen = calibration_split(inputs.captions, inputs.train_index, 12)
    base = Settings("ciar", guidance=2.0, top_k=20)
    threshold = calibrate_threshold(inputs, DEVICE, chosen, base, score, share, rounds=6)
    features, mask = inputs.captions.mixed(chosen)
    made = [Settings(**{**base.__dict__, "seed": 10_000 + i}) for i in range(12)]
    gates = [ThresholdConfig("fixed", value=threshold).start(16) for _ in made]
    pictures = Batch(
        inputs.cloud, DEVICE, features, mask, made, get_strategy("ciar"), list(gates), score
    ).run()
    uploaded = float(np.mean([picture.ledger.upload_share for picture in pictures]))
    assert uploaded == pytest.approx(share, abs=0.1)


def test_prompts_that_calibrate_are_training_ones_and_always_the_same(inputs: Inputs) -> None:
    chosen = calibration_split(inputs.captions, inputs.train_index, 8)
    assert len(set(chosen)) == 8
    assert set(chosen) <= set(inputs.train_index.tolist())
    torch.manual_seed(5)
    assert calibration_split(inputs.captions, inputs.train_index, 8) == chosen
    assert calibration_split(inputs.captions, inputs.train_index, 3) == chosen[:3]
