"""Quality against cost: what runs cost, that nothing changes against oneself, and which prompts count."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_run import tiny_icons, write_tiny_data, write_tiny_run

from ciar.errors import CheckpointError, DataError, InputError
from ciar.evaluation.features import image_features
from ciar.evaluation.frechet import frechet_distance
from ciar.intervals.thresholds import ThresholdConfig
from ciar.models.bundle import Bundle
from ciar.models.text import StaticTextEncoder
from ciar.pipeline import Pipeline
from ciar.quality import (
    Judge,
    Run,
    check_runs,
    draw_sheets,
    evaluation_prompts,
    judge,
    make_pictures,
    markdown,
)
from ciar.training.captions import CaptionBank, indices_of, load_captions
from ciar.training.gate import CALIBRATION_PICTURES, calibration_split

BASE = Run("base", {"strategy": "base"})
PROMPTS = ["cat", "a red car with a smiling dog sunglasses", "a dog", "smiling sun", "red cat"]
#: Training names that calibration leaves.
USABLE = sum(icon.split == "train" for icon in tiny_icons()) - CALIBRATION_PICTURES


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quality") / "run"
    write_tiny_run(folder)
    return folder


@pytest.fixture(scope="module")
def text(work: Path) -> StaticTextEncoder:
    return StaticTextEncoder.load(work / "text")


@pytest.fixture(scope="module")
def the_judge(work: Path, text: StaticTextEncoder) -> Judge:
    return Judge.from_data(work / "dual-encoder", text, work / "data")


# --- what a run costs and draws -----------------------------------------------------------------------


@pytest.mark.parametrize("prefix_rate", [0.0, 0.0625, 0.25])
@pytest.mark.parametrize("injection", [True, False])
def test_uploads_go_from_all_but_the_prefix_to_none(
    tiny_bundle: Bundle, prefix_rate: float, injection: bool
) -> None:
    settings = {"strategy": "ciar", "prefix_rate": prefix_rate, "injection": injection}
    everything = Run("all", settings, ThresholdConfig(value=0.0))
    made = make_pictures(tiny_bundle, PROMPTS, everything)
    assert made.mean(lambda ledger: ledger.upload_share) == 1.0 - prefix_rate
    assert made.mean(lambda ledger: ledger.cloud_call_share) >= 1.0
    nothing = Run("none", settings, ThresholdConfig(value=math.inf))
    made = make_pictures(tiny_bundle, PROMPTS, nothing)
    assert made.mean(lambda ledger: ledger.upload_share) == 0.0
    # The prefill gives the first token.
    assert made.mean(lambda ledger: ledger.cloud_call_share) == max(1.0, prefix_rate * 16) / 16


@pytest.mark.parametrize("score", ["interval", "entropy", "margin"])
@pytest.mark.parametrize(("share", "asked"), [(0.0, 0), (0.4, 6), (1.0, 15)])
def test_a_budget_is_met_whatever_the_score(
    tiny_bundle: Bundle, score: str, share: float, asked: int
) -> None:
    run = Run(score, {"strategy": "ciar"}, ThresholdConfig(kind="budget", share=share), score)
    made = make_pictures(tiny_bundle, PROMPTS, run)
    assert made.mean(lambda ledger: ledger.upload_share) == asked / 16


def test_plain_ar_takes_one_pass_a_token(tiny_bundle: Bundle) -> None:
    made = make_pictures(tiny_bundle, PROMPTS, BASE)
    for ledger in made.ledgers:
        assert (ledger.upload_share, ledger.cloud_passes, ledger.token_rows) == (
            0.0,
            16,
            32,
        )  # guided: two rows
    assert (made.pixels.shape, made.pixels.dtype) == ((5, 16, 16, 3), np.uint8)
    assert made.tokens.shape == (5, 16)


@pytest.mark.parametrize("strategy", ["base", "ciar"])
def test_picture_i_is_the_lone_picture_of_seed_plus_i(tiny_bundle: Bundle, strategy: str) -> None:
    notes: list[str] = []
    run = Run("x", {"strategy": strategy})
    pixels = make_pictures(tiny_bundle, PROMPTS, run, seed=40, batch=2, note=notes.append).pixels
    assert notes == ["x: 2 of 5 pictures", "x: 4 of 5 pictures", "x: 5 of 5 pictures"]
    pipe = Pipeline(tiny_bundle)
    for i, prompt in enumerate(PROMPTS):
        alone = pipe(prompt, seed=40 + i, strategy=strategy, output_type="np").images[0]
        # A batch is decoded with other kernels, so a rounding may go the other way.
        np.testing.assert_allclose(pixels[i].astype(int), alone.astype(int), atol=1)


# --- the judgement ------------------------------------------------------------------------------------


def judged_of(bundle: Bundle, the_judge: Judge, work: Path, runs: list[Run], **options: Any) -> Any:
    prompts, names = evaluation_prompts(work / "data", 20, the_judge.text)  # type: ignore[arg-type]
    return judge(bundle, the_judge, prompts, names, runs, seed=5, **options)


def test_the_first_run_is_the_yardstick(
    tiny_bundle: Bundle, the_judge: Judge, work: Path, text: StaticTextEncoder
) -> None:
    """A run beside itself changes nothing; another one does; every figure is that of its own pictures."""
    runs = [BASE, Run("again", {"strategy": "base"}), Run("device", {"strategy": "device-only"})]
    first, again, device = judged = judged_of(tiny_bundle, the_judge, work, runs, batch=7)
    assert [row.label for row in judged] == ["base", "again", "device"]
    assert first.frechet_change is None
    assert first.retrieval_change is None
    np.testing.assert_array_equal(first.made.pixels, again.made.pixels)
    assert first.frechet == again.frechet > 0.0
    for change in (again.frechet_change, again.retrieval_change):
        assert (change.value, change.low, change.high, change.count) == (0.0, 0.0, 0.0, 20)
    assert device.frechet_change.value == pytest.approx(device.frechet / first.frechet - 1.0)
    assert device.frechet_change.value != 0.0
    assert device.frechet_change.low < device.frechet_change.high
    change = 100.0 * (device.retrieval - first.retrieval)
    assert device.retrieval_change.value == pytest.approx(change, abs=1e-9)
    for row in judged:
        own = image_features(the_judge.encoder, row.made.pixels)
        assert row.frechet == pytest.approx(frechet_distance(generated=own, real=the_judge.real).value)
        assert 0.0 <= row.retrieval <= 1.0
    assert (first.passes, device.passes) == (1.0, 0.0)


def test_documents_and_tables_hold_every_run(tiny_bundle: Bundle, the_judge: Judge, work: Path) -> None:
    run = Run("kept", {"strategy": "ciar"}, ThresholdConfig(value=math.inf))
    judged = judged_of(tiny_bundle, the_judge, work, [BASE, run])
    documents = json.loads(json.dumps([row.to_dict() for row in judged], allow_nan=False))
    assert [set(row) for row in documents] == [set(documents[0])] * 2
    assert documents[0]["frechet_change"] is None
    value, low, high = documents[1]["frechet_change"]
    assert value == judged[1].frechet_change.value
    assert low <= high
    table = markdown(judged)
    assert table.endswith("|\n")
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    assert [len(line) for line in lines] == [8] * 4
    assert lines[2][:4] == ["base", "0.0%", "100.0%", "2.00"]
    assert lines[2][5] == lines[2][7] == ""
    assert lines[3][0] == "kept"
    assert lines[3][1] == "0.0%"
    assert lines[3][5].startswith(f"{value:+.1%} [")
    assert lines[3][7].endswith("] points")


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (Run("x", {"strategy": "cira"}), "no strategy 'cira'. The strategies are: .*ciar"),
        (Run("x", {"strategy": "ciar"}, None, "entropie"), "no score 'entropie'. The scores are: .*entropy"),
    ],
)
def test_unknown_names_are_refused_before_any_picture(
    tiny_bundle: Bundle, the_judge: Judge, work: Path, run: Run, message: str
) -> None:
    notes: list[str] = []
    with pytest.raises(InputError, match=message):
        judged_of(tiny_bundle, the_judge, work, [BASE, run], note=notes.append)
    assert notes == []
    check_runs([BASE])


# --- the judge and its prompts ------------------------------------------------------------------------


def test_a_judge_knows_the_training_pictures_alone(the_judge: Judge) -> None:
    icons = tiny_icons()
    train = [icon.name for icon in icons if icon.split == "train"]
    assert the_judge.pool_names == train
    assert the_judge.pool.shape == (len(train), 8)
    images = np.random.default_rng(0).integers(0, 256, (len(icons), 16, 16, 3), dtype=np.uint8)
    rows = [i for i, icon in enumerate(icons) if icon.split == "train"]
    np.testing.assert_allclose(the_judge.real, image_features(the_judge.encoder, images[rows]), atol=1e-6)


def test_what_a_judge_lacks_is_named(work: Path, text: StaticTextEncoder, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="ciar train dual-encoder"):
        Judge.from_data(tmp_path / "none", text, work / "data")
    with pytest.raises(DataError, match=r"captions\.json does not exist.*ciar train data"):
        Judge.from_data(work / "dual-encoder", text, tmp_path)
    (tmp_path / "captions.json").write_bytes((work / "data" / "captions.json").read_bytes())
    with pytest.raises(DataError, match=r"images\.npy does not exist.*ciar train data"):
        Judge.from_data(work / "dual-encoder", text, tmp_path)


def test_evaluation_leaves_out_what_calibrated_and_what_is_held_out(
    work: Path, text: StaticTextEncoder
) -> None:
    icons = load_captions(work / "data")
    train = indices_of(icons, "train")
    calibrated = calibration_split(CaptionBank(icons, text), train, CALIBRATION_PICTURES)
    assert len(set(calibrated)) == CALIBRATION_PICTURES
    prompts, names = evaluation_prompts(work / "data", 3 * USABLE, text)
    assert set(names).isdisjoint(icons[i].name for i in calibrated)
    assert set(names).isdisjoint(icon.name for icon in icons if icon.split != "train")
    assert len(set(names)) == USABLE
    for prompt, name in zip(prompts, names, strict=True):
        assert prompt.removesuffix(" flat") == name.replace("-", " ")


def test_evaluation_prompts_are_the_same_at_every_call_and_repeat(
    work: Path, text: StaticTextEncoder
) -> None:
    prompts, names = evaluation_prompts(work / "data", 2 * USABLE, text)
    assert evaluation_prompts(work / "data", 2 * USABLE, text) == (prompts, names)
    assert evaluation_prompts(work / "data", 10, text) == (prompts[:10], names[:10])
    assert names[USABLE:] == names[:USABLE]
    assert sum(prompt.endswith(" flat") for prompt in prompts) == pytest.approx(2 * len(prompts) / 3, abs=1)


def test_a_data_set_that_calibration_uses_up_is_refused(tmp_path: Path, text: StaticTextEncoder) -> None:
    write_tiny_data(tmp_path / "data", count=60)
    with pytest.raises(DataError, match="larger data set"):
        evaluation_prompts(tmp_path / "data", 4, text)


def test_sheets_need_held_out_names(tmp_path: Path, tiny_folder: Path) -> None:
    write_tiny_data(tmp_path / "data", count=5)
    with pytest.raises(DataError, match="no held-out names"):
        draw_sheets(str(tiny_folder), tmp_path / "data", tmp_path, 0)
