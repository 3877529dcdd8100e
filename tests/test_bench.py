"""The benchmark: that both sides do the same work, and that its figures are what they are called."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_run import write_wide_bundle
from torch import Tensor

import ciar.bench as bench_module
from ciar.bench import STRATEGIES, BenchResult, bench, peak_memory, reference_loop
from ciar.errors import InputError
from ciar.models.bundle import Bundle, load_bundle
from ciar.pipeline import Pipeline
from ciar.training.teacher import guided_logits

#: Prompts of 1, 2 and 8 word pieces.
PROMPTS = ["cat", "a dog", "a red car with a smiling dog sunglasses"]


@pytest.fixture
def bundle(tiny_folder: Path) -> Bundle:
    """A bundle of its own, since tests change its defaults."""
    return load_bundle(tiny_folder)


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench") / "wide"
    write_wide_bundle(folder)
    return folder


# --- the reference loop -------------------------------------------------------------------------------


def test_reference_tokens_depend_on_the_seed_alone(bundle: Bundle) -> None:
    tokens = reference_loop(bundle, "a cat", 1)
    assert len(tokens) == 16
    assert all(isinstance(token, int) and 0 <= token < 64 for token in tokens)
    torch.manual_seed(0)  # nothing may read the global generator
    assert reference_loop(bundle, "a cat", 1) == tokens
    assert reference_loop(bundle, "a cat", 2) != tokens


@pytest.mark.parametrize("guidance", [1.0, 3.0])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_reference_does_the_work_of_base(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, prompt: str, guidance: float
) -> None:
    """Without chance, the growing cache and the static one give the same picture, token for token."""
    bundle.defaults = replace(bundle.defaults, guidance=guidance)
    ours = Pipeline(bundle)(prompt, seed=0, strategy="base", temperature=0.0, output_type="tokens").tokens[0]
    assert len(set(ours)) > 4

    def likeliest(law: Tensor, count: int, generator: torch.Generator) -> Tensor:
        assert count == 1
        torch.testing.assert_close(law.sum(), torch.tensor(1.0))
        return law.argmax(-1, keepdim=True)

    monkeypatch.setattr(torch, "multinomial", likeliest)
    assert reference_loop(bundle, prompt, 0) == ours


def test_the_reference_draws_from_the_guided_top_k(bundle: Bundle) -> None:
    """Its first token follows the guided law of the whole-sequence model, cut to the k most likely."""
    bundle.defaults = replace(bundle.defaults, top_k=3)
    text = bundle.text.encode("a cat")
    codes = torch.zeros(1, 16, dtype=torch.long)
    guided = guided_logits(bundle.gpt, text.features[None], text.mask[None], codes, 3.0)[0, 0]
    top = guided.topk(3)
    law = top.values.softmax(-1)
    rounds = 150
    drawn = [_first_token(bundle, seed) for seed in range(rounds)]
    assert set(drawn) <= set(top.indices.tolist())
    for code, p in zip(top.indices.tolist(), law.tolist(), strict=True):
        spread = (p * (1.0 - p) / rounds) ** 0.5
        assert drawn.count(code) / rounds == pytest.approx(p, abs=4.0 * spread + 1e-9)


def _first_token(bundle: Bundle, seed: int) -> int:
    """Stops the loop after its first draw."""

    class Drawn(Exception):
        pass

    draw = torch.multinomial
    found: list[int] = []

    def once(law: Tensor, count: int, generator: torch.Generator) -> Tensor:
        found.append(int(draw(law, count, generator=generator)))
        raise Drawn

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "multinomial", once)
        with pytest.raises(Drawn):
            reference_loop(bundle, "a cat", seed)
    return found[0]


# --- figures ------------------------------------------------------------------------------------------


def row(**figures: float) -> dict[str, float]:
    names = ("total_ms", "text_ms", "cloud_ms", "device_ms", "other_ms", "pixels_ms", "loop_ms", "passes")
    return dict.fromkeys((*names, "rows", "uploads"), 0.0) | figures


def test_ratios_come_from_the_rows() -> None:
    rows = {
        "base": row(total_ms=300.0, loop_ms=200.0),
        "ciar": row(total_ms=100.0),
        "device-only": row(total_ms=60.0),
    }
    result = BenchResult(
        rows, reference_ms=500.0, cloud_step_ms=8.0, device_step_ms=1.0, peak_bytes=123_000_000
    )
    assert result.ratios == {
        "base_over_reference_tokens_per_s": 2.5,
        "device_step_over_cloud_step": 0.125,
        "ciar_speedup_over_base": 3.0,
        "device-only_speedup_over_base": 5.0,
    }
    document = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert document["ratios"] == result.ratios
    assert document["strategies"] == rows
    assert document["peak_bytes"] == 123_000_000
    lines = {line[:40].strip(): line[40:].strip() for line in result.table().splitlines()[4:]}
    assert lines["ciar speedup over base"] == "3.00"
    assert lines["peak memory of ciar generate, MB"] == "123"


def test_figures_are_medians_and_sides_take_turns(wide_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[tuple[str, int]] = []

    def one(pipe: Pipeline, prompt: str, seed: int, strategy: str) -> dict[str, float]:
        turns.append((strategy, seed))
        spent = float([1, 2, 9, 4, 1, 8][(len(turns) - 1) // len(STRATEGIES)])
        return row(total_ms=spent, loop_ms=spent, cloud_ms=32.0, device_ms=8.0, passes=16.0)

    monkeypatch.setattr(bench_module, "_one", one)
    monkeypatch.setattr(bench_module, "peak_memory", lambda backbone, seed: 7)
    notes: list[str] = []
    result = bench(str(wide_folder), pictures=2, repeats=3, seed=5, note=notes.append)
    assert turns == [(name, seed) for _ in range(3) for seed in (5, 6) for name in STRATEGIES]
    assert {name: figures["total_ms"] for name, figures in result.rows.items()} == dict.fromkeys(
        STRATEGIES, 3.0
    )
    assert (result.cloud_step_ms, result.device_step_ms, result.peak_bytes) == (2.0, 0.5, 7)
    assert (result.pictures, result.repeats, result.tokens) == (2, 3, 16)
    assert notes[-1] == "repeat 3 of 3"


def test_a_real_run_accounts_for_its_time(wide_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_module, "peak_memory", lambda backbone, seed: 7)
    result = bench(str(wide_folder), pictures=1, repeats=1)
    assert tuple(result.rows) == STRATEGIES
    for figures in result.rows.values():
        parts = ("text_ms", "cloud_ms", "device_ms", "other_ms", "pixels_ms")
        assert sum(figures[part] for part in parts) == pytest.approx(figures["total_ms"])
        assert figures["other_ms"] >= 0.0
        assert figures["loop_ms"] < figures["total_ms"]
    assert result.rows["base"]["passes"] == 16.0
    assert result.rows["base"]["device_ms"] == 0.0
    assert result.rows["device-only"]["passes"] == result.rows["device-only"]["cloud_ms"] == 0.0
    assert result.reference_ms > 0.0
    assert all(np.isfinite(value) and value > 0.0 for value in result.ratios.values())
    assert [line.split()[0] for line in result.table().splitlines()[1:5]] == list(STRATEGIES)


def test_threads_are_set(wide_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    with pytest.raises(InputError, match="no backbone 'nowhere'"):
        bench("nowhere", threads=1)
    assert asked == [1]


@pytest.mark.parametrize("device", ["nonsense", "cuda:99"])
def test_a_device_that_is_not_there_is_refused(wide_folder: Path, device: str) -> None:
    with pytest.raises(InputError, match="Try cpu"):
        bench(str(wide_folder), device=device)


def test_peak_memory_is_that_of_the_other_process(wide_folder: Path) -> None:
    """Linux hands a parent's peak on to its children, so a large parent must not show."""
    ballast: Any = np.ones(1_200_000_000, dtype=np.uint8)
    assert 50e6 < peak_memory(str(wide_folder), 0) < 1.1e9
    assert ballast[-1] == 1
