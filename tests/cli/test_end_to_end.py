"""The command line on real models: tiny ones with random weights, the whole path."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

Ciar = Callable[..., tuple[int, str, str]]


def images(ciar: Ciar, *words: str) -> list[dict[str, Any]]:
    code, out, err = ciar("generate", *words, "--json", "--force")
    assert code == 0, err
    found: list[dict[str, Any]] = json.loads(out)["images"]
    return found


@pytest.mark.parametrize("strategy", ["base", "lossless", "ciar", "device-only"])
def test_every_strategy_makes_a_picture(ciar: Ciar, folder: Path, tiny_folder: Path, strategy: str) -> None:
    words = ["a red car", "--seed", "7", "--strategy", strategy, "--backbone", str(tiny_folder)]
    (made,) = images(ciar, *words, "--heatmap")
    ledger = made["ledger"]
    assert (made["prompt"], made["seed"], made["strategy"]) == ("a red car", 7, strategy)
    assert len(made["tokens"]) == ledger["tokens"] == sum(ledger["decided"].values()) == 16
    for name in ("file", "heatmap"):
        with Image.open(made[name]) as picture:
            assert picture.width >= 16
    assert images(ciar, *words)[0]["tokens"] == made["tokens"]


def test_a_batch_is_its_lone_runs(ciar: Ciar, folder: Path, tiny_folder: Path) -> None:
    common = ["--seed", "3", "--backbone", str(tiny_folder)]
    together = images(ciar, "a cat", "a dog", "--n", "2", *common)
    alone = [images(ciar, prompt, "--n", "2", *common) for prompt in ("a cat", "a dog")]
    assert [one["tokens"] for one in together] == [one["tokens"] for pair in alone for one in pair]
    assert len({tuple(one["tokens"]) for one in together}) == 4


def test_a_server_gives_the_same_tokens(ciar: Ciar, folder: Path, tiny_folder: Path) -> None:
    from ciar.cloud.sessions import Cloud
    from ciar.serving.run import BackgroundServer, ServerConfig

    words = ["a smiling cat", "--seed", "5", "--backbone", str(tiny_folder)]
    here = images(ciar, *words)
    with BackgroundServer(Cloud.from_pretrained(tiny_folder), ServerConfig(token="secret")) as server:
        there = images(ciar, *words, "--cloud", server.url, "--token", "secret")
        code, out, err = ciar("generate", *words, "--cloud", server.url, "--token", "wrong", "--force")
        assert (code, out) == (6, "")
        assert err.count("\n") == 1
    assert there[0]["tokens"] == here[0]["tokens"]
    assert there[0]["ledger"]["bytes_up"] > 0
    code, out, err = ciar("generate", *words, "--cloud", server.url, "--force")
    assert (code, out) == (6, "")
    assert err.startswith("error: ")


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        ("cat " * 2500, 0),
        ("a \x00 cat", 0),
        ("😸", 0),
        ("قطة", 2),
        ("   ", 2),
        ("\u200b\u200e", 2),
    ],
    ids=["long", "nul", "emoji", "right-to-left", "blank", "invisible"],
)
def test_strange_prompts(ciar: Ciar, folder: Path, tiny_folder: Path, prompt: str, code: int) -> None:
    got, _, err = ciar("generate", prompt, "--seed", "1", "--backbone", str(tiny_folder))
    assert got == code, err
    assert "unexpected" not in err
    if len(prompt) > 2000:
        assert "warning: " in err
        assert "2000 characters" in err


def test_damaged_weights(ciar: Ciar, folder: Path, tiny_folder: Path) -> None:
    copy = folder / "copy"
    shutil.copytree(tiny_folder, copy)
    (copy / "gpt.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    code, _, err = ciar("generate", "a cat", "--seed", "1", "--backbone", str(copy))
    assert code == 4
    assert "Git LFS" in err
    code, _, err = ciar("generate", "a cat", "--seed", "1", "--backbone", "nowhere")
    assert code == 2
    assert "nowhere" in err
    assert not list(folder.glob("*.png"))


def test_an_unknown_strategy_and_device(ciar: Ciar, folder: Path, tiny_folder: Path) -> None:
    words = ["generate", "a cat", "--backbone", str(tiny_folder)]
    code, _, err = ciar(*words, "--strategy", "loseless")
    assert code == 2
    assert "lossless" in err
    code, _, err = ciar(*words, "--device", "toaster")
    assert code == 2
    assert "toaster" in err
