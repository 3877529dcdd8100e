"""Both halves of one picture on a clock of their own: what happens when, without a network or a model.

Device, cloud and the two directions of the line each take time, and whoever is due first goes first, so
a device that drafts on while its drafts are verified, and a cloud that finds new ones between its passes,
do what they would do in that time. Messages arrive in the order in which they were sent. Models are run
by whoever asks for the next operation.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any

from ciar.decoding.strategy import (
    CloudHalf,
    Commit,
    DeviceHalf,
    Drain,
    GrowTree,
    Pace,
    Pass,
    Propose,
    Receive,
    Scatter,
    Send,
    TreePass,
)
from ciar.decoding.trips import RoundTrips
from ciar.protocol.messages import Cost, Draft, Patch


@dataclass(frozen=True)
class Link:
    """How long things take, in milliseconds.

    The default is a cloud that answers at once: every draft is answered before the device goes on.

    Attributes:
        step_ms: one proposal of the device, or one token of a tree that it drafts.
        pass_ms: one pass of the cloud, beside its rows.
        row_ms: each position that a pass processes.
        round_trip_ms: there and back.
        node_ms: one token of a tree that is drafted in the cloud; free where nothing is said.
    """

    step_ms: float = 1.0
    pass_ms: float = 0.0
    row_ms: float = 0.0
    round_trip_ms: float = 0.0
    node_ms: float = 0.0


class Timeline:
    """Drives both halves.

    Args:
        device: the device half.
        answer: begins the cloud's half of a draft.
        link: how long things take.
        pace: where the device reads how long they take.

    Attributes:
        device_ms: the device's clock; at the end, when the picture was complete.
        cloud_ms: the cloud's clock.
        trips: round trips so far.
    """

    def __init__(
        self,
        device: DeviceHalf,
        answer: Callable[[Draft], CloudHalf],
        link: Link,
        pace: Pace | None = None,
    ) -> None:
        self.link = link
        self.device_ms = self.cloud_ms = 0.0
        self.trips = RoundTrips()
        self._answer = answer
        self._device: Generator[Any, Any, None] | None = device
        self._cloud: Generator[Any, Any, None] | None = None
        self._due: dict[str, Any] = {}  # what each half waits for
        self._up: deque[tuple[float, Draft]] = deque()
        self._down: deque[tuple[float, Patch]] = deque()
        self._runs = ""  # whose models run
        self._spent = Cost()
        if pace is not None:
            pace.step_ms, pace.round_trip_ms = link.step_ms, link.round_trip_ms
            pace.pass_ms, pace.row_ms = link.pass_ms, link.row_ms
        self._go_on_device(None)

    def advance(self, reply: Any = None) -> Any:
        """Goes on to the next operation that needs a model.

        Args:
            reply: the model's answer to the last one; None at the beginning.

        Returns:
            A ``Propose``, a ``Pass`` or another such, or None when the picture is complete.

        Raises:
            RuntimeError: both halves wait for each other, which no strategy may let happen.
        """
        if self._runs == "device":
            self._go_on_device(reply)
        elif self._runs == "cloud":
            self._go_on_cloud(reply)
        self._runs = ""
        while True:
            device_at, cloud_at = self._device_due(), self._cloud_due()
            if device_at == cloud_at == math.inf:
                if self._device is None:
                    return None
                raise RuntimeError("Device and cloud wait for each other.")
            # The cloud first: what it is sent now, it may answer now.
            op = self._step_cloud(cloud_at) if cloud_at <= device_at else self._step_device(device_at)
            if op is not None:
                return op

    @property
    def on_device(self) -> bool:
        """Whether the operation that was asked for last is the device's."""
        return self._runs == "device"

    def _device_due(self) -> float:
        """When the device does what it is about to do."""
        if self._device is None:
            return math.inf
        op = self._due["device"]
        if isinstance(op, Receive) and op.wait:
            return max(self.device_ms, self._down[0][0]) if self._down else math.inf
        return self.device_ms

    def _cloud_due(self) -> float:
        if self._cloud is not None:
            return self.cloud_ms
        return max(self.cloud_ms, self._up[0][0]) if self._up else math.inf

    def _step_device(self, now_ms: float) -> Any:
        op = self._due["device"]
        self.device_ms = now_ms
        if isinstance(op, Send):
            assert isinstance(op.message, Draft)
            self.trips.sent(op.message)
            self._up.append((now_ms + self.link.round_trip_ms / 2, op.message))
            self._go_on_device(None)
        elif isinstance(op, Receive):
            patch = None
            if self._down and self._down[0][0] <= now_ms:
                patch = self._down.popleft()[1]
                self.trips.received(patch, waited=op.critical)
            self._go_on_device(patch)
        elif isinstance(op, Commit):
            self._go_on_device(None)
        else:
            self._runs = "device"
            self.device_ms += self.link.step_ms * _steps(op)
            return op
        return None

    def _step_cloud(self, now_ms: float) -> Any:
        self.cloud_ms = now_ms
        if self._cloud is None:
            self._cloud = self._answer(self._up.popleft()[1])
            self._go_on_cloud(None)
            return None
        op = self._due["cloud"]
        if isinstance(op, Drain):
            taken: list[Draft] = []
            while self._up and self._up[0][0] <= now_ms:
                taken.append(self._up.popleft()[1])
            self._go_on_cloud(taken)
        elif isinstance(op, Patch):
            cost, self._spent = self._spent, Cost()
            self._down.append((now_ms + self.link.round_trip_ms / 2, replace(op, cost=cost)))
            self._go_on_cloud(None)
        else:
            self._runs = "cloud"
            rows = _positions(op)
            if rows:
                took_ms = self.link.pass_ms + self.link.row_ms * rows
                before = self._spent
                self._spent = Cost(before.passes + 1, before.token_rows + rows, before.cloud_ms + took_ms)
                self.cloud_ms += took_ms
            elif isinstance(op, GrowTree):
                took_ms = self.link.node_ms * _steps(op)
                self._spent = replace(self._spent, cloud_ms=self._spent.cloud_ms + took_ms)
                self.cloud_ms += took_ms
            return op
        return None

    def _go_on_device(self, reply: Any) -> None:
        assert self._device is not None
        try:
            self._due["device"] = self._device.send(reply)
        except StopIteration:
            self._device = None

    def _go_on_cloud(self, reply: Any) -> None:
        assert self._cloud is not None
        try:
            self._due["cloud"] = self._cloud.send(reply)
        except StopIteration:
            self._cloud = None


def _steps(op: Any) -> int:
    """Steps of the device's drafter; a tree begins with the one behind the known tokens."""
    if isinstance(op, GrowTree):
        return max(1, len(op.ids))
    return int(isinstance(op, Propose))


def _positions(op: Any) -> int:
    """Positions that a pass processes; 0 for what is no pass, and for the prefill's answer."""
    if isinstance(op, TreePass):
        return len(op.ids) + len(op.nodes)
    return len(op.ids) if isinstance(op, Pass | Scatter) else 0
