"""What the planner knows of network and machines when it chooses. Pure numbers, no clock, no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from ciar.errors import InputError

#: What the user wants: the cloud's own picture soonest, a near one soonest, the least work for the cloud,
#: or no cloud at all.
Wish = Literal["exact", "balanced", "cheapest", "offline"]
WISHES: tuple[Wish, ...] = get_args(Wish)


def check_wish(wish: str) -> Wish:
    """The wish of a name.

    Raises:
        InputError: there is none of that name.
    """
    for known in WISHES:
        if wish == known:
            return known
    raise InputError(f"There is no wish {wish!r}. The wishes are: {', '.join(WISHES)}.")


@dataclass(frozen=True)
class Conditions:
    """How fast everything is; times in milliseconds.

    Attributes:
        tokens: tokens of a picture, at least 1.
        rtt_ms: there and back, without the cloud's passes.
        pass_ms: a pass of the cloud, beside its rows.
        row_ms: each position of a pass; both rows of guidance count as one position.
        step_ms: a step of the device.
        connect_ms: making a connection, before the session is opened.
        prefill_ms: reading the prompt in the cloud.
        bytes_per_ms: what the line carries in one direction; infinite where nothing is known of it.
        together: whether device and cloud take turns on one machine, so that neither works while the
            other does.

    Raises:
        InputError: a number is negative, not finite, or tokens or bandwidth are not above 0.
    """

    tokens: int
    rtt_ms: float
    pass_ms: float
    row_ms: float
    step_ms: float
    connect_ms: float = 0.0
    prefill_ms: float = 0.0
    bytes_per_ms: float = math.inf
    together: bool = False

    def __post_init__(self) -> None:
        for name in ("rtt_ms", "pass_ms", "row_ms", "step_ms", "connect_ms", "prefill_ms"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise InputError(f"{name} is {value}; it must be a number of milliseconds, 0 or more.")
        if self.tokens < 1:
            raise InputError(f"tokens is {self.tokens}; it must be at least 1.")
        if not self.bytes_per_ms > 0:
            raise InputError(f"bytes_per_ms is {self.bytes_per_ms}; it must be above 0.")
