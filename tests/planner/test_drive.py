"""One picture over several legs, on sessions without models: changes, refusals, stops and what is counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from ciar.errors import CloudUnavailable, ServerBusy
from ciar.ledger import Decider, Ledger
from ciar.planner.choose import Choice
from ciar.planner.conditions import Wish
from ciar.planner.cost import Prediction
from ciar.planner.drive import Drawn, Progress, draw
from ciar.planner.planner import Planner
from ciar.planner.plans import PLANS, Plan
from ciar.planner.probe import probe, widths_of
from ciar.protocol.messages import Cost, Draft, Message, Open, Opened, Patch, Settings

TOTAL = 64
BY_NAME = {plan.name: plan for plan in PLANS}
FIRST, SECOND = BY_NAME["lossless-16"], BY_NAME["scd-8"]
BUSY = ServerBusy("The server is full.")


def choice(plan: Plan) -> Choice:
    return Choice(plan, Prediction(0, 0, 0, 0, 0, 0, 0), f"{plan.name} it is", ())


class Eager(Planner):
    """Begins with one plan, and would rather go on with the other at every look."""

    def __init__(self, first: Plan = FIRST, together: bool = False) -> None:
        super().__init__(TOTAL, together=together)
        self.first, self.looks = first, 0

    def needs_probe(self, wish: Wish) -> bool:
        return False

    def choose(self, wish: Wish) -> Choice:
        return choice(self.first)

    def review(self, wish: Wish, plan: Plan, done: int) -> Choice | None:
        self.looks += 1
        return choice(SECOND if plan is self.first else self.first)


@dataclass
class Result:
    tokens: list[int]
    ledger: Ledger
    warnings: tuple[str, ...] = ()
    stopped: bool = False


@dataclass
class Legs:
    """Sessions that commit token by token; ``fails`` are those that end in an error, and at which token."""

    fails: dict[int, tuple[int, Exception]] = field(default_factory=dict)
    begun: list[tuple[str, int]] = field(default_factory=list)

    def __call__(
        self, plan: Plan, tokens: Sequence[int], decided: Sequence[Decider], progress: Progress
    ) -> Result:
        at, error = self.fails.get(len(self.begun), (TOTAL + 1, BUSY))
        self.begun.append((plan.name, len(tokens)))
        made, ledger = list(tokens), Ledger(tokens=TOTAL, decided=list(decided))
        while len(made) < TOTAL:
            if len(made) >= at:
                raise error
            made.append(len(made))
            ledger.decided.append("prefix")
            ledger.cloud_passes += 1
            if progress(len(made), ledger) is False:
                return Result(made, ledger, stopped=True)
        return Result(made, ledger)


def drawn(planner: Planner, legs: Legs, **values: Any) -> Drawn:
    return draw(planner, "exact", legs, lambda: pytest.fail("no probe is needed"), 2, **values)


def test_a_picture_changes_twice_at_most_and_every_leg_is_counted() -> None:
    legs = Legs()
    found = drawn(Eager(), legs, spent=Ledger(device_steps=7, device_ms=3.0, discarded=8))
    assert legs.begun == [(FIRST.name, 0), (SECOND.name, 4), (FIRST.name, 8)]
    assert found.tokens == list(range(TOTAL))
    assert found.ledger.decided == ["prefix"] * TOTAL
    assert (found.ledger.tokens, found.ledger.cloud_passes) == (TOTAL, TOTAL)
    assert (found.ledger.device_steps, found.ledger.device_ms, found.ledger.discarded) == (7, 3.0, 8)


@pytest.mark.parametrize("error", [BUSY, CloudUnavailable("Nobody answers.")])
@pytest.mark.parametrize(("number", "start"), [(1, 4), (2, 8)])
def test_a_change_that_cannot_begin_costs_no_picture(error: Exception, number: int, start: int) -> None:
    legs, planner = Legs({number: (0, error)}), Eager()
    found = drawn(planner, legs)
    before = (FIRST, SECOND)[number - 1]
    assert legs.begun[-1] == (before.name, start)
    assert len(legs.begun) == number + 2
    assert planner.looks == number  # it is not tried again
    assert found.tokens == list(range(TOTAL))
    assert found.plans[-2:] == [before, before]
    assert len(found.why) == len(found.plans) == number + 1
    assert found.why[-1].endswith(f"could not begin ({error}), so {before.name} goes on")


@pytest.mark.parametrize(
    "fails",
    [
        {0: (0, BUSY)},  # the first leg
        {1: (6, BUSY)},  # a later one that was going well
        {1: (0, BUSY), 2: (0, BUSY)},  # and the earlier plan cannot go on either
        {1: (0, ValueError("a fault of ours"))},
    ],
)
def test_other_failures_are_told(fails: dict[int, tuple[int, Exception]]) -> None:
    with pytest.raises((ServerBusy, ValueError), match=r"full|ours"):
        drawn(Eager(), Legs(fails))


@pytest.mark.parametrize("plan", ["base", "scd-16", "lossless-32"])
@pytest.mark.parametrize("together", [False, True])
def test_what_is_computed_already_is_not_left(plan: str, together: bool) -> None:
    """In one process a plan that listens has its whole picture before the first look."""
    planner = Eager(BY_NAME[plan], together)
    legs = Legs()
    drawn(planner, legs)
    stays = together and plan != "lossless-32"
    assert (planner.looks == 0) == stays == (len(legs.begun) == 1)


@pytest.mark.parametrize(("stop", "legs_begun"), [(1, 1), (4, 1), (5, 2), (30, 3)])
def test_a_caller_may_stop_in_any_leg(stop: int, legs_begun: int) -> None:
    seen: list[int] = []

    def progress(done: int, ledger: Ledger) -> bool:
        seen.append(done)
        assert ledger.cloud_passes == done
        return done < stop

    legs = Legs()
    found = drawn(Eager(), legs, progress=progress)
    assert found.stopped
    assert found.tokens == list(range(stop))
    assert seen == list(range(1, stop + 1))
    assert len(legs.begun) == legs_begun


# --- the probe --------------------------------------------------------------------------------------


@dataclass
class Cloud:
    """A cloud that takes every draft as it is; ``lost`` are answers in whose place the line goes dead."""

    total: int
    lost: tuple[int, ...] = ()
    sent: list[Draft] = field(default_factory=list)
    answers: list[Message] = field(default_factory=list)
    given: int = 0
    opened: int = 0
    open_now: int = 0
    bytes_up: int = 3
    bytes_down: int = 5

    def connect(self) -> Cloud:
        self.open_now += 1
        self.sent.clear()
        self.answers.clear()
        return self

    def send(self, message: Message) -> None:
        if isinstance(message, Open):
            self.opened += 1
            self.answers.append(Opened("x", self.total, 64, passes=1, token_rows=6, cloud_ms=2.0))
        elif isinstance(message, Draft):
            self.sent.append(message)
            many = len(message.ids)
            cost = Cost(1, 2 * many, 1.0)
            self.answers.append(Patch(message.step, message.start, (9,) * many, (2,) * many, 0, cost))

    def receive(self, timeout_s: float | None = None) -> Message:
        self.given += 1
        if self.given - 1 in self.lost:
            raise CloudUnavailable("The line is dead.")
        return self.answers.pop(0)

    def close(self) -> None:
        self.open_now -= 1


OPENING = Open("tiny", "a cat", Settings("base"))


@pytest.mark.parametrize("total", [1, 2, 4, 5, 6, 7, 16, 256])
def test_a_probe_leaves_something_to_plan_and_counts_what_it_sent(total: int) -> None:
    cloud = Cloud(total)
    found = probe(cloud, OPENING)
    widths = [len(draft.ids) for draft in cloud.sent]
    assert widths == widths_of(total)
    assert [draft.start for draft in cloud.sent] == [sum(widths[:step]) for step in range(len(widths))]
    assert len(found.tokens) == sum(widths) < total
    assert widths[:4] == [1] * min(4, total - 1)
    assert found.ledger.round_trips == found.ledger.cloud_passes == 1 + len(widths)
    assert found.ledger.critical_round_trips == 1 + min(2, len(widths))
    assert (found.ledger.bytes_up, found.ledger.bytes_down, cloud.open_now) == (3, 5, 0)


def test_a_probe_whose_line_dies_is_made_once_more() -> None:
    cloud = Cloud(16, lost=(2,))
    found = probe(cloud, OPENING)
    assert found.tokens == [9] * 10
    assert (cloud.opened, cloud.open_now) == (2, 0)
    assert found.ledger.cloud_passes == 2 + 6  # what the dead line had brought counts
    assert found.ledger.bytes_up == 6
    for lost, opened in (((0,), 1), ((2, 5), 2)):  # nobody there, or dead twice
        cloud = Cloud(16, lost=lost)
        with pytest.raises(CloudUnavailable):
            probe(cloud, OPENING)
        assert (cloud.opened, cloud.open_now) == (opened, 0)
