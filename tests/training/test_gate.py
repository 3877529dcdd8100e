"""Choosing the gate: what is recorded, how scores are compared, where the threshold comes to lie."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny import tiny_device, tiny_gpt, tiny_text
from torch import Tensor

from ciar.decoding.batch import Batch
from ciar.decoding.gate import LAW_SCORES, SCORE_NAMES, top_logits
from ciar.decoding.sampling import SamplingLaw, to_law
from ciar.decoding.scorer import Reading, Scoring, make_scorer
from ciar.decoding.strategy import get_strategy
from ciar.intervals.thresholds import ThresholdConfig
from ciar.models.device import DeviceConfig, DeviceModel
from ciar.protocol.messages import Settings
from ciar.training.captions import CaptionBank, indices_of
from ciar.training.data.emoji import Icon
from ciar.training.distil import Inputs
from ciar.training.gate import (
    GateRecords,
    calibration_split,
    record,
    score_costs,
    score_table,
    untrained_gates,
)
from ciar.training.gate_head import examples, fit_gate
from ciar.training.gate_thresholds import calibrate_threshold, calibrate_thresholds
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
    hidden = DEVICE.train_hidden(features, mask, codes[:, :-1])
    return to_law(cloud, LAW), to_law(DEVICE.head.centre_logits(hidden), LAW)


def test_records_are_the_definitions(inputs: Inputs) -> None:
    rows = torch.arange(len(ICONS))
    found = record(inputs, DEVICE, rows, guidance=2.0, law=LAW, seed=3, batch=5)
    assert set(found.scores) == set(SCORE_NAMES) - {"learned"}
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
    threshold, uploaded = calibrate_threshold(inputs, DEVICE, chosen, base, score, share, rounds=6)
    assert uploaded == pytest.approx(share, abs=0.05)
    features, mask = inputs.captions.mixed(chosen)
    made = [Settings(**{**base.__dict__, "seed": 10_000 + i}) for i in range(12)]
    gates = [ThresholdConfig("fixed", value=threshold).start(16) for _ in made]
    pictures = Batch(
        inputs.cloud, DEVICE, features, mask, made, get_strategy("ciar"), list(gates), score
    ).run()
    assert uploaded == pytest.approx(np.mean([picture.ledger.upload_share for picture in pictures]))


def test_all_gates_upload_the_same_share(inputs: Inputs) -> None:
    """Equal uploads: calibrated, blind, or by a budget where the scores are too coarse."""
    chosen = calibration_split(inputs.captions, inputs.train_index, 12)
    base = Settings("ciar", guidance=2.0, top_k=20)
    gates = [
        Scoring(name, share=0.4) for name in ("entropy", "softmaxcorr", "u-hlm", "random", "softmaxcorr-1")
    ]
    records = record(inputs, DEVICE, torch.arange(8), guidance=2.0, law=LAW, gates=gates)
    found = calibrate_thresholds(inputs, DEVICE, chosen, base, gates, 0.375, 6, records.scores)
    assert list(found) == [gate.name for gate in gates]
    assert found["entropy"].kind == found["random"].kind == "fixed"
    assert found["random"].value == pytest.approx(0.6)  # 0.375 of all are 0.4 of those after the prefix
    assert found["softmaxcorr-1"].kind == "budget"
    features, mask = inputs.captions.mixed(chosen)
    made = [Settings(**{**base.__dict__, "seed": 10_000 + i}) for i in range(12)]
    for gate in gates:
        config = found[gate.name]
        assert config.share == pytest.approx(0.4)
        pictures = Batch(
            inputs.cloud,
            DEVICE,
            features,
            mask,
            made,
            get_strategy("ciar"),
            [config.start(15) for _ in made],
            gate,
        ).run()
        share = float(np.mean([picture.ledger.upload_share for picture in pictures]))
        assert share == pytest.approx(0.375, abs=0.12 if gate.name == "random" else 0.04), gate.name


@pytest.mark.parametrize("name", ["softmaxcorr-2d", "entropy-lens-mean", "u-hlm-expected", "discrete-100"])
def test_recorded_scores_are_those_of_single_positions(inputs: Inputs, name: str) -> None:
    """What the table sees is what a device sees that makes these tokens one by one."""
    rows = torch.tensor([2, 9])
    found = record(inputs, DEVICE, rows, guidance=2.0, law=LAW, gates=[Scoring(name)], seed=1)
    again = record(inputs, DEVICE, rows[1:], guidance=2.0, law=LAW, gates=[Scoring(name)], seed=1)
    if not name.startswith("u-hlm"):  # whose proposals come from noise that is drawn row by row
        np.testing.assert_allclose(found.scores[name][1:], again.scores[name], atol=1e-5)
    scorer = make_scorer(Scoring(name), DEVICE, [(1, 2), (1, 9)])
    features, mask = inputs.captions.mixed(rows)
    for t in (0, 3, 15):
        with torch.inference_mode():
            states = DEVICE.train_hidden(features, mask, inputs.codes[rows, :t])
            centre = DEVICE.head.centre_logits(states[:, -1])
            tokens = inputs.codes[rows, :t].tolist()
            reading = Reading([0, 1], tokens, [0, 0], states[:, -1], centre, top_logits(centre), list(states))
            if not name.startswith("u-hlm"):
                np.testing.assert_allclose(found.scores[name][:, t], scorer(reading), atol=1e-4)
    assert found.scores[name].shape == (2, 16)


def test_every_gate_has_a_cost() -> None:
    costs = score_costs(DEVICE, untrained_gates(), repeats=2)
    assert set(costs) == set(SCORE_NAMES) - {"learned"}
    assert all(cost > 0 for cost in costs.values())
    assert costs["periodic"] < costs["discrete-300"]


# --- the learned gate -----------------------------------------------------------------------------


def test_what_the_learned_gate_learns_from(inputs: Inputs) -> None:
    rows = torch.arange(5)
    read, wanted = examples(inputs, DEVICE, rows, guidance=2.0, law=LAW, batch=3)
    assert read.shape == (5 * 16, DEVICE.config.trunk.dim + len(LAW_SCORES))
    recorded = record(inputs, DEVICE, rows, guidance=2.0, law=LAW, gates=[Scoring("entropy")])
    np.testing.assert_allclose(wanted, recorded.tv.reshape(-1), atol=1e-5)
    column = DEVICE.config.trunk.dim + LAW_SCORES.index("entropy")
    np.testing.assert_allclose(read[:, column], recorded.scores["entropy"].reshape(-1), atol=1e-4)


def test_the_learned_gate_learns(inputs: Inputs) -> None:
    """On positions where the distance is a function of what it reads, it finds the function."""
    generator = torch.Generator().manual_seed(0)
    read = torch.randn(3000, 4 + len(LAW_SCORES), generator=generator)
    wanted = torch.sigmoid(2.0 * read[:, 1] - read[:, -1])
    gate = fit_gate(read[:2000] * 5 + 3, wanted[:2000], seed=1)
    found = gate(read[2000:] * 5 + 3)
    assert torch.corrcoef(torch.stack([found, wanted[2000:]]))[0, 1] > 0.98
    assert (found - wanted[2000:]).abs().mean() < 0.04
    before = torch.random.get_rng_state()
    again = fit_gate(read[:2000] * 5 + 3, wanted[:2000], seed=1)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.testing.assert_close(again(read[2000:]), gate(read[2000:]))
    flat = fit_gate(torch.zeros(10, 4 + len(LAW_SCORES)), torch.full((10,), 0.25), steps=200)
    assert flat(torch.zeros(1, 4 + len(LAW_SCORES))).item() == pytest.approx(0.25, abs=0.05)


def test_prompts_that_calibrate_are_training_ones_and_always_the_same(inputs: Inputs) -> None:
    chosen = calibration_split(inputs.captions, inputs.train_index, 8)
    assert len(set(chosen)) == 8
    assert set(chosen) <= set(inputs.train_index.tolist())
    torch.manual_seed(5)
    assert calibration_split(inputs.captions, inputs.train_index, 8) == chosen
    assert calibration_split(inputs.captions, inputs.train_index, 3) == chosen[:3]
