"""The progress line, tables, and text that is safe to print."""

from __future__ import annotations

import io
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciar.cli.output import printable, say_json, table
from ciar.cli.progress import Progress, line
from ciar.cli.report import Made, describe
from ciar.ledger import Ledger


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def info(done: int, image: int = 0) -> dict[str, object]:
    decided = ["prefix", "device", "device", "replaced"][:done]
    return {
        "done": done,
        "total": 4,
        "image": image,
        "images": 2,
        "ledger": Ledger(tokens=4, decided=decided),
    }  # type: ignore[arg-type]


def test_line_counts_tokens_and_the_local_share() -> None:
    assert line(info(3), 0, 1) == "[###############.....] 3/4 tokens, 67 % kept local"
    assert line(info(0), 0, 1) == "[....................] 0/4 tokens, 0 % kept local"
    assert line(info(4, image=1), 2, 6).startswith("picture 4 of 6  [####################] 4/4 tokens, 50 %")


def test_progress_rewrites_one_line_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "30")
    stream = Terminal()
    progress = Progress(stream, 1)
    for done in range(1, 5):
        assert progress.step(None, done, info(done)) is True
    progress.clear()
    written = stream.getvalue()
    assert "\n" not in written
    shown = written.split("\r\x1b[K")
    assert all(len(text) <= 29 for text in shown)
    assert shown[-1] == ""  # nothing is left on the line
    assert "4/4" in shown[-2]  # the last step is always drawn, however fast it came
    assert len(shown) == 4  # before, first, last, cleared: the steps between came too fast


@pytest.mark.parametrize(("stream", "quiet"), [(io.StringIO(), False), (Terminal(), True)])
def test_progress_is_silent_otherwise(stream: io.StringIO, quiet: bool) -> None:
    progress = Progress(stream, 1, quiet=quiet)
    progress.message("loading")
    assert progress.step(None, 4, info(4)) is True
    progress.clear()
    assert stream.getvalue() == ""


def test_a_dumb_terminal_gets_no_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    Progress(stream, 1).message("loading")
    assert stream.getvalue() == ""


@given(st.text(max_size=300), st.integers(3, 200))
def test_printable_text_is_short_and_has_no_control_characters(text: str, limit: int) -> None:
    safe = printable(text, limit)
    assert len(safe) <= limit
    assert not [char for char in safe if unicodedata.category(char).startswith("C")]
    if len(text) <= limit:
        assert len(safe) == len(text)


def test_table_aligns() -> None:
    rows = [["name", "count"], ["a", "10"], ["longer", "9", "!"]]
    assert table(rows, "<>").splitlines() == ["name    count", "a          10", "longer      9  !"]
    assert table([]) == ""


def test_json_has_no_nan() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        say_json({"value": float("nan")})


def test_the_ledger_table_accounts_for_every_millisecond() -> None:
    ledger = Ledger(
        tokens=4,
        cloud_passes=3,
        token_rows=8,
        cloud_ms=20.0,
        device_ms=5.0,
        total_ms=40.0,
        text_ms=2.0,
        pixels_ms=3.0,
        decided=["prefix", "device", "accepted", "replaced"],
    )
    made = Made("a cat", 7, 0, "ciar", [1, 2, 3, 4], Path("p.png"), None, ledger)
    blocks = describe([made]).split("\n\n")
    assert blocks[0] == "a cat"
    times = {row.rsplit(None, 2)[0].strip(): row.split()[-2] for row in blocks[-1].splitlines()}
    assert times == {
        "text": "2",
        "cloud passes": "20",
        "device steps": "5",
        "pixels": "3",
        "the rest": "10",
        "total": "40",
    }
    assert [row.split()[:3] for row in blocks[2].splitlines()[1:]] == [
        [name, "1", "25"] for name in ("prefix", "device", "accepted", "replaced")
    ]
    assert "0.75 a token" in blocks[3]


def test_an_empty_ledger_has_no_shares() -> None:
    text = describe([Made("a cat", 7, 0, "ciar", [], Path("p.png"), None, Ledger())])
    rows = [line.split()[:3] for line in text.splitlines()]
    assert ["device", "0", "-"] in rows
