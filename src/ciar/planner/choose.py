"""Which plan, and why: one sentence for the user.

``exact`` and ``balanced`` want the picture soonest, ``cheapest`` the least work for the cloud among plans
that are no slower than plain AR, ``offline`` no cloud. Among plans that are as good as the best to within
what a prediction is worth, the one with the fewest critical round trips is taken, which is the one that a
worse network hurts least; so a device that does not gain more than that is left out. Because predictions
are linear in the round trip, a longer one never makes a plan with more of them preferred.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ciar.errors import InputError
from ciar.planner.agreement import Table
from ciar.planner.conditions import Conditions, Wish
from ciar.planner.cost import Prediction, predict
from ciar.planner.plans import PLANS, Plan

#: How much worse than the best a chosen plan may be predicted to be, by what the wish wants. The promise is
#: 5 %; the rest of it is left for the predictions' own errors.
NEAR = 0.02

Costs = Sequence[tuple[Plan, Prediction]]


@dataclass(frozen=True)
class Choice:
    """A chosen plan.

    Attributes:
        plan: what to do.
        prediction: what it would cost.
        why: one sentence for the user.
        considered: every permitted plan with its prediction, the fastest first.
    """

    plan: Plan
    prediction: Prediction
    why: str
    considered: tuple[tuple[Plan, Prediction], ...]


def choose(
    conditions: Conditions,
    wish: Wish,
    table: Table,
    *,
    plans: Sequence[Plan] = PLANS,
    device: bool = True,
) -> Choice:
    """Chooses a plan.

    Args:
        conditions: how fast everything is.
        wish: what the user wants.
        table: agreement of every plan; a plan without a row is not considered.
        plans: what to choose among.
        device: whether the backbone has a device model.

    Raises:
        InputError: no plan is left, for want of a device model or of rows of the table.
    """
    if wish == "offline" and not device:
        raise InputError(
            "The wish 'offline' needs a device model, and this backbone has none. Train one with ciar "
            "train device, or wish for exact."
        )
    known = [
        (plan, predict(plan, table.plans[plan.name], conditions))
        for plan in plans
        if plan.permits(wish) and plan.name in table.plans and (device or not plan.uses_device)
    ]
    if not known:
        raise InputError("The table of agreement has no row for any plan that is permitted. Restore it.")
    known.sort(key=lambda pair: pair[1].total_ms)
    plan, prediction = best(known, wish)
    return Choice(plan, prediction, explain(plan, dict(known), wish, device), tuple(known))


def best(costs: Costs, wish: Wish) -> tuple[Plan, Prediction]:
    """The plan to take of some, which a wish permits.

    Args:
        costs: at least one; those of ``base`` are the bound of ``cheapest``, where they are among them.
    """
    if wish == "cheapest":
        bound_ms = min((one.total_ms for plan, one in costs if plan.name == "base"), default=None)
        eligible = [pair for pair in costs if bound_ms is None or pair[1].total_ms <= bound_ms]
        least = min(one.cloud_ms for _, one in eligible)
        near = [pair for pair in eligible if pair[1].cloud_ms <= (1 + NEAR) * least]
    else:
        least = min(one.total_ms for _, one in costs)
        near = [pair for pair in costs if pair[1].total_ms <= (1 + NEAR) * least]
    # What comes last decides only between plans that wait equally often.
    if wish == "cheapest":
        return min(near, key=lambda pair: (pair[1].critical, pair[1].cloud_ms, pair[1].total_ms))
    return min(near, key=lambda pair: (pair[1].critical, pair[1].total_ms, pair[1].cloud_ms))


def explain(plan: Plan, costs: Mapping[Plan, Prediction], wish: Wish, device: bool) -> str:
    """Why a plan was chosen, in one sentence."""
    own = costs[plan]
    if plan.placement == "device":
        return f"{plan.name}: the wish is offline, so the device draws alone, in about {_time(own.total_ms)}"
    if wish == "cheapest":
        base = next((one for other, one in costs.items() if other.name == "base"), own)
        share = 100 * own.cloud_ms / base.cloud_ms if base.cloud_ms else 100
        return (
            f"{plan.name}: the least work for the cloud among plans no slower than plain AR, about "
            f"{_time(own.cloud_ms)} of passes ({share:.0f} % of plain AR's) and {_time(own.total_ms)} in all"
        )
    rivals = [(other, one) for other, one in costs.items() if other.uses_device != plan.uses_device]
    about = f"{plan.name}: about {_time(own.total_ms)} with {own.critical:.0f} critical round trips"
    if not rivals:
        return about if device else f"{about}; there is no device model to draft"
    rival, other = min(rivals, key=lambda pair: pair[1].total_ms)
    if plan.uses_device:
        return f"{about}; without the device, {rival.name} would take {_time(other.total_ms)}"
    return f"{about}; with the device drafting, {rival.name} would take {_time(other.total_ms)}"


def _time(milliseconds: float) -> str:
    return f"{milliseconds:.0f} ms" if milliseconds < 9999.5 else f"{milliseconds / 1e3:.1f} s"
