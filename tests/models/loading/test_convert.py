"""Public files to a backbone folder, and every file that does not belong is refused with the reason."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from golden_data import tensors
from safetensors.torch import load_file, save_file
from tiny_llamagen import ONE, gpt_tensors, lantern, trainer_file, vq_tensors, write_sources, write_t5
from torch import Tensor

from ciar.errors import CheckpointError, CiarError, DataError, InputError
from ciar.models.bundle import Bundle, load_bundle
from ciar.models.checkpoint import check_manifest
from ciar.models.loading import write
from ciar.models.loading.convert import convert
from ciar.models.loading.open import open_bundle
from ciar.pipeline import Pipeline
from ciar.protocol.messages import Settings

IO = tensors("llamagen_gpt_t120_io")
Change = Callable[[dict[str, Tensor]], Any]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("downloads")
    write_sources(folder)
    return folder


@pytest.fixture
def converted(sources: Path, tmp_path: Path) -> Path:
    convert([sources], tmp_path / "one", dtype="float32", text_dtype="float32")
    return tmp_path / "one"


def test_a_folder_of_downloads_becomes_a_backbone(sources: Path, tmp_path: Path) -> None:
    said: list[str] = []
    made = convert([sources], tmp_path / "one", say=said.append)
    assert (made["preset"], made["dtype"], made["text"]) == ("tiny-one", "bfloat16", "t5")
    assert len(said) == 4
    assert check_manifest(tmp_path / "one") == []
    bundle = load_bundle(tmp_path / "one")
    assert (bundle.name, bundle.gpt_config, bundle.vq_config) == ("tiny-one", ONE.gpt, ONE.vq)
    assert (bundle.defaults.guidance, bundle.defaults.top_k) == (7.5, 100)
    for name, value in gpt_tensors().items():
        assert torch.equal(bundle.gpt.state_dict()[name], value.bfloat16()), name
    assert bundle.vq.decoder.conv_out.weight.dtype == torch.float32
    names = set(vq_tensors()) - {"quantize.codebook_used"}
    assert {name for name in names if torch.equal(bundle.vq.state_dict()[name], vq_tensors()[name])} == names
    assert not [parameter for parameter in bundle.gpt.parameters() if parameter.is_meta]
    assert bundle.gpt.table.shape == (120 + 16, 8, 2)
    assert load_bundle(tmp_path / "one", dtype="float32").gpt.norm.weight.dtype == torch.float32


def test_the_converted_model_gives_the_reference_pictures(converted: Path) -> None:
    """From the file to the token: the golden greedy run, with the golden features put into the folder."""
    bundle = load_bundle(converted)
    from drive import finish_cloud
    from golden_data import left_padded, prompts

    from ciar.cloud.engine import CloudEngine

    for row, text in enumerate(prompts(*left_padded(IO["in/t5_out"], IO["in/t5_mask"]))):
        made, _ = finish_cloud(CloudEngine(bundle.gpt), text, "base", guidance=7.5, temperature=0.0)
        assert made == IO["gen/greedy_cfg7.5"][row].tolist()


def test_pictures_of_the_pipeline(converted: Path, sources: Path) -> None:
    """A converted folder, the files as they are, and the files in another layout draw the same."""
    pipe = Pipeline.from_pretrained(converted)
    values: dict[str, Any] = {"strategy": "base", "seed": 3}
    out = pipe("a red cat", **values)
    assert out.images[0].size == (8, 8)
    assert len(out.tokens[0]) == 16
    direct = Pipeline.from_pretrained("tiny-one", weights=sources, dtype="float32")
    assert direct.bundle.weights == ""
    named = [sources / "stage1.pt", str(sources / "vq_t2i.pt"), sources / "flan-t5"]
    again = Pipeline.from_pretrained("tiny-one", weights=named, dtype="float32")
    direct.bundle.text.dtype = again.bundle.text.dtype = torch.float32  # type: ignore[attr-defined]
    assert direct("a red cat", **values).tokens == out.tokens == again("a red cat", **values).tokens
    assert pipe("a blue car", **values).tokens != out.tokens
    with pytest.raises(CheckpointError, match=r"no device model 'device'.*--strategy base"):
        pipe("a red cat", strategy="ciar")


def test_two_layouts_make_the_same_folder(sources: Path, tmp_path: Path) -> None:
    hf = tmp_path / "hf"
    hf.mkdir()
    save_file(lantern(gpt_tensors()), hf / "model.safetensors")
    (hf / "config.json").write_text('{"model_type": "llama", "rms_norm_eps": 1e-6}')
    for name, transformer in (("a", sources / "stage1.pt"), ("b", hf)):
        convert([transformer, sources / "vq_t2i.pt"], tmp_path / name, "tiny-one")
    assert (tmp_path / "a/gpt.safetensors").read_bytes() == (tmp_path / "b/gpt.safetensors").read_bytes()
    assert load_bundle(tmp_path / "b").gpt_config.norm_eps == 1e-5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("norm.weight"), r"missing: norm\.weight\. No preset would fit: .* layers 2"),
        (lambda w: w.pop("cls_embedding.uncond_embedding"), r"missing: cls_embedding\.uncond_embedding"),
        (lambda w: w.update(extra=torch.zeros(1)), "unexpected: extra"),
        (lambda w: w.update({"norm.weight": torch.ones(5)}), r"misshapen: norm\.weight is \[5\] and should"),
        (lambda w: w.update({f"x{i:02}": torch.zeros(1) for i in range(13)}), "x09 and 3 more"),
        (lambda w: w.update({"norm.weight": torch.ones(32, dtype=torch.int8)}), "quantised.*is int8"),
        (lambda w: w.update({"norm.weight": torch.full((32,), torch.nan)}), r"norm\.weight of .*NaN"),
        (lambda w: w["cls_embedding.uncond_embedding"].zero_(), "null caption .* is empty"),
        (lambda w: w["cls_embedding.uncond_embedding"].fill_(torch.inf), "null caption .* not finite"),
    ],
)
def test_a_transformer_that_is_not_whole(sources: Path, tmp_path: Path, change: Change, message: str) -> None:
    weights = gpt_tensors()
    change(weights)
    torch.save(weights, tmp_path / "stage1.pt")
    with pytest.raises(CheckpointError, match=message):
        convert([tmp_path / "stage1.pt", sources / "vq_t2i.pt"], tmp_path / "out")
    assert not (tmp_path / "out/config.json").exists()
    with pytest.raises(CheckpointError):
        _ = open_bundle("tiny-one", [tmp_path / "stage1.pt", sources / "vq_t2i.pt"]).gpt


def half_codebook(weights: dict[str, Tensor]) -> None:
    weights["quantize.embedding.weight"] = weights["quantize.embedding.weight"][:64]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("vq_ds16_c2i.pt", lambda w: None, r"wrong tokenizer.*class-conditional.*needs vq_t2i\.pt"),
        ("vq.pt", half_codebook, "wrong tokenizer.*has 64 codes and should have 128"),
        ("vq.pt", lambda w: w.pop("quant_conv.bias"), r"missing: quant_conv\.bias"),
        ("vq.pt", lambda w: (w.clear(), w.update({"decoder.mid.block_1.norm1.weight": torch.ones(1)})),
         "wrong tokenizer.*Chameleon"),
    ],
)  # fmt: skip
def test_the_wrong_tokenizer(sources: Path, tmp_path: Path, name: str, change: Change, message: str) -> None:
    weights = vq_tensors()
    change(weights)
    torch.save({"model": weights}, tmp_path / name)
    with pytest.raises(CheckpointError, match=message):
        convert([sources / "stage1.pt", tmp_path / name], tmp_path / "out")


def test_the_stage_is_told_or_asked_for(sources: Path, tmp_path: Path) -> None:
    vq = sources / "vq_t2i.pt"
    torch.save(gpt_tensors(), tmp_path / "weights.pt")
    with pytest.raises(InputError, match=r"fits tiny-one and tiny-two.*--preset"):
        convert([tmp_path / "weights.pt", vq], tmp_path / "out")
    with pytest.raises(InputError, match=r"no preset 'tiny'\. Known: tiny-one, tiny-two"):
        convert([tmp_path / "weights.pt", vq], tmp_path / "out", "tiny")
    with pytest.raises(CheckpointError, match=r"is of stage 1 .* tiny-two is of stage 2.*--preset tiny-one"):
        convert([sources / "stage1.pt", vq], tmp_path / "out", "tiny-two")
    torch.save(trainer_file(gpt_tensors(), image_size=16), tmp_path / "trainer.pt")
    assert convert([tmp_path / "trainer.pt", vq], tmp_path / "two")["preset"] == "tiny-two"
    assert load_bundle(tmp_path / "two").total == 64
    torch.save(gpt_tensors(), tmp_path / "x_stage2_512.pt")
    both = [sources / "stage1.pt", tmp_path / "x_stage2_512.pt", vq]
    with pytest.raises(InputError, match="more than one transformer"):
        convert(both, tmp_path / "out")
    assert convert(both, tmp_path / "picked", "tiny-two")["preset"] == "tiny-two"


def test_a_transformer_of_no_preset(sources: Path, tmp_path: Path) -> None:
    other = {
        "tok_embeddings.weight": torch.zeros(7, 4),
        "cls_embedding.cap_proj.fc1.weight": torch.zeros(4, 4),
    }
    torch.save(other, tmp_path / "other.pt")
    with pytest.raises(
        CheckpointError, match=r"fits no preset: .*layers 0, dim 4, codes 7.*tiny-one, tiny-two"
    ):
        convert([tmp_path / "other.pt", sources / "vq_t2i.pt"], tmp_path / "out")


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (["vq_t2i.pt"], r"no transformer among the sources.*stage1\.pt or stage2\.pt"),
        (["stage1.pt"], r"no tokenizer among the sources.*vq_t2i\.pt"),
        (["stage1.pt", "vq_t2i.pt", "flan-t5/model-00001-of-00002.safetensors"], "T5|unknown"),
        (["stage1.pt", "vq_t2i.pt", "empty"], "holds nothing that a backbone is made of"),
        (["stage1.pt", "vq_t2i.pt", "nowhere.pt"], "does not exist"),
        (["stage1.pt", "vq_t2i.pt", "flan-t5", "again"], "more than one text encoder"),
    ],
)
def test_what_is_missing_or_too_much(sources: Path, tmp_path: Path, chosen: list[str], message: str) -> None:
    work = Path(shutil.copytree(sources, tmp_path / "work"))
    (work / "empty").mkdir()
    shutil.copytree(work / "flan-t5", work / "again")
    with pytest.raises(CiarError, match=message):
        convert([work / name for name in chosen], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_folder_to_write(sources: Path, converted: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"is not empty\. Pass --force"):
        convert([sources], converted)
    with pytest.raises(InputError, match="backbone folder already"):
        convert([converted], tmp_path / "again")
    digest = load_bundle(converted).weights
    convert([sources], converted, force=True)
    assert load_bundle(converted).weights != digest
    assert check_manifest(converted) == []
    (tmp_path / "own").mkdir()
    (tmp_path / "own/letter.txt").write_text("dear")
    with pytest.raises(DataError, match="something else"):
        convert([sources], tmp_path / "own", force=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="is a file"):
        convert([sources], tmp_path / "file")
    with pytest.raises(InputError, match="cannot be stored in 'float16'"):
        convert([sources], tmp_path / "half", dtype="float16")


def test_no_room(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ciar.models.loading.staging as module

    class Usage:
        free = 10

    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: Usage)
    with pytest.raises(DataError, match=r"GB free\. Make room"):
        convert([sources], tmp_path / "out")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_conversion_that_fails_leaves_the_old_backbone(
    sources: Path, converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN is found while writing, room is looked for before: the folder is what it was either way."""
    (converted / "notes.txt").write_text("mine")
    before = contents(converted)
    broken = gpt_tensors()
    broken["norm.weight"][0] = torch.nan
    torch.save({"model": broken}, tmp_path / "stage1.pt")
    with pytest.raises(CheckpointError, match=r"norm\.weight .* NaN"):
        convert([tmp_path / "stage1.pt", sources / "vq_t2i.pt"], converted, force=True)
    assert contents(converted) == before
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 10}))
        with pytest.raises(DataError, match="Make room"):
            convert([sources], converted, force=True)
    assert contents(converted) == before
    # The new one replaces what was of the old one, and nothing else.
    convert([sources / "stage1.pt", sources / "vq_t2i.pt"], converted, force=True)
    assert contents(converted).keys() == {
        "gpt.safetensors", "vq.safetensors", "config.json", "manifest.json", "notes.txt",
    }  # fmt: skip
    assert check_manifest(converted) == []


def test_an_interrupted_conversion_can_be_repeated(sources: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def interrupt(words: str) -> None:
        if "text encoder" in words:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert([sources], out, say=interrupt)
    assert not out.exists()
    # A process that was killed could not clean up.
    (out / ".partial" / "text").mkdir(parents=True)
    (out / ".partial" / "gpt.safetensors.partial").write_bytes(b"half")
    convert([sources], out)
    assert check_manifest(out) == []
    assert not (out / ".partial").exists()


def test_without_a_text_encoder(sources: Path, tmp_path: Path) -> None:
    convert([sources / "stage1.pt", sources / "vq_t2i.pt"], tmp_path / "bare")
    bundle = load_bundle(tmp_path / "bare")
    assert bundle.weights == ""
    with pytest.raises(CheckpointError, match="has no text encoder"):
        Pipeline(bundle)("a cat", strategy="base")


def test_the_wrong_text_encoder(sources: Path, tmp_path: Path) -> None:
    small = write_t5(tmp_path / "small", d_model=16)
    with pytest.raises(CheckpointError, match=r"wrong text encoder: its features are 16 wide .* reads 24"):
        convert([sources / "stage1.pt", sources / "vq_t2i.pt", small], tmp_path / "out")


def test_from_pretrained_says_what_to_do(tmp_path: Path, sources: Path) -> None:
    with pytest.raises(InputError, match=r"do not ship with ciar.*ciar convert stage1\.pt vq_t2i\.pt"):
        Pipeline.from_pretrained("tiny-one")
    with pytest.raises(InputError, match="is a file, and a backbone is a folder"):
        Pipeline.from_pretrained(sources / "stage1.pt")
    with pytest.raises(InputError, match="weights are for a preset"):
        Pipeline.from_pretrained("emoji", weights=sources)
    with pytest.raises(InputError, match="cannot run in 'float16'"):
        Pipeline.from_pretrained("tiny-one", weights=sources, dtype="float16")


def test_a_file_is_written_tensor_by_tensor(tmp_path: Path) -> None:
    """The writer against the library's reader, and the digest against the file's."""
    values = {"b": torch.randn(3, 5), "a": torch.randn(7), "c": torch.tensor(2.5)}
    for dtype in (torch.float32, torch.bfloat16):
        path = tmp_path / "w.safetensors"
        digest = write.write_tensors(path, values, dtype)
        assert {n: v.dtype for n, v in load_file(path).items()} == dict.fromkeys("abc", dtype)
        for name, value in load_file(path).items():
            assert torch.equal(value, values[name].to(dtype))
        assert digest == write.tensors_digest(values, dtype)
        from ciar.models.checkpoint import file_digest

        assert digest == file_digest(path)
    assert [p.name for p in tmp_path.iterdir()] == ["w.safetensors"]


def anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="counts memory by /proc")
@pytest.mark.parametrize("container", ["folder", "pt"])
def test_weights_are_mapped_and_not_copied(tmp_path: Path, container: str) -> None:
    """Loading 64 MB of the right type takes next to no memory of its own."""
    from ciar.models.checkpoint import build_from, read_tensors
    from ciar.models.loading.read import open_file

    big = torch.nn.Linear(4096, 4096, bias=False)
    path = tmp_path / ("w.safetensors" if container == "folder" else "w.pt")
    state = big.state_dict()
    save_file(state, path) if container == "folder" else torch.save({"model": state}, path)
    del big, state
    before = anonymous_bytes()
    tensors_of = read_tensors(path) if container == "folder" else open_file(path).tensors
    model = build_from(lambda: torch.nn.Linear(4096, 4096, bias=False), tensors_of, path)
    assert model.weight.shape == (4096, 4096)
    assert float(model.weight.detach().sum()) != 0.0  # every page is read
    assert anonymous_bytes() - before < 16e6


def test_prompts_of_3_40_and_120_text_tokens_in_one_batch(converted: Path) -> None:
    """Each picture of a batch has the tokens of its lone run (float32)."""
    from ciar.decoding.batch import Batch
    from ciar.decoding.strategy import get_strategy
    from ciar.intervals.thresholds import ThresholdConfig

    bundle = load_bundle(converted)
    prompts = ["red cat", " ".join(["fox", "house", "a"] * 13), " ".join(["blue", "dog", "on"] * 40)[:-3]]
    texts = [bundle.text.encode(prompt) for prompt in prompts]
    assert [int(text.mask.sum()) for text in texts] == [3, 40, 120]
    settings = [
        Settings("base", seed=seed, guidance=7.5, top_k=100, window=bundle.defaults.window)
        for seed in (1, 2, 3)
    ]
    made = Batch(
        bundle.gpt,
        None,
        torch.stack([text.features for text in texts]),
        torch.stack([text.mask for text in texts]),
        settings,
        get_strategy("base"),
        [ThresholdConfig("fixed", value=1.0).start(16) for _ in texts],
    ).run()
    pipe = Pipeline(Bundle(converted))
    for prompt, own, picture in zip(prompts, settings, made, strict=True):
        alone = pipe(prompt, strategy="base", seed=own.seed, output_type="tokens")
        assert alone.tokens[0] == picture.tokens
    assert len({tuple(picture.tokens) for picture in made}) == 3


def test_config_names_the_origin(converted: Path) -> None:
    config = json.loads((converted / "config.json").read_text())
    assert config["origin"]["gpt"] == {"file": "stage1.pt", "layout": "LlamaGen"}
    assert config["text"]["kind"] == "t5"
    assert len(config["text"]["encoder"]) == 64
