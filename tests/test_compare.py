"""The comparison of strategies: rows are read, plain AR is the yard-stick, figures are what they say."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import write_tiny_bundle
from tiny_run import tiny_icons, write_tiny_run, write_wide_bundle

from ciar.cli.main import main
from ciar.compare import Row, compare, markdown, mean_slacks, parse_run, runs_of
from ciar.decoding.options import default_settings
from ciar.errors import InputError
from ciar.ledger import Ledger
from ciar.models.bundle import Bundle, load_bundle
from ciar.models.text import StaticTextEncoder
from ciar.pipeline import Pipeline
from ciar.protocol.messages import Settings
from ciar.quality import Judge, text_features
from ciar.training.teacher import guided_logits

PROMPTS = [" ".join(icon.name.split("-")) for icon in tiny_icons(24)]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compare") / "run"
    write_tiny_run(folder)
    return folder


@pytest.fixture(scope="module")
def rows(work: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    folder = tmp_path_factory.mktemp("compare-bundle")
    write_tiny_bundle(folder)
    text = StaticTextEncoder.load(work / "text")
    the_judge = Judge.from_data(work / "dual-encoder", text, work / "data")
    runs = runs_of("lossless:window=4 ciar:share=1.0 device-only")
    return compare(Bundle(folder), the_judge, PROMPTS, PROMPTS, runs, seed=3, batch=16, timed=2)


def test_rows_are_read_from_their_description() -> None:
    run = parse_run("slack:allowance=2,window=32")
    assert run.label == "slack:allowance=2,window=32"
    assert run.settings == {"strategy": "slack", "window": 32, "options": (("allowance", 2),)}
    gated = parse_run("ciar:score=entropy,share=0.25,injection=false,guidance=2.5")
    assert gated.score == "entropy"
    assert gated.threshold is not None
    assert (gated.threshold.kind, gated.threshold.share) == ("budget", 0.25)
    assert gated.settings == {"strategy": "ciar", "injection": False, "guidance": 2.5}


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("nothing", "no strategy 'nothing'"),
        ("base:window", "name=value"),
        ("base:window=wide", "'wide' is no value for window"),
        ("base:colour=3", "no option 'colour'"),
        ("ciar:share=2", "share"),
        ("ciar:share=much", "'much' is no share"),
    ],
)
def test_a_row_that_cannot_be_read_says_why(text: str, part: str) -> None:
    with pytest.raises(InputError, match=part):
        parse_run(text)


def test_plain_ar_comes_first_and_no_row_twice() -> None:
    assert [run.label for run in runs_of("ciar base ciar")] == ["base", "ciar"]
    everything = [run.label for run in runs_of("all lossless:window=4")]
    assert everything[0] == "base"
    assert {"ciar", "lossless", "device-only", "lossless:window=4"} <= set(everything)


def test_the_yard_stick_differs_from_itself_in_nothing(rows: list[Row]) -> None:
    base = rows[0]
    assert (base.exact, base.same, base.outside) == (True, 1.0, 0.0)
    assert base.slack.value == pytest.approx(0.0, abs=1e-4)
    assert base.judged.passes == 1.0
    assert base.to_dict(base)["speed_up"] == 1.0
    assert base.to_dict(base)["accept_length"] == 1.0


def test_an_exact_strategy_gives_the_pictures_of_plain_ar(rows: list[Row]) -> None:
    lossless = rows[1]
    assert lossless.exact
    assert lossless.same >= 0.9  # batched kernels may round a choice the other way
    assert lossless.slack.value == pytest.approx(0.0, abs=0.02)
    assert lossless.judged.passes < 1.0


def test_a_relaxed_one_pays_in_slack(rows: list[Row]) -> None:
    alone = rows[3]
    assert not alone.exact
    assert alone.judged.passes == 0.0
    assert alone.slack.value > rows[1].slack.value
    assert alone.slack.low <= alone.slack.value <= alone.slack.high


def test_wire_figures_come_from_whole_pictures(rows: list[Row]) -> None:
    asked, alone = rows[2].to_dict(rows[0]), rows[3].to_dict(rows[0])
    assert asked["uploads"] == pytest.approx(15 / 16)  # all but the prefix of one
    assert asked["round_trips"] > 15
    assert asked["bytes_up"] > 0
    assert (alone["round_trips"], alone["bytes_up"], alone["bytes_down"]) == (0, 0, 0)
    assert all(len(row.lone) == 2 for row in rows)


def test_slack_is_that_of_the_pictures_own_noise(tmp_path: Path) -> None:
    """Pictures of plain AR have slack 0 under their own seeds, and not under others'."""
    write_tiny_bundle(tmp_path)
    bundle = Bundle(tmp_path)
    pipe = Pipeline(bundle)
    prompts = ["cat", "red dog"]
    made = [
        pipe(p, seed=20 + i, strategy="base", output_type="tokens").tokens[0] for i, p in enumerate(prompts)
    ]
    own, _ = mean_slacks(bundle, prompts, torch.tensor(made), settings_of(bundle, 20))
    other, _ = mean_slacks(bundle, prompts, torch.tensor(made), settings_of(bundle, 50))
    assert max(own) < 1e-4
    assert min(other) > 0.1


def test_a_model_in_bfloat16_is_compared_as_well(tmp_path: Path) -> None:
    """Public checkpoints run in it, and features are float32."""
    write_tiny_bundle(tmp_path)
    bundle = Bundle(tmp_path, dtype="bfloat16")
    prompts = ["cat", "red dog"]
    pipe = Pipeline(bundle)
    made = [
        pipe(p, seed=20 + i, strategy="base", output_type="tokens").tokens[0] for i, p in enumerate(prompts)
    ]
    own, outside = mean_slacks(bundle, prompts, torch.tensor(made), settings_of(bundle, 20))
    assert max(own) < 0.05
    assert outside == 0.0
    features, mask = text_features(bundle, prompts)
    stored = guided_logits(bundle.model, features, mask, torch.tensor(made), 3.0)
    exact = guided_logits(Bundle(tmp_path).model, features, mask, torch.tensor(made), 3.0)
    assert float((stored - exact).norm() / exact.norm()) < 0.05


def settings_of(bundle: Bundle, seed: int) -> Settings:
    return replace(default_settings(bundle.defaults, "base"), seed=seed)


def test_the_table_has_a_line_a_row(rows: list[Row]) -> None:
    lines = markdown(rows).splitlines()
    assert len(lines) == 2 + len(rows)
    width = lines[0].count("|")
    assert all(line.count("|") == width for line in lines)
    assert "lossless:window=4" in lines[3]


def test_the_table_has_what_a_comparison_needs(rows: list[Row]) -> None:
    """Every figure by name in the table, and an interval for each that is a mean of pictures."""
    head = [cell.strip() for cell in markdown(rows).splitlines()[0].strip("|").split("|")]
    assert {
        *("speed-up", "passes / T", "rows / T", "round trips", "bytes up", "bytes down", "accept length"),
        *("Frechet", "retrieval", "slack"),
    } <= set(head)
    for row in rows:
        figures = row.to_dict(rows[0])
        named = figures["intervals"] | {"slack": figures["slack"]}
        assert set(figures["intervals"]) == {
            *("speed_up", "passes_per_token", "rows_per_token", "uploads", "accept_length")
        }
        for name, (value, low, high) in named.items():
            assert low <= value + 1e-9
            assert value - 1e-9 <= high
            if name in figures and name != "slack":
                assert figures[name] == pytest.approx(value)
    cells = [cell.strip() for cell in markdown(rows).splitlines()[3].strip("|").split("|")]
    assert cells[head.index("slack")].count("[") == cells[head.index("speed-up")].count("[") == 1


def test_a_speed_up_is_the_ratio_of_medians(rows: list[Row]) -> None:
    def timed(*ms: float) -> Row:
        return replace(rows[1], lone=[Ledger(total_ms=one) for one in ms])

    assert timed(2.0, 4.0, 9.0).speed_up(timed(8.0, 8.0, 8.0)) == pytest.approx((2.0, 8 / 9, 4.0))
    assert timed(2.0).speed_up(timed(6.0)) == (3.0, 3.0, 3.0)


def test_the_command_writes_table_document_and_plot(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_wide_bundle(tmp_path / "bundle")
    asked = ["--strategies", "lossless", "--backbone", str(tmp_path / "bundle"), "--images", "24"]
    code = main(["compare", *asked, "--timed", "1", "--work", str(work), "--out", str(tmp_path / "out")])
    assert code == 0
    shown = capsys.readouterr().out
    assert (tmp_path / "out" / "compare.md").read_text() == shown
    document = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert [row["label"] for row in document["rows"]] == ["base", "lossless"]
    assert (tmp_path / "out" / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_all_leaves_out_what_a_backbone_has_no_drafter_for(tiny_bundle: Bundle, tmp_path: Path) -> None:
    full = {run.label for run in runs_of("all", tiny_bundle)}
    shutil.copytree(tiny_bundle.folder, tmp_path / "bare")
    (tmp_path / "bare" / "eagle.safetensors").unlink()
    bare = {run.label for run in runs_of("all", load_bundle(tmp_path / "bare"))}
    assert full - bare == {"adt-tree", "eagle1-static", "eagle2"}


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("speculative:window=0", "window is 0"),
        ("ciar:score=oracle,share=0.3", "oracle"),
        ("ciar:injection=yes", "'yes' is no value for injection"),
    ],
)
def test_what_cannot_take_the_whole_way_is_refused_before_any_picture(text: str, part: str) -> None:
    with pytest.raises(InputError, match=part):
        parse_run(text)
