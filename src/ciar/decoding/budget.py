"""What a picture may spend on tokens that are not the cloud's own choice, and what it has spent.

The unit is one token: a token z that stands where the cloud's choice under the picture's noise is y costs
1 if z is not y, and else nothing. The cloud knows y at every position that it judges, so the cost is
measured and not guessed.

Why this is drift. Let F be all that happened before position t: the noise of the positions before it, the
tokens there, the allowance of t, which rests on them. The noise of t is independent of F, so y has the
cloud's law p given F. Of two variables on one probability space the laws differ by no more than the chance
that they are not equal, so ``TV(law of z given F, p) <= P(z != y given F) = E[cost given F]``, whoever
guessed z, and whether that guess knew the noise. Summed over the positions, the law of the whole picture
is no further from the cloud's than the expected sum of the costs, and a budget that is kept on every
picture bounds that sum. Where z's guess knows nothing of the noise at t the first step is an equation: all
mass that moves, moves to the guess.

And what an allowance a can cost: z is not y only where the second best token is within a of the best.
Token k leads all others by more than a with chance ``p_k / (p_k + e^a (1 - p_k)) >= e^-a p_k`` for Gumbel
noise, so the expected cost is at most ``1 - sum_k p_k / (p_k + e^a (1 - p_k)) <= 1 - e^-a``.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Sequence
from typing import Protocol

#: Audits that the first word on how often certain tokens are wrong weighs as much as.
PRIOR = 16.0


class Judge(Protocol):
    """Says which guesses of a pass stand."""

    def __call__(self, places: Sequence[int], gaps: Sequence[float], final: bool) -> list[bool]:
        """Whether each guess stands.

        Args:
            places: of the guesses, counted from the verified horizon.
            gaps: their slacks, in nats.
            final: places are 0, 1, 2, ... and rest on nothing but each other, so that the verdicts up to the
                first guess that falls are final; else all of them are provisional.
        """
        ...


def within(allowances: Sequence[float]) -> Judge:
    """The judge who lets stand what is within a given allowance, one for each place."""
    return lambda places, gaps, final: [
        gap <= allowances[place] for place, gap in zip(places, gaps, strict=True)
    ]


class Budget:
    """Allowances that follow from what is left of a picture's budget.

    The allowance of a token is the running quantile of the slacks so far under which the tokens to come
    spend, on average, what is left; never less than what cannot spend more than that whatever is guessed,
    ``-log(1 - rate)``. What is spent never exceeds the rate times the tokens so far, so that a session that
    goes on after a lost connection, and knows nothing of what was spent, stays within the picture's budget
    with the tokens that are left.

    Args:
        rate: tokens other than the cloud's choice that may stand, as a share of all; 0 to 1.
        tokens: tokens that will be decided.
        most: largest allowance, in nats.
        risk: how often a certain token is taken not to be the cloud's choice, before audits tell; above 0.

    Attributes:
        spent: so far, in tokens; measured for what was judged, expected for what was trusted.
        trusted: tokens that stand unchecked.
        audits: certain tokens that were audited.
        wrong: those of them that were not the cloud's choice.
    """

    def __init__(self, rate: float, tokens: int, most: float = math.inf, risk: float = 0.5) -> None:
        self.rate, self.tokens, self.most = rate, tokens, most
        self.spent = 0.0
        self.trusted = self.audits = self.wrong = 0
        self._first_risk = risk
        self._done = self._judged = 0
        self._slacks: list[float] = []  # of judged tokens that were not the choice, by their level

    @property
    def risk(self) -> float:
        """How often a certain token is not the cloud's choice, by what audits have told."""
        return (PRIOR * self._first_risk + self.wrong) / (PRIOR + self.audits)

    def allowance(self, level: float = 1.0) -> float:
        """Slack of the next token, in nats.

        Args:
            level: share of the allowance that the token gets, 0 to 1.
        """
        goal = self._goal()
        certified = -math.log1p(-goal) if goal < 1 else math.inf
        count = math.floor(goal * self._judged)
        learned = 0.0
        if count:
            learned = self._slacks[min(count, len(self._slacks)) - 1] if self._slacks else math.inf
        return level * min(max(certified, learned), self.most) if level > 0 else 0.0

    def judge(self, gap: float, level: float = 1.0) -> bool:
        """Whether the next token stands, and spends accordingly.

        Args:
            gap: its slack.
            level: see :meth:`allowance`.
        """
        stands = gap == 0 or (gap <= self.allowance(level) and self._affords(1.0))
        self._done += 1
        self._judged += 1
        if gap > 0:
            self.spent += stands
            insort(self._slacks, gap / level if level > 0 else math.inf)
        return stands

    def trust(self, level: float) -> bool:
        """Whether the next token, which is certain, stands unchecked, and spends accordingly.

        As many do as what is left pays for, the surest of them.

        Args:
            level: share of the picture's tokens that are less certain.
        """
        risk = self.risk
        if level < 1.0 - self._goal() / risk or not self._affords(risk):
            return False
        self.spent += risk
        self._done += 1
        self.trusted += 1
        return True

    def check(self, gap: float) -> bool:
        """Whether the next token, which is audited, stands: where it is the cloud's choice, at no cost."""
        self._done += 1
        return gap == 0

    def audited(self, right: bool) -> None:
        """Tells what an audit found.

        Args:
            right: whether the device's certain token was the cloud's choice.
        """
        self.audits += 1
        self.wrong += not right

    def _goal(self) -> float:
        """What each token to come may spend on average."""
        left = self.rate * self.tokens - self.spent
        return min(1.0, max(0.0, left / max(1, self.tokens - self._done)))

    def _affords(self, cost: float) -> bool:
        # A sum of rates may fall short by its rounding.
        return self.spent + cost <= self.rate * (self._done + 1) + 1e-9


def budgeted(
    budget: Budget,
    level: Callable[[int], float] = lambda place: 1.0,
    audited: Callable[[int], bool] = lambda place: False,
) -> Judge:
    """The judge who spends a budget.

    Args:
        budget: of the picture.
        level: of the guess at a place.
        audited: whether the guess at a place is an audited certain token.
    """

    def judge(places: Sequence[int], gaps: Sequence[float], final: bool) -> list[bool]:
        stands: list[bool] = []
        for place, gap in zip(places, gaps, strict=True):
            if not final:
                stands.append(gap <= (0.0 if audited(place) else budget.allowance(level(place))))
                continue
            stands.append(budget.check(gap) if audited(place) else budget.judge(gap, level(place)))
            final = stands[-1]
        return stands

    return judge
