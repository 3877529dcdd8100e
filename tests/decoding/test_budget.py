"""Budgets: what a token costs against measured laws, what a picture spends against its own recount."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as profile
from hypothesis import strategies as st
from law_suite import DEVICES, MANY, PLAIN, P, bank
from stream_world import Play, World, play, play_any
from table_cloud import CODES, LENGTH
from vector_law import laws

from ciar.decoding.budget import Budget, budgeted, within
from ciar.decoding.options import law_of
from ciar.decoding.pending import Pending
from ciar.decoding.sampling import choose, slack, to_law
from ciar.decoding.timeline import Link
from ciar.protocol.messages import Settings

WORLD = World(11, grid=8)


# --- one token: cost and drift --------------------------------------------------------------------


def most_cost(p: np.ndarray, allowance: float) -> float:
    """Chance that the second best token is within the allowance of the best."""
    return float(1 - (p / (p + math.exp(allowance) * (1 - p))).sum())


@pytest.mark.parametrize("allowance", [0.1, 0.5, 2.0, 5.0])
def test_the_expected_cost_of_a_token_bounds_its_drift(allowance: float) -> None:
    """One-step TV <= mean cost <= what the allowance can cost <= 1 - exp(-allowance).

    For a guess that knows nothing of the noise the first is an equation.
    """
    p = P[0].double().exp().numpy()
    gumbels = bank().gumbels.view(-1, LENGTH, CODES)[:, 0]
    best = choose(P[0], gumbels)
    guesses = {f"always {code}": torch.full((MANY,), code) for code in range(CODES)}
    guesses |= {name: choose(laws(table, PLAIN)[0], gumbels) for name, table in DEVICES.items()}
    total = P[0] + gumbels
    # The worst guesser there is: the second best token, whatever the noise.
    guesses["adversary"] = total.topk(2, dim=1).indices[:, 1]
    for name, guess in guesses.items():
        gap = slack(P[0], gumbels, guess)
        kept = gap <= allowance
        tokens = torch.where(kept, guess, best)
        cost = float((tokens != best).double().mean())
        drift = 0.5 * np.abs(np.bincount(tokens.numpy(), minlength=CODES) / MANY - p).sum()
        assert drift <= cost + 0.004
        if name.startswith("always"):
            assert drift == pytest.approx(cost, abs=0.004)
        assert cost <= most_cost(p, allowance) + 0.004
        assert most_cost(p, allowance) <= 1 - math.exp(-allowance)
        if name == "adversary":
            assert cost == pytest.approx(most_cost(p, allowance), abs=0.004)
        # The budget counts just that.
        counted = [Budget(1.0, 1, most=allowance) for _ in range(300)]
        stood = [budget.judge(value) for budget, value in zip(counted, gap[:300].tolist(), strict=True)]
        assert stood == kept[:300].tolist()
        assert [budget.spent for budget in counted] == (tokens != best)[:300].double().tolist()


GAPS = st.lists(
    st.tuples(st.sampled_from([0.0, 0.01, 0.3, 1.0, 4.0, math.inf]), st.floats(0, 1)), min_size=1, max_size=80
)


@given(st.floats(0, 1), GAPS, st.randoms(use_true_random=False))
def test_a_budget_is_never_overdrawn_and_never_paid_in_advance(
    rate: float, tokens: list[tuple[float, float]], dice: random.Random
) -> None:
    budget = Budget(rate, len(tokens), most=3.0)
    measured = 0.0
    for count, (gap, level) in enumerate(tokens, 1):
        if dice.random() < 0.3:
            before = budget.risk
            measured += before if budget.trust(level) else budget.check(gap) * 0.0
        else:
            allowed = budget.allowance(level)
            assert 0 <= allowed <= 3.0 * level
            stands = budget.judge(gap, level)
            assert not stands or gap <= max(allowed, 0.0)
            assert stands or gap > 0
            measured += stands and gap > 0
        if dice.random() < 0.2:
            budget.audited(dice.random() < 0.5)
        assert budget.spent == pytest.approx(measured)
        assert budget.spent <= rate * count + 1e-6


def test_allowances_follow_what_is_left() -> None:
    """Slacks are a known law: the allowance settles at its quantile, and the budget is used up."""
    rng = np.random.default_rng(0)
    budget = Budget(0.2, 2000)
    assert budget.allowance() == pytest.approx(-math.log(0.8))  # nothing is known: what is certain to do
    gaps = np.where(rng.random(2000) < 0.4, 0.0, rng.exponential(2.0, 2000))
    for gap in gaps:
        budget.judge(float(gap))
    assert 0.97 * 400 <= budget.spent <= 400
    # 60 % have slack, a third of those may stand: exp(-a / 2) = 2 / 3.
    halfway = Budget(0.2, 4000)
    for gap in gaps:
        halfway.judge(float(gap))
    assert halfway.allowance() == pytest.approx(-2 * math.log(2 / 3), rel=0.15)
    assert halfway.allowance(0.5) == pytest.approx(halfway.allowance() / 2)
    assert Budget(0.0, 10).allowance() == 0.0
    assert Budget(1.0, 10).allowance() == math.inf


def test_trust_is_scaled_by_what_audits_find() -> None:
    def share(right: bool) -> float:
        budget = Budget(0.2, 1000, risk=0.4)
        for _ in range(100):
            budget.audited(right)
        rng = np.random.default_rng(1)
        return sum(budget.trust(float(level)) or budget.check(1.0) for level in rng.random(1000)) / 1000

    good, bad = Budget(0.2, 1, risk=0.4), Budget(0.2, 1, risk=0.4)
    for _ in range(100):
        good.audited(True)
        bad.audited(False)
    assert good.risk == pytest.approx(6.4 / 116)
    assert bad.risk == pytest.approx(106.4 / 116)
    assert share(True) == 1.0
    assert share(False) == pytest.approx(0.2 / bad.risk, abs=0.03)


def test_a_judge_spends_on_final_verdicts_alone() -> None:
    assert within([1.0, 0.0, math.inf])([0, 2, 1], [0.5, math.inf, 0.1], True) == [True, True, False]
    budget = Budget(1.0, 10, most=1.0)
    judge = budgeted(budget, lambda place: 1.0, lambda place: place == 3)
    assert judge([0, 1, 2, 3], [0.5, 2.0, 0.5, 0.5], True) == [True, False, True, False]
    assert budget.spent == 1
    assert judge([4, 5], [0.5, 9.0], False) == [True, False]
    assert budget.spent == 1


# --- whole pictures -------------------------------------------------------------------------------


def made(name: str, seed: int, **options: Any) -> Settings:
    return Settings(name, seed=seed, window=16, prefix_rate=0.0, options=tuple(options.items()))


def recount(world: World, one: Play) -> list[bool]:
    """At each position whether the picture's token is other than the cloud's choice given those before."""
    tokens, settings = one.device.tokens, one.device.settings
    noise = world.noise(settings)
    return [
        int(choose(to_law(world.logits(tokens[:place], world.tables), law_of(settings)), g)) != token
        for place, (token, g) in enumerate(zip(tokens, noise.gumbel(0, world.total), strict=True))
    ]


@pytest.mark.parametrize("height", [1, 3])
@pytest.mark.parametrize("budget", [0.0, 0.1, 0.3])
def test_scd_slack_spends_its_budget_and_no_more(budget: float, height: int) -> None:
    passes, spent = {0.0: 0, budget: 0}, 0
    for seed in range(6):
        settings = made("scd-slack", seed, policy="budget", budget=budget, allowance=20.0, height=height)
        one, _ = play(WORLD, settings, Link())
        other = recount(WORLD, one)
        assert one.cloud.kept.spent == sum(other) <= budget * 64
        for place in range(64):  # nothing in advance
            assert sum(other[: place + 1]) <= budget * (place + 1)
        passes[budget] += one.passes
        spent += sum(other)
        if budget == 0:
            assert one.device.tokens == WORLD.plain(settings)
    assert spent >= 0.7 * (math.floor(budget * 64) * 6)


def test_a_budget_saves_passes() -> None:
    passes = [
        sum(play(WORLD, made("scd-slack", s, policy="budget", budget=b, allowance=20.0), Link())[0].passes
            for s in range(6))
        for b in (0.0, 0.1, 0.3)
    ]  # fmt: skip
    assert passes[0] > passes[1] > passes[2]


@profile(max_examples=60)
@given(
    st.integers(0, 1000),
    st.sampled_from(["budget", "trust-budget"]),
    st.sampled_from([0.0, 0.1, 0.4]),
    st.integers(1, 3),
    st.integers(-1, 60),
    st.randoms(use_true_random=False),
)
def test_streams_stay_within_their_budget_whatever_happens_when(
    seed: int, policy: str, budget: float, height: int, cut: int, dice: random.Random
) -> None:
    """Measured on the picture itself, a lost connection included; audited tokens are never trusted."""
    options = {"policy": policy, "budget": budget, "audit": 0.3, "risk": 0.5, "height": height, "lag": 40}
    settings = made("ciar-stream", seed, **options, allowance=20.0)
    one = play_any(WORLD, settings, dice.randrange, cut)
    other, decided = recount(WORLD, one), one.device.decided
    trusted = [decider == "device" for decider in decided]
    judged = sum(o for o, t in zip(other, trusted, strict=True) if not t)
    pending: Pending = one.cloud.kept[0]
    assert pending.budget is not None
    assert judged <= budget * 64 + 1e-6
    if cut < 0 or one.cloud.kept is None:
        assert pending.budget.trusted == sum(trusted)
        assert pending.budget.spent >= judged - 1e-6
    if policy == "budget" or budget == 0:
        assert not any(trusted)
    noise = WORLD.noise(settings)
    assert all(noise.accept(place) >= 0.3 for place, t in enumerate(trusted) if t)
    if budget == 0:
        assert one.device.tokens == WORLD.plain(settings)


class Sure:
    """A gate that is certain of everything and remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[bool] = []

    def certain(self, score: float) -> bool:
        return True

    def answered(self, accepted: bool) -> None:
        self.told.append(accepted)


def test_audits_tell_the_gate_how_often_trust_is_wrong() -> None:
    """Half of all tokens are audited; the gate hears of each, and what stands of them is the cloud's."""
    told: list[bool] = []
    for seed in range(6):
        gate = Sure()
        one, _ = play(WORLD, made("ciar-stream", seed, policy="trust", audit=0.5, lag=64), Link(), gate)
        noise = WORLD.noise(one.device.settings)
        audited = [noise.accept(place) < 0.5 for place in range(64)]
        assert [decider != "device" for decider in one.device.decided] == audited
        assert not any(o for o, a in zip(recount(WORLD, one), audited, strict=True) if a)
        assert gate.told == [decider == "accepted" for decider in one.device.decided if decider != "device"]
        told += gate.told
    assert 0.2 < sum(told) / len(told) < 0.95


def test_audits_tell_the_budget_how_often_trust_is_wrong() -> None:
    """All audited tokens are counted, also those that a sweep had repaired before their verdict."""
    for seed in range(6):
        settings = made("ciar-stream", seed, policy="trust-budget", audit=0.5, budget=1.0, risk=0.01, lag=64)
        one, _ = play(WORLD, settings, Link(), Sure())
        audited = [place for place in range(64) if WORLD.noise(settings).accept(place) < 0.5]
        replaced = sum(one.device.decided[place] == "replaced" for place in audited)
        budget = one.cloud.kept[0].budget
        assert budget.audits == len(audited)
        assert budget.wrong == replaced > 0


def test_everything_audited_is_exact_and_nothing_is_the_paper() -> None:
    for policy in ("trust", "trust-budget"):
        settings = made("ciar-stream", 1, policy=policy, audit=1.0, budget=1.0)
        one, _ = play(WORLD, settings, Link(), Sure())
        assert one.device.tokens == WORLD.plain(settings)
    one, _ = play(WORLD, made("ciar-stream", 1, policy="trust", audit=0.0), Link(), Sure())
    assert (one.passes, one.device.decided) == (0, ["device"] * 64)


def test_a_bad_device_is_trusted_less() -> None:
    def trusted(off: float) -> float:
        world = World(12, grid=16, off=off)
        options = {"policy": "trust-budget", "audit": 0.2, "budget": 0.2, "risk": 0.3, "lag": 64}
        plays = [play(world, made("ciar-stream", seed, **options), Link(), Sure())[0] for seed in range(3)]
        return sum(one.device.decided.count("device") for one in plays) / (3 * 256)

    assert trusted(0.1) > 1.3 * trusted(4.0)
