"""What the planner measures: round trips, bandwidth, passes and rows, from messages that travel anyway.

:class:`Metered` wraps a transport and times each exchange; :class:`Meter` keeps what it saw. Medians of
the latest, so that one slow answer changes nothing and a changed network shows after a few.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable

from ciar.decoding.pacing import NEWEST
from ciar.planner.conditions import Conditions
from ciar.protocol.messages import Cost, Draft, Message, Open, Opened, Patch
from ciar.transport.base import Connection, Transport

#: Exchanges and passes that are remembered.
REMEMBERED = 32
#: Of which so many tell the time of now.
LATEST = 5
#: Passes tell the price of a row when the widest is so many times as wide as the narrowest.
CONTRAST = 2.0
#: Exchanges tell the bandwidth when the largest is so many times the smallest.
BYTE_CONTRAST = 4.0


class PassMeter:
    """Splits the time of passes into what a pass costs and what each of its rows does.

    A strategy's passes are mostly of one width, which says nothing of the split. So the ratio of the two
    is kept from when widths last differed, and the latest passes scale it.

    Args:
        row_share: the ratio, a row's time to a pass's, before anything was measured.
    """

    def __init__(self, row_share: float) -> None:
        self.row_share = row_share
        self._seen: deque[tuple[float, float]] = deque(maxlen=REMEMBERED)

    def seen(self, rows: float, milliseconds: float) -> None:
        """A pass of so many positions took so long."""
        self._seen.append((rows, milliseconds))
        narrow, wide = min(w for w, _ in self._seen), max(w for w, _ in self._seen)
        if wide < CONTRAST * max(narrow, 1.0):
            return
        middle = (narrow * wide) ** 0.5
        low = _middle([pair for pair in self._seen if pair[0] <= middle])
        high = _middle([pair for pair in self._seen if pair[0] > middle])
        row_ms = max(0.0, (high[1] - low[1]) / (high[0] - low[0]))
        # Where rows are all that counts, a pass beside them still is a hundredth of the narrow ones.
        self.row_share = row_ms / max(low[1] - row_ms * low[0], 0.01 * low[1], 1e-9)

    def split(self) -> tuple[float, float]:
        """Milliseconds of a pass beside its rows, and of a row; 0 and 0 where no pass was seen."""
        if not self._seen:
            return 0.0, 0.0
        latest = list(self._seen)[-LATEST:]
        pass_ms = statistics.median(ms / (1.0 + self.row_share * rows) for rows, ms in latest)
        return pass_ms, self.row_share * pass_ms


class Meter:
    """What was measured so far.

    Args:
        row_share: what to take for the price of a row until it is known.
    """

    def __init__(self, row_share: float = 0.03) -> None:
        self.passes = PassMeter(row_share)
        self.step_ms = 0.0
        self._trips: deque[tuple[int, float]] = deque(maxlen=REMEMBERED)
        self._openings: deque[float] = deque(maxlen=LATEST)
        self._connects: deque[float] = deque(maxlen=LATEST)
        self._prefills: deque[float] = deque(maxlen=LATEST)

    @property
    def knows_cloud(self) -> bool:
        """Whether a round trip and a pass were measured."""
        return bool(self._trips or self._openings) and self.passes.split()[0] > 0

    def stepped(self, milliseconds: float) -> None:
        """A step of the device took so long, as a mean of several."""
        if milliseconds > 0:
            before = self.step_ms
            self.step_ms = milliseconds if before == 0 else before + NEWEST * (milliseconds - before)

    def connected(self, milliseconds: float) -> None:
        """Making a connection took so long."""
        self._connects.append(milliseconds)

    def opened(self, cost: Cost) -> None:
        """A session without a history was opened."""
        self._prefills.append(cost.cloud_ms)

    def greeted(self, milliseconds: float) -> None:
        """An opening was answered after so long, the cloud's passes taken off.

        What is left still holds work that no cost states, such as reading the prompt's words. So it stands
        for the round trip only until a draft was answered, and never tells of the bandwidth.
        """
        self._openings.append(max(0.0, milliseconds))

    def answered(self, size: int, milliseconds: float) -> None:
        """An exchange of so many bytes took so long, the cloud's passes taken off."""
        self._trips.append((size, max(0.0, milliseconds)))

    def computed(self, cost: Cost, guided: int) -> None:
        """The cloud made some passes; a pass has ``guided`` rows a position."""
        if cost.passes > 0 and cost.cloud_ms > 0:
            self.passes.seen(cost.token_rows / cost.passes / guided, cost.cloud_ms / cost.passes)

    def ms_per_byte(self) -> float:
        """Time of a byte on the line; 0 where it cannot be told from chance."""
        sizes = [size for size, _ in self._trips]
        if len(sizes) < LATEST or max(sizes) < BYTE_CONTRAST * max(min(sizes), 1):
            return 0.0
        middle = (max(min(sizes), 1) * max(sizes)) ** 0.5
        small = [pair for pair in self._trips if pair[0] <= middle]
        large = [pair for pair in self._trips if pair[0] > middle]
        if min(len(small), len(large)) < 2:
            return 0.0
        low, high = _middle(small), _middle(large)
        # Chance is what the small ones differ by among themselves, and so the large ones.
        spread = max(_spread([ms for _, ms in small]), _spread([ms for _, ms in large]))
        return (high[1] - low[1]) / (high[0] - low[0]) if high[1] - low[1] > 2 * spread else 0.0

    def rtt_ms(self) -> float:
        """The round trip of the latest exchanges, bytes taken off; 0 where nothing was measured."""
        if not self._trips:
            return statistics.median(self._openings) if self._openings else 0.0
        each = self.ms_per_byte()
        return statistics.median(max(0.0, ms - each * size) for size, ms in list(self._trips)[-LATEST:])

    def conditions(self, tokens: int, *, together: bool) -> Conditions:
        """What is known now."""
        pass_ms, row_ms = self.passes.split()
        each = self.ms_per_byte()
        return Conditions(
            tokens,
            self.rtt_ms(),
            pass_ms,
            row_ms,
            self.step_ms,
            statistics.median(self._connects) if self._connects else 0.0,
            statistics.median(self._prefills) if self._prefills else 0.0,
            1 / each if each > 0 else float("inf"),
            together,
        )


class MeteredConnection:
    """A connection whose exchanges are timed.

    Args:
        inner: what carries the messages.
        meter: what is told.
        clock: seconds.
    """

    def __init__(self, inner: Connection, meter: Meter, clock: Callable[[], float]) -> None:
        self._inner, self._meter, self._clock = inner, meter, clock
        self.bytes_up = self.bytes_down = 0
        self._guided = 2
        self._history = False
        self._next_answer = 0
        self._opened_at = 0.0
        self._alone: tuple[int, float, int] | None = None  # the only draft on its way: step, when, bytes

    def send(self, message: Message) -> None:
        """Sends, and notes when it had left."""
        before = self._inner.bytes_up + self._inner.bytes_down
        try:
            self._inner.send(message)
        finally:
            self._count()
        # Not before: in one process the cloud computes its answer while the message is sent.
        now = self._clock()
        if isinstance(message, Open):
            self._guided = 1 if message.settings.guidance == 1.0 else 2
            self._history = bool(message.history)
            self._opened_at = now
        elif isinstance(message, Draft):
            alone = message.step == self._next_answer
            self._alone = (message.step, now, before) if alone else None

    def receive(self, timeout_s: float | None = None) -> Message:
        """Receives, and tells the meter what it took."""
        try:
            message = self._inner.receive(timeout_s)
        finally:
            self._count()
        elapsed_ms = (self._clock() - self._opened_at) * 1e3
        if isinstance(message, Opened):
            cost = Cost(message.passes, message.token_rows, message.cloud_ms)
            self._meter.greeted(elapsed_ms - cost.cloud_ms)
            if not self._history:
                self._meter.opened(cost)
        elif isinstance(message, Patch):
            self._patched(message, waited=timeout_s != 0.0)
        return message

    def close(self) -> None:
        """Ends the connection."""
        self._inner.close()
        self._count()

    def _patched(self, patch: Patch, *, waited: bool) -> None:
        self._meter.computed(patch.cost, self._guided)
        alone, self._alone = self._alone, None
        # Only the first answer to a draft that had the line to itself tells of the line.
        if alone is not None and alone[0] == patch.step and waited:
            _, began, before = alone
            elapsed_ms = (self._clock() - began) * 1e3
            self._meter.answered(self.bytes_up + self.bytes_down - before, elapsed_ms - patch.cost.cloud_ms)
        self._next_answer = max(self._next_answer, patch.step + 1)

    def _count(self) -> None:
        self.bytes_up, self.bytes_down = self._inner.bytes_up, self._inner.bytes_down


class Metered:
    """A transport whose connections are timed.

    Args:
        inner: the way to the cloud.
        meter: what is told.
        clock: seconds.
    """

    def __init__(
        self, inner: Transport, meter: Meter, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._inner, self._meter, self._clock = inner, meter, clock

    def connect(self) -> MeteredConnection:
        """Begins a session."""
        began = self._clock()
        connection = self._inner.connect()
        self._meter.connected((self._clock() - began) * 1e3)
        return MeteredConnection(connection, self._meter, self._clock)


def _middle(pairs: list[tuple[float, float]] | list[tuple[int, float]]) -> tuple[float, float]:
    """Medians of both columns."""
    return statistics.median(float(a) for a, _ in pairs), statistics.median(b for _, b in pairs)


def _spread(values: list[float]) -> float:
    """Half the span between the quarters, roughly: the median distance from the median."""
    middle = statistics.median(values)
    return statistics.median(abs(value - middle) for value in values)
