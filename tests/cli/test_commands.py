"""``doctor``, ``inspect``, ``strategies``, ``serve`` and ``bench``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save_file

from ciar.cli import doctor, serve
from ciar.decoding.strategy import all_strategies
from ciar.models import bundle as bundle_module
from ciar.models.checkpoint import write_manifest
from ciar.models.gpt import GPTConfig
from ciar.models.vq import VQConfig

Ciar = Callable[..., tuple[int, str, str]]


@pytest.fixture
def backbone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of weights that is listed as shipped under the name ``small``."""
    monkeypatch.setattr(bundle_module, "EMBEDDED", folder / "weights")
    small = folder / "weights" / "small"
    bundle_module.write_config(small, "small", GPTConfig(), VQConfig(), {}, bundle_module.Defaults())
    save_file({"a": np.zeros((2, 3), np.float32), "b": np.zeros(5, np.int8)}, small / "gpt.safetensors")
    write_manifest(small)
    return small


def test_doctor_when_all_is_well(ciar: Ciar, backbone: Path) -> None:
    code, out, err = ciar("doctor", "--backbone", "small")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    for subject in ("ciar", "python", "torch", "torch threads", "weights of small", "extra [serve]"):
        assert any(line.startswith(("ok", "--")) and subject in line for line in lines)
    assert 'Try: ciar generate "' in out
    assert "To do" not in out


def test_doctor_finds_damaged_and_missing_weights(ciar: Ciar, backbone: Path) -> None:
    content = bytearray((backbone / "gpt.safetensors").read_bytes())
    content[-1] ^= 1
    (backbone / "gpt.safetensors").write_bytes(content)
    code, out, err = ciar("doctor", "--backbone", "small")
    assert code == 1
    assert "gpt.safetensors differs" in out
    assert "To do: weights of small: install ciar again" in out
    assert "ciar generate" not in out
    assert err.endswith("for: weights of small\n")
    (backbone / "gpt.safetensors").unlink()
    assert "gpt.safetensors is missing" in ciar("doctor", "--backbone", "small")[1]
    (backbone / "manifest.json").unlink()
    assert "no readable manifest.json" in ciar("doctor", "--backbone", "small")[1]
    code, out, _ = ciar("doctor", "--backbone", "other")
    assert code == 1
    assert "small" in out  # the known names


def test_doctor_without_a_package(ciar: Ciar, backbone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = doctor.version_of
    gone = ("tokenizers", "uvicorn")
    monkeypatch.setattr(doctor, "version_of", lambda name: None if name in gone else real(name))
    code, out, _ = ciar("doctor", "--backbone", "small")
    assert code == 1
    assert "To do: tokenizers: pip install tokenizers" in out
    assert "If you want it: extra [serve]: pip install 'ciar[serve]' for ciar serve" in out


def test_inspect_weights_and_backbone(ciar: Ciar, backbone: Path) -> None:
    code, out, _ = ciar("inspect", str(backbone / "gpt.safetensors"), "--json")
    assert code == 0
    found = json.loads(out)
    assert (found["tensors"], found["parameters"], found["types"]) == (2, 11, ["F32", "I8"])
    listed = json.loads((backbone / "manifest.json").read_text())["gpt.safetensors"]
    assert {"sha256": found["sha256"], "bytes": found["bytes"]} == listed
    for name in ("small", str(backbone)):
        whole = json.loads(ciar("inspect", name, "--json")[1])
        assert whole["gpt.safetensors"] == found
        assert whole["config.json"]["name"] == "small"
    assert "parameters" in ciar("inspect", "small")[1]


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("no.safetensors", None, 4),
        ("bad.safetensors", b"\xff" * 64, 4),
        ("long.safetensors", (2**62).to_bytes(8, "little") + b"{}", 4),
        ("no.png", None, 3),
        ("bad.png", b"\x89PNG\r\n\x1a\nxxxx", 3),
        ("nothing", None, 2),
    ],
)
def test_inspect_refuses(ciar: Ciar, folder: Path, name: str, content: bytes | None, code: int) -> None:
    if content is not None:
        (folder / name).write_bytes(content)
    got, out, err = ciar("inspect", name)
    assert (got, out) == (code, "")
    assert err.startswith("error: ")
    assert "unexpected" not in err


def test_inspect_of_a_picture_by_someone_else(ciar: Ciar, folder: Path) -> None:
    Image.new("RGB", (4, 4)).save("plain.png")
    code, _, err = ciar("inspect", "plain.png")
    assert code == 3
    assert "carries no settings" in err


def test_strategies_lists_all(ciar: Ciar) -> None:
    code, out, err = ciar("strategies")
    assert (code, err) == (0, "")
    names = [line.split()[0] for line in out.splitlines()[1:]]
    assert names == [one.name for one in all_strategies()]
    assert {"base", "lossless", "ciar", "device-only"} <= set(names)
    listed = json.loads(ciar("strategies", "--json")[1])["strategies"]
    assert [one["name"] for one in listed] == names
    assert {one["name"]: one["exact"] for one in listed}["lossless"] is True


def fake_modules(monkeypatch: pytest.MonkeyPatch, **modules: SimpleNamespace) -> None:
    for name, content in modules.items():
        module = ModuleType(name.replace("__", "."))
        module.__dict__.update(vars(content))
        monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_serve_hands_its_options_over(
    ciar: Ciar, folder: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    served: list[Any] = []

    def run_server(cloud: Any, host: str, port: int, config: Any, on_ready: Callable[..., None]) -> None:
        served.append((cloud, host, port, config))
        on_ready("ws://127.0.0.1:4321")

    fake_modules(
        monkeypatch,
        ciar__cloud__sessions=SimpleNamespace(
            Cloud=SimpleNamespace(from_pretrained=lambda name, device: (name, device))
        ),
        ciar__serving__run=SimpleNamespace(ServerConfig=dict, serve=run_server),
    )
    words = ["--host", host, "--port", "0", "--backbone", "b", "--max-sessions", "3", "--idle-timeout", "0.5"]
    code, out, err = ciar("serve", *words, "--token", "secret")
    assert (code, out) == (0, "")
    assert served == [(("b", "cpu"), host, 0, {"max_sessions": 3, "token": "secret", "idle_timeout_s": 0.5})]
    assert "on ws://127.0.0.1:4321" in err
    assert "secret" not in err
    assert "warning" not in err


def test_serve_takes_the_token_from_the_environment_and_warns_without(
    ciar: Ciar, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens: list[str | None] = []
    monkeypatch.setattr(serve, "serve_cloud", lambda options, token: tokens.append(token))
    _, _, err = ciar("serve", "--host", "0.0.0.0")
    assert "warning: anyone who reaches 0.0.0.0 is served" in err
    monkeypatch.setenv("CIAR_TOKEN", "v")
    _, _, err = ciar("serve", "--host", "0.0.0.0")
    assert "warning" not in err
    assert tokens == [None, "v"]
    assert ciar("serve", "--token", "")[0] == 2


def test_serve_without_its_extra(ciar: Ciar, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "find_spec", lambda name: None)
    code, _, err = ciar("serve")
    assert code == 2
    assert "pip install 'ciar[serve]'" in err


@pytest.mark.parametrize(
    "words",
    [
        ["--port", "65536"],
        ["--port", "-1"],
        ["--max-sessions", "0"],
        ["--idle-timeout", "0"],
        ["--idle-timeout", "nan"],
    ],
)
def test_serve_ranges(ciar: Ciar, words: list[str]) -> None:
    code, out, err = ciar("serve", *words)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {words[0]}: ")


def test_bench_prints_a_table_and_then_one_json_line(ciar: Ciar, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def bench(backbone: str, **options: Any) -> SimpleNamespace:
        options.pop("note")("warming up")
        asked.append((backbone, options))
        return SimpleNamespace(table=lambda: "a  b\n1  2", to_dict=lambda: {"ratio": 2.0})

    fake_modules(monkeypatch, ciar__bench=SimpleNamespace(bench=bench))
    code, out, err = ciar("bench", "--pictures", "2", "--repeats", "5", "--seed", "9", "--threads", "1")
    assert (code, err) == (0, "warming up\n")
    assert out.splitlines()[:2] == ["a  b", "1  2"]
    assert json.loads(out.splitlines()[-1]) == {"ratio": 2.0}
    assert asked == [("emoji", {"device": "cpu", "pictures": 2, "repeats": 5, "seed": 9, "threads": 1})]
