"""The table of gates: complete, described, documented, and with thresholds that hold a share."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ciar.decoding.gate import SCORE_NAMES
from ciar.errors import InputError
from ciar.intervals.gates import BY_NAME, CONTENT_BLIND, GATES, gate_named, share_threshold

PAGE = Path(__file__).parents[2] / "docs" / "gates.md"


def test_names_are_distinct_and_described() -> None:
    assert len(BY_NAME) == len(GATES)
    assert tuple(BY_NAME) == SCORE_NAMES
    for gate in GATES:
        assert all((gate.summary, gate.source, gate.cost, gate.training))
        assert gate.bounds[0] <= gate.bounds[1]
        assert gate_named(gate.name) is gate


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(InputError, match="collision, discrete-100"):
        gate_named("magic")
    with pytest.raises(InputError, match="no score 'magic'"):
        share_threshold("magic", 0.3)


def test_the_page_has_a_row_for_every_gate() -> None:
    rows = re.findall(r"^\| `([^`]+)` \|", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert [row for row in rows if row in BY_NAME] == [gate.name for gate in GATES]
    for gate in GATES:
        row = next(line for line in PAGE.read_text().splitlines() if line.startswith(f"| `{gate.name}` |"))
        assert gate.source.split("arXiv ")[-1] in row, gate.name
        assert f"| {gate.training} |" in row, gate.name


@pytest.mark.parametrize("name", SCORE_NAMES)
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_a_share_without_calibration(name: str, share: float) -> None:
    config = share_threshold(name, share)
    assert config.share == share
    if name in CONTENT_BLIND:
        assert (config.kind, config.value) == ("fixed", 1.0 - share)
    else:
        assert config.kind == "budget"


def test_the_gate_of_the_page_runs() -> None:
    (example,) = re.findall(
        r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    names: dict[str, Any] = {}
    exec(compile(example, str(PAGE), "exec"), names)
    corner, middle = names["centre_first"](SimpleNamespace(tokens=[[], [0] * (7 * 16 + 7)]))
    assert corner < middle
