"""A pipeline without models, and ways to run the command line in this process and in another."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from ciar.cli import generate
from ciar.cli.main import main
from ciar.errors import CiarError
from ciar.ledger import Ledger

SOURCE = Path(__file__).parents[2] / "src"


class FakePipeline:
    """Makes grey squares of four tokens, and remembers how it was called."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.loaded: dict[str, Any] = {}
        self.warnings: list[str] = []
        #: What the call raises for a prompt.
        self.failures: dict[str, BaseException] = {}

    def __call__(
        self,
        prompts: str,
        *,
        num_images_per_prompt: int = 1,
        seed: int,
        strategy: str = "ciar",
        callback_on_step_end: Callable[[Any, int, dict[str, Any]], bool | None],
        **settings: Any,
    ) -> SimpleNamespace:
        self.calls.append({"prompt": prompts, "n": num_images_per_prompt, "seed": seed} | settings)
        if prompts in self.failures:
            raise self.failures[prompts]
        count = num_images_per_prompt
        ledgers = []
        for image in range(count):
            ledger = Ledger(tokens=4, cloud_passes=2, token_rows=6, bytes_up=40, bytes_down=30, total_ms=12.5)
            for done, decider in enumerate(("prefix", "device", "device", "replaced"), 1):
                ledger.decided.append(decider)  # type: ignore[arg-type]
                info = {"done": done, "total": 4, "image": image, "images": count, "ledger": ledger}
                assert callback_on_step_end(self, done, info) is not False
            ledgers.append(ledger)
        return SimpleNamespace(
            images=[Image.new("RGB", (8, 8), (image, 0, 0)) for image in range(count)],
            tokens=[[image, 1, 2, 3] for image in range(count)],
            ledgers=ledgers,
            prompts=[prompts] * count,
            seeds=[seed] * count,
            strategies=[strategy] * count,
            warnings=list(self.warnings),
        )


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch) -> FakePipeline:
    fake = FakePipeline()

    def load(backbone: str, **options: Any) -> FakePipeline:
        fake.loaded = {"backbone": backbone} | options
        if isinstance(fake.failures.get("load"), CiarError):
            raise fake.failures["load"]
        return fake

    monkeypatch.setattr(generate, "load_pipeline", load)
    return fake


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CIAR_TOKEN", raising=False)
    return tmp_path


@pytest.fixture
def ciar(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs the command line here: exit code, standard output, standard error."""

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(arguments)
        out, err = capsys.readouterr()
        return code, out, err

    return run


def python(code: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs Python code in a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(SOURCE)} | options.pop("env", {})
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=environment,
        **options,
    )
