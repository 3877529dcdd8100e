"""What is measured: the line, passes and rows, from messages on a clock that the test holds."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from ciar.planner.measure import Meter, Metered, PassMeter
from ciar.protocol.messages import Cost, Draft, Message, Open, Opened, Patch, Settings


def test_a_pass_and_its_rows_are_told_apart_and_stay_so() -> None:
    meter = PassMeter(0.0)
    assert meter.split() == (0.0, 0.0)
    for rows in (1, 1, 1, 17, 16, 18):
        meter.seen(rows, 10.0 + 0.5 * rows)
    assert meter.split() == (pytest.approx(10.0), pytest.approx(0.5))
    for _ in range(100):  # one width alone tells nothing of rows, and takes nothing back
        meter.seen(32, 26.0)
    assert meter.split() == (pytest.approx(10.0), pytest.approx(0.5))
    for _ in range(100):  # a cloud that became half as fast
        meter.seen(32, 52.0)
    assert meter.split() == (pytest.approx(20.0), pytest.approx(1.0))


def test_before_widths_differ_the_given_share_holds() -> None:
    meter = PassMeter(0.1)
    meter.seen(10, 20.0)
    assert meter.split() == (pytest.approx(10.0), pytest.approx(1.0))


def test_passes_that_cost_their_rows_alone() -> None:
    meter = PassMeter(0.0)
    for rows in (1, 1, 16, 16):
        meter.seen(rows, 2.0 * rows)
    pass_ms, row_ms = meter.split()
    assert pass_ms + 16 * row_ms == pytest.approx(32.0, rel=0.02)
    assert pass_ms < 0.03


def test_one_slow_answer_changes_nothing_and_a_slower_line_shows() -> None:
    meter = Meter()
    for ms in (20, 21, 20, 900, 20):
        meter.answered(100, ms)
    assert meter.rtt_ms() == pytest.approx(20.0)
    for _ in range(3):
        meter.answered(100, 200.0)
    assert meter.rtt_ms() == pytest.approx(200.0)


def test_bandwidth_is_told_where_it_is_more_than_chance() -> None:
    meter = Meter()
    for size in (50, 60, 800, 50, 900, 1000, 55, 850):
        meter.answered(size, 30.0 + 0.1 * size)
    assert meter.conditions(256, together=False).bytes_per_ms == pytest.approx(10.0)
    assert meter.rtt_ms() == pytest.approx(30.0)
    noisy = Meter()
    for size, ms in ((50, 30), (60, 44), (800, 31), (50, 39), (900, 45), (1000, 33)):
        noisy.answered(size, ms)
    assert noisy.conditions(256, together=False).bytes_per_ms == float("inf")


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Line:
    """A connection and its transport: every answer comes after its time."""

    clock: Clock
    answers: list[tuple[float, Message]]
    bytes_up: int = 0
    bytes_down: int = 0
    sent: list[Message] = field(default_factory=list)
    computes_ms: float = 0.0

    def connect(self) -> Line:
        self.clock.now_s += 0.040
        return self

    def send(self, message: Message) -> None:
        self.sent.append(message)
        self.bytes_up += 100
        self.clock.now_s += self.computes_ms / 1e3

    def receive(self, timeout_s: float | None = None) -> Message:
        took_ms, message = self.answers.pop(0)
        self.clock.now_s += took_ms / 1e3
        self.bytes_down += 50
        return message

    def close(self) -> None:
        self.bytes_up += 1


def patch(step: int, passes: int, rows: int, cloud_ms: float) -> Patch:
    return Patch(step, 0, (1,), (0,), 1, Cost(passes, rows, cloud_ms))


def test_exchanges_are_timed() -> None:
    clock, meter = Clock(), Meter(0.0)
    line = Line(
        clock,
        [
            (35.0, Opened("x", 16, 64, passes=1, token_rows=20, cloud_ms=15.0)),
            (42.0, patch(0, 2, 4, 22.0)),
            (500.0, patch(0, 1, 2, 11.0)),  # a second answer tells of passes, not of the line
            (21.0, patch(1, 1, 2, 11.0)),
            (90.0, patch(2, 1, 2, 11.0)),  # another draft left before this came
        ],
    )
    connection = Metered(line, meter, clock).connect()
    connection.send(Open("tiny", "a cat", Settings("lossless")))
    connection.receive()
    assert meter.rtt_ms() == pytest.approx(20.0)  # until a draft was answered
    connection.send(Draft(0, 0, (1,), (False,)))
    for _ in range(2):
        connection.receive()
    connection.send(Draft(1, 1, (1,), (False,)))
    connection.receive()
    for step in (2, 3):
        connection.send(Draft(step, step, (1,), (False,)))
    connection.receive()
    connection.close()
    found = meter.conditions(16, together=False)
    assert [ms for _, ms in meter._trips] == pytest.approx([20.0, 10.0])
    assert [size for size, _ in meter._trips] == [150, 150]
    assert (found.rtt_ms, found.connect_ms, found.prefill_ms) == pytest.approx((15.0, 40.0, 15.0))
    assert found.pass_ms == pytest.approx(11.0)
    assert (connection.bytes_up, connection.bytes_down) == (line.bytes_up, line.bytes_down)
    assert meter.knows_cloud


def test_what_is_computed_while_a_message_is_sent_is_no_round_trip() -> None:
    """In one process the cloud makes its whole answer, of many patches, before ``send`` returns."""
    clock, meter = Clock(), Meter(0.0)
    answers: list[tuple[float, Message]] = [
        (0.0, Opened("x", 16, 64, passes=1, token_rows=20, cloud_ms=15.0))
    ]
    answers += [(1.0, patch(0, 16, 32, 160.0)), (0.0, patch(0, 16, 32, 160.0))]
    connection = Metered(Line(clock, answers, computes_ms=700.0), meter, clock).connect()
    connection.send(Open("tiny", "a cat", Settings("base")))
    connection.receive()
    assert meter.rtt_ms() == 0.0
    connection.send(Draft(0, 0, want=16))
    for _ in range(2):
        connection.receive()
    assert [ms for _, ms in meter._trips] == [0.0]
    assert meter.knows_cloud


def test_openings_tell_nothing_of_the_bandwidth() -> None:
    """What a server does with the words of a prompt is in no cost, and grows with nothing that travels."""
    meter = Meter()
    for size in (50, 60, 800, 50, 900, 1000, 55, 850):
        meter.greeted(500.0)
        meter.answered(size, 30.0 + 0.1 * size)
    assert meter.rtt_ms() == pytest.approx(30.0)
    assert meter.ms_per_byte() == pytest.approx(0.1)
