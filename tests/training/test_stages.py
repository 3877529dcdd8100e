"""``ciar train``, all stages of the tiny profile in a row, to a backbone that draws; and their resumption."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ciar.cli.main import main
from ciar.cli.train import STAGES
from ciar.decoding.gate import SCORE_NAMES
from ciar.decoding.strategy import all_strategies
from ciar.intervals.thresholds import ThresholdConfig
from ciar.models.bundle import load_bundle
from ciar.models.checkpoint import check_manifest
from ciar.models.text import StaticTextEncoder
from ciar.pipeline import Pipeline
from ciar.training.assemble import fold_trunks
from ciar.training.data.emoji import Icon
from ciar.training.distil import load_device
from ciar.training.loop import read_log

COLOURS = {"red": (220, 30, 30), "blue": (30, 60, 220), "green": (20, 160, 40), "black": (10, 10, 10)}
SHAPES = ("ball", "box", "bar")
STYLES = ("flat", "noto")


def drawn(colour: str, shape: str, style: str) -> np.ndarray:
    """A picture of 16 px: a thing of one colour on white; ``noto`` has a dark edge."""
    picture = np.full((16, 16, 3), 255, dtype=np.uint8)
    y, x = np.mgrid[0:16, 0:16] - 7.5
    inside = {"ball": x**2 + y**2 < 36, "box": np.maximum(abs(x), abs(y)) < 6, "bar": abs(y) < 3}[shape]
    picture[inside] = COLOURS[colour]
    if style == "noto":
        edge = inside & ~np.roll(inside, 1, axis=0)
        picture[edge] //= 2
    return picture


def write_data(work: Path) -> None:
    """24 drawn pictures with their captions, and a text encoder in place of a distilled one."""
    things = [(c, s, style) for style in STYLES for c in COLOURS for s in SHAPES]
    data, text = work / "data", work / "text"
    data.mkdir(parents=True)
    text.mkdir()
    np.save(data / "images.npy", np.stack([drawn(*thing) for thing in things]))
    icons = []
    for number, (colour, shape, style) in enumerate(things):
        split = "held_name" if (colour, shape) == ("red", "bar") else "held_pair" if number == 17 else "train"
        icons.append(Icon(f"{colour}-{shape}", style, split, ("thing",)))
    (data / "captions.json").write_text(json.dumps([asdict(icon) for icon in icons]))
    (data / "card.json").write_text(json.dumps({"pictures": len(icons), "size": 16}))
    vocabulary = ["[UNK]", "a", "an", "thing", *COLOURS, *SHAPES, *STYLES]
    table = torch.randn(len(vocabulary), 12, generator=torch.Generator().manual_seed(0))
    StaticTextEncoder(vocabulary, table, text_len=6).save(text)


def stage(name: str, work: Path, *options: str) -> int:
    profile = () if name in ("codebook", "codes", "gate", "assemble") else ("--profile", "tiny")
    return main(["train", name, "--work", str(work), *profile, *options])


#: What follows data and text, in order.
ORDER = ("tokenizer", "codebook", "codes", "backbone", "device", "eagle", "gate", "dual-encoder", "assemble")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("run") / "tiny"
    write_data(work)
    for name in ORDER:
        options = ("--pictures", "4", "--learn", "8", "--rounds", "2") if name == "gate" else ()
        assert stage(name, work, *options) == 0, name
    return work


@pytest.fixture
def copy(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def test_the_order_is_that_of_the_command() -> None:
    assert tuple(STAGES) == ("data", "text", *ORDER, "curves")


def test_the_assembled_backbone_draws(trained: Path) -> None:
    folder = trained / "backbone-emoji"
    assert check_manifest(folder) == []
    bundle = load_bundle(folder)
    assert (bundle.name, bundle.total, bundle.gpt_config.vocab_size) == ("emoji", 4, 64)
    assert bundle.vq_config.image_size == 16
    gate = json.loads((trained / "gate" / "gate.json").read_text())
    assert bundle.defaults.score == gate["score"]
    assert bundle.defaults.threshold.value == pytest.approx(gate["threshold"]["value"])
    assert bundle.defaults.top_k == 64
    thresholds = {name: ThresholdConfig.from_dict(one) for name, one in gate["thresholds"].items()}
    assert bundle.defaults.thresholds == thresholds
    assert bundle.defaults.share == gate["budget"]
    pipe = Pipeline.from_pretrained(folder)
    found: dict[str, list[list[int]]] = {}
    for strategy in all_strategies():
        out = pipe(["a red ball", "a blue box flat"], seed=1, strategy=strategy.name)
        assert [picture.size for picture in out.images] == [(16, 16)] * 2
        found[strategy.name] = out.tokens
    assert found["lossless"] == found["eagle2"] == found["base"]
    learned = pipe("a red ball", seed=1, score="learned", output_type="tokens")
    assert len(learned.tokens[0]) == 4


def test_what_each_stage_leaves(trained: Path) -> None:
    codes = np.load(trained / "codes" / "codes.npy")
    assert (codes.shape, codes.dtype) == ((24, 4), np.uint16)
    assert codes.max() < 64
    for name in ("tokenizer", "backbone", "device/round-1", "device/round-2", "device/features"):
        lines = list(read_log(trained / name))
        assert all(np.isfinite(line["loss"]) for line in lines), name
        assert lines[-1]["rate"] > 0
    gate = json.loads((trained / "gate" / "gate.json").read_text())
    assert set(gate["scores"]) == {*SCORE_NAMES, "oracle"}
    assert gate["score"] in SCORE_NAMES
    assert set(gate["thresholds"]) == set(SCORE_NAMES)
    assert gate["thresholds"][gate["score"]] == gate["threshold"]
    assert all(gate["scores"][name]["microseconds"] > 0 for name in SCORE_NAMES)
    assert 0 <= gate["greedy_agreement"] <= 1
    assert 0 <= gate["mean_tv"] <= 1


def test_the_refilled_codebook_is_the_one_that_is_used(trained: Path) -> None:
    codes = np.load(trained / "codes" / "codes.npy")
    plain, refilled = (load_file(trained / f / "vq.safetensors") for f in ("tokenizer", "codebook"))
    name = "quantize.embedding.weight"
    moved = (plain[name] != refilled[name]).any(dim=1).nonzero().squeeze(1)
    assert len(moved)
    assert len(np.intersect1d(codes, moved.numpy()))
    others = [other for other in plain if other != name]
    assert all(torch.equal(plain[other], refilled[other]) for other in others)


def test_storing_narrow_loses_little(trained: Path) -> None:
    """The folder that ships holds half of the bytes and the same model, its norms folded."""
    device = load_device(trained / "device")
    fold_trunks(device)
    for stem, home in (("gpt", "backbone"), ("vq", "codebook"), ("device", "device")):
        wide = device.state_dict() if stem == "device" else load_file(trained / home / f"{stem}.safetensors")
        narrow = load_file(trained / "backbone-emoji" / f"{stem}.safetensors")
        assert wide.keys() == narrow.keys()
        for name, value in wide.items():
            torch.testing.assert_close(narrow[name].float(), value, atol=1e-4, rtol=1e-3)


def test_device_weights_are_the_clouds_where_nothing_is_trained(trained: Path) -> None:
    device = load_device(trained / "device")
    gpt = load_file(trained / "backbone" / "gpt.safetensors")
    assert device.config.trunk.n_layer == 1
    assert torch.equal(device.trunk.cls_embedding.uncond_embedding, gpt["cls_embedding.uncond_embedding"])


# --- running a stage again ---------------------------------------------------------------------------


def digests(work: Path, *paths: str) -> list[bytes]:
    return [(work / path).read_bytes() for path in paths]


WEIGHTS = (
    "tokenizer/vq.safetensors",
    "codebook/vq.safetensors",
    "backbone/gpt.safetensors",
    "device/device.safetensors",
)


def test_a_finished_stage_leaves_its_weights_alone(copy: Path) -> None:
    before = digests(copy, *WEIGHTS)
    for name in ("tokenizer", "codebook", "backbone", "device"):
        assert stage(name, copy) == 0
    assert digests(copy, *WEIGHTS) == before


def test_beginning_anew_gives_the_same_weights(copy: Path) -> None:
    """Everything random comes from the seed."""
    before = digests(copy, *WEIGHTS)
    for name in ("tokenizer", "codebook", "backbone", "device"):
        assert stage(name, copy, *(() if name == "codebook" else ("--no-resume",))) == 0
    assert digests(copy, *WEIGHTS) == before


def trunk_of(work: Path) -> dict[str, torch.Tensor]:
    tensors = load_file(work / "device" / "device.safetensors")
    return {name: value for name, value in tensors.items() if not name.startswith("phi.")}


@pytest.mark.parametrize(
    "options", [("--steps", "12"), ("--no-resume", "--steps", "12")], ids=["more", "anew"]
)
def test_a_device_trained_longer_is_the_one_that_is_kept(copy: Path, options: tuple[str, ...]) -> None:
    """The feature map's checkpoint must not bring the old trunk back."""
    before = trunk_of(copy)
    assert stage("device", copy, *options) == 0
    after = trunk_of(copy)
    state = torch.load(copy / "device" / "round-2" / "state.pt", weights_only=True)
    newest = state["modules"]["device"]
    assert any(not torch.equal(before[name], after[name]) for name in before)
    for name, value in after.items():
        assert torch.equal(value, newest[name]), name


def test_another_backbone_gets_another_teacher(copy: Path) -> None:
    """The teacher's laws are cached; they are not taken for those of a backbone trained later."""
    cached = copy / "device" / "teacher" / "real" / "logits.npy"
    before = np.array(np.load(cached))
    assert stage("backbone", copy, "--steps", "12") == 0
    assert stage("device", copy, "--no-resume") == 0
    assert not np.array_equal(np.load(cached), before)


def test_a_device_model_that_finishes_is_packed_beside_the_other(copy: Path, tmp_path: Path) -> None:
    assert stage("device", copy, "--finish-from", "0.5", "--steps", "6") == 0
    general, finish = (load_device(copy / name).state_dict() for name in ("device", "device-finish"))
    assert any(not torch.equal(general[name], finish[name]) for name in general)
    assert not (copy / "device-finish" / "teacher").exists()  # the teacher's answers are made once
    assert main(["train", "assemble", "--work", str(copy), "--out", str(tmp_path / "out")]) == 0
    assert set(load_bundle(tmp_path / "out").config["devices"]) == {"device", "device-finish"}
    options = {"strategy": "code", "seed": 1, "options": {"share": 0.5}, "output_type": "tokens"}
    made = Pipeline.from_pretrained(tmp_path / "out", device_model="device-finish")("a red ball", **options)
    assert made.ledgers[0].counts["prefix"] == 2


@pytest.mark.parametrize("loss", ["coverage", "inter-dro"])
def test_both_losses_train(copy: Path, loss: str) -> None:
    assert stage("device", copy, "--no-resume", "--loss", loss) == 0
    (line,) = [entry for entry in read_log(copy / "device" / "round-2") if "held_tv" in entry][-1:]
    assert 0.0 < line["held_tv"] < 1.0
    assert ("interval" in line) == (loss == "coverage")


def test_assembling_without_a_gate_takes_a_running_quantile_of_entropy(copy: Path, tmp_path: Path) -> None:
    shutil.rmtree(copy / "gate")
    out = tmp_path / "bare"
    assert main(["train", "assemble", "--work", str(copy), "--out", str(out), "--name", "bare"]) == 0
    bundle = load_bundle(out)
    assert bundle.name == "bare"
    assert (bundle.defaults.score, bundle.defaults.threshold.kind) == ("entropy", "budget")
    assert len(Pipeline(bundle)("a red ball", seed=1).tokens[0]) == bundle.total
