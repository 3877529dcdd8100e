"""How much a streaming device sends at once, and how far it may run ahead: from what it has measured.

Pure arithmetic on the latency model, with times in milliseconds. A device that sends too little at once
makes the cloud spend passes on a few tokens; one that sends too much keeps an idle cloud waiting. Each
pass makes g tokens final, and a token that became final lets the device send a new one, which the
cloud has after a round trip and the time of a draft. So that the cloud never runs dry, the unverified
span must hold what is consumed meanwhile and what a pass needs to be worth its price. Wider passes
make more tokens final each, so a pass is worth widening until its rows cost as much as the pass itself;
more than that only makes passes longer and drafts rest on older guesses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

#: Drafts are at least and at most so long, in tokens: below, headers weigh more than ids and passes are
#: spent on too little; above, nothing is gained.
SHORTEST, LONGEST = 4, 16
#: A pass is at least so many times as wide as the tokens that it makes final.
SPARE = 8.0
#: Weight of the newest patch in running means.
NEWEST = 0.2


class Times(Protocol):
    """What has been measured, in milliseconds; 0 is not known yet."""

    step_ms: float
    pass_ms: float
    row_ms: float
    round_trip_ms: float


@dataclass(frozen=True)
class Plan:
    """What to send.

    Attributes:
        burst: tokens of a draft.
        lag: most tokens that were drafted and are not final.
    """

    burst: int
    lag: int


class Pacer:
    """Plans from running means.

    Args:
        total: tokens of the picture; no span is longer.
        start: the plan while nothing is known.
    """

    def __init__(self, total: int, start: Plan) -> None:
        self.total, self.start = total, start
        #: Tokens that one pass makes final: what agreement comes to.
        self.gain = 2.5

    def seen(self, final: int, passes: int) -> None:
        """A patch came.

        Args:
            final: tokens that became final.
            passes: passes that it took.
        """
        if passes > 0:
            self.gain += NEWEST * (final / passes - self.gain)

    def plan(self, times: Times) -> Plan:
        """The plan for what is known now."""
        step, once, trip = times.step_ms, times.pass_ms, times.round_trip_ms
        if step <= 0 or once <= 0:
            return self.start
        worth = max(SPARE * self.gain, once / times.row_ms if times.row_ms > 0 else math.inf)
        width = min(worth, self.total)
        whole = once + times.row_ms * width
        burst = min(LONGEST, max(SHORTEST, math.ceil(min(whole / step, LONGEST))), self.total)
        meanwhile = self.gain * (trip + whole + burst * step) / whole
        lag = math.ceil(min(meanwhile + width, self.total))
        return Plan(burst, max(lag, burst))


class PassTimes:
    """Splits the time of passes into what each costs and what each of its rows does: a running line fit.

    For one picture, whose passes differ in width all the time. ``ciar.planner.measure.PassMeter`` is for
    many, of which most have passes of one width: it keeps the price of a row where this forgets it.
    """

    def __init__(self) -> None:
        self._sums = [0.0] * 5  # weight, rows, time, rows squared, rows times time

    def seen(self, rows: float, milliseconds: float) -> None:
        """A pass of so many rows took so long."""
        new = (1.0, rows, milliseconds, rows * rows, rows * milliseconds)
        self._sums = [(1 - NEWEST) * old + NEWEST * value for old, value in zip(self._sums, new, strict=True)]

    def split(self) -> tuple[float, float]:
        """Milliseconds of a pass beside its rows, and of a row; neither is negative.

        Where all passes were as wide, nothing is known of rows, and they count as free.
        """
        weight, rows, time, squares, products = self._sums
        if weight == 0:
            return 0.0, 0.0
        spread = weight * squares - rows * rows
        known = spread > 1e-3 * weight * squares
        row_ms = max(0.0, (weight * products - rows * time) / spread) if known else 0.0
        pass_ms = (time - row_ms * rows) / weight
        if pass_ms <= 0:  # rows are all that counts
            return 1e-3 * time / weight, time / max(rows, 1e-9)
        return pass_ms, row_ms
