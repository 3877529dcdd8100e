"""The planner of many pictures: it measures, chooses, learns from each, and looks again on the way."""

from __future__ import annotations

from ciar.ledger import Ledger
from ciar.planner.agreement import Table
from ciar.planner.choose import Choice, best, choose, explain
from ciar.planner.conditions import Conditions, Wish
from ciar.planner.cost import predict, predict_change, predict_rest
from ciar.planner.defaults import DEFAULTS
from ciar.planner.measure import Meter
from ciar.planner.plans import PLANS, Plan

#: A running picture changes its plan when the rest would take so much less, a new session included.
GAIN = 0.2


class Planner:
    """Chooses plans for pictures of one backbone over one way to a cloud.

    Args:
        tokens: tokens of a picture.
        device: whether the backbone has a device model.
        together: whether device and cloud take turns on one machine.
        table: agreement to begin with.
        meter: what is measured; the transport in use tells it. None begins with the table's price of a row.
    """

    def __init__(
        self,
        tokens: int,
        device: bool = True,
        together: bool = False,
        table: Table = DEFAULTS,
        meter: Meter | None = None,
    ) -> None:
        self.tokens, self.device, self.together, self.table = tokens, device, together, table
        self.meter = Meter(table.row_share) if meter is None else meter

    def conditions(self) -> Conditions:
        """What is known now."""
        return self.meter.conditions(self.tokens, together=self.together)

    def needs_probe(self, wish: Wish) -> bool:
        """Whether the cloud has to be measured before a plan can be chosen."""
        return wish != "offline" and not self.meter.knows_cloud

    def choose(self, wish: Wish) -> Choice:
        """The plan of the next picture.

        Raises:
            InputError: no plan is permitted, see :func:`ciar.planner.choose.choose`.
        """
        return choose(self.conditions(), wish, self.table, device=self.device)

    def review(self, wish: Wish, plan: Plan, done: int) -> Choice | None:
        """Whether a running picture should go on by another plan, and by which.

        Args:
            wish: what the user wants; the new plan is one that it permits, too.
            plan: what it runs by.
            done: tokens that are decided.
        """
        if wish == "offline" or done >= self.tokens:
            return None
        now = self.conditions()
        costs = {
            other: predict_change(other, self.table.plans[other.name], now, done)
            for other in PLANS
            if other.permits(wish)
            and other.name in self.table.plans
            and (self.device or not other.uses_device)
        }
        own = predict_rest(plan, self.table.plans[plan.name], now, done)
        costs[plan] = own
        found, rest = best(list(costs.items()), wish)
        # Whatever the wish: what saves no time, less work for the cloud included, is not worth a new session.
        if found == plan or rest.total_ms > (1 - GAIN) * own.total_ms:
            return None
        whole = predict(found, self.table.plans[found.name], now)
        why = f"from token {done} on {explain(found, costs, wish, self.device)}"
        return Choice(found, whole, why, tuple(sorted(costs.items(), key=lambda pair: pair[1].total_ms)))

    def learn(self, plan: Plan, ledger: Ledger, guided: int) -> None:
        """A picture was made by one plan, from its first token to its last.

        Args:
            guided: rows of one position, 2 with guidance.
        """
        before = self.table.plans[plan.name]
        self.table = self.table.with_plan(plan.name, before.moved(ledger, guided, self.meter.step_ms))
