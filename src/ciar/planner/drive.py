"""One picture by plan: a probe where nothing is known yet, then one leg, or several if the network changes.

A leg is a session. One that is left in mid-picture hands its decided tokens to the next, which opens
with them as its history, as after a lost connection. Where the wish is exact every plan gives the tokens
of plain AR, so the picture is the same wherever it changes hands. Knows neither models nor sessions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ciar.errors import CloudUnavailable, ServerBusy
from ciar.ledger import Decider, Ledger
from ciar.planner.choose import Choice
from ciar.planner.conditions import Wish
from ciar.planner.planner import Planner
from ciar.planner.plans import Plan
from ciar.planner.probe import Probed

#: A running picture is looked at so many times, and changes its plan at most so often.
LOOKS, CHANGES = 16, 2

#: Called with the tokens done so far and the ledger; False stops.
Progress = Callable[[int, Ledger], bool | None]


class LegResult(Protocol):
    """What a session returns."""

    @property
    def tokens(self) -> list[int]: ...

    @property
    def ledger(self) -> Ledger: ...

    @property
    def warnings(self) -> tuple[str, ...]: ...

    @property
    def stopped(self) -> bool: ...


class RunLeg(Protocol):
    """Runs a session by a plan, from the tokens that are decided on."""

    def __call__(
        self, plan: Plan, tokens: Sequence[int], decided: Sequence[Decider], progress: Progress, /
    ) -> LegResult: ...


@dataclass
class Drawn:
    """A picture and how it was made.

    Attributes:
        tokens: fewer than all when ``stopped``.
        ledger: of all legs and the probe together.
        plans: the plans of its legs, in order.
        why: a sentence for each.
        warnings: sentences for the user.
        stopped: whether the caller ended it.
    """

    tokens: list[int] = field(default_factory=list)
    ledger: Ledger = field(default_factory=Ledger)
    plans: list[Plan] = field(default_factory=list)
    why: list[str] = field(default_factory=list)
    warnings: tuple[str, ...] = ()
    stopped: bool = False

    @property
    def strategy(self) -> str:
        """Names of the strategies that really ran, in order: ``lossless, then scd``."""
        names = [plan.strategy for plan in self.plans]
        return ", then ".join(name for i, name in enumerate(names) if i == 0 or name != names[i - 1])


def draw(
    planner: Planner,
    wish: Wish,
    run_leg: RunLeg,
    run_probe: Callable[[], Probed],
    guided: int,
    progress: Progress | None = None,
    spent: Ledger | None = None,
) -> Drawn:
    """Makes one picture.

    A change of plan never costs the picture: where the new leg finds no cloud, or a busy one, before it has
    made a token, the plan before goes on, and the picture keeps it.

    Args:
        planner: what chooses; learns from the picture.
        wish: what the user wants.
        run_leg: runs a session; its transport tells the planner's meter.
        run_probe: measures the cloud.
        guided: rows of one position, 2 with guidance.
        progress: called as the picture grows.
        spent: what the picture has cost so far, without deciders.

    Raises:
        CloudUnavailable: the cloud cannot be reached.
        CiarError: whatever else a session or the probe raises.
    """
    drawn = Drawn(ledger=_sum(Ledger(tokens=planner.tokens), spent or Ledger()))
    decided: list[Decider] = []
    if planner.needs_probe(wish):
        probed = run_probe()
        drawn.ledger = _sum(drawn.ledger, probed.ledger)
        drawn.tokens = list(probed.tokens)
    choice = planner.choose(wish)
    if not choice.plan.exact:  # so that the picture is what the plan makes of the seed
        drawn.tokens = []
    decided += ["prefix"] * len(drawn.tokens)
    probe_only = not drawn.tokens
    settled = False
    while True:
        drawn.plans.append(choice.plan)
        drawn.why.append(choice.why)
        watch = _Watch(planner, wish, choice.plan, drawn.ledger, len(drawn.tokens), progress)
        # In one process a plan that listens has computed all it asked for before it is looked at.
        computed = planner.together and choice.plan.placement == "colocated"
        watch.may_change = len(drawn.plans) <= CHANGES and not computed and not settled
        try:
            result = run_leg(choice.plan, drawn.tokens, decided, watch)
        except (CloudUnavailable, ServerBusy) as error:
            if settled or watch.grew or len(drawn.plans) == 1:
                raise
            settled = True
            failed, back = drawn.plans.pop(), drawn.plans[-1]
            drawn.why.pop()
            why = f"{failed.name} could not begin ({error}), so {back.name} goes on"
            choice = Choice(back, choice.prediction, why, choice.considered)
            continue
        drawn.tokens, decided = list(result.tokens), list(result.ledger.decided)
        drawn.ledger = _sum(drawn.ledger, result.ledger)
        drawn.warnings += tuple(one for one in result.warnings if one not in drawn.warnings)
        if not result.stopped:
            break
        if watch.change is None:
            drawn.stopped = True
            break
        choice = watch.change
    if not drawn.stopped and probe_only and len(drawn.plans) == 1:
        planner.learn(choice.plan, result.ledger, guided)
    return drawn


class _Watch:
    """Looks at a leg as it goes: passes the caller's progress on, and asks the planner now and then."""

    may_change = True

    def __init__(
        self,
        planner: Planner,
        wish: Wish,
        plan: Plan,
        before: Ledger,
        done: int,
        progress: Progress | None,
    ) -> None:
        self.planner, self.wish, self.plan, self.before, self.progress = planner, wish, plan, before, progress
        self.apart = max(1, planner.tokens // LOOKS)
        self.due = done + self.apart
        #: Whether the leg made a token.
        self.grew = False
        #: The plan to go on with, once there is a better one.
        self.change: Choice | None = None

    def __call__(self, done: int, ledger: Ledger) -> bool | None:
        self.grew = True
        if self.progress is not None and self.progress(done, _sum(self.before, ledger)) is False:
            return False
        # The last look is a while before the end: what is left then is not worth a session.
        if self.may_change and self.due <= done <= self.planner.tokens - self.apart:
            self.due = done + self.apart
            self.change = self.planner.review(self.wish, self.plan, done)
            return False if self.change is not None else None
        return None


def _sum(first: Ledger, second: Ledger) -> Ledger:
    """Both ledgers together; tokens and deciders are those of the second, where it has any."""
    counts = {
        name: getattr(first, name) + value
        for name, value in vars(second).items()
        if name not in ("tokens", "decided")
    }
    return Ledger(second.tokens or first.tokens, **counts, decided=second.decided or first.decided)
