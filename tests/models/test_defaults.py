"""A backbone's defaults: thresholds of several scores, old files, other device models."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from ciar.errors import CheckpointError, InputError
from ciar.intervals.thresholds import ThresholdConfig
from ciar.models.bundle import Bundle, Defaults, load_bundle

CALIBRATED = {"margin": ThresholdConfig(value=-0.4), "u-hlm": ThresholdConfig(kind="budget", share=0.4)}


def test_there_and_back_through_json() -> None:
    defaults = Defaults(
        score="entropy", threshold=ThresholdConfig(value=2.0), thresholds=CALIBRATED, share=0.2
    )
    assert Defaults.from_dict(json.loads(json.dumps(defaults.to_dict()))) == defaults


def test_files_without_thresholds_load(tiny_folder: Path) -> None:
    config = json.loads((tiny_folder / "config.json").read_text())
    old = {k: v for k, v in config["defaults"].items() if k not in ("thresholds", "share")}
    defaults = Defaults.from_dict(old)
    assert (defaults.thresholds, defaults.share) == ({}, 0.30)
    assert defaults.threshold == ThresholdConfig(value=0.5)
    assert load_bundle("emoji").defaults.threshold.value > 0


def test_the_threshold_of_a_score() -> None:
    defaults = Defaults(score="entropy", threshold=ThresholdConfig(value=2.0), thresholds=CALIBRATED)
    defaults = replace(defaults, share=0.3, prefix_rate=0.25)
    assert defaults.threshold_for("entropy").value == 2.0
    assert defaults.threshold_for("margin") is CALIBRATED["margin"]
    other = defaults.threshold_for("collision")  # 0.3 of all tokens is 0.4 of those after the prefix
    assert (other.kind, other.share) == ("budget", pytest.approx(0.4))
    assert defaults.threshold_for("random").value == pytest.approx(0.6)
    with pytest.raises(InputError, match="no score 'magic'"):
        defaults.threshold_for("magic")


def test_another_device_model_has_no_calibrated_threshold() -> None:
    defaults = Defaults(score="entropy", threshold=ThresholdConfig(value=2.0), thresholds=CALIBRATED)
    assert defaults.with_device("device") is defaults
    other = defaults.with_device("tail")
    assert (other.device, other.thresholds, other.threshold.kind) == ("tail", {}, "budget")
    assert other.threshold_for("margin").kind == "budget"
    assert replace(defaults, score="learned").with_device("tail").score == "entropy"


@pytest.mark.parametrize(
    "wrong", [{"thresholds": {"magic": {}}}, {"thresholds": {"margin": {"x": 1}}}, {"y": 1}]
)
def test_a_damaged_file_is_named(tiny_folder: Path, tmp_path: Path, wrong: dict[str, object]) -> None:
    shutil.copytree(tiny_folder, tmp_path / "copy")
    path = tmp_path / "copy" / "config.json"
    config = json.loads(path.read_text())
    config["defaults"] |= wrong
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="does not describe a backbone"):
        Bundle(tmp_path / "copy")
