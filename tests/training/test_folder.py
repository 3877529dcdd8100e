"""A device model for a folder of public files: teacher cache, training, threshold, folder, pictures."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny_chameleon
import tiny_llamagen
import torch
from PIL import Image
from torch import Tensor

from ciar.cli.main import main
from ciar.decoding.options import default_settings
from ciar.errors import CheckpointError, DataError, InputError
from ciar.models import presets
from ciar.models.bundle import Bundle, load_bundle
from ciar.models.checkpoint import check_manifest
from ciar.models.device import DeviceConfig, DeviceModel
from ciar.models.encode import encode_prompts
from ciar.models.families import for_decoding
from ciar.models.install import install_device
from ciar.models.loading.convert import convert
from ciar.pipeline import Pipeline
from ciar.training import distil, material
from ciar.training import folder as folder_module
from ciar.training import teacher as teacher_module
from ciar.training.bank import PromptBank
from ciar.training.device import start_from
from ciar.training.distil import DistilConfig, two_rounds
from ciar.training.folder import FolderSources, train_folder_device
from ciar.training.loop import LoopConfig
from ciar.training.material import (
    captioned_pictures,
    drawn_codes,
    encoded_pictures,
    given_codes,
    text_encoder,
)
from ciar.training.teacher import guided_logits, guided_parts

PROMPTS = ["a red cat", "the dog", "blue car on a house", "fox", "a fox on the house", "red dog"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A tiny LlamaGen and a tiny Anole, converted, without device models."""
    before = dict(presets.PRESETS)
    presets.PRESETS.clear()
    presets.PRESETS.update(tiny_llamagen.PRESETS)
    presets.PRESETS[tiny_chameleon.PRESET.name] = tiny_chameleon.PRESET
    folder = tmp_path_factory.mktemp("folders")
    tiny_llamagen.write_sources(folder / "downloads")
    convert([folder / "downloads"], folder / "llamagen", dtype="float32", text_dtype="float32")
    convert([tiny_chameleon.write_hf(folder / "hf")], folder / "anole", dtype="bfloat16")
    (folder / "prompts.txt").write_text("\n".join(PROMPTS) + "\n\n")
    yield folder
    presets.PRESETS.clear()
    presets.PRESETS.update(before)


@pytest.fixture
def work(folders: Path, tmp_path: Path) -> Path:
    for name in ("llamagen", "anole"):
        shutil.copytree(folders / name, tmp_path / name)
    return tmp_path


def bank_of(bundle: Bundle) -> PromptBank:
    return PromptBank(PROMPTS, bundle.text)


@pytest.mark.parametrize("name", ["llamagen", "anole"])
def test_the_whole_chain(
    work: Path,
    folders: Path,
    name: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From prompts alone to a picture by the folder's own default strategy."""
    backbone = work / name
    words = ["train", "device", "--backbone", str(backbone), "--prompts", str(folders / "prompts.txt")]
    words += ["--work", str(work / "run"), "--profile", "tiny", "--calibrate", "2", "--budget", "0.4"]
    assert main(words) == 0
    figures = json.loads(capsys.readouterr().out)
    assert 0.0 <= figures["held_greedy"] <= 1.0
    assert figures["held_ce"] > 0
    assert figures["kept_codes"] == (100 if name == "llamagen" else 64)
    assert check_manifest(backbone) == []
    assert not list(backbone.rglob("*.partial"))
    bundle = load_bundle(backbone)
    defaults = bundle.defaults
    assert (defaults.score, defaults.share, defaults.injection) == ("entropy", 0.4, False)
    assert bundle.device_model.config.feature_dim == bundle.gpt_config.dim
    out = Pipeline(bundle)("a red cat", seed=1)
    assert len(out.tokens[0]) == 16
    assert {"device", "replaced"} & set(out.ledgers[0].decided)
    # A second call finds everything done: the same model, and nothing is drawn, asked or trained.
    before = (backbone / "device.safetensors").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(material, "Batch", None)
        patch.setattr(teacher_module, "guided_parts", None)
        patch.setattr(distil, "drifted_sequences", None)
        assert main(words) == 0
    assert (backbone / "device.safetensors").read_bytes() == before
    # Other settings are another run, which is refused before it writes anything.
    kept = content(work / "run")
    capsys.readouterr()
    for other in (["--loss", "inter-dro"], ["--seed", "1"]):
        assert main([*words, *other]) == 3
        assert "begin anew with --no-resume" in capsys.readouterr().err
        assert content(work / "run") == kept


def content(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class Stopped(Exception):
    """What stands for a stop by the user."""


def stop(*_: object, **__: object) -> None:
    raise Stopped


def trained(work: Path, prompts: list[str], run: str = "run", *, resume: bool = True) -> None:
    """A tiny run on given codes."""
    (work / "p.txt").write_text("\n".join(prompts) + "\n")
    codes = np.random.default_rng(1).integers(0, 128, (len(prompts), 16))
    np.save(work / "codes.npy", codes)
    sources = FolderSources(prompts=work / "p.txt", codes=work / "codes.npy")
    loop = LoopConfig(steps=4, warmup=1, log_every=4, eval_every=4)
    sizes = DistilConfig(real=8, drifted=4, held=4, radius_rank=4, reader_layers=1)
    config = folder_module.FolderConfig(calibrate=0)
    bundle = load_bundle(work / "llamagen")
    train_folder_device(bundle, sources, work / run, loop=loop, sizes=sizes, config=config, resume=resume)


def test_what_begins_anew_never_goes_on_from_the_old(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped at any moment, a run that began anew leaves nothing that was trained before."""
    old = [work / "run" / name for name in ("round-1", "round-2", "drifted")]
    trained(work, PROMPTS)
    assert all(path.is_dir() for path in old)
    monkeypatch.setattr(folder_module, "teacher_sets", stop)
    with pytest.raises(Stopped):
        trained(work, PROMPTS[::-1], resume=False)
    assert not any(path.exists() for path in old)
    with pytest.raises(DataError, match="begin anew"):
        trained(work, PROMPTS)
    with pytest.raises(Stopped):
        trained(work, PROMPTS[::-1])  # goes on with what began anew
    # The stage of a run folder has no claim, but the same two rounds.
    monkeypatch.setattr(distil, "DeviceTask", stop)
    for path in old:
        path.mkdir()
        (path / "device.safetensors").touch()
    nothing: Any = SimpleNamespace(captions=None)
    with pytest.raises(Stopped):
        two_rounds(
            nothing,
            nothing,
            nothing,
            nothing,
            DistilConfig(),
            nothing,
            LoopConfig(),
            work / "run",
            resume=False,
        )
    assert not any(path.exists() for path in old)


def test_the_teachers_laws_are_those_of_the_prompts(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other prompts of the same pictures are asked about anew."""
    laws: list[np.ndarray] = []

    def asked(*values: Any) -> None:
        real, _ = distil.teacher_sets(*values)
        laws.append(np.array(real.logits))
        raise Stopped

    monkeypatch.setattr(folder_module, "teacher_sets", asked)
    for prompts, run, resume in (
        (PROMPTS, "run", True),
        (PROMPTS[::-1], "run", False),
        (PROMPTS[::-1], "new", True),
    ):
        with pytest.raises(Stopped):
            trained(work, prompts, run, resume=resume)
    assert not (laws[0] == laws[1]).all()
    assert (laws[1] == laws[2]).all()


def test_pictures_are_claimed_as_well(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_module, "teacher_sets", stop)
    with pytest.raises(Stopped):
        trained(work, PROMPTS)
    monkeypatch.setattr(folder_module, "given_codes", lambda *_: torch.zeros(len(PROMPTS), 16).long())
    with pytest.raises(DataError, match="other prompts, pictures, weights or settings"):
        trained(work, PROMPTS)


def test_a_folder_without_a_manifest_is_refused_at_once(
    work: Path, folders: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (work / "llamagen" / "manifest.json").unlink()
    words = ["train", "device", "--backbone", str(work / "llamagen"), "--work", str(work / "run")]
    assert main([*words, "--prompts", str(folders / "prompts.txt")]) == CheckpointError.exit_code
    assert "no readable manifest.json" in capsys.readouterr().err
    assert not (work / "run").exists()


def test_a_large_text_encoder_goes_on_where_it_stopped(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(material, "_READ", 2)
    bundle = load_bundle(work / "llamagen")
    assert bundle.text_config.kind == "t5"
    read: list[str] = []
    encode = bundle.text.encode

    def counted(prompt: str) -> Any:
        read.append(prompt)
        if len(read) == 4:
            raise Stopped
        return encode(prompt)

    monkeypatch.setattr(bundle.text, "encode", counted)
    with pytest.raises(Stopped):
        text_encoder(bundle, None, PROMPTS, work)
    made = text_encoder(bundle, None, PROMPTS, work)
    assert read == [*PROMPTS[:4], *PROMPTS[2:]]
    for prompt in PROMPTS:
        assert torch.equal(made.encode(prompt).features, encode(prompt).features)
    # Rows and index that a stop left of different calls are made anew.
    shutil.copy(work / "text" / "features.json", work / "old.json")
    text_encoder(bundle, None, [*PROMPTS, "a house"], work)
    shutil.copy(work / "old.json", work / "text" / "features.json")
    again = text_encoder(bundle, None, PROMPTS, work)
    assert torch.equal(again.encode(PROMPTS[0]).features, encode(PROMPTS[0]).features)


def test_an_unknown_prompt_is_said_before_anything_is_drawn(
    work: Path, folders: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    encode_prompts(PROMPTS[:-1], work / "llamagen", work / "features", dtype="float32")
    words = ["train", "device", "--backbone", str(work / "llamagen"), "--features", str(work / "features")]
    words += ["--prompts", str(folders / "prompts.txt"), "--work", str(work / "run"), "--profile", "tiny"]
    assert main(words) == 2
    assert "only the features of" in capsys.readouterr().err
    assert not (work / "run" / "codes").exists()


@pytest.mark.parametrize("name", ["llamagen", "anole"])
def test_the_teacher_in_parts_is_the_teacher(work: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Laws of a few positions at a time are those of one position after the other, alone."""
    monkeypatch.setattr(teacher_module, "POSITIONS", 5)
    bundle = load_bundle(work / name, dtype="float32")
    codes = torch.randint(bundle.gpt_config.vocab_size, (3, 16), generator=torch.Generator().manual_seed(0))
    features, mask = bank_of(bundle).mixed([0, 2, 3])
    cloud = for_decoding(bundle.model)
    with torch.inference_mode():
        parts = list(guided_parts(cloud, features, mask, codes, 3.0))
        assert [first for first, _ in parts] == [0, 5, 10, 15]
        found = torch.cat([logits for _, logits in parts], dim=1)
    assert found.shape == (3, 16, bundle.gpt_config.vocab_size)
    for row, number in enumerate((0, 2, 3)):
        expected = alone(bundle, PROMPTS[number], codes[row])
        torch.testing.assert_close(found[row], expected, atol=2e-4, rtol=0)
    if name == "llamagen":
        whole = guided_logits(bundle.gpt, features, mask, codes, 3.0)
        torch.testing.assert_close(found, whole, atol=2e-4, rtol=0)
    else:
        assert torch.equal(guided_logits(bundle.model, features, mask, codes, 3.0), found)


def alone(bundle: Bundle, prompt: str, codes: Tensor) -> Tensor:
    """Guided logits of one picture through the engine that serves it."""
    from ciar.cloud.engine import CloudEngine
    from ciar.decoding.strategy import Pass

    engine = CloudEngine(bundle.model)
    text = bundle.text.encode(prompt)
    slot = engine.open(text, None, 3.0, text)
    rows = [slot.prefill]
    for position, token in enumerate(codes[:-1].tolist()):
        rows.append(engine.run(slot, Pass(position, [token], want=1))[0])
    return torch.stack(rows)


def test_codes_that_the_cloud_draws_are_those_of_base(work: Path) -> None:
    bundle = load_bundle(work / "llamagen")
    settings = default_settings(bundle.defaults, "base")
    values: dict[str, Any] = {"captions": bank_of(bundle), "prompts": PROMPTS, "settings": settings}
    said: list[str] = []
    made = drawn_codes(for_decoding(bundle.model), **values, out=work / "codes", batch=4, say=said.append)
    pipe = Pipeline(bundle)
    for i, prompt in enumerate(PROMPTS):
        assert made[i].tolist() == pipe(prompt, strategy="base", seed=i, output_type="tokens").tokens[0]
    assert len(said) == 2
    # All is there: the model is not asked again; other settings begin anew.
    again = drawn_codes(for_decoding(bundle.model), **values, out=work / "codes", say=said.append)
    assert torch.equal(again, made)
    assert len(said) == 2
    values["settings"] = replace(settings, seed=1)
    other = drawn_codes(for_decoding(bundle.model), **values, out=work / "codes", batch=6, say=said.append)
    assert len(said) == 3
    assert torch.equal(
        other[:1], torch.tensor(pipe(PROMPTS[0], strategy="base", seed=1, output_type="tokens").tokens)
    )


def test_a_device_model_starts_from_its_cloud(work: Path) -> None:
    bundle = load_bundle(work / "anole", dtype="float32")
    cloud = dict(bundle.model.state_dict())
    trunk = bundle.family.draft(bundle.gpt_config)
    device = DeviceModel(DeviceConfig(trunk, radius_rank=4, feature_dim=32))
    fresh = device.trunk.layers[0].attention.wqkv.weight[:64].clone()  # type: ignore[union-attr, index]
    start_from(device, bundle.family.seeds(bundle.model))
    block = device.trunk.blocks[0]
    assert torch.equal(device.head.centre.weight, cloud["lm_head.weight"])
    assert torch.equal(device.trunk.tok_embeddings.weight, cloud["model.embed_tokens.weight"])
    last = "model.layers.1."
    assert torch.equal(block.attention.wqkv.weight[64:], cloud[f"{last}self_attn.v_proj.weight"])
    assert torch.equal(block.attention.wqkv.weight[:64], fresh)
    hidden = cloud[f"{last}mlp.gate_proj.weight"].shape[0]
    assert torch.equal(block.feed_forward.w1.weight[:hidden], cloud[f"{last}mlp.gate_proj.weight"])
    assert not block.feed_forward.w2.weight[:, hidden:].any()


def test_pictures_with_captions_become_codes(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    generator = np.random.default_rng(0)
    square = generator.integers(0, 256, (8, 8, 3), dtype=np.uint8)
    wide = np.concatenate([np.zeros((8, 4, 3), np.uint8), square, np.zeros((8, 4, 3), np.uint8)], axis=1)
    for name, pixels in (("a", square), ("b", wide)):
        Image.fromarray(pixels).save(folder / f"{name}.png")
        (folder / f"{name}.txt").write_text(f"the {name}\ncat\n")
    pictures, prompts = captioned_pictures(folder)
    assert prompts == ["the a cat", "the b cat"]
    bundle = load_bundle(work / "llamagen")
    codes = encoded_pictures(bundle, pictures, tmp_path / "encoded", "w")
    images = torch.from_numpy(square).permute(2, 0, 1)[None].float() / 127.5 - 1.0
    with torch.inference_mode():
        expected = bundle.vq.encode(images)[0]
    assert torch.equal(codes[0], expected)
    assert torch.equal(codes[1], expected)  # cropped about the middle
    with pytest.raises(InputError, match="LlamaGen family"):
        encoded_pictures(load_bundle(work / "anole"), pictures, tmp_path / "none")
    # They are kept, as long as the files and the tokenizer are the same.
    shutil.copytree(tmp_path / "encoded", tmp_path / "copy")
    with monkeypatch.context() as patch:
        patch.setattr(material, "_square", stop)
        assert torch.equal(encoded_pictures(bundle, pictures, tmp_path / "encoded", "w"), codes)
        with pytest.raises(Stopped):
            encoded_pictures(bundle, pictures, tmp_path / "encoded", "other")
        os.utime(pictures[0], (1, 1))
        with pytest.raises(Stopped):
            encoded_pictures(bundle, pictures, tmp_path / "copy", "w")
    (folder / "b.txt").unlink()
    with pytest.raises(DataError, match=r"no caption beside b\.png"):
        captioned_pictures(folder)


def test_a_picture_is_read_as_it_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turned as its camera says, what is transparent on white, and no bomb."""
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    turned = Image.fromarray(pixels)
    exif = Image.Exif()
    exif[0x0112] = 6  # the top of the picture is on the right
    turned.save(tmp_path / "turned.png", exif=exif)
    assert (material._square(tmp_path / "turned.png", 8) == np.rot90(pixels, -1)).all()
    hidden = np.dstack([pixels, np.zeros((8, 8), np.uint8)])
    hidden[:4, :, 3] = 255
    Image.fromarray(hidden, "RGBA").save(tmp_path / "hidden.png")
    shown = material._square(tmp_path / "hidden.png", 8)
    assert (shown[:4] == pixels[:4]).all()
    assert (shown[4:] == 255).all()
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    with pytest.raises(DataError, match="too many pixels"):
        material._square(tmp_path / "turned.png", 8)


@pytest.mark.parametrize(
    ("codes", "words"),
    [
        (np.zeros((2, 15), np.int64), r"int64 of \[2, 15\], and 2 prompts need"),
        (np.zeros((2, 16), np.float32), r"float32 of \[2, 16\]"),
        (np.full((2, 16), 128), "codes from 128 to 128"),
        (np.full((2, 16), -1), "codes from -1 to -1"),
        (None, "no array of NumPy"),
        ({"codes": np.zeros((2, 16), np.int64)}, "holds several arrays"),
    ],
)
def test_codes_that_do_not_fit_are_refused(tmp_path: Path, codes: Any, words: str) -> None:
    path = tmp_path / "codes.npy"
    with path.open("wb") as file:
        if codes is None:
            file.write(b"none")
        elif isinstance(codes, dict):
            np.savez(file, **codes)
        else:
            np.save(file, codes)
    with pytest.raises(DataError, match=words):
        given_codes(path, 2, tiny_llamagen.ONE.gpt)


def test_features_and_codes_need_no_text_encoder(
    work: Path, folders: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Features of ciar encode bring the prompts; codes bring the pictures."""
    encode_prompts(PROMPTS, work / "llamagen", work / "features", dtype="float32")
    codes = np.random.default_rng(1).integers(0, 128, (len(PROMPTS), 16))
    np.save(work / "codes.npy", codes)
    words = ["train", "device", "--backbone", str(work / "llamagen"), "--features", str(work / "features")]
    words += ["--codes", str(work / "codes.npy"), "--work", str(work / "run"), "--profile", "tiny"]
    assert main([*words, "--calibrate", "0", "--score", "interval", "--width", "64", "--drifted", "4"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["threshold"]["kind"] == "budget"
    assert not (work / "run" / "codes").exists()
    bundle = load_bundle(work / "llamagen")
    assert bundle.device_model.config.trunk.dim == 64
    # 5 real, 1 held and 4 drifted sequences of 16 positions: 100 codes of 2 bytes and 2 bytes each.
    assert figures["teacher_bytes"] == pytest.approx(10 * 16 * 100 * 4, rel=0.02)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--backbone", "emoji", "--prompts", "prompts.txt"], 2, "ships with ciar"),
        (["--backbone", "llamagen"], 2, "Pass --prompts FILE"),
        (["--backbone", "llamagen", "--prompts", "none.txt"], 3, "none.txt cannot be read"),
        (["--backbone", "llamagen", "--prompts", "prompts.txt", "--score", "learned"], 2, "is not set here"),
        (["--backbone", "llamagen", "--data", ".", "--codes", "c.npy"], 2, "Leave --prompts and --codes out"),
        (["--backbone", "llamagen", "--prompts", "prompts.txt", "--device", "foo"], 2, "not usable here"),
        (["--prompts", "prompts.txt"], 2, "Add --backbone DIR"),
        (["--budget", "0.2"], 2, "--budget is for a folder of ciar convert"),
        (["--batch", "8"], 2, "--batch is for a folder of ciar convert"),
        (["--calibrate", "8"], 2, "--calibrate is for a folder of ciar convert"),
        (["--backbone", "llamagen", "--prompts", "one.txt"], 3, "At least two prompts"),
    ],
)
def test_what_cannot_be_done_is_said(
    work: Path,
    folders: Path,
    words: list[str],
    code: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(work)
    shutil.copy(folders / "prompts.txt", "prompts.txt")
    Path("one.txt").write_text("a cat\n")
    assert main(["train", "device", *words, "--profile", "tiny"]) == code
    err = capsys.readouterr().err
    assert message in err
    assert "unexpected" not in err


def test_a_drafter_of_features_needs_a_device_that_is_there(tmp_path: Path) -> None:
    from ciar.training.eagle import train_eagle

    nothing: Any = dict.fromkeys(("data", "text", "codes", "backbone", "out"), tmp_path)
    with pytest.raises(InputError, match="Device 'foo' is not usable here"):
        train_eagle(**nothing, device="foo")


def test_an_installation_that_fails_leaves_the_folder_whole(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = load_bundle(work / "llamagen")
    device = DeviceModel(DeviceConfig.for_cloud(tiny_llamagen.ONE.gpt, radius_rank=4))  # type: ignore[arg-type]
    before = {path: path.read_bytes() for path in bundle.folder.rglob("*") if path.is_file()}

    def full(*_: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ciar.models.install.file_digest", full)
    with pytest.raises(DataError, match="No space left on device"):
        install_device(bundle, device, bundle.defaults)
    assert {path: path.read_bytes() for path in bundle.folder.rglob("*") if path.is_file()} == before
