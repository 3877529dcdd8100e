"""docs/strategies.md against the registry: a row for each strategy, and the worked example runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from drive import device_session, opening

import ciar.decoding.strategy as registry
from ciar.cloud.sessions import Cloud
from ciar.decoding.options import COMMON
from ciar.decoding.strategy import Strategy, all_strategies
from ciar.models.bundle import Bundle
from ciar.transport.inprocess import InProcessTransport

TEXT = (Path(__file__).parents[2] / "docs" / "strategies.md").read_text(encoding="utf-8")
ROWS = {
    cells[0].strip("` "): cells
    for line in TEXT.splitlines()
    if line.startswith("| `")
    for cells in [[cell.strip() for cell in line.strip("|").split("|")]]
}


@pytest.mark.parametrize("strategy", all_strategies(), ids=lambda s: s.name)
def test_each_strategy_has_its_row(strategy: Strategy) -> None:
    assert strategy.name in ROWS, f"docs/strategies.md needs a row for {strategy.name}"
    _, _, source, law, options, training = ROWS[strategy.name]
    assert (law == "exact") == strategy.exact
    for paper in re.findall(r"\d{4}\.\d{5}", source):
        assert paper in strategy.source
    assert (training == "none") == (strategy.training == "none")
    found = dict(re.findall(r"`(\w+)` ([\w.]+)", options))
    assert set(found) == {option.name for option in strategy.options}
    for option in strategy.options:
        default = option.default
        same = (
            found[option.name] == default
            if isinstance(default, str)
            else float(found[option.name]) == default
        )
        assert same, option.name


def test_no_row_without_a_strategy_and_common_options_are_told() -> None:
    assert set(ROWS) == {strategy.name for strategy in all_strategies()}
    for option in COMMON:
        assert f"`{option.name}`" in TEXT


@pytest.fixture
def example() -> Iterator[str]:
    """The example's code, run; its registration is taken back."""
    (code,) = re.findall(r"^```python\n(.*?)^```", TEXT, flags=re.MULTILINE | re.DOTALL)
    before = dict(registry._REGISTRY)
    exec(compile(code, "docs/strategies.md", "exec"), {})
    yield code
    registry._REGISTRY.clear()
    registry._REGISTRY.update(before)


def test_the_worked_example_runs(example: str, tiny_bundle: Bundle, tiny_cloud: Cloud) -> None:
    assert len(example.splitlines()) <= 40
    wire = InProcessTransport(tiny_cloud)
    for gap in (1, 3):
        message = opening("a smiling cat", "every-other", seed=1, options=(("gap", gap),))
        ledger = device_session(tiny_bundle, wire, message).run().ledger
        assert ledger.decided == (["device"] * gap + ["replaced"]) * (16 // (gap + 1))
        assert ledger.cloud_passes == 1 + 16 // (gap + 1)
