"""A cloud without a model, for the tests of transports and servers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

from ciar.errors import InputError, ProtocolError
from ciar.ledger import DECIDERS
from ciar.protocol import Cost, Done, Draft, Open, Opened, Patch, Settings
from ciar.transport.base import Connection, MoreDrafts, Transport

TOKENS = 16
VOCAB_SIZE = 1000
PREFIX, ACCEPTED, REPLACED = (DECIDERS.index(name) for name in ("prefix", "accepted", "replaced"))


def token_at(seed: int, position: int) -> int:
    """The cloud's own choice; the whole picture follows from the seed."""
    return (seed * 31 + position * 7) % VOCAB_SIZE


def picture(seed: int) -> tuple[int, ...]:
    """The picture of a seed."""
    return tuple(token_at(seed, position) for position in range(TOKENS))


class FakeSession:
    """Takes the drafted tokens that are its own choice and replaces the others."""

    def __init__(self, cloud: FakeCloud, message: Open, number: int) -> None:
        self.opened = Opened(f"session-{number:04d}", TOKENS, VOCAB_SIZE)
        self.is_closed = False
        self._cloud = cloud
        self._seed = message.settings.seed
        self._tokens = list(message.history)
        self._next_step = 0
        self._last: list[Patch | Done] = []

    def handle(self, message: Draft, more: MoreDrafts = tuple) -> Iterator[Patch | Done]:
        cloud = self._cloud
        cloud.begun.release()
        if cloud.gate is not None:
            assert cloud.gate.wait(20)
        time.sleep(cloud.delay_s)
        if cloud.failure is not None:
            raise cloud.failure
        if message.step == self._next_step - 1:
            yield from self._last
            return
        if message.step != self._next_step or message.start != len(self._tokens):
            raise ProtocolError(f"Draft {message.step} came where {self._next_step} was due.")
        cloud.passes += 1
        count = len(message.ids) or message.want
        own = tuple(token_at(self._seed, message.start + offset) for offset in range(count))
        decided = tuple(ACCEPTED if a == b else REPLACED for a, b in zip(message.ids, own, strict=False))
        decided = decided or (PREFIX,) * count
        self._tokens += own
        self._next_step += 1
        self._last = [
            Patch(message.step, message.start, own, decided, len(self._tokens), Cost(1, count, 0.5))
        ]
        if len(self._tokens) == TOKENS:
            self._last.append(Done(tuple(self._tokens), Cost(0, 0, 0.0)))
        yield from self._last

    def close(self) -> None:
        self.is_closed = True
        self._cloud.live.discard(self)


class FakeCloud:
    """Opens fake sessions.

    Attributes:
        live: sessions that are not closed.
        passes: drafts that were computed.
        gate: when set to an event, drafts wait for it.
        begun: released once for each draft that begins.
        delay_s: how long a draft takes.
        failure: raised by every draft.
    """

    def __init__(self, delay_s: float = 0.0) -> None:
        self.backbone = "fake"
        self.weights = "w1"
        self.live: set[FakeSession] = set()
        self.passes = 0
        self.opens = 0
        self.open_delay_s = 0.0
        self.gate: threading.Event | None = None
        self.begun = threading.Semaphore(0)
        self.delay_s = delay_s
        self.failure: Exception | None = None

    def open(self, message: Open) -> FakeSession:
        time.sleep(self.open_delay_s)
        if not message.prompt.strip():
            raise InputError("The prompt is empty. Say what to draw.")
        self.opens += 1
        session = FakeSession(self, message, self.opens)
        self.live.add(session)
        return session


def opening(seed: int = 0, prompt: str = "a cat", history: tuple[int, ...] = ()) -> Open:
    """How a test begins a picture."""
    return Open("fake", prompt, Settings("ciar", seed=seed), weights="w1", history=history)


def run_picture(transport: Transport, seed: int = 0, width: int = 4) -> tuple[tuple[int, ...], Connection]:
    """Make a picture from drafts that are right at every other position; returns it with the connection."""
    connection = transport.connect()
    try:
        connection.send(opening(seed))
        opened = connection.receive()
        assert isinstance(opened, Opened)
        tokens: list[int] = []
        for step in range(TOKENS // width):
            start = step * width
            ids = tuple((token_at(seed, start + k) + k % 2) % VOCAB_SIZE for k in range(width))
            connection.send(Draft(step, start, ids, (False,) * width))
            patch = connection.receive()
            assert isinstance(patch, Patch)
            assert patch.step == step
            tokens += patch.ids
        done = connection.receive()
        assert isinstance(done, Done)
        assert done.ids == tuple(tokens)
        return done.ids, connection
    finally:
        connection.close()
