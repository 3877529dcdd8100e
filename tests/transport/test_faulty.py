"""The misbehaving network: each fault does what it says, on schedule, and the ends survive all of them."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transport.fake_cloud import FakeCloud, opening, picture, run_picture

from ciar.errors import CloudUnavailable, InputError, ProtocolError, RemoteError
from ciar.protocol import Draft, Opened, Patch
from ciar.transport.base import ReceiveTimeout
from ciar.transport.faulty import Fault, FaultyTransport
from ciar.transport.inprocess import InProcessTransport


def faulty(*faults: Fault, cloud: FakeCloud | None = None) -> FaultyTransport:
    return FaultyTransport(InProcessTransport(cloud or FakeCloud()), faults)


def test_no_faults_change_nothing() -> None:
    tokens, connection = run_picture(faulty(), seed=2)
    _, direct = run_picture(InProcessTransport(FakeCloud()), seed=2)
    assert tokens == picture(2)
    assert (connection.bytes_up, connection.bytes_down) == (direct.bytes_up, direct.bytes_down)


@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_dropped_frame_is_a_timeout(direction: str) -> None:
    with faulty(Fault(direction, 1, "drop")).connect() as connection:  # type: ignore[arg-type]
        connection.send(opening())
        assert isinstance(connection.receive(0), Opened)
        connection.send(Draft(0, 0, want=1))
        with pytest.raises(ReceiveTimeout):
            connection.receive(0.05)
        connection.send(Draft(0, 0, want=1))  # asking again is safe
        assert isinstance(connection.receive(0), Patch)


def test_a_duplicated_draft_is_answered_twice_but_computed_once() -> None:
    cloud = FakeCloud()
    with faulty(Fault("up", 1, "duplicate"), cloud=cloud).connect() as connection:
        connection.send(opening())
        connection.receive()
        connection.send(Draft(0, 0, want=1))
        assert connection.receive(0) == connection.receive(0)
        assert cloud.passes == 1


def test_a_delayed_frame_comes_later() -> None:
    with faulty(Fault("down", 0, "delay", 0.08)).connect() as connection:
        connection.send(opening())
        began = time.monotonic()
        assert isinstance(connection.receive(), Opened)
        assert time.monotonic() - began >= 0.08


def test_a_corrupt_frame_differs_in_one_bit_and_by_the_seed() -> None:
    frame = bytes(range(40))
    fault = Fault("up", 0, "corrupt")
    damaged = [
        FaultyTransport(InProcessTransport(FakeCloud()), seed=s).corrupted(frame, fault) for s in (1, 1, 2)
    ]
    assert damaged[0] == damaged[1] != damaged[2]
    difference = int.from_bytes(frame, "big") ^ int.from_bytes(damaged[0], "big")
    assert difference.bit_count() == 1


def test_a_cut_strikes_once_over_all_connections() -> None:
    cloud = FakeCloud()
    transport = faulty(Fault("up", 1, "close"), cloud=cloud)
    with transport.connect() as connection:
        connection.send(opening())
        connection.receive()
        with pytest.raises(CloudUnavailable):
            connection.send(Draft(0, 0, want=1))
    assert not cloud.live
    tokens, _ = run_picture(transport, seed=4)
    assert tokens == picture(4)
    assert [fault.kind for fault in transport.struck] == ["close"]


@given(st.integers(0, 2**32))
@settings(max_examples=80, deadline=None)
def test_random_faults_end_in_the_right_picture_or_a_clean_error(seed: int) -> None:
    cloud = FakeCloud()
    rates = {"drop": 0.03, "duplicate": 0.03, "corrupt": 0.1, "close": 0.03}
    transport = FaultyTransport.random(InProcessTransport(cloud), rates, seed)  # type: ignore[arg-type]
    try:
        run_picture(transport, seed=6)
    except (RemoteError, InputError):
        pass
    except AssertionError:
        # A flipped bit in an id or a doubled answer is valid on the wire; it must have been a fault.
        assert transport.struck
    assert not cloud.live
    again = FaultyTransport.random(InProcessTransport(FakeCloud()), rates, seed)  # type: ignore[arg-type]
    faults = [(again.next_fault("up"), again.next_fault("down")) for _ in range(20)]
    planned = [fault for pair in faults for fault in pair if fault is not None]
    assert set(transport.struck) <= set(planned)


def test_schedules_that_make_no_sense_are_refused() -> None:
    with pytest.raises(InputError, match="Two faults"):
        faulty(Fault("up", 1, "drop"), Fault("up", 1, "close"))
    with pytest.raises(InputError, match="Unknown kinds"):
        FaultyTransport.random(InProcessTransport(FakeCloud()), {"eat": 0.1}, 0)  # type: ignore[dict-item]
    with pytest.raises(InputError, match="together"):
        FaultyTransport.random(InProcessTransport(FakeCloud()), {"drop": 0.7, "close": 0.7}, 0)


def test_corrupt_frames_up_are_told_to_the_device() -> None:
    refused = 0
    for seed in range(30):
        transport = FaultyTransport(InProcessTransport(FakeCloud()), [Fault("up", 1, "corrupt")], seed)
        with transport.connect() as connection:
            connection.send(opening())
            connection.receive()
            connection.send(Draft(0, 0, (1, 2, 3), (True, True, False)))
            try:
                connection.receive(0)
            except (ProtocolError, ReceiveTimeout):
                refused += 1
    assert 5 <= refused < 30
