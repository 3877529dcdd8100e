"""Anole's public files, in both layouts, to a backbone that draws; and the files that do not belong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_chameleon
import torch
from safetensors.torch import save_file
from tiny_chameleon import CONFIG, PRESET, VQ, framed, next_logits, public_model, write_hf, write_meta
from torch import Tensor

from ciar.cli.inspect import inspect
from ciar.cloud.engine import CloudEngine
from ciar.cloud.sessions import Cloud
from ciar.decoding.sampling import guide
from ciar.decoding.strategy import Pass, all_strategies
from ciar.errors import CheckpointError, CiarError, InputError
from ciar.models import presets
from ciar.models.bundle import load_bundle
from ciar.models.checkpoint import check_manifest
from ciar.models.loading.convert import convert
from ciar.models.loading.layout import read, understand
from ciar.pipeline import Pipeline
from ciar.serving.config import ServerConfig
from ciar.serving.run import BackgroundServer

Change = Callable[[dict[str, Tensor]], Any]
#: Strategies that need nothing but the cloud model.
ALONE = sorted(s.name for s in all_strategies() if s.training == "none")


@pytest.fixture(autouse=True)
def with_anole(tiny_presets: None) -> None:
    presets.PRESETS[PRESET.name] = PRESET


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf(tmp_path_factory.mktemp("downloads") / "anole-hf")


@pytest.fixture(scope="module")
def meta(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_meta(tmp_path_factory.mktemp("downloads") / "anole")


@pytest.fixture(scope="module")
def folder(hf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    before = dict(presets.PRESETS)
    presets.PRESETS[PRESET.name] = PRESET
    out = tmp_path_factory.mktemp("backbones") / "anole"
    convert([hf], out, dtype="float32")
    presets.PRESETS.clear()
    presets.PRESETS.update(before)
    return out


def greedy(words: str) -> list[int]:
    """The guided greedy picture, by transformers' own class over whole sequences."""
    public = public_model(tiny_chameleon.transformer_tensors())
    codes: list[int] = []
    while len(codes) < CONFIG.tokens:
        rows = [next_logits(public, prompt, codes)[-1] for prompt in (framed(words), [0, 69])]
        codes.append(int(guide(rows[0], rows[1], 3.0).argmax()))
    return codes


def test_a_converted_folder(folder: Path) -> None:
    assert check_manifest(folder) == []
    files = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    weights = {"gpt.safetensors", "vq.safetensors", "text/table.safetensors", "text/tokenizer.json"}
    assert files == weights | {"config.json", "manifest.json"}
    config = json.loads((folder / "config.json").read_text())
    assert (config["family"], config["text"]["kind"]) == ("chameleon", "tokens")
    assert config["origin"]["gpt"] == {"file": "anole-hf", "layout": "Hugging Face"}
    bundle = load_bundle(folder)
    assert (bundle.name, bundle.gpt_config, bundle.vq_config) == ("tiny-anole", CONFIG, VQ)
    assert (bundle.defaults.guidance, bundle.defaults.top_p) == (3.0, 0.9)
    assert (bundle.total, bundle.codes.shape, len(bundle.weights)) == (16, (64, 32), 16)
    with pytest.raises(InputError, match=r"LlamaGen family, and tiny-anole is of the family Chameleon"):
        _ = bundle.gpt


def test_pictures_are_those_of_transformers(folder: Path, hf: Path) -> None:
    """From files to tokens and pixels; converted, and with the files as they are."""
    values: dict[str, Any] = {"strategy": "base", "temperature": 0.0, "seed": 1}
    pipe = Pipeline.from_pretrained(folder)
    out = pipe("a red cat", **values)
    assert out.tokens[0] == greedy("a red cat")
    assert out.images[0].size == (8, 8)
    assert out.ledgers[0].cloud_passes == 16
    assert out.ledgers[0].token_rows == 2 * 16
    direct = Pipeline.from_pretrained("tiny-anole", weights=hf, dtype="float32")
    assert direct("a red cat", **values).tokens == out.tokens
    assert pipe("a dog", **values).tokens != out.tokens
    with pytest.raises(CheckpointError, match="no device model"):
        pipe("a dog", strategy="ciar")


def test_strategies_of_the_cloud_alone(folder: Path) -> None:
    """In this process, and over a real socket: the same tokens; the exact ones draw what base draws."""
    pipe = Pipeline.from_pretrained(folder)
    made = {name: pipe("a red cat", strategy=name, seed=5, output_type="tokens").tokens[0] for name in ALONE}
    assert {"base", "scd", "sjd", "zipar"} <= made.keys()
    assert made["scd"] == made["base"]
    assert all(len(codes) == 16 and 0 <= min(codes) <= max(codes) < 64 for codes in made.values())
    with BackgroundServer(Cloud(load_bundle(folder)), ServerConfig()) as server:
        remote = Pipeline.from_pretrained(folder, cloud=server.url)
        for name, tokens in made.items():
            again = remote("a red cat", strategy=name, seed=5, output_type="tokens")
            assert again.tokens[0] == tokens, name


def test_metas_layout_computes_what_meta_computes(meta: Path, tmp_path: Path) -> None:
    """The rotation of neighbours became that of halves; the tokenizer comes from its own file."""
    made = convert([meta], tmp_path / "out", dtype="float32")
    assert (made["preset"], made["text"]) == ("tiny-anole", "tokens")
    bundle = load_bundle(tmp_path / "out")
    engine = CloudEngine(bundle.model)
    text, codes = bundle.text.encode("a red cat"), [3, 1, 4, 1, 5, 9, 2, 6]
    slot = engine.open(text, None, 1.0, text)
    logits = torch.cat([slot.prefill[None], engine.run(slot, Pass(0, codes))])
    prompt = framed("a red cat")
    ids = prompt + [CONFIG.first_code + code for code in codes]
    expected = tiny_chameleon.meta_logits(tiny_chameleon.meta_tensors(), ids)[len(prompt) - 1 :, 4:68]
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0.0)
    name = "decoder.conv_out.bias"
    assert torch.equal(bundle.image_tokenizer.state_dict()[name], tiny_chameleon.vq_tensors()[name])
    parts = [meta / "models/7b", meta / "tokenizer/vqgan.ckpt", meta / "tokenizer/text_tokenizer.json"]
    convert(parts, tmp_path / "again", "tiny-anole", dtype="float32")
    for name in ("gpt", "vq", "text/table"):
        left, right = ((tmp_path / top / f"{name}.safetensors").read_bytes() for top in ("out", "again"))
        assert left == right


def test_older_exports_with_one_norm_for_all_heads() -> None:
    weights = tiny_chameleon.transformer_tensors()
    name = "model.layers.1.self_attn.q_norm.weight"
    weights[name] = weights[name][:1]
    part = understand(weights)
    assert torch.equal(read(part.tensors[name]), weights[name].expand(4, -1))
    del weights["model.layers.1.self_attn.q_proj.weight"]
    with pytest.raises(CheckpointError, match=r"lacks model\.layers\.1\.self_attn\.q_proj\.weight"):
        understand(weights)


def test_the_decoder_may_come_from_its_own_folder(tmp_path: Path, folder: Path) -> None:
    bare = write_hf(tmp_path / "bare", decoder=False)
    with pytest.raises(InputError, match=r"no tokenizer among the sources.*vqgan\.ckpt"):
        convert([bare], tmp_path / "out")
    (tmp_path / "vqvae").mkdir()
    save_file(tiny_chameleon.vq_tensors(), tmp_path / "vqvae/model.safetensors")
    (tmp_path / "vqvae/config.json").write_text('{"model_type": "chameleon_vqgan"}')
    convert([bare, tmp_path / "vqvae"], tmp_path / "out", dtype="float32")
    assert load_bundle(tmp_path / "out").weights == load_bundle(folder).weights


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("model.norm.weight"), r"missing: model\.norm\.weight\. No preset .*layers 2"),
        (lambda w: w.update(extra=torch.zeros(1)), "unexpected: extra"),
        (lambda w: w.update({"lm_head.weight": torch.zeros(64, 32)}), r"lm_head\.weight is \[64, 32\]"),
        (lambda w: w["lm_head.weight"][4:68].zero_(), "image rows of lm_head.* are empty, so it cannot draw"),
        (lambda w: w["model.norm.weight"].fill_(torch.nan), r"model\.norm\.weight of .*NaN"),
        (lambda w: w.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)}), "quantised"),
        (lambda w: [w.pop(n) for n in list(w) if "decoder.up.0" in n], r"wrong tokenizer.*has 1 levels"),
        (lambda w: w.update({"model.vqmodel.post_quant_conv.bias": torch.ones(3)}), "misshapen: post_q"),
    ],
)  # fmt: skip
def test_a_model_that_is_not_whole(tmp_path: Path, change: Change, message: str) -> None:
    weights = tiny_chameleon.transformer_tensors()
    weights |= {f"model.vqmodel.{name}": value for name, value in tiny_chameleon.vq_tensors().items()}
    change(weights)
    (tmp_path / "hf").mkdir()
    save_file(weights, tmp_path / "hf/model.safetensors")
    tiny_chameleon.write_tokenizer(tmp_path / "hf/tokenizer.json")
    with pytest.raises(CheckpointError, match=message):
        convert([tmp_path / "hf"], tmp_path / "out", "tiny-anole")
    assert not (tmp_path / "out/config.json").exists()


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"swin_norm": True}, "swin_norm is True, and this model has False"),
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps is 1e-06"),
        ({"rope_parameters": {"rope_theta": 5e5}}, "rope_theta is 500000"),
    ],
)
def test_another_network_of_the_same_shapes(tmp_path: Path, facts: dict[str, Any], message: str) -> None:
    source = write_hf(tmp_path / "hf", **facts)
    with pytest.raises(CheckpointError, match=message):
        convert([source], tmp_path / "out")


def test_sources_that_do_not_belong(hf: Path, meta: Path, tmp_path: Path) -> None:
    own = Path(shutil.copytree(hf, tmp_path / "own"))
    (own / "tokenizer.json").unlink()
    with pytest.raises(InputError, match=r"needs its text tokenizer. Add tokenizer\.json"):
        convert([own], tmp_path / "out")
    with pytest.raises(InputError, match="more than one text tokenizer"):
        convert([hf, meta / "tokenizer/text_tokenizer.json"], tmp_path / "out")
    with pytest.raises(InputError, match="more than one transformer"):
        convert([hf, meta], tmp_path / "out")
    names = [*tiny_chameleon.VOCABULARY]
    names[9], names[10] = names[10], names[9]
    tiny_chameleon.write_tokenizer(own / "tokenizer.json", names)
    with pytest.raises(
        CheckpointError, match=r"tokens of .* are not Anole's: IMGIMGFZ is 10 and should be 9"
    ):
        convert([own], tmp_path / "out")
    with pytest.raises(
        CheckpointError, match=r"no transformer of tiny-one: it is transformer of the Chameleon"
    ):
        convert([hf], tmp_path / "out", "tiny-one")
    with pytest.raises(
        InputError, match=r"do not ship with ciar.*ciar convert anole-hf/ --preset tiny-anole"
    ):
        load_bundle("tiny-anole")
    assert not (tmp_path / "out").exists()


def test_damage_in_a_converted_folder(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    save_file({"table": torch.zeros(99, 3)}, copy / "text/table.safetensors")
    with pytest.raises(CheckpointError, match="not the table of this model"):
        _ = load_bundle(copy).text
    config = json.loads((copy / "config.json").read_text())
    for name, value in (("family", "janus"), ("gpt", config["gpt"] | {"text_len": 60})):
        (copy / "config.json").write_text(json.dumps(config | {name: value}))
        with pytest.raises(CiarError, match="does not describe a backbone"):
            load_bundle(copy)


def test_inspect(hf: Path, meta: Path, folder: Path) -> None:
    found = inspect(str(hf))
    assert found["kind"] == "transformer of the Chameleon family (Anole)"
    assert (found["layout"], found["presets"]) == ("Hugging Face", ["tiny-anole"])
    assert found["holds also"] == ["image tokenizer of the Chameleon family (Anole) (fits tiny-anole)"]
    assert found["sizes"] == {"layers": 2, "text_tokens": 104, "dim": 32, "ffn_hidden": 48, "heads": 4}
    assert found["shapes"]["model.layers.{}.self_attn.q_proj.weight"] == "32 x 32 (2 times)"
    found = inspect(str(meta / "models/7b/consolidated.pth"))
    assert (found["layout"], found["presets"]) == ("Meta", ["tiny-anole"])
    found = inspect(str(meta / "tokenizer/vqgan.ckpt"))
    assert (found["wrapper"], found["presets"]) == ("state_dict", ["tiny-anole"])
    assert found["ignored"] == ["encoder.*", "quant_conv.*", "loss.*"]
    assert found["sizes"] == {"levels": 2, "codes": 64, "embed_dim": 32}
    found = inspect(str(folder))
    assert found["gpt.safetensors"]["presets"] == found["vq.safetensors"]["presets"] == ["tiny-anole"]
    assert found["gpt.safetensors"]["layout"] == "ciar"
    assert found["text/table.safetensors"]["kind"] == "token table of a text encoder of ciar"


def test_inspect_says_what_is_missing(tmp_path: Path) -> None:
    weights = tiny_chameleon.transformer_tensors()
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    found = inspect(str(tmp_path / "model.safetensors"))
    assert found["presets"] == "none fits; the nearest is tiny-anole"
    assert found["missing"] == "model.norm.weight"
    assert found["holds also"] == ["no image decoder, which must come from another file"]
