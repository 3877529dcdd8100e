"""The arithmetic of a network, on a clock of its own."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciar.errors import InputError
from ciar.network.namespaces import netem_options
from ciar.network.shape import Lane, Shape

SENDS = st.lists(st.tuples(st.floats(0, 0.2), st.integers(1, 1460)), min_size=1, max_size=40)
SHAPES = st.builds(
    Shape,
    rtt_ms=st.floats(0, 300),
    jitter_ms=st.floats(0, 50),
    megabits_per_s=st.none() | st.floats(0.1, 100),
    loss=st.floats(0, 0.5),
)


def arrivals(shape: Shape, sends: list[tuple[float, int]], **lane: float) -> list[tuple[float, float]]:
    """Moments of sending and of arrival, for pauses and sizes."""
    line = Lane(shape, random.Random(1), **lane)
    now, out = 0.0, []
    for pause, size in sends:
        now += pause
        out.append((now, line.arrival_s(size, now)))
    return out


@given(SHAPES, SENDS)
def test_nothing_overtakes_and_nothing_is_early(shape: Shape, sends: list[tuple[float, int]]) -> None:
    moments = arrivals(shape, sends)
    came = [arrival for _, arrival in moments]
    assert came == sorted(came)
    least = max(0.0, shape.one_way_s - shape.jitter_ms / 1e3)
    assert all(arrival >= sent + least - 1e-9 for sent, arrival in moments)
    assert all(math.isfinite(arrival) for arrival in came)


@given(st.floats(0.1, 100), st.floats(0, 300), SENDS, st.integers(0, 5000))
def test_no_stretch_of_time_carries_more_than_bucket_and_rate(
    megabits: float, rtt_ms: float, sends: list[tuple[float, int]], bucket: int
) -> None:
    shape = Shape(rtt_ms, megabits_per_s=megabits)
    moments = arrivals(shape, sends, bucket_bytes=bucket)
    for first in range(len(moments)):
        for last in range(first, len(moments)):
            carried = sum(size for _, size in sends[first : last + 1])
            # From the moment at which the first of them could have begun to arrive.
            began = moments[first - 1][1] if first else moments[0][0] + shape.one_way_s
            room = bucket + shape.bytes_per_s * (moments[last][1] - began)
            assert carried <= room + sends[first][1] * bool(first and bucket) + 1e-3


@given(st.floats(0.1, 100), st.floats(0, 300), SENDS)
def test_a_line_without_a_bucket_is_a_queue(
    megabits: float, rtt_ms: float, sends: list[tuple[float, int]]
) -> None:
    """Against the plain simulation of a transmitter that takes one packet after the other."""
    shape = Shape(rtt_ms, megabits_per_s=megabits)
    free = 0.0
    for (sent, arrival), (_, size) in zip(arrivals(shape, sends), sends, strict=True):
        free = max(free, sent) + size / shape.bytes_per_s
        assert arrival == pytest.approx(free + rtt_ms / 2e3)


def test_nothing_leaves_before_the_line_opens() -> None:
    ((_, arrival),) = arrivals(Shape(rtt_ms=40), [(0.0, 10)], opens_s=0.04)
    assert arrival == pytest.approx(0.06)


def test_a_lost_packet_holds_up_those_behind_it() -> None:
    shape = Shape(rtt_ms=20, loss=0.3)
    late = [arrival - sent > 0.011 for sent, arrival in arrivals(shape, [(0.5, 100)] * 2000)]
    assert sum(late) / 2000 == pytest.approx(0.3, abs=4 * (0.3 * 0.7 / 2000) ** 0.5)
    quick = arrivals(shape, [(0.001, 100)] * 50)
    came = [arrival for _, arrival in quick]
    assert came == sorted(came)
    assert max(arrival - sent for sent, arrival in quick) == pytest.approx(0.01 + 0.22)


def test_jitter_is_spread_evenly() -> None:
    shape = Shape(rtt_ms=40, jitter_ms=5)
    delays = [arrival - sent for sent, arrival in arrivals(shape, [(1.0, 100)] * 2000)]
    assert min(delays) == pytest.approx(0.015, abs=1e-4)
    assert max(delays) == pytest.approx(0.025, abs=1e-4)
    assert sum(delays) / 2000 == pytest.approx(0.02, abs=4 * 0.01 / 12**0.5 / 2000**0.5)


@pytest.mark.parametrize(
    "wrong",
    [{"rtt_ms": -1.0}, {"rtt_ms": math.nan}, {"jitter_ms": math.inf}, {"megabits_per_s": 0.0}, {"loss": 1.0}],
)
def test_impossible_networks_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        Shape(**wrong)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (Shape(), ""),
        (Shape(rtt_ms=10), "delay 5ms limit 20000"),
        (Shape(80, 2.5, 1.5, 0.01), "delay 40ms 2.5ms loss 1% rate 1500000bit limit 20000"),
        (Shape(megabits_per_s=100), "rate 100000000bit limit 20000"),
    ],
)
def test_words_for_netem(shape: Shape, words: str) -> None:
    assert " ".join(netem_options(shape)) == words
