"""Options of strategies: types, ranges, near misses; and the law that common options make."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ciar.decoding.options import COMMON, Option, law_of, read_options
from ciar.decoding.sampling import SamplingLaw, to_law
from ciar.decoding.strategy import Strategy, all_strategies, get_strategy
from ciar.errors import InputError
from ciar.protocol.messages import Settings

DECLARED = (
    Option("count", 3, "a count", low=1, high=9),
    Option("share", 0.5, "a share", high=1.0),
    Option("kind", "a", "a kind", choices=("a", "b")),
)


def test_what_is_left_out_has_its_default() -> None:
    values = read_options("s", DECLARED, (("share", 1),))
    assert (values.whole("count"), values.real("share"), values.word("kind")) == (3, 1.0, "a")
    assert isinstance(values.real("share"), float)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("count", 0, "count is 0; it must be a whole number from 1 to 9"),
        ("count", 10, "from 1 to 9"),
        ("count", 2.5, "whole number"),
        ("count", True, "whole number"),
        ("count", "3", "whole number"),
        ("share", 1.5, "share is 1.5; it must be a number from 0 to 1"),
        ("share", math.nan, "must be a number"),
        ("share", math.inf, "must be a number"),
        ("kind", "c", "one of a, b"),
        ("kind", 1, "one of a, b"),
        ("shrae", 0.1, "no option 'shrae'. Did you mean share\\? Its options are: count, share, kind"),
        ("zzz", 0.1, "no option 'zzz'. Its options are"),
    ],
)
def test_what_cannot_be_is_refused(name: str, value: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_options("s", DECLARED, ((name, value),))


def test_a_whole_number_may_be_written_as_a_real_one() -> None:
    """Browsers have one kind of number."""
    assert read_options("s", DECLARED, (("count", 4.0),)).whole("count") == 4


def test_an_option_comes_once() -> None:
    with pytest.raises(InputError, match="share is given twice"):
        read_options("s", DECLARED, (("share", 0.1), ("share", 0.2)))


@pytest.mark.parametrize("strategy", all_strategies(), ids=lambda s: s.name)
def test_defaults_are_allowed_and_names_are_free(strategy: Strategy) -> None:
    names = [option.name for option in (*strategy.options, *COMMON)]
    assert len(set(names)) == len(names)
    assert not set(names) & set(Settings.__dataclass_fields__)
    for option in strategy.options:
        assert option.check(option.default) == option.default
        assert option.help
    given = tuple((option.name, option.default) for option in strategy.options)
    strategy.values(Settings(strategy.name, options=given))


def test_common_options_make_the_law() -> None:
    given = (("allowance", 1.0), ("entropy_heat", 2.5), ("entropy_floor", 0.7))
    law = law_of(Settings("slack", temperature=0.9, top_k=4, top_p=0.8, options=given))
    assert law == SamplingLaw(0.9, 4, 0.8, 2.5, 3.0, 0.7)
    assert law_of(Settings("base")) == SamplingLaw()
    with pytest.raises(InputError, match="entropy_scale is 0"):
        law_of(Settings("base", options=(("entropy_scale", 0.0),)))
    get_strategy("base").values(Settings("base", options=(("entropy_heat", 2.5),)))


def test_entropy_makes_sure_positions_hotter_and_flat_ones_cooler() -> None:
    """Published numbers: T = 2.5 exp(-H / 3) + 0.6, so 3.1 at entropy 0 and 1 at 5.50 nats."""
    law = SamplingLaw(entropy_heat=2.5)
    sure = torch.tensor([9.0, 0.0, 0.0, 0.0])
    flat = torch.zeros(4096)
    flat[0] = 0.5
    for logits in (sure, flat):
        p = logits.softmax(0)
        entropy = float(-(p * p.log()).sum())
        temperature = 2.5 * math.exp(-entropy / 3.0) + 0.6
        torch.testing.assert_close(to_law(logits, law), (logits / temperature).log_softmax(0))
        assert (temperature > 1.0) == (logits is sure)
    off = to_law(sure, SamplingLaw(entropy_heat=0.0))
    torch.testing.assert_close(off, sure.log_softmax(0))
    greedy = to_law(sure, SamplingLaw(temperature=0.0, entropy_heat=2.5))
    assert greedy[0] == 0.0


@pytest.mark.parametrize("values", [(-1.0, 3.0, 0.6), (1.0, 0.0, 0.6), (1.0, 3.0, 0.0), (math.nan, 3.0, 0.6)])
def test_a_law_that_cannot_be(values: tuple[float, float, float]) -> None:
    with pytest.raises(InputError, match="entropy-adaptive"):
        SamplingLaw(1.0, 0, 1.0, *values)
