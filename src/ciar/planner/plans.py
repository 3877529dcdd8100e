"""Ways to make a picture that the planner chooses among: a strategy, its settings, and who works where.

Knows strategies by their names alone; tests hold every plan against the registered strategy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ciar.planner.conditions import Wish
from ciar.protocol.messages import OptionValue

#: ``device``: the device alone; ``split``: the device drafts and the cloud verifies; ``colocated``: the
#: cloud does all there is to do, and one round trip brings the picture.
Placement = Literal["device", "split", "colocated"]


@dataclass(frozen=True)
class Plan:
    """One way to make a picture.

    Attributes:
        name: what the table of agreement calls it.
        strategy: name of a registered strategy.
        placement: who works where.
        window: the setting ``window``; None leaves the backbone's.
        options: the strategy's options.
        exact: whether its pictures are those of plain AR, token for token.
        overlaps: whether the device drafts on while the cloud computes.
        least: the first wish, in the order exact, balanced, cheapest, that permits it.
    """

    name: str
    strategy: str
    placement: Placement
    window: int | None = None
    options: tuple[tuple[str, OptionValue], ...] = ()
    exact: bool = False
    overlaps: bool = False
    least: Wish = "exact"

    @property
    def uses_device(self) -> bool:
        """Whether a device model is needed."""
        return self.placement != "colocated"

    def permits(self, wish: Wish) -> bool:
        """Whether a wish permits this plan."""
        if wish == "offline" or self.placement == "device":
            return wish == "offline" and self.placement == "device"
        order = ("exact", "balanced", "cheapest")
        return order.index(self.least) <= order.index(wish)


def _windows(
    strategy: str,
    placement: Placement,
    windows: tuple[int, ...],
    least: Wish,
    options: tuple[tuple[str, OptionValue], ...] = (),
    mark: str = "",
) -> tuple[Plan, ...]:
    return tuple(
        Plan(f"{strategy}{mark}-{w}", strategy, placement, w, options, least == "exact", False, least)
        for w in windows
    )


_TWO, _FOUR = (("allowance", 2.0),), (("allowance", 4.0),)
_AUTO: tuple[tuple[str, OptionValue], ...] = (("pace", "auto"),)
_SLACK: tuple[tuple[str, OptionValue], ...] = (*_AUTO, ("policy", "slack"))

DEVICE_ONLY = Plan("device-only", "device-only", "device", least="offline")
#: Every plan. ``balanced`` adds an allowance of 2 nats on tokens that are all checked, ``cheapest`` one of
#: 4, and the paper's unchecked certain tokens.
PLANS: tuple[Plan, ...] = (
    Plan("base", "base", "colocated", exact=True),
    *_windows("scd", "colocated", (8, 16, 32, 64), "exact"),
    *_windows("lossless", "split", (16, 32), "exact"),
    Plan("ciar-stream", "ciar-stream", "split", 64, _AUTO, exact=True, overlaps=True),
    *_windows("scd-slack", "colocated", (8, 16, 32, 64), "balanced", _TWO),
    *_windows("slack", "split", (16, 32), "balanced", _TWO),
    Plan("ciar-stream-slack", "ciar-stream", "split", 32, _SLACK, overlaps=True, least="balanced"),
    *_windows("scd-slack", "colocated", (16, 32), "cheapest", _FOUR, "-4"),
    Plan(
        "ciar-stream-slack-4",
        "ciar-stream",
        "split",
        64,
        (*_SLACK, *_FOUR),
        overlaps=True,
        least="cheapest",
    ),
    Plan("ciar", "ciar", "split", least="cheapest"),
    DEVICE_ONLY,
)
