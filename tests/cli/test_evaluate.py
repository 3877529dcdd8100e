"""``ciar eval``: documents in, tables out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ciar.evaluation.report import Figure, MetricPreset, Result
from ciar.ledger import Ledger

Ciar = Callable[..., tuple[int, str, str]]


def document(path: Path, strategy: str, local: list[int]) -> str:
    """Writes a document of pictures of ten tokens, with so many of them kept local."""
    images = []
    for count in local:
        ledger = Ledger(tokens=10, cloud_passes=10 - count, token_rows=20, total_ms=100.0)
        ledger.decided = [*(["device"] * count), *(["replaced"] * (10 - count))]
        images.append(
            {"prompt": "x", "seed": 1, "strategy": strategy, "tokens": [], "ledger": ledger.to_dict()}
        )
    path.write_text(json.dumps({"images": images}))
    return str(path)


def test_ledgers_are_means_by_strategy(ciar: Ciar, folder: Path) -> None:
    base = document(folder / "base.json", "base", [0, 0])
    ours = document(folder / "ciar.json", "ciar", [4, 8])
    more = document(folder / "more.json", "ciar", [6])
    code, out, err = ciar("eval", "ledgers", base, ours, more, "--json")
    assert (code, err) == (0, "")
    rows = {row["strategy"]: row for row in json.loads(out)["strategies"]}
    assert rows["base"]["pictures"] == 2
    assert rows["base"]["kept_local"] == [0.0, 0.0, 0.0]
    assert rows["ciar"]["pictures"] == 3
    mean, low, high = rows["ciar"]["kept_local"]
    assert mean == pytest.approx(0.6)
    assert 0.4 - 1e-9 <= low < mean < high <= 0.8 + 1e-9
    assert rows["ciar"]["passes_a_token"][0] == pytest.approx(0.4)
    assert rows["ciar"]["asked"][0] == pytest.approx(0.4)
    shown = ciar("eval", "ledgers", base, ours)[1].splitlines()
    assert shown[0].split() == ["strategy", "base", "ciar"]
    assert shown[2].startswith("kept local")


@pytest.mark.parametrize(
    "content",
    [
        None,
        "",
        "[]",
        "{}",
        '{"images": []}',
        '{"images": [{"strategy": "x", "ledger": {}}]}',
        '{"images": 3}',
    ],
)
def test_what_is_no_document_is_refused(ciar: Ciar, folder: Path, content: str | None) -> None:
    if content is not None:
        (folder / "d.json").write_text(content)
    code, out, err = ciar("eval", "ledgers", "d.json")
    assert (code, out) == (3, "")
    assert err.startswith("error: d.json")


def result(title: str, value: float, count: int = 4) -> Result:
    preset = MetricPreset("p", "e", "0" * 64, "box", "none", "r", "1" * 64)
    figures = {"retrieval": Figure(value, "share", True)}
    return Result(title, preset, count, "prompts", "2" * 64, [1], {}, "3" * 64, figures)


def test_show_and_compare(ciar: Ciar, folder: Path) -> None:
    result("plain", 0.5).save(folder / "a.json")
    result("ours", 0.75).save(folder / "b.json")
    result("few", 0.5, count=2).save(folder / "c.json")
    code, out, _ = ciar("eval", "show", "a.json", "b.json")
    assert code == 0
    assert "| plain | 4 | 0.5 |" in out
    code, out, _ = ciar("eval", "compare", "a.json", "b.json")
    assert code == 0
    assert "+0.25" in out
    assert "+50.0%" in out
    assert ciar("eval", "compare", "a.json", "c.json")[0] == 2
    assert ciar("eval", "show", "missing.json")[0] == 3
