"""Random backbones and what they cost: the way at tiny size, and full sizes as ``slow`` targets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_chameleon
import tiny_llamagen
import torch
from tiny import tiny_gpt

from ciar.cli.main import main
from ciar.errors import InputError
from ciar.footprint import footprint, weights_read
from ciar.models import presets
from ciar.models.bundle import load_bundle
from ciar.models.checkpoint import check_manifest
from ciar.models.families import for_decoding
from ciar.models.loading.random import Drawn, write_random
from ciar.pipeline import Pipeline

PROMPTS = ("a red cat", "a dog")


@pytest.fixture
def tiny_presets() -> Iterator[None]:
    before = dict(presets.PRESETS)
    presets.PRESETS.clear()
    presets.PRESETS.update(tiny_llamagen.PRESETS)
    presets.PRESETS[tiny_chameleon.PRESET.name] = tiny_chameleon.PRESET
    yield
    presets.PRESETS.clear()
    presets.PRESETS.update(before)


@pytest.mark.parametrize("name", ["tiny-one", "tiny-anole"])
def test_a_random_backbone_draws(tiny_presets: None, tmp_path: Path, name: str) -> None:
    made = write_random(name, tmp_path / "random", PROMPTS)
    assert made["files"].keys() >= {"gpt.safetensors", "vq.safetensors", "device.safetensors"}
    assert check_manifest(tmp_path / "random") == []
    bundle = load_bundle(tmp_path / "random")
    assert (bundle.name, bundle.dtype) == (f"{name}-random", torch.bfloat16)
    pipe = Pipeline(bundle)
    outs = [pipe(prompt, seed=1, strategy=how) for prompt in PROMPTS for how in ("base", "ciar")]
    assert [len(out.tokens[0]) for out in outs] == [16] * 4
    assert len({tuple(out.tokens[0]) for out in outs[::2]}) == 2  # prompts matter
    # One token of prefix, and 30 % of the picture to ask about.
    assert outs[1].ledgers[0].decided.count("replaced") + outs[1].ledgers[0].decided.count("accepted") == 5
    with pytest.raises(InputError, match="only the features of 2 prompts"):
        pipe("a house", strategy="base")
    again = write_random(name, tmp_path / "again", PROMPTS)
    one, two = (tmp_path / folder / "gpt.safetensors" for folder in ("random", "again"))
    assert one.read_bytes() == two.read_bytes()
    assert again["files"] == made["files"]


def test_drawn_tensors_keep_variance_and_norms_do_nothing() -> None:
    matrix = Drawn("layers.0.w1.weight", (64, 400), 0).read()
    assert float(matrix.std()) == pytest.approx(400**-0.5, rel=0.02)
    assert float(Drawn("tok_embeddings.weight", (64, 400), 0).read().std()) == pytest.approx(1.0, rel=0.02)
    assert Drawn("model.layers.0.self_attn.q_norm.weight", (4, 8), 0).read().unique().tolist() == [1.0]
    assert not Drawn("decoder.conv_in.bias", (8,), 0).read().any()
    assert not torch.equal(matrix, Drawn("layers.1.w1.weight", (64, 400), 0).read())


def test_a_footprint(tiny_presets: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "--random", "tiny-one", "--out", str(tmp_path / "one")]) == 0
    assert "pictures are noise" in capsys.readouterr().err
    assert main(["bench", "--once", "--backbone", str(tmp_path / "one"), "--repeats", "2"]) == 0
    out = capsys.readouterr().out
    found = json.loads(out.splitlines()[-1])
    assert found["weight_bytes"] == matrices(tmp_path / "one")
    assert found["pass_ms"].keys() == {"1", "16"}
    assert min(found["pass_ms"].values()) > 0 < found["copy_ms"]
    # 12 text tokens, 16 of the picture, two rows, keys and values.
    config = tiny_llamagen.ONE.gpt.to_dict()
    assert found["cache_bytes"] == 2 * 2 * config["n_layer"] * config["dim"] * (12 + 16) * 2
    base, ciar = (found["pictures"][name] for name in ("base", "ciar"))
    assert (base["tokens"], base["passes"]) == (16, 16)
    assert 1 < ciar["passes"] < 16
    resident = resident_bytes()
    for one in (base, ciar):
        assert 0.2 * resident < one["peak_bytes"] < 10 * resident
    # The cloud tells its tokens by sixteens, so a picture is broken off at the end of one.
    write_random("tiny-two", tmp_path / "two", PROMPTS)
    short = footprint(str(tmp_path / "two"), strategies=("base",), tokens=5, repeats=1)
    assert (short.total, short.pictures["base"].tokens, short.pictures["base"].passes) == (64, 16, 16)


def resident_bytes() -> int:
    """What this process has in memory now, as the kernel tells it to another tool; pytest alone is 200 MB."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return 300_000_000
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def matrices(folder: Path) -> int:
    """Layers and head: norms do nothing here, and a pass reads a row of the token table."""
    model = load_bundle(folder).gpt
    return sum(p.nbytes for part in (model.layers, model.output) for p in part.parameters() if p.ndim == 2)


@pytest.mark.skipif("fbgemm" not in torch.backends.quantized.supported_engines, reason="no float16 products")
def test_weights_are_counted_as_they_lie_in_memory() -> None:
    """Numbers that fit into float16 are kept in it; a norm that does something, and its matrix, are not."""
    model = tiny_gpt()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.ones(()) if "norm" in name else parameter.half())
        model.blocks[0].ffn_norm.weight.fill_(1.1)
    read = weights_read(for_decoding(model), model)
    wide = [part.weight for part in (model.blocks[0].feed_forward.w1, model.blocks[0].feed_forward.w3)]
    every = [p for part in (model.layers, model.output) for p in part.parameters() if p.ndim == 2]
    expected = sum(p.numel() * 2 for p in every) + sum(p.numel() * 2 for p in wide)
    assert sum(weight.nbytes for weight in read) == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["convert", "--out", "x"], "Name the files to convert"),
        (["convert", "--random", "huge", "--out", "x"], "There is no preset 'huge'"),
        (["convert", "a.pt", "--random", "tiny-one", "--out", "x"], "takes no sources"),
        (["bench", "--tokens", "5"], "is for --once"),
        (["bench", "--once", "--pictures", "4"], "--once makes one picture a strategy"),
        (["bench", "--once", "--device", "foo"], "not usable here"),
        (["encode", "a cat", "--text", "t5", "--out", "x", "--device", "foo"], "not usable here"),
    ],
)
def test_wrong_words(
    tiny_presets: None, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert message in capsys.readouterr().err


# --- full size: minutes and gigabytes ---------------------------------------------------------------


def measured(folder: Path, preset: str, *options: str) -> dict[str, Any]:
    """A random backbone of full size, measured in a process of its own."""
    for words in (
        ["convert", "--random", preset, "--out", str(folder)],
        ["bench", "--once", "--backbone", str(folder), "--threads", "2", *options],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "ciar", *words], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    sys.stderr.write(done.stdout)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("preset", "options", "tokens", "peak"),
    [
        ("llamagen-xl-256", (), 256, 6e9),
        ("llamagen-xl-512", (), 1024, 8e9),
        # The cloud alone makes the first 64 tokens of any picture.
        ("anole-7b", ("--tokens", "128", "--repeats", "1"), 128, 24e9),
    ],
)
def test_full_size(tmp_path: Path, preset: str, options: tuple[str, ...], tokens: int, peak: float) -> None:
    """Whole pictures of the public sizes (128 tokens of Anole's), memory, and passes against a copy."""
    found = measured(tmp_path / preset, preset, *options)
    base, ciar = (found["pictures"][name] for name in ("base", "ciar"))
    assert base["tokens"] == base["passes"] == tokens
    assert ciar["tokens"] >= tokens
    assert ciar["passes"] < base["passes"]
    if not options:
        assert ciar["uploads"] == pytest.approx(0.3, abs=0.01)
    assert ciar["peak_bytes"] < peak
    assert found["pass_over_copy"] < 1.5
