"""Thresholds: they hold their budgets whatever the scores, and move as they say."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciar.errors import InputError
from ciar.intervals.thresholds import (
    BudgetThreshold,
    DynamicThreshold,
    FixedThreshold,
    RiskThreshold,
    Threshold,
    ThresholdConfig,
)

scores = st.lists(st.one_of(st.floats(-5, 5), st.sampled_from([0.0, 0.3, 1.0])), min_size=1, max_size=120)
CURVE = ((0.0, 0.01), (0.2, 0.05), (0.5, 0.2), (0.8, 0.5), (1.2, 0.9))

CONFIGS = [
    ThresholdConfig(),
    ThresholdConfig(kind="budget", share=0.25, prior=(0.1, 0.2, 0.3)),
    ThresholdConfig(kind="risk", risk=0.2, curve=CURVE),
    ThresholdConfig(kind="dynamic", accept_rate=0.1, replace_rate=0.2, minimum=0.1, maximum=2.0),
]


def judge(gate: Threshold, values: list[float]) -> list[bool]:
    return [gate.certain(value) for value in values]


def test_fixed_is_certain_strictly_below_its_value() -> None:
    gate = ThresholdConfig(kind="fixed", value=0.3).start(4)
    assert isinstance(gate, FixedThreshold)
    assert judge(gate, [0.29, 0.3, 0.31, -math.inf]) == [True, False, False, True]
    gate.answered(True)
    gate.answered(False)
    assert judge(gate, [0.29, 0.3]) == [True, False]


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=20))
def test_zero_asks_about_all_and_infinity_about_none(values: list[float]) -> None:
    assert not any(judge(FixedThreshold(0.0), values))
    assert all(judge(FixedThreshold(math.inf), values))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kind)
def test_a_score_that_is_not_a_number_is_never_certain(config: ThresholdConfig) -> None:
    gate = config.start(40)
    judge(gate, [0.01, 0.02] * 10)
    assert gate.certain(math.nan) is False
    judge(gate, [0.01, 0.02] * 9)  # and breaks nothing


@given(scores, st.floats(0, 1), st.lists(st.floats(-5, 5), max_size=30))
def test_budget_is_met_to_the_token_whatever_the_scores(
    values: list[float], share: float, prior: list[float]
) -> None:
    for order in (values, sorted(values), sorted(values, reverse=True)):
        gate = ThresholdConfig(kind="budget", share=share, prior=tuple(prior)).start(len(values))
        assert judge(gate, order).count(False) == round(share * len(values))


def test_budget_picks_the_most_uncertain() -> None:
    rng = random.Random(0)
    caught = 0.0
    for _ in range(50):
        values = [rng.gammavariate(1.0, 0.2) for _ in range(256)]
        gate = BudgetThreshold(0.30, 256, prior=[-0.2 * math.log(1 - (i + 0.5) / 64) for i in range(64)])
        asked = {i for i, kept in enumerate(judge(gate, values)) if not kept}
        best = set(sorted(range(256), key=lambda i: -values[i])[: len(asked)])
        caught += len(asked & best) / len(asked) / 50
    assert caught > 0.9  # of what hindsight would have asked about


def test_budget_finds_its_threshold_when_calibration_was_off() -> None:
    rng = random.Random(1)
    values = [10.0 * rng.random() for _ in range(256)]
    gate = BudgetThreshold(0.5, 256, prior=[i / 64 for i in range(64)])
    kept = judge(gate, values)
    assert kept.count(False) == 128
    late = [(value, ok) for value, ok in zip(values[64:], kept[64:], strict=True)]
    mean = {
        flag: sum(v for v, ok in late if ok is flag) / sum(ok is flag for _, ok in late)
        for flag in (True, False)
    }
    assert mean[False] > mean[True] + 3.0


def test_budget_starts_from_its_initial_value() -> None:
    gate = BudgetThreshold(0.5, 100, initial=0.3, warmup=3)
    assert gate.value == 0.3
    assert judge(gate, [0.2, 0.4, 0.9]) == [True, False, False]
    assert gate.value == 0.4  # 48 of 97 left to ask about: the middle of three scores


@given(st.lists(st.floats(-1, 3), min_size=1, max_size=150), st.floats(0, 1))
def test_risk_never_overspends(values: list[float], risk: float) -> None:
    gate = RiskThreshold(risk, len(values), CURVE)
    spent = sum(gate.expected(value) for value in values if gate.certain(value))
    assert spent == pytest.approx(gate.spent)
    assert spent <= risk * len(values) + 1e-9


def test_risk_spends_most_of_its_budget_on_the_surest() -> None:
    rng = random.Random(2)
    knots = [((i + 0.5) / 32, ((i + 0.5) / 32) ** 2) for i in range(32)]  # uniform scores, risk = score ** 2
    for risk in (0.05, 0.15, 0.3):
        values = [rng.random() for _ in range(256)]
        gate = RiskThreshold(risk, 256, knots)
        kept = [value for value in values if gate.certain(value)]
        assert 0.85 * risk * 256 < gate.spent <= risk * 256
        # Keeping up to t costs t**3 / 3 a token: the best that hindsight could do.
        assert len(kept) > 0.85 * 256 * (3 * risk) ** (1 / 3)


def test_risk_at_its_ends() -> None:
    values = [0.0, 0.5, 1.0, 2.0]
    assert judge(RiskThreshold(1.0, 4, CURVE), values) == [True] * 4
    assert judge(RiskThreshold(0.0, 4, CURVE), values) == [False] * 4
    free = RiskThreshold(0.0, 4, ((0.0, 0.0), (1.0, 0.5)))
    assert judge(free, [-1.0, 0.0, 0.1, 1.0]) == [True, True, False, False]


def test_expected_risk_is_straight_between_knots_and_flat_beyond() -> None:
    gate = RiskThreshold(0.1, 10, CURVE)
    assert gate.expected(-3.0) == 0.01
    assert gate.expected(0.2) == pytest.approx(0.05)
    assert gate.expected(0.35) == pytest.approx(0.125)
    assert gate.expected(9.0) == 0.9


@given(scores, st.floats(0.0, 2.0), st.lists(st.booleans(), min_size=120, max_size=120))
def test_dynamic_without_rates_is_fixed(values: list[float], value: float, answers: list[bool]) -> None:
    fixed = ThresholdConfig(kind="fixed", value=value).start(len(values))
    dynamic = ThresholdConfig(kind="dynamic", value=value).start(len(values))
    for score, answer in zip(values, answers, strict=False):
        assert fixed.certain(score) is dynamic.certain(score)
        dynamic.answered(answer)


def test_dynamic_rises_when_accepted_and_falls_when_replaced() -> None:
    gate = DynamicThreshold(0.3, 100, accept_rate=0.05, replace_rate=0.1)
    gate.answered(True)
    assert gate.value == pytest.approx(0.35)
    gate.answered(False)
    assert gate.value == pytest.approx(0.25)
    assert gate.certain(0.24)
    assert not gate.certain(0.26)


@given(st.lists(st.booleans(), max_size=60), st.floats(-1, 1))
def test_dynamic_stays_within_its_bounds_and_does_not_wind_up(answers: list[bool], progress: float) -> None:
    gate = DynamicThreshold(0.3, 60, 0.05, 0.05, progress, minimum=0.2, maximum=0.5)
    for answer in answers:
        gate.certain(0.3)
        gate.answered(answer)
        assert 0.2 <= gate.value <= 0.5
    level = DynamicThreshold(0.3, 60, 0.05, 0.05, minimum=0.2, maximum=0.5)
    for _ in range(30):
        level.answered(True)
    level.answered(False)
    assert level.value == pytest.approx(0.45)


def test_dynamic_moves_with_progress() -> None:
    gate = DynamicThreshold(0.3, 101, progress_rate=-0.2)
    seen = []
    for _ in range(101):
        seen.append(gate.value)
        gate.certain(0.0)
    assert seen[0] == 0.3
    assert seen[50] == pytest.approx(0.2)
    assert seen[100] == pytest.approx(0.1)


def test_dynamic_settles_where_answers_balance() -> None:
    """A score s is accepted with chance 1 - s; above threshold t that is (1 - t) / 2, here 1/4 at t = 1/2."""
    rng = random.Random(3)
    for start in (0.1, 0.9):
        gate = DynamicThreshold(start, 4000, accept_rate=0.03, replace_rate=0.01, minimum=0.0, maximum=1.0)
        path = []
        for _ in range(4000):
            score = rng.random()
            if not gate.certain(score):
                gate.answered(rng.random() < 1 - score)
            path.append(gate.value)
        assert sum(path[1000:]) / 3000 == pytest.approx(0.5, abs=0.06)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kind)
def test_a_config_survives_json_and_starts_fresh_gates(config: ThresholdConfig) -> None:
    again = ThresholdConfig.from_dict(json.loads(json.dumps(config.to_dict(), allow_nan=False)))
    assert again == config
    values = [random.Random(4).random() for _ in range(50)]
    first = config.start(50)
    pattern = []
    for value in values:
        pattern.append(first.certain(value))
        first.answered(False)
    second = again.start(50)
    for value, expected in zip(values, pattern, strict=True):
        assert second.certain(value) is expected
        second.answered(False)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"kind": "clever"}, "fixed, budget, risk, dynamic"),
        ({"share": 1.5}, "share"),
        ({"risk": -0.1}, "risk"),
        ({"share": math.nan}, "share"),
        ({"value": math.nan}, "NaN"),
        ({"prior": (0.1, math.nan)}, "NaN"),
        ({"warmup": -1}, "warmup"),
        ({"accept_rate": -0.1}, "accept_rate"),
        ({"replace_rate": math.nan}, "replace_rate"),
        ({"kind": "dynamic", "value": 0.3, "minimum": 0.4}, "minimum"),
        ({"kind": "dynamic", "value": 0.3, "maximum": 0.2}, "maximum"),
        ({"kind": "risk"}, "curve"),
        ({"kind": "risk", "curve": ((0.2, 0.1), (0.1, 0.2))}, "rise"),
        ({"kind": "risk", "curve": ((0.1, 0.2), (0.2, 0.1))}, "rise"),
        ({"kind": "risk", "curve": ((0.1, 0.2), (0.2, 1.1))}, "between 0 and 1"),
    ],
)
def test_a_bad_config_says_what_is_wrong(values: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        ThresholdConfig(**values)


def test_unknown_names_and_negative_lengths_are_refused() -> None:
    with pytest.raises(InputError, match="shares"):
        ThresholdConfig.from_dict({"kind": "budget", "shares": 0.3})
    with pytest.raises(InputError, match="tokens"):
        ThresholdConfig().start(-1)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kind)
def test_a_picture_that_is_all_prefix_starts_too(config: ThresholdConfig) -> None:
    assert config.start(0).certain(0.05) in (True, False)


def test_it_needs_neither_torch_nor_numpy() -> None:
    code = "import sys, ciar.intervals.thresholds; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
