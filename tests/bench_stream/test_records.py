"""The file of a run: nothing is lost, a run goes on, and only whole rounds count."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_stream.conftest import picture

from ciar.bench_stream.records import Records
from ciar.errors import DataError, InputError

SETTINGS = {"seed": 1, "network": {"loss": 0.0}, "pair": (1, 2)}


def test_a_run_goes_on_where_it_was_left(tmp_path: Path) -> None:
    path = tmp_path / "new" / "records.jsonl"
    records = Records.open(path, SETTINGS)
    records.add({"rtt_ms": 10.0, "echo_ms": 11.0, "go": "a"})
    for number, row in ((0, "base"), (0, "scd"), (1, "base")):
        records.add(picture(10.0, number, row, 100.0))
    again = Records.open(path, SETTINGS)
    assert again.pictures == records.pictures
    assert again.echoes == {10.0: [11.0]}
    assert again.rounds(10.0, ["base", "scd"]) == [0]
    assert again.rounds(10.0, ["base"]) == [0, 1]
    assert again.rounds(0.0, ["base"]) == []
    again.add(picture(10.0, 1, "scd", 50.0, go="b"))  # another go: not measured side by side
    assert again.rounds(10.0, ["base", "scd"]) == [0]
    again.add(picture(10.0, 1, "base", 101.0, go="b"))
    assert again.rounds(10.0, ["base", "scd"]) == [0, 1]
    assert Records.open(path, SETTINGS).of(10.0, "base", [1])[0]["ledger"]["total_ms"] == 101.0


def test_a_line_that_was_cut_off_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    Records.open(path, SETTINGS).add(picture(10.0, 0, "base", 100.0))
    whole = path.read_text()
    path.write_text(whole + '{"rtt_ms": 10.0, "pict')
    records = Records.open(path, SETTINGS)
    assert path.read_text() == whole
    records.add(picture(10.0, 1, "base", 100.0))
    assert Records.open(path, SETTINGS).rounds(10.0, ["base"]) == [0, 1]


def test_other_settings_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    Records.open(path, SETTINGS)
    with pytest.raises(InputError, match="with another network and seed"):
        Records.open(path, SETTINGS | {"seed": 2, "network": {"loss": 0.1}})


@pytest.mark.parametrize(
    "text", [b"", b"{}\n", b"nothing\n", b'{"settings": 3}\n', b"[1]\n", b"\x89PNG\xff\n"]
)
def test_files_that_are_something_else(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "records.jsonl"
    path.write_bytes(text)
    with pytest.raises(DataError, match="Choose another --out"):
        Records.open(path, SETTINGS)


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be made"):
        Records.open(tmp_path / "file" / "records.jsonl", SETTINGS)
