"""The cloud in a thread of its own: sending does not wait, and drafts can be taken between passes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from transport.fake_cloud import TOKENS, FakeCloud, FakeSession, opening, picture, run_picture

from ciar.errors import CloudUnavailable, InputError, NumericalError, ProtocolError
from ciar.protocol import Cancel, Done, Draft, Open, Opened, Patch
from ciar.transport.base import MoreDrafts, ReceiveTimeout
from ciar.transport.delayed import DelayedTransport
from ciar.transport.threaded import ThreadedConnection, ThreadedTransport


class Collecting(FakeSession):
    """Answers everything that has come with one patch, as a streaming strategy does."""

    def handle(self, message: Draft, more: MoreDrafts = tuple) -> Iterator[Patch | Done]:
        cloud = self._cloud
        cloud.begun.release()
        if cloud.gate is not None:
            assert cloud.gate.wait(20)
        drafts = [message, *more()]
        answers = [one for draft in drafts for one in super(Collecting, self).handle(draft)]
        yield answers[-1]


class CollectingCloud(FakeCloud):
    def open(self, message: Open) -> FakeSession:
        self.opens += 1
        session = Collecting(self, message, self.opens)
        self.live.add(session)
        return session


def begin(cloud: FakeCloud, read_timeout_s: float = 5.0) -> ThreadedConnection:
    connection = ThreadedTransport(cloud, read_timeout_s).connect()
    connection.send(opening())
    assert isinstance(connection.receive(), Opened)
    return connection


def test_a_picture_is_that_of_any_other_transport() -> None:
    cloud = FakeCloud()
    assert run_picture(ThreadedTransport(cloud), seed=3)[0] == picture(3)
    assert run_picture(DelayedTransport(ThreadedTransport(cloud), 0.01), seed=4)[0] == picture(4)
    assert not cloud.live


def test_sending_does_not_wait_and_waiting_drafts_are_taken_together() -> None:
    cloud = CollectingCloud()
    with begin(cloud) as connection:
        cloud.gate = threading.Event()
        for step in range(3):
            connection.send(Draft(step, 4 * step, want=4))
        assert cloud.begun.acquire(timeout=5)
        with pytest.raises(ReceiveTimeout):
            connection.receive(0)
        cloud.gate.set()
        patch = connection.receive()
        assert isinstance(patch, Patch)
        assert patch.step == 2  # one answer to all three
        with pytest.raises(ReceiveTimeout):
            connection.receive(0.02)


def test_what_is_taken_is_checked_like_everything_else() -> None:
    for second, words in ((Draft(1, TOKENS, want=1), "beyond the 16 tokens"), (opening(), "Open came among")):
        cloud = CollectingCloud()
        connection = begin(cloud)
        cloud.gate = threading.Event()
        connection.send(Draft(0, 0, want=4))
        assert cloud.begun.acquire(timeout=5)
        connection.send(second)
        cloud.gate.set()
        with pytest.raises(ProtocolError, match=words):
            connection.receive()
        connection.close()
        assert not cloud.live


def test_a_cloud_that_fails_a_session_that_is_over_and_one_that_says_nothing() -> None:
    cloud = FakeCloud()
    connection = begin(cloud)
    cloud.failure = NumericalError("NaN at position 3.")
    connection.send(Draft(0, 0, want=1))
    with pytest.raises(NumericalError):
        connection.receive()
    with pytest.raises(CloudUnavailable, match="over"):
        connection.receive()
    with pytest.raises(CloudUnavailable, match="over"):
        connection.send(Draft(1, 1, want=1))
    connection.close()

    silent = FakeCloud()
    connection = begin(silent, read_timeout_s=0.05)
    silent.gate = threading.Event()
    connection.send(Draft(0, 0, want=1))
    began = time.monotonic()
    with pytest.raises(ReceiveTimeout, match="did not answer"):
        connection.receive()
    assert time.monotonic() - began < 1.0
    silent.gate.set()
    connection.close()
    connection.close()
    with pytest.raises(CloudUnavailable):
        connection.receive(0)
    assert not silent.live


def test_cancel_and_bad_frames_end_the_session() -> None:
    cloud = FakeCloud()
    connection = begin(cloud)
    connection.send(Cancel())
    with pytest.raises(CloudUnavailable):
        connection.receive()
    connection = begin(cloud)
    connection.send_frame(b"\xc1")
    with pytest.raises(ProtocolError):
        connection.receive()
    connection.close()
    assert not cloud.live
    for wrong in (0.0, float("nan")):
        with pytest.raises(InputError):
            ThreadedTransport(cloud, wrong)
