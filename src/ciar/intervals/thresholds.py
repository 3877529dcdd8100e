"""Where certain ends: small state machines that judge one score a position (DESIGN section 3).

A :class:`ThresholdConfig` says which rule; its ``start`` gives a fresh :class:`Threshold` for one picture.
A score below the threshold is certain; so a threshold of 0 asks the cloud about every token (scores of
width are >= 0), infinity about none, and a score that is NaN is never certain.

Plain Python: runs where neither torch nor NumPy is. Knows nothing of how scores are made; where the
numbers of a config come from is :mod:`ciar.intervals.calibration`'s business.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import inf, isnan
from typing import Any, Literal, Protocol, get_args

from ciar.errors import InputError

Kind = Literal["fixed", "budget", "risk", "dynamic"]


class Threshold(Protocol):
    """The gate of one picture."""

    def certain(self, score: float) -> bool:
        """Whether the device keeps its token. Call it once a position, in order."""
        ...

    def answered(self, accepted: bool) -> None:
        """Tells the gate what the cloud made of a token that it was asked about."""
        ...


class FixedThreshold:
    """The same threshold at every position.

    Args:
        value: scores below this are certain.
    """

    def __init__(self, value: float) -> None:
        self.value = value

    def certain(self, score: float) -> bool:
        return score < self.value

    def answered(self, accepted: bool) -> None:
        """Changes nothing."""


class BudgetThreshold:
    """Asks the cloud about a given share of the tokens: exactly ``round(share * tokens)`` of them.

    The threshold is a running quantile of the scores so far. The quantile is not ``1 - share`` but what
    is left of the budget over what is left of the picture, so that a stretch of easy or hard tokens is
    made up for, and the count is met whatever the scores do.

    Args:
        share: share of the tokens to ask about, 0 to 1.
        tokens: tokens to be judged.
        initial: threshold until there are ``warmup`` scores.
        prior: scores of calibration pictures (their quantiles will do), counted among those seen.
        warmup: scores, prior and seen, before the quantile is trusted.
    """

    def __init__(
        self,
        share: float,
        tokens: int,
        initial: float = 0.30,
        prior: Sequence[float] = (),
        warmup: int = 8,
    ) -> None:
        self._scores = sorted(prior)
        self._initial = initial
        self._warmup = warmup
        self._to_ask = round(share * tokens)
        self._to_judge = tokens

    @property
    def value(self) -> float:
        """The next score is certain below this."""
        if self._to_ask <= 0:
            return inf
        if self._to_ask >= self._to_judge:
            return -inf
        count = len(self._scores)
        if count < max(self._warmup, 1):
            return self._initial
        return self._scores[int(count * (1.0 - self._to_ask / self._to_judge))]

    def certain(self, score: float) -> bool:
        result = score < self.value
        self._to_judge -= 1
        self._to_ask -= not result
        if not isnan(score):
            insort(self._scores, score)
        return result

    def answered(self, accepted: bool) -> None:
        """Changes nothing."""


class RiskThreshold:
    """Spends expected total variation, and never more than a picture's budget of it.

    A curve, fitted on calibration pictures, turns a score into the total variation between the device's
    and the cloud's law that it stands for. Keeping a token spends that much. The threshold lies where
    keeping everything below it would use up, on average, what is left of the budget over what is left
    of the picture.

    Args:
        risk: budget a token, in expected total variation, averaged over all judged tokens; 0 to 1.
        tokens: tokens to be judged.
        curve: knots (score, expected total variation), both rising, each knot standing for an equal
            share of the calibration tokens, as :func:`ciar.intervals.calibration.risk_curve` makes them.
    """

    def __init__(self, risk: float, tokens: int, curve: Sequence[tuple[float, float]]) -> None:
        self._scores = [score for score, _ in curve]
        self._risks = [value for _, value in curve]
        self._known = sorted(self._risks)  # expected spendings: of the calibration, then also of this picture
        self._budget = risk * tokens
        self._to_judge = tokens
        self.spent = 0.0

    def expected(self, score: float) -> float:
        """Expected total variation of a score: the curve, straight between knots, flat beyond them."""
        above = bisect_right(self._scores, score)
        if above == 0:
            return self._risks[0]
        if above == len(self._scores):
            return self._risks[-1]
        low, high = self._scores[above - 1], self._scores[above]
        weight = (score - low) / (high - low)
        return self._risks[above - 1] * (1.0 - weight) + self._risks[above] * weight

    def certain(self, score: float) -> bool:
        rate = (self._budget - self.spent) / max(self._to_judge, 1)
        self._to_judge -= 1
        if isnan(score):
            return False
        risk = self.expected(score)
        result = risk <= self._affordable(rate) and self.spent + risk <= self._budget
        if result:
            self.spent += risk
        insort(self._known, risk)
        return result

    def answered(self, accepted: bool) -> None:
        """Changes nothing: what the cloud decides spends no risk."""

    def _affordable(self, rate: float) -> float:
        """The largest known risk r such that keeping all risks up to r spends ``rate`` a token on average.

        Where even the smallest costs more than that, it is the rate itself.
        """
        limit, total = rate * len(self._known), 0.0
        affordable = rate
        for risk in self._known:
            total += risk
            if total > limit:
                break
            affordable = max(affordable, risk)
        return affordable


class DynamicThreshold:
    """Starts from a calibrated value and moves with progress and with the cloud's answers.

    An accepted token says that the gate asks too much, and raises the threshold; a replaced one lowers
    it. Where answers balance, the share of accepted ones is ``replace_rate / (accept_rate +
    replace_rate)``: the ratio of the rates sets the acceptance that the gate steers to, their size how
    fast. With all rates 0 it is :class:`FixedThreshold`.

    Args:
        value: threshold at the start.
        tokens: tokens to be judged.
        accept_rate: added for every accepted token, in units of the score, >= 0.
        replace_rate: taken away for every replaced token, in units of the score, >= 0.
        progress_rate: added between the first and the last token, evenly; may be negative.
        minimum: lower bound of the threshold.
        maximum: upper bound of the threshold.
    """

    def __init__(
        self,
        value: float,
        tokens: int,
        accept_rate: float = 0.0,
        replace_rate: float = 0.0,
        progress_rate: float = 0.0,
        minimum: float = -inf,
        maximum: float = inf,
    ) -> None:
        self._level = value
        self._step = progress_rate / max(tokens - 1, 1)
        self._judged = 0
        self._accept_rate, self._replace_rate = accept_rate, replace_rate
        self._minimum, self._maximum = minimum, maximum

    @property
    def value(self) -> float:
        """The next score is certain below this."""
        return self._bounded(self._level + self._step * self._judged)

    def certain(self, score: float) -> bool:
        result = score < self.value
        self._judged += 1
        return result

    def answered(self, accepted: bool) -> None:
        # Bounded here too, or a long run of one answer would have to be undone before the other counts.
        self._level = self._bounded(self._level + (self._accept_rate if accepted else -self._replace_rate))

    def _bounded(self, level: float) -> float:
        return min(max(level, self._minimum), self._maximum)


@dataclass(frozen=True)
class ThresholdConfig:
    """Which rule a gate follows, and its numbers. Those of other kinds are ignored.

    Attributes:
        kind: ``fixed``, ``budget``, ``risk`` or ``dynamic``.
        value: ``fixed``: the threshold. ``dynamic``: where it starts. ``budget``: the threshold until
            ``warmup`` scores are known. In units of the score.
        share: ``budget``: share of the tokens that the cloud is asked about, 0 to 1.
        prior: ``budget``: calibration scores that count as already seen.
        warmup: ``budget``: scores before the running quantile is trusted.
        risk: ``risk``: expected total variation a token that may be spent, 0 to 1.
        curve: ``risk``: knots (score, expected total variation), both rising.
        accept_rate: ``dynamic``: rise for an accepted token, >= 0, in units of the score.
        replace_rate: ``dynamic``: fall for a replaced token, >= 0, in units of the score.
        progress_rate: ``dynamic``: change from the first to the last token, in units of the score.
        minimum: ``dynamic``: lower bound; None = none.
        maximum: ``dynamic``: upper bound; None = none.

    Raises:
        InputError: a number is out of range; the message names it.
    """

    kind: Kind = "fixed"
    value: float = 0.30
    share: float = 0.30
    prior: tuple[float, ...] = ()
    warmup: int = 8
    risk: float = 0.10
    curve: tuple[tuple[float, float], ...] = ()
    accept_rate: float = 0.0
    replace_rate: float = 0.0
    progress_rate: float = 0.0
    minimum: float | None = None
    maximum: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise InputError(
                f"No threshold is called {self.kind!r}; choose one of {', '.join(get_args(Kind))}."
            )
        for name in ("share", "risk"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise InputError(f"{name} must lie between 0 and 1, not {getattr(self, name)}.")
        for name in ("accept_rate", "replace_rate"):
            if not getattr(self, name) >= 0.0:
                raise InputError(f"{name} must be at least 0, not {getattr(self, name)}.")
        if isnan(self.value) or isnan(self.progress_rate) or any(map(isnan, self.prior)):
            raise InputError("value, progress_rate and prior must be numbers, not NaN.")
        if self.warmup < 0:
            raise InputError(f"warmup must be at least 0, not {self.warmup}.")
        if self.kind == "dynamic" and not self._minimum <= self.value <= self._maximum:
            raise InputError(
                f"value must lie between minimum and maximum, but {self.value} does not lie between "
                f"{self._minimum} and {self._maximum}."
            )
        if self.kind == "risk":
            self._check_curve()

    def start(self, tokens: int) -> Threshold:
        """A fresh gate for one picture.

        Args:
            tokens: tokens that will be judged: those after the prefix.

        Raises:
            InputError: ``tokens`` is negative.
        """
        if tokens < 0:
            raise InputError(f"tokens must be at least 0, not {tokens}.")
        if self.kind == "fixed":
            return FixedThreshold(self.value)
        if self.kind == "budget":
            return BudgetThreshold(self.share, tokens, self.value, self.prior, self.warmup)
        if self.kind == "risk":
            return RiskThreshold(self.risk, tokens, self.curve)
        return DynamicThreshold(
            self.value,
            tokens,
            self.accept_rate,
            self.replace_rate,
            self.progress_rate,
            self._minimum,
            self._maximum,
        )

    def to_dict(self) -> dict[str, Any]:
        """For JSON; :meth:`from_dict` is its inverse, also after JSON made lists of the tuples."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ThresholdConfig:
        """A config from its ``to_dict``.

        Raises:
            InputError: a name is unknown or a number out of range.
        """
        unknown = values.keys() - cls.__dataclass_fields__.keys()
        if unknown:
            known = ", ".join(cls.__dataclass_fields__)
            raise InputError(f"A threshold has no {', '.join(sorted(unknown))}; it has {known}.")
        values = dict(values)
        if "prior" in values:
            values["prior"] = tuple(values["prior"])
        if "curve" in values:
            values["curve"] = tuple((score, risk) for score, risk in values["curve"])
        return cls(**values)

    @property
    def _minimum(self) -> float:
        return -inf if self.minimum is None else self.minimum

    @property
    def _maximum(self) -> float:
        return inf if self.maximum is None else self.maximum

    def _check_curve(self) -> None:
        if not self.curve:
            raise InputError("A risk threshold needs a curve; make one with calibration.risk_curve.")
        if not all(low[0] < high[0] and low[1] <= high[1] for low, high in pairwise(self.curve)):
            raise InputError("The knots of a risk curve must rise: scores strictly, risks not falling.")
        if not all(0.0 <= risk <= 1.0 for _, risk in self.curve):
            raise InputError("The risks of a risk curve must lie between 0 and 1.")
