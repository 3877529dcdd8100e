"""The cost model and its choices against the clock: every plan is played, the chosen one is near the best."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import pytest
from stream_world import Play, World

from ciar.decoding.strategy import Propose, get_strategy
from ciar.decoding.timeline import Link, Timeline
from ciar.planner.agreement import Agreement, Table
from ciar.planner.choose import choose
from ciar.planner.conditions import Conditions, Wish
from ciar.planner.cost import predict
from ciar.planner.plans import PLANS, Plan
from ciar.protocol.messages import Settings

WORLD = World(9, grid=8, off=0.3)
NAMES = {
    "exact": ("base", "scd-8", "scd-16", "scd-32", "lossless-16", "lossless-32", "ciar-stream"),
    "balanced": ("base", "scd-8", "scd-32", "scd-slack-8", "scd-slack-16", "slack-16", "ciar-stream-slack"),
}
LINKS = [
    Link(step_ms, pass_ms, row_ms, trip_ms)
    for trip_ms in (0.0, 10.0, 30.0, 80.0, 200.0)
    for pass_ms in (8.0, 40.0)
    for row_ms in (0.0, 0.8)
    for step_ms in (0.5, 2.0)
]


@dataclass(frozen=True)
class Played:
    """What two pictures took, as means."""

    total_ms: float
    agreement: Agreement


@lru_cache
def played(plan: Plan, link: Link) -> Played:
    total_ms = passes = rows = steps = critical = 0.0
    for seed in range(2):
        settings = Settings(
            plan.strategy, seed=seed, prefix_rate=0.0, window=plan.window or 16, options=plan.options
        )
        one, strategy = Play.begin(WORLD, settings), get_strategy(plan.strategy)
        clock = Timeline(
            strategy.device(one.device),
            lambda draft, strategy=strategy, one=one: strategy.cloud(one.cloud, draft),
            link,
            one.device.pace,
        )
        op = clock.advance()
        while op is not None:
            steps += isinstance(op, Propose) / 2
            op = clock.advance(one.model(op))
        total_ms += clock.device_ms / 2
        passes, rows = passes + one.passes / 2, rows + sum(one.widths) / 2
        critical += clock.trips.critical / 2
    each = [figure / WORLD.total for figure in (passes, rows, steps)]
    fixed = 1.0 if plan.placement == "colocated" else 0.0
    return Played(total_ms, Agreement(*each, (critical - fixed) / WORLD.total, fixed))


def plans_of(wish: Wish) -> list[Plan]:
    return [plan for plan in PLANS if plan.name in NAMES[wish]]


def conditions(link: Link) -> Conditions:
    return Conditions(WORLD.total, link.round_trip_ms, link.pass_ms, link.row_ms, link.step_ms)


def table_of(wish: Wish, link: Link) -> Table:
    """What the planner has learned when it has made pictures by every plan at some network."""
    return Table({plan.name: played(plan, link).agreement for plan in plans_of(wish)})


def regret(wish: Wish, link: Link) -> float:
    """Time of the chosen plan, relative to the best one's."""
    plans = plans_of(wish)
    plan = choose(conditions(link), wish, table_of(wish, link), plans=plans).plan
    return played(plan, link).total_ms / min(played(one, link).total_ms for one in plans)


def test_no_slower_than_the_best_plan() -> None:
    """Predictions have errors, so one of the 80 settings may miss the 5 %, by little."""
    regrets = [regret(wish, link) for wish in ("exact", "balanced") for link in LINKS]
    assert max(regrets) <= 1.065
    assert sum(one > 1.05 for one in regrets) <= 1


@pytest.mark.parametrize("link", LINKS, ids=str)
def test_plans_that_take_turns_are_predicted_to_the_millisecond(link: Link) -> None:
    for plan in plans_of("exact"):
        found = predict(plan, played(plan, link).agreement, conditions(link)).total_ms
        if plan.overlaps:
            assert found == pytest.approx(played(plan, link).total_ms, rel=0.12)
        else:
            assert found == pytest.approx(played(plan, link).total_ms, rel=0.02)
