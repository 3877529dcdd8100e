"""The slow network: when frames arrive, and that nothing else changes."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transport.fake_cloud import FakeCloud, opening, picture, run_picture

from ciar.errors import CloudUnavailable, InputError, NumericalError
from ciar.protocol import Draft, Opened, Patch
from ciar.transport.base import ReceiveTimeout
from ciar.transport.delayed import DelayedTransport, Line
from ciar.transport.inprocess import InProcessTransport


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(1, 10_000)), min_size=1, max_size=20))
def test_frames_arrive_in_order_and_never_faster_than_the_line(sends: list[tuple[float, int]]) -> None:
    delay_s, bytes_per_s = 0.25, 1000.0
    line = Line(delay_s, bytes_per_s)
    now, previous, total = 0.0, 0.0, 0
    for pause_s, size in sends:
        now += pause_s
        total += size
        arrival = line.arrival_s(size, now)
        assert arrival >= max(previous, now + delay_s + size / bytes_per_s) - 1e-9
        assert arrival <= now + delay_s + total / bytes_per_s + 1e-9
        previous = arrival


def test_the_bandwidth_queues_frames_behind_each_other() -> None:
    line = Line(0.0, 100.0)
    assert [line.arrival_s(50, 0.0), line.arrival_s(50, 0.0), line.arrival_s(50, 9.0)] == [0.5, 1.0, 9.5]


def test_a_picture_over_a_slow_network_is_the_same_and_costs_its_round_trips() -> None:
    plain, direct = run_picture(InProcessTransport(FakeCloud()), seed=3)
    began = time.monotonic()
    slow, connection = run_picture(DelayedTransport(InProcessTransport(FakeCloud()), 0.02, 100.0), seed=3)
    spent_s = time.monotonic() - began
    assert slow == plain == picture(3)
    assert (connection.bytes_up, connection.bytes_down) == (direct.bytes_up, direct.bytes_down)
    assert spent_s >= 0.02 * (2 + 1 + 4)  # connecting, Open, four drafts


def test_sending_does_not_block_and_drafts_overlap() -> None:
    with DelayedTransport(InProcessTransport(FakeCloud()), 0.2).connect() as connection:
        began = time.monotonic()
        connection.send(opening())
        for step in range(4):
            connection.send(Draft(step, 4 * step, want=4))
        assert time.monotonic() - began < 0.1
        assert isinstance(connection.receive(), Opened)
        for step in range(4):
            patch = connection.receive()
            assert isinstance(patch, Patch)
            assert patch.step == step
        assert 0.2 <= time.monotonic() - began < 0.5  # five messages in about one round trip


def test_a_frame_on_its_way_is_not_lost_by_a_timeout() -> None:
    with DelayedTransport(InProcessTransport(FakeCloud()), 0.2).connect() as connection:
        connection.send(opening())
        with pytest.raises(ReceiveTimeout):
            connection.receive(0.02)
        time.sleep(0.12)  # computed, and on its way down
        with pytest.raises(ReceiveTimeout):
            connection.receive(0)
        assert isinstance(connection.receive(2.0), Opened)


def test_failures_come_through_and_closing_leaves_no_thread() -> None:
    cloud = FakeCloud()
    cloud.failure = NumericalError("NaN at position 3.")
    before = threading.active_count()
    connection = DelayedTransport(InProcessTransport(cloud), 0.01).connect()
    connection.send(opening())
    connection.receive()
    connection.send(Draft(0, 0, want=1))
    with pytest.raises(NumericalError, match="position 3"):
        connection.receive(2.0)
    with pytest.raises(CloudUnavailable):
        connection.receive(2.0)
    connection.close()
    connection.close()
    with pytest.raises(CloudUnavailable, match="closed"):
        connection.send(Draft(1, 1, want=1))
    assert threading.active_count() == before
    assert not cloud.live


@pytest.mark.parametrize(("round_trip_s", "megabits_per_s"), [(-1, None), (float("nan"), 1), (0, 0), (0, -1)])
def test_impossible_networks_are_refused(round_trip_s: float, megabits_per_s: float | None) -> None:
    with pytest.raises(InputError):
        DelayedTransport(InProcessTransport(FakeCloud()), round_trip_s, megabits_per_s)
