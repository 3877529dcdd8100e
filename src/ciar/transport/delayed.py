"""A slow network around any transport, so that benchmarks can run without network namespaces.

Each frame waits for its turn on the line (bandwidth, one frame after the other) and then for half a round
trip. Sending does not block, as over a real socket, and both directions are independent. Not modelled:
loss, jitter, TCP's slow start and the bytes of headers.
"""

from __future__ import annotations

import math
import queue
import threading
import time

from ciar.errors import CiarError, CloudUnavailable, InputError
from ciar.transport.base import FrameConnection, FrameTransport, ReceiveTimeout

#: How often a waiting thread looks whether the connection was closed, in seconds.
_LOOK_S = 0.05
#: Longest time that closing waits for frames under way and a pass in progress, beyond the round trip.
_LINGER_S = 1.0


class Line:
    """One direction of a network: when does a frame arrive?

    Args:
        delay_s: time that a bit takes, in seconds.
        bytes_per_s: bandwidth; infinite when there is no limit.
    """

    def __init__(self, delay_s: float, bytes_per_s: float) -> None:
        self._delay_s = delay_s
        self._bytes_per_s = bytes_per_s
        self._free_at_s = -math.inf

    def arrival_s(self, frame_bytes: int, now_s: float) -> float:
        """When a frame that is sent now arrives. Later frames queue behind it."""
        self._free_at_s = max(now_s, self._free_at_s) + frame_bytes / self._bytes_per_s
        return self._free_at_s + self._delay_s


class DelayedConnection(FrameConnection):
    """A connection whose frames take time.

    Args:
        inner: what carries the frames.
        round_trip_s: time there and back, in seconds.
        bytes_per_s: bandwidth of each direction.
    """

    def __init__(self, inner: FrameConnection, round_trip_s: float, bytes_per_s: float) -> None:
        super().__init__()
        self._inner = inner
        self._round_trip_s = round_trip_s
        self._up = Line(round_trip_s / 2, bytes_per_s)
        self._down = Line(round_trip_s / 2, bytes_per_s)
        self._outbox: queue.SimpleQueue[tuple[float, bytes] | None] = queue.SimpleQueue()
        self._inbox: queue.SimpleQueue[tuple[float, bytes | CiarError]] = queue.SimpleQueue()
        self._next: tuple[float, bytes | CiarError] | None = None
        self._failure: CiarError | None = None
        self._is_closed = threading.Event()
        self._sender = threading.Thread(target=self._carry_up, name="ciar-line-up", daemon=True)
        self._receiver = threading.Thread(target=self._carry_down, name="ciar-line-down", daemon=True)
        self._sender.start()
        self._receiver.start()

    def send_frame(self, frame: bytes) -> None:
        if self._is_closed.is_set():
            raise CloudUnavailable("This connection is closed. Open a new one.")
        if self._failure is not None:
            raise self._failure
        self._outbox.put((self._up.arrival_s(len(frame), time.monotonic()), frame))

    def receive_frame(self, timeout_s: float | None = None) -> bytes:
        deadline_s = time.monotonic() + (math.inf if timeout_s is None else timeout_s)
        while self._next is None:
            try:
                self._next = self._inbox.get(timeout=min(_LOOK_S, max(0.0, deadline_s - time.monotonic())))
            except queue.Empty:
                if self._is_closed.is_set():
                    raise CloudUnavailable("This connection is closed. Open a new one.") from None
                if time.monotonic() >= deadline_s:
                    raise ReceiveTimeout(
                        "No answer arrived in time. Wait longer, or send a message."
                    ) from None
        arrival_s, item = self._next
        _sleep_until(min(arrival_s, deadline_s))
        if arrival_s > deadline_s:
            raise ReceiveTimeout("The answer is still on its way. Wait longer.")
        if isinstance(item, CiarError):
            raise item
        self._next = None
        return item

    def close(self) -> None:
        if self._is_closed.is_set():
            return
        self._is_closed.set()
        self._outbox.put(None)
        # Frames under way still arrive, as they do when a socket is closed in an orderly way.
        self._sender.join(self._round_trip_s + _LINGER_S)
        self._inner.close()
        self._receiver.join(_LINGER_S)

    def abort(self) -> None:
        self._is_closed.set()
        self._outbox.put(None)
        self._inner.abort()

    def _carry_up(self) -> None:
        while (item := self._outbox.get()) is not None:
            arrival_s, frame = item
            _sleep_until(arrival_s)
            try:
                self._inner.send_frame(frame)
            except CiarError as error:
                self._fail(error)
                return

    def _carry_down(self) -> None:
        while not self._is_closed.is_set():
            try:
                frame = self._inner.receive_frame(_LOOK_S)
            except ReceiveTimeout:
                continue
            except CiarError as error:
                self._fail(error)
                return
            self._inbox.put((self._down.arrival_s(len(frame), time.monotonic()), frame))

    def _fail(self, error: CiarError) -> None:
        self._failure = error
        self._inbox.put((self._down.arrival_s(0, time.monotonic()), error))


class DelayedTransport:
    """A slow network in front of another transport.

    Args:
        inner: the transport behind the network.
        round_trip_s: time there and back, in seconds; each direction takes half of it.
        megabits_per_s: bandwidth of each direction; None is no limit.

    Raises:
        InputError: a number is out of range.
    """

    def __init__(
        self, inner: FrameTransport, round_trip_s: float, megabits_per_s: float | None = None
    ) -> None:
        if not (math.isfinite(round_trip_s) and round_trip_s >= 0):
            raise InputError(f"round_trip_s must be 0 or more seconds, got {round_trip_s}.")
        if megabits_per_s is not None and not megabits_per_s > 0:
            raise InputError(f"megabits_per_s must be above 0, got {megabits_per_s}. None is no limit.")
        self._inner = inner
        self._round_trip_s = round_trip_s
        self._bytes_per_s = math.inf if megabits_per_s is None else megabits_per_s * 1e6 / 8

    def connect(self) -> DelayedConnection:
        """Begin a session; takes two round trips, as the handshakes of TCP and WebSocket do."""
        inner = self._inner.connect()
        time.sleep(2 * self._round_trip_s)
        return DelayedConnection(inner, self._round_trip_s, self._bytes_per_s)


def _sleep_until(moment_s: float) -> None:
    """Sleep until a moment of the monotonic clock."""
    wait_s = moment_s - time.monotonic()
    if wait_s > 0:
        time.sleep(wait_s)
