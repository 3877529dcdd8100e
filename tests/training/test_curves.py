"""Curves: a panel a run, only what the logs hold, and sentences where a log is missing or damaged."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ciar.errors import DataError
from ciar.training.curves import draw_curves


def write_log(folder: Path, lines: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True)
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    lines: list[dict[str, Any]] = [{"step": step, "loss": 1.0 / step} for step in range(1, 31)]
    lines[9]["held_loss"] = 0.5
    lines[29]["held_loss"] = 0.4
    return write_log(tmp_path / "run", lines)


def drawn(path: Path) -> np.ndarray:
    with Image.open(path) as picture:
        assert picture.format == "PNG"
        return np.asarray(picture.convert("RGB"))


def test_every_run_gets_a_panel(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "new" / "curves.png"
    draw_curves({"one": run}, out)
    alone = drawn(out)
    assert alone.shape == (350, 450, 3)
    draw_curves({"one": run, "two": run}, out)
    pair = drawn(out)
    assert pair.shape == (350, 900, 3)
    for half in (pair[:, :450], pair[:, 450:]):
        assert (half != 255).any(axis=-1).mean() > 0.01
    # The same log is drawn with the same colours in both halves.
    assert set(map(tuple, alone.reshape(-1, 3))) >= {(31, 119, 180), (255, 127, 14)}


def test_only_what_is_asked_for_and_logged_is_drawn(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    first, second, third = (tmp_path / f"{i}.png" for i in range(3))
    draw_curves({"run": run}, first, ("loss",))
    draw_curves({"run": run}, second, ("loss", "psnr"))
    draw_curves({"run": run}, third, ("loss", "held_loss"))
    np.testing.assert_array_equal(drawn(first), drawn(second))
    assert not np.array_equal(drawn(first), drawn(third))


def test_a_log_without_any_of_the_figures_is_an_empty_panel(run: Path, tmp_path: Path) -> None:
    """No warning of a legend of nothing."""
    pytest.importorskip("matplotlib")
    draw_curves({"run": run}, tmp_path / "curves.png", ("psnr",))
    assert (drawn(tmp_path / "curves.png") != 255).any()


def test_a_missing_log_is_named_before_anything_is_drawn(run: Path, tmp_path: Path) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    before = pyplot.get_fignums()
    with pytest.raises(DataError, match=r"nowhere/log\.jsonl does not exist"):
        draw_curves({"run": run, "other": tmp_path / "nowhere"}, tmp_path / "curves.png")
    assert not (tmp_path / "curves.png").exists()
    assert pyplot.get_fignums() == before


def test_a_torn_line_is_named(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with (run / "log.jsonl").open("a") as log:
        log.write('{"step": 31, "lo')
    with pytest.raises(DataError, match=r"log\.jsonl has a line that is no JSON"):
        draw_curves({"run": run}, tmp_path / "curves.png")


def test_without_matplotlib_the_extra_is_named(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(DataError, match=r"pip install 'ciar\[train\]'"):
        draw_curves({"run": run}, tmp_path / "curves.png")
