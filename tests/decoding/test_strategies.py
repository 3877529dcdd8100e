"""The registry of strategies, and what every strategy says of itself."""

from __future__ import annotations

import pytest

from ciar.decoding.strategy import Strategy, all_strategies, get_strategy
from ciar.errors import InputError


def test_built_in_strategies() -> None:
    assert {"base", "ciar", "device-only", "lossless"} <= {s.name for s in all_strategies()}


def test_unknown_name_lists_the_known() -> None:
    with pytest.raises(InputError, match="no strategy 'magic'") as caught:
        get_strategy("magic")
    for strategy in all_strategies():
        assert strategy.name in str(caught.value)


@pytest.mark.parametrize("strategy", all_strategies(), ids=lambda s: s.name)
def test_each_describes_itself(strategy: Strategy) -> None:
    assert get_strategy(strategy.name) is strategy
    assert strategy.summary
    assert strategy.source
    assert strategy.uses_cloud or strategy.uses_device
    assert not (strategy.exact and strategy.injects), "features change the cloud's law"


def test_which_are_exact() -> None:
    assert get_strategy("base").exact
    assert get_strategy("lossless").exact
    assert not get_strategy("ciar").exact
    assert not get_strategy("base").uses_device
    assert not get_strategy("device-only").uses_cloud
