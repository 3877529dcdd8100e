"""A network that misbehaves on a schedule, around any transport. For tests: same seed, same faults."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from ciar.errors import CloudUnavailable, InputError
from ciar.transport.base import FrameConnection, FrameTransport, ReceiveTimeout

FaultKind = Literal["drop", "delay", "duplicate", "corrupt", "close"]
Direction = Literal["up", "down"]


@dataclass(frozen=True)
class Fault:
    """What happens to one frame.

    Attributes:
        direction: ``up`` from device to cloud, ``down`` from cloud to device.
        frame: which frame of that direction, counted from 0 over all connections of the transport, so
            that a fault does not strike again after a reconnection.
        kind: ``drop`` loses it, ``delay`` holds it for ``delay_s``, ``duplicate`` delivers it twice,
            ``corrupt`` flips one bit, ``close`` cuts the connection instead of delivering it.
        delay_s: for ``delay``, in seconds.
    """

    direction: Direction
    frame: int
    kind: FaultKind
    delay_s: float = 0.05


#: For a direction and frame number, the fault that strikes, if any.
Schedule = Callable[[Direction, int], Fault | None]


class FaultyTransport:
    """Misbehaves in front of another transport.

    Args:
        inner: the transport behind.
        faults: what happens to which frame.
        seed: decides which bit a ``corrupt`` flips.

    Raises:
        InputError: two faults strike the same frame.
    """

    def __init__(self, inner: FrameTransport, faults: Iterable[Fault] = (), seed: int = 0) -> None:
        planned: dict[tuple[Direction, int], Fault] = {}
        for fault in faults:
            key = (fault.direction, fault.frame)
            if key in planned:
                raise InputError(f"Two faults strike frame {fault.frame} {fault.direction}; plan one.")
            planned[key] = fault
        self._inner = inner
        self._schedule: Schedule = lambda direction, frame: planned.get((direction, frame))
        self._seed = seed
        self._counts: dict[Direction, int] = {"up": 0, "down": 0}
        self.struck: list[Fault] = []

    @classmethod
    def random(
        cls, inner: FrameTransport, rates: Mapping[FaultKind, float], seed: int, delay_s: float = 0.05
    ) -> FaultyTransport:
        """Faults at random, each kind at its rate a frame.

        Args:
            inner: the transport behind.
            rates: probability of each kind of fault; together at most 1.
            seed: decides everything.
            delay_s: how long a ``delay`` holds a frame, in seconds.

        Raises:
            InputError: a kind is unknown, or the rates are no probabilities.
        """
        unknown = set(rates) - set(get_args(FaultKind))
        if unknown:
            raise InputError(f"Unknown kinds of fault: {sorted(unknown)}. Known: {get_args(FaultKind)}.")
        if any(rate < 0 for rate in rates.values()) or sum(rates.values()) > 1:
            raise InputError("Rates of faults must be 0 or more and together at most 1.")

        def schedule(direction: Direction, frame: int) -> Fault | None:
            mark = random.Random(f"{seed}/{direction}/{frame}").random()
            for kind, rate in rates.items():
                mark -= rate
                if mark < 0:
                    return Fault(direction, frame, kind, delay_s)
            return None

        transport = cls(inner, seed=seed)
        transport._schedule = schedule
        return transport

    def connect(self) -> FaultyConnection:
        """Begin a session."""
        return FaultyConnection(self._inner.connect(), self)

    def next_fault(self, direction: Direction) -> Fault | None:
        """Count a frame and say what happens to it."""
        frame = self._counts[direction]
        self._counts[direction] += 1
        fault = self._schedule(direction, frame)
        if fault is not None:
            self.struck.append(fault)
        return fault

    def corrupted(self, frame: bytes, fault: Fault) -> bytes:
        """The frame with one bit flipped."""
        dice = random.Random(f"{self._seed}/{fault.direction}/{fault.frame}/bit")
        place = dice.randrange(len(frame) * 8)
        damaged = bytearray(frame)
        damaged[place // 8] ^= 1 << place % 8
        return bytes(damaged)


class FaultyConnection(FrameConnection):
    """A connection whose frames meet the faults of its transport.

    Args:
        inner: what carries the frames.
        transport: where the schedule is.
    """

    def __init__(self, inner: FrameConnection, transport: FaultyTransport) -> None:
        super().__init__()
        self._inner = inner
        self._transport = transport
        self._waiting: list[bytes] = []

    def send_frame(self, frame: bytes) -> None:
        fault = self._transport.next_fault("up")
        for copy in self._strike(frame, fault):
            self._inner.send_frame(copy)

    def receive_frame(self, timeout_s: float | None = None) -> bytes:
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._waiting:
            left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            frame = self._inner.receive_frame(left_s)
            self._waiting = self._strike(frame, self._transport.next_fault("down"))
            if deadline_s is not None and time.monotonic() > deadline_s and not self._waiting:
                raise ReceiveTimeout("No answer arrived in time. Wait longer, or send a message.")
        return self._waiting.pop(0)

    def close(self) -> None:
        self._inner.close()

    def abort(self) -> None:
        self._inner.abort()

    def _strike(self, frame: bytes, fault: Fault | None) -> list[bytes]:
        """The frames that are delivered in place of one."""
        if fault is None:
            return [frame]
        match fault.kind:
            case "drop":
                return []
            case "delay":
                time.sleep(fault.delay_s)
                return [frame]
            case "duplicate":
                return [frame, frame]
            case "corrupt":
                return [self._transport.corrupted(frame, fault)]
            case "close":
                self._inner.abort()
                raise CloudUnavailable("The connection was cut, as planned. Open a new one.")
