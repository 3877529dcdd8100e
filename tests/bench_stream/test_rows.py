"""Lists of rows: names, settings, and the row without a drafter behind each."""

from __future__ import annotations

import pytest

from ciar.bench_stream.rows import NAMED, rows_of
from ciar.errors import InputError


def test_the_usual_rows_begin_with_plain_ar_and_leave_no_drafter_alone() -> None:
    rows = rows_of()
    labels = [row.label for row in rows]
    assert [row.name for row in rows if not row.label.endswith("fill=left")] == [
        "base", "scd:window=64", "ciar", "code", "exact", "balanced", "cheapest", "auto",
    ]  # fmt: skip
    for name in NAMED:
        row = next(row for row in rows if row.name == name)
        assert row.without == f"{NAMED[name]},fill=left"
        assert labels.index(row.without) == labels.index(row.label) + 1
    partner = next(row for row in rows if row.label.endswith("allowance=2,fill=left"))
    assert partner.run.settings["options"][-1] == ("fill", "left")
    assert partner.without == ""


@pytest.mark.parametrize(
    ("word", "without"),
    [
        ("lossless", "scd"),
        ("lossless:window=32", "scd:window=32"),
        ("slack:allowance=1,window=8", "scd-slack:allowance=1,window=8"),
        ("slack:allowed=certain", ""),
        ("ciar-stream", "ciar-stream:fill=left"),
        ("ciar-stream:policy=trust", ""),
        ("ciar-stream:fill=above", ""),
        ("ciar", ""),
        ("auto:wish=exact", ""),
    ],
)
def test_the_same_without_a_drafter(word: str, without: str) -> None:
    rows = rows_of(word)
    assert rows[0].label == "base"
    assert rows[1].without == without
    assert [row.label for row in rows[2:]] == ([without] if without else [])


def test_a_row_comes_once_and_the_planner_is_asked_for_a_wish() -> None:
    rows = rows_of("scd lossless base auto:wish=exact scd auto")
    assert [row.label for row in rows] == ["base", "scd", "lossless", "auto:wish=exact", "auto"]
    assert rows[3].run.settings == {"strategy": "auto", "wish": "exact"}
    assert rows[4].run.settings == {"strategy": "auto"}


def test_rows_without_a_device_model() -> None:
    assert [row.label for row in rows_of(step=False)] == ["base", "scd:window=64", "auto"]
    with pytest.raises(InputError, match="ciar needs a device model"):
        rows_of("ciar", step=False)


@pytest.mark.parametrize(
    ("word", "match"),
    [
        ("nothing", "no strategy 'nothing'"),
        ("exact:window=3", "no strategy 'exact'"),
        ("auto:window=3", "auto:wish=NAME"),
        ("auto:wish=luck", "balanced"),
    ],
)
def test_rows_that_cannot_be_read(word: str, match: str) -> None:
    with pytest.raises(InputError, match=match):
        rows_of(word)


def test_trees_are_given_no_tempo() -> None:
    assert [row.label for row in rows_of("eagle2")] == ["base", "eagle2"]
    with pytest.raises(InputError, match="eagle2 works with trees"):
        rows_of("eagle2", paced=True)
