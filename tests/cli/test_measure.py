"""``ciar eval quality``, ``eval sheets``, ``train assemble``, ``train curves`` and ``bench``."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tiny_run import tiny_icons, write_tiny_run, write_tiny_stages, write_wide_bundle

import ciar.bench as bench_module
from ciar.models.bundle import load_bundle
from ciar.models.checkpoint import check_manifest
from ciar.quality import SHEET_PROMPTS

Ciar = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with all that a backbone is judged by, and ``wide``, the backbone."""
    folder = tmp_path_factory.mktemp("measure") / "run"
    write_tiny_run(folder)
    write_wide_bundle(folder / "wide")
    return folder


@pytest.fixture
def copy(work: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(work, tmp_path / "copy"))


@pytest.fixture
def quality(ciar: Ciar, work: Path) -> Ciar:
    def run(*words: str, work: Path = work) -> tuple[int, str, str]:
        where = ("--work", str(work), "--backbone", str(work / "wide"), "--pictures", "16")
        return ciar("eval", "quality", *where, *words)

    return run


def no_constant(name: str) -> Any:
    raise AssertionError(f"{name} is no JSON")


# --- eval quality -------------------------------------------------------------------------------------


def test_quality_prints_a_row_a_strategy_and_writes_json(quality: Ciar, work: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "quality.json"
    words = ("--strategies", "base,ciar,lossless", "--out", str(out), "--batch", "8", "--seed", "3")
    code, shown, err = quality(*words)
    assert code == 0
    lines = shown.splitlines()
    assert lines[0].startswith("| setting | uploads |")
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["base", "ciar", "lossless"]
    assert "base: 8 of 16 pictures\n" in err
    assert "lossless: 16 of 16 pictures\n" in err
    document = json.loads(out.read_text(), parse_constant=no_constant)
    assert (document["pictures"], document["seed"], document["backbone"]) == (16, 3, "tiny")
    assert document["weights"] == load_bundle(work / "wide").weights
    base, ciar_row, lossless = document["rows"]
    assert base["frechet_change"] is base["retrieval_change"] is None
    assert (base["uploads"], base["passes_per_token"]) == (0.0, 1.0)
    assert 0.0 <= ciar_row["uploads"] <= 15 / 16
    assert lossless["frechet_change"][0] == pytest.approx(0.0, abs=1e-6)  # the same tokens as base
    assert lossless["retrieval_change"] == [0.0, 0.0, 0.0]


def test_a_curve_goes_through_the_shares_of_every_score(quality: Ciar, tmp_path: Path) -> None:
    out = tmp_path / "curve.json"
    shares = ("--curve", "--shares", "0,0.4,1", "--no-injection", "--out", str(out))
    assert quality(*shares, "--curve-scores", "entropy,margin")[0] == 0
    rows = json.loads(out.read_text(), parse_constant=no_constant)["rows"]
    found = {row["label"]: row["uploads"] for row in rows}
    every = {f"{score} {name}": share for score in ("entropy", "margin") for name, share in BUDGETS}
    assert found == {"base": 0.0} | every
    # Without injected features, asking about every token gives the cloud's own picture.
    own = next(row for row in rows if row["label"] == "entropy 100%")
    assert own["frechet_change"][0] == pytest.approx(0.0, abs=1e-6)


#: What the label says, and the share of all sixteen tokens: fifteen are judged.
BUDGETS = (("0%", 0.0), ("40%", 6 / 16), ("100%", 15 / 16))


def test_a_curve_takes_the_score_of_the_backbone(quality: Ciar) -> None:
    code, out, _ = quality("--curve", "--shares", "0.5")
    assert code == 0
    assert [line.split("|")[1].strip() for line in out.splitlines()[2:]] == ["base", "interval 50%"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--strategies", "base,cira"), "There is no strategy 'cira'. The strategies are: adt-tree, base"),
        (("--curve", "--curve-scores", "entropy,luck"), "There is no score 'luck'. The scores are: "),
        (("--shares", "0.5,2"), "--shares: give a finite number of at least 0 and at most 1, not '2'"),
        (("--pictures", "1"), "--pictures: give a whole number of at least 2"),
        (("--backbone", "nowhere"), "There is no backbone 'nowhere'."),
    ],
)
def test_wrong_words_cost_no_picture(quality: Ciar, words: tuple[str, ...], message: str) -> None:
    code, out, err = quality(*words)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err
    assert "pictures\n" not in err


@pytest.mark.parametrize(
    ("lost", "code", "stage"),
    [
        ("dual-encoder", 4, "dual-encoder"),
        ("data", 3, "data"),
        ("data/images.npy", 3, "data"),
        ("text", 3, "text"),
    ],
)
def test_quality_says_what_to_run_first(quality: Ciar, copy: Path, lost: str, code: int, stage: str) -> None:
    shutil.move(copy / lost, copy / "lost")
    found, out, err = quality(work=copy)
    assert (found, out) == (code, "")
    assert err.startswith(f"error: {copy / lost}")
    assert " does not exist. " in err
    assert f"ciar train {stage}" in err


# --- eval sheets --------------------------------------------------------------------------------------

SHEETS = {
    "reconstruction.png": (4 * 274, 2),
    "training-base.png": (6 * 136 + 8, 4),
    "training-ciar.png": (6 * 136 + 8, 4),
    "held-out-base.png": (5 * 136 + 8, 1),
    "held-out-ciar.png": (5 * 136 + 8, 1),
    "guidance-1.png": (6 * 136 + 8, 2),
    "guidance-3.png": (6 * 136 + 8, 2),
    "guidance-6.png": (6 * 136 + 8, 2),
}


def test_sheets_are_written_and_named(ciar: Ciar, work: Path, tmp_path: Path) -> None:
    assert len(SHEET_PROMPTS) == len(set(SHEET_PROMPTS)) == 24
    assert sum(icon.split == "held_name" for icon in tiny_icons()) == 5
    out = tmp_path / "new" / "sheets"
    where = ("--work", str(work), "--backbone", str(work / "wide"), "--out", str(out))
    code, shown, _ = ciar("eval", "sheets", *where)
    assert code == 0
    assert shown.splitlines() == [str(out / name) for name in SHEETS]
    for name, (width, rows) in SHEETS.items():
        with Image.open(out / name) as sheet:
            assert (sheet.format, sheet.width) == ("PNG", width), name
            assert sheet.height > rows * 128, name
    again = tmp_path / "again"
    assert ciar("eval", "sheets", *where[:4], "--out", str(again), "--seed", "1")[0] == 0
    same = {name for name in SHEETS if (out / name).read_bytes() == (again / name).read_bytes()}
    assert same == {"reconstruction.png"}  # the only one that no seed changes


@pytest.mark.parametrize("lost", ["data", "data/images.npy"])
def test_sheets_say_what_to_run_first(ciar: Ciar, copy: Path, lost: str) -> None:
    shutil.move(copy / lost, copy / "lost")
    where = ("--work", str(copy), "--backbone", str(copy / "wide"), "--out", str(copy / "sheets"))
    code, out, err = ciar("eval", "sheets", *where)
    assert (code, out) == (3, "")
    assert err.startswith(f"error: {copy / lost}")
    assert "ciar train data" in err


# --- train assemble and train curves ------------------------------------------------------------------


def test_assemble_reports_sizes_of_a_whole_folder(ciar: Ciar, folder: Path) -> None:
    write_tiny_stages(folder / "run")
    code, out, _ = ciar("train", "assemble", "--work", "run", "--name", "small", "--guidance", "1.5")
    assert code == 0
    made = folder / "run" / "backbone-small"
    assert json.loads(out) == {path.name: path.stat().st_size for path in made.iterdir()}
    assert check_manifest(made) == []
    bundle = load_bundle(made)
    assert (bundle.name, bundle.defaults.guidance) == ("small", 1.5)
    (folder / "run" / "device" / "device.json").unlink()
    code, out, err = ciar("train", "assemble", "--work", "run")
    assert (code, out) == (3, "")
    assert "Run first: ciar train device --work run" in err
    assert ciar("train", "assemble", "--guidance", "-1")[0] == 2


def test_curves_are_drawn_from_the_runs_that_are_named(ciar: Ciar, folder: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("tokenizer", "device/round-1"):
        (folder / "run" / name).mkdir(parents=True)
        (folder / "run" / name / "log.jsonl").write_text(
            '{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.5}\n'
        )
    two = ("--runs", "tokenizer", "device/round-1")
    code, out, _ = ciar("train", "curves", "--work", "run", *two, "--out", "pictures/curves.png")
    assert (code, out) == (0, "pictures/curves.png\n")
    with Image.open("pictures/curves.png") as picture:
        assert (picture.format, picture.size) == ("PNG", (900, 350))
    code, out, err = ciar("train", "curves", "--work", "run", "--runs", "tokenizer", "device/round-2")
    assert (code, out) == (3, "")
    message = "run/device/round-2/log.jsonl does not exist. Run first: ciar train device --work run"
    assert err == f"error: {message}\n"
    assert not Path("curves.png").exists()


# --- bench --------------------------------------------------------------------------------------------


def test_bench_prints_a_table_and_one_json_line(
    ciar: Ciar, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_module, "peak_memory", lambda backbone, seed: 64_000_000)
    few = ("--pictures", "1", "--repeats", "2", "--threads", "1")
    code, out, err = ciar("bench", "--backbone", str(work / "wide"), *few)
    assert code == 0
    *table, line = out.splitlines()
    assert table[0].split()[:2] == ["strategy", "total_ms"]
    assert [row.split()[0] for row in table[1:5]] == ["base", "ciar", "lossless", "device-only"]
    assert err.splitlines()[-1] == "repeat 2 of 2"
    document = json.loads(line, parse_constant=no_constant)
    assert (document["pictures"], document["repeats"], document["threads"]) == (1, 2, 1)
    assert document["peak_bytes"] == 64_000_000
    rows = document["strategies"]
    fast = rows["base"]["total_ms"] / rows["ciar"]["total_ms"]
    assert document["ratios"]["ciar_speedup_over_base"] == pytest.approx(fast)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--backbone", "nowhere"), "There is no backbone 'nowhere'."),
        (("--device", "nonsense"), "Device 'nonsense' is not usable here"),
        (("--repeats", "0"), "--repeats: give a whole number from 1 to 100"),
        (("--threads", "0"), "--threads: give a whole number from 1 to 1024"),
    ],
)
def test_bench_refuses_what_it_cannot_use(
    ciar: Ciar, work: Path, words: tuple[str, ...], message: str
) -> None:
    code, out, err = ciar("bench", "--backbone", str(work / "wide"), *words)
    assert (code, out) == (2, "")
    assert message in err
