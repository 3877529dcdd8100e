"""Packing a run folder: the backbone loads, draws, is half the size, and is what the stages left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import TINY_GPT, TINY_VQ
from tiny_run import write_tiny_stages

from ciar.decoding.gate import LAW_SCORES
from ciar.decoding.scorer import scoring_of
from ciar.errors import CheckpointError, DataError
from ciar.intervals.learned import LearnedGate
from ciar.intervals.thresholds import ThresholdConfig
from ciar.models.bundle import load_bundle
from ciar.models.checkpoint import check_manifest, save_tensors
from ciar.models.text import StaticTextEncoder
from ciar.pipeline import Pipeline
from ciar.training.assemble import assemble

HOMES = (("vq", "tokenizer"), ("gpt", "backbone"), ("device", "device"))
GATE = {"score": "interval", "threshold": {"kind": "fixed", "value": 0.7}, "budget": 0.3}


@pytest.fixture
def work(tmp_path: Path) -> Path:
    write_tiny_stages(tmp_path / "run")
    return tmp_path / "run"


def add_gate(work: Path, **values: object) -> None:
    (work / "gate").mkdir()
    (work / "gate" / "gate.json").write_text(json.dumps(GATE | values))


def test_the_folder_is_a_backbone_that_draws(work: Path, tmp_path: Path) -> None:
    add_gate(work)
    out = tmp_path / "made" / "backbone"
    sizes = assemble(work, out, "small", guidance=2.0)
    assert sizes == {path.name: path.stat().st_size for path in out.iterdir()}
    assert set(sizes) >= {"config.json", "manifest.json", "text.safetensors", "vocabulary.txt", "text.json"}
    assert check_manifest(out) == []
    pipe = Pipeline.from_pretrained(out)
    bundle = pipe.bundle
    assert (bundle.name, bundle.gpt_config, bundle.vq_config) == ("small", TINY_GPT, TINY_VQ)
    assert bundle.weights
    defaults = bundle.defaults
    assert (defaults.guidance, defaults.score, defaults.top_k) == (2.0, "interval", 64)
    assert (defaults.threshold, defaults.injection) == (ThresholdConfig(kind="fixed", value=0.7), True)
    made = {
        name: pipe("a red cat", seed=1, strategy=name) for name in ("base", "lossless", "ciar", "device-only")
    }
    assert all(result.images[0].size == (16, 16) for result in made.values())
    assert made["lossless"].tokens == made["base"].tokens != made["device-only"].tokens


def test_weights_are_halved_and_kept_within_a_thousandth(work: Path, tmp_path: Path) -> None:
    assemble(work, tmp_path / "out")
    for stem, home in HOMES:
        wide = load_file(work / home / f"{stem}.safetensors")
        narrow = load_file(tmp_path / "out" / f"{stem}.safetensors")
        assert wide.keys() == narrow.keys()
        for name, value in wide.items():
            assert narrow[name].dtype == (torch.float16 if value.is_floating_point() else value.dtype), name
            # Below 6e-5 float16 has a fixed spacing, which is what the absolute part allows for.
            torch.testing.assert_close(narrow[name].to(value.dtype), value, rtol=1e-3, atol=1e-7, msg=name)
    text = StaticTextEncoder.load(work / "text")
    packed = load_bundle(tmp_path / "out").text
    assert isinstance(packed, StaticTextEncoder)
    assert packed.vocabulary == text.vocabulary
    torch.testing.assert_close(packed.table, text.table, rtol=1e-3, atol=0.02)


def test_without_a_gate_a_running_quantile_holds_the_share(work: Path, tmp_path: Path) -> None:
    assemble(work, tmp_path / "out")
    bundle = load_bundle(tmp_path / "out")
    defaults = bundle.defaults
    assert (bundle.name, defaults.score, defaults.threshold.kind) == ("emoji", "entropy", "budget")
    assert defaults.threshold.share == pytest.approx(0.30 / (1 - 0.0625))
    ledger = Pipeline(bundle)("a cat", seed=1).ledgers[0]
    assert 1 / 16 <= ledger.upload_share <= 8 / 16
    assert ledger.counts["prefix"] == 1


def test_a_gate_may_switch_injection_off(work: Path, tmp_path: Path) -> None:
    add_gate(work, injection=False)
    assemble(work, tmp_path / "out")
    assert load_bundle(tmp_path / "out").defaults.injection is False


def test_every_threshold_and_the_learned_gate_are_packed(work: Path, tmp_path: Path) -> None:
    thresholds = {"margin": {"value": -0.3, "share": 0.22}, "u-hlm": {"kind": "budget", "share": 0.22}}
    add_gate(work, thresholds=thresholds, budget=0.2)
    torch.manual_seed(0)
    gate = LearnedGate(TINY_GPT.dim, len(LAW_SCORES))
    save_tensors(gate, work / "gate" / "gate.safetensors")
    assemble(work, tmp_path / "out")
    bundle = load_bundle(tmp_path / "out")
    assert bundle.defaults.share == 0.2
    assert bundle.defaults.threshold_for("margin") == ThresholdConfig(value=-0.3, share=0.22)
    assert bundle.defaults.threshold_for("u-hlm").kind == "budget"
    packed = scoring_of(bundle, "learned").learned
    assert packed is not None
    for name, value in gate.state_dict().items():
        assert torch.equal(packed.state_dict()[name], value)
    assert check_manifest(tmp_path / "out") == []
    save_tensors(LearnedGate(7, len(LAW_SCORES)), work / "gate" / "gate.safetensors")
    with pytest.raises(CheckpointError, match="does not fit the model"):
        assemble(work, tmp_path / "other")


def test_packing_again_gives_the_same_folder(work: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    sizes = assemble(work, out)
    before = (out / "manifest.json").read_bytes()
    assert assemble(work, out) == sizes
    assert (out / "manifest.json").read_bytes() == before
    (out / "gpt.safetensors").write_bytes(b"")
    assert check_manifest(out) == [f"{out / 'gpt.safetensors'} differs from the manifest."]


@pytest.mark.parametrize(
    ("file", "stage"),
    [
        ("tokenizer/vq.json", "tokenizer"),
        ("backbone/gpt.json", "backbone"),
        ("device/device.json", "device"),
        ("text/text.json", "text"),
    ],
)
def test_a_missing_stage_is_named(work: Path, tmp_path: Path, file: str, stage: str) -> None:
    (work / file).unlink()
    with pytest.raises(DataError) as error:
        assemble(work, tmp_path / "out")
    assert str(error.value) == f"{work / file} does not exist. Run first: ciar train {stage} --work {work}"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("stem", "home"), HOMES)
def test_weights_of_another_size_are_refused(work: Path, tmp_path: Path, stem: str, home: str) -> None:
    other = next(name for name, _ in HOMES if name != stem)
    source = dict(HOMES)[other]
    (work / home / f"{stem}.safetensors").write_bytes((work / source / f"{other}.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match="does not fit the model"):
        assemble(work, tmp_path / "out")
