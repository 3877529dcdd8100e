"""Figures against hand-made ledgers, and what is written of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bench_stream.conftest import picture
from PIL import Image

from ciar.bench_stream.figures import asked_ms, figures
from ciar.bench_stream.records import Records
from ciar.bench_stream.report import can_draw, markdown, write
from ciar.bench_stream.rows import Row, rows_of

SETTINGS: dict[str, Any] = {
    "backbone": "tiny", "device": "cpu", "version": "1", "torch": "2", "machine": "m", "threads": None,
    "network": {"megabits_per_s": None, "jitter_ms": 0.0, "loss": 0.01},
    "shaping": "relay", "shaping_detail": "A relay.", "tempo": {"pass_ms": 10.0, "row_ms": 1.0},
    "step_ms": 2.0,
}  # fmt: skip


@pytest.fixture
def rows() -> list[Row]:
    return rows_of("lossless")  # base, lossless, scd


@pytest.fixture
def records(tmp_path: Path) -> Records:
    found = Records.open(tmp_path / "records.jsonl", SETTINGS)
    found.add({"rtt_ms": 10.0, "echo_ms": 10.4, "go": "a"})
    for number, (base, lossless, scd) in enumerate(
        [(400.0, 100.0, 210.0), (440.0, 140.0, 190.0), (390.0, 90.0, 200.0)]
    ):
        found.add(picture(10.0, number, "base", base, cloud_passes=16, token_rows=32, cloud_ms=200.0))
        digest = "other" if number == 1 else "d"
        found.add(picture(10.0, number, "lossless", lossless, digest=digest, cloud_passes=4 + number))
        found.add(picture(10.0, number, "scd", scd))
    found.add(picture(10.0, 3, "base", 1.0))  # a round that is not whole
    return found


def test_figures_of_whole_rounds(rows: list[Row], records: Records) -> None:
    base, lossless, scd = figures(records, rows, [10.0, 80.0], (10.0, 1.0))
    assert (base.pictures, base.total_ms, base.speed_up, base.over_without) == (3, 400.0, 1.0, None)
    assert (lossless.total_ms, lossless.speed_up, lossless.over_without) == (100.0, 4.0, 2.0)
    assert lossless.quartiles_ms == (95.0, 120.0)
    assert lossless.without == "scd"
    assert (lossless.passes, lossless.rows) == (5 / 16, 24 / 16)
    assert (lossless.same, scd.same) == (2 / 3, 1.0)
    assert (scd.critical, scd.bytes_up, scd.bytes_down) == (2, 300, 500)
    # base: 16 passes, 16 positions, and two further positions of the text
    assert base.overrun == pytest.approx(200.0 / (160 + 16 + 2) - 1)
    assert figures(records, rows, [10.0])[0].overrun is None
    assert figures(records, rows, [80.0]) == []


def test_a_picture_without_a_cloud_asks_for_no_time() -> None:
    alone = picture(0.0, 0, "device-only", 1.0, cloud_passes=0, token_rows=0)
    assert asked_ms(alone, 10.0, 1.0) == 0.0


def test_the_report_says_how_it_was_measured(rows: list[Row], records: Records, tmp_path: Path) -> None:
    found = figures(records, rows, [10.0], (10.0, 1.0))
    text = markdown(found, records)
    head, section, *lines = [line for line in text.splitlines() if line]
    assert "Network: relay (A relay); no limit of bandwidth, jitter 0 ms, loss 1 %." in head
    assert "Passes last 10 ms and 1 ms a position" in head
    assert "A proposal of the device lasts 2 ms." in head
    assert section == "## RTT 10 ms"
    assert lines[0] == "3 pictures a row; measured: 10.4 ms."
    cells = [cell.strip() for cell in lines[4].strip("|").split("|")]
    assert cells[:8] == ["lossless", "100", "95 to 120", "4.00", "2.00", "31.2%", "1.50", "2"]
    assert len(lines) == 6
    assert {line.count("|") for line in lines[1:]} == {lines[1].count("|")}


def test_files_of_the_report(rows: list[Row], records: Records, tmp_path: Path) -> None:
    paths = write(figures(records, rows, [10.0]), records, tmp_path)
    document = json.loads((tmp_path / "bench-stream.json").read_text())
    assert document["settings"] == SETTINGS
    assert [one["row"] for one in document["figures"]] == ["base", "lossless", "scd"]
    assert len(document["pictures"]) == 10
    assert document["echo_ms"] == [{"rtt_ms": 10.0, "measured": [10.4]}]
    assert (tmp_path / "bench-stream.md").read_text().count("\n| ") == 4
    if can_draw():
        with Image.open(paths[2]) as plot:
            assert (plot.format, plot.size) == ("PNG", (900, 600))


def test_a_report_of_nothing(records: Records, rows: list[Row], tmp_path: Path) -> None:
    paths = write([], Records(tmp_path / "none", SETTINGS), tmp_path)
    assert [path.suffix for path in paths] == [".md", ".json"]
