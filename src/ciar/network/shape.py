"""What a network is like, and when bytes that are sent through it arrive. Pure arithmetic, no clock.

A bucket of tokens limits the rate, a delay with jitter follows, and now and then a packet comes late, as
one that was lost and sent again does. Nothing overtakes: TCP hands bytes over in their order.
"""

from __future__ import annotations

import math
import random
from dataclasses import asdict, dataclass
from typing import Any

from ciar.errors import InputError

#: Payload of a TCP packet on Ethernet, in bytes.
PACKET_BYTES = 1460
#: Shortest time after which Linux sends a lost packet again (RFC 6298; TCP_RTO_MIN), in milliseconds.
RETRANSMIT_MS = 200.0


@dataclass(frozen=True)
class Shape:
    """A network, the same in both directions.

    Attributes:
        rtt_ms: time there and back.
        jitter_ms: each packet's one-way delay is up to so much shorter or longer, evenly spread.
        megabits_per_s: bandwidth of each direction; None is no limit.
        loss: share of the packets that get lost, 0 to 1.

    Raises:
        InputError: a number is out of its range.
    """

    rtt_ms: float = 0.0
    jitter_ms: float = 0.0
    megabits_per_s: float | None = None
    loss: float = 0.0

    def __post_init__(self) -> None:
        for name in ("rtt_ms", "jitter_ms"):
            value = getattr(self, name)
            if not (math.isfinite(value) and 0 <= value <= 60_000):
                raise InputError(f"{name} is {value}; it must be from 0 to 60000 milliseconds.")
        rate = self.megabits_per_s
        if rate is not None and not (math.isfinite(rate) and rate > 0):
            raise InputError(f"megabits_per_s is {rate}; it must be above 0, or None for no limit.")
        if not 0 <= self.loss < 1:
            raise InputError(f"loss is {self.loss}; it must be from 0 to below 1.")

    @property
    def one_way_s(self) -> float:
        """Delay of one direction, in seconds."""
        return self.rtt_ms / 2e3

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth of one direction; infinite where there is no limit."""
        return math.inf if self.megabits_per_s is None else self.megabits_per_s * 1e6 / 8

    @property
    def late_s(self) -> float:
        """How much later a packet comes that was lost: the sender waits, and sends again."""
        return (RETRANSMIT_MS + self.rtt_ms) / 1e3

    def to_dict(self) -> dict[str, Any]:
        """One JSON object."""
        return asdict(self)


class Lane:
    """One direction of one connection: when do bytes arrive?

    Args:
        shape: the network.
        chance: draws jitter and losses.
        opens_s: nothing leaves before this moment.
        bucket_bytes: what may leave at once after a pause, beyond the rate.
    """

    def __init__(
        self,
        shape: Shape,
        chance: random.Random,
        opens_s: float = -math.inf,
        bucket_bytes: float = 0.0,
    ) -> None:
        self._shape, self._chance, self._opens_s = shape, chance, opens_s
        self._bucket_s = bucket_bytes / shape.bytes_per_s
        self._paid_until_s = -math.inf  # when the bucket would be back where it was full
        self._last_s = -math.inf

    def arrival_s(self, size_bytes: int, now_s: float) -> float:
        """When a packet that is sent now has arrived whole.

        Args:
            size_bytes: of the packet; 0 for the end of the stream.
            now_s: the moment; never before that of an earlier call.
        """
        shape = self._shape
        sent_s = max(now_s, self._opens_s)
        # A token bucket as one number (the generic cell rate algorithm, ITU-T I.371).
        self._paid_until_s = max(self._paid_until_s, sent_s - self._bucket_s) + size_bytes / shape.bytes_per_s
        delay_s = shape.one_way_s
        if shape.jitter_ms:
            delay_s = max(0.0, delay_s + self._chance.uniform(-shape.jitter_ms, shape.jitter_ms) / 1e3)
        if size_bytes and shape.loss and self._chance.random() < shape.loss:
            delay_s += shape.late_s
        self._last_s = max(self._last_s, sent_s + delay_s, self._paid_until_s + delay_s)
        return self._last_s
