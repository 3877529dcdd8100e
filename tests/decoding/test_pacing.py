"""How a streaming device paces itself, against the best fixed setting on the same clock."""

from __future__ import annotations

from functools import lru_cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stream_world import World, play

from ciar.decoding.pacing import LONGEST, SHORTEST, Pacer, PassTimes, Plan
from ciar.decoding.strategy import Pace
from ciar.decoding.timeline import Link
from ciar.protocol.messages import Settings

WORLD = World(9, grid=8)
START = Plan(8, 64)
TIMES = st.floats(0.01, 1000)


def spent_ms(link: Link, **options: int | str) -> float:
    """Time to two pictures of 64 tokens."""
    given = tuple(options.items())
    made = [
        play(WORLD, Settings("ciar-stream", seed=seed, prefix_rate=0.0, window=64, options=given), link)
        for seed in range(2)
    ]
    return sum(timeline.device_ms for _, timeline in made)


@lru_cache
def best_fixed_ms(link: Link) -> float:
    return min(spent_ms(link, burst=burst, lag=lag) for burst in (4, 16) for lag in (8, 24, 64))


@pytest.mark.parametrize("round_trip_ms", [0.0, 30.0, 200.0])
@pytest.mark.parametrize("pass_ms", [4.0, 40.0])
@pytest.mark.parametrize("row_ms", [0.0, 0.2])
def test_the_regret_is_bounded(round_trip_ms: float, pass_ms: float, row_ms: float) -> None:
    """Never more than a fifth slower than the best of six fixed settings at its network and machines."""
    link = Link(2.0, pass_ms, row_ms, round_trip_ms)
    assert spent_ms(link, pace="auto") <= 1.2 * best_fixed_ms(link)


def test_while_nothing_is_known_the_plan_is_the_given_one() -> None:
    pacer = Pacer(256, START)
    assert pacer.plan(Pace()) == pacer.plan(Pace(1.0, 0.0, 0.0, 5.0)) == START


SEEN = st.lists(st.tuples(st.integers(0, 64), st.integers(0, 8)), max_size=5)


@given(TIMES, TIMES, st.floats(0, 100), st.floats(0, 1000), SEEN)
def test_a_plan_is_always_usable(
    step_ms: float, pass_ms: float, row_ms: float, trip_ms: float, seen: list[tuple[int, int]]
) -> None:
    pacer = Pacer(256, START)
    for final, passes in seen:
        pacer.seen(final, passes)
    plan = pacer.plan(Pace(step_ms, pass_ms, row_ms, trip_ms))
    assert SHORTEST <= plan.burst <= LONGEST
    assert plan.burst <= plan.lag <= 256
    # A longer line never asks for a shorter span.
    assert pacer.plan(Pace(step_ms, pass_ms, row_ms, 2 * trip_ms)).lag >= plan.lag


def test_agreement_is_measured() -> None:
    pacer = Pacer(256, START)
    before = pacer.plan(Pace(1.0, 10.0, 1.0, 50.0))
    for _ in range(20):
        pacer.seen(12, 2)
    pacer.seen(5, 0)  # tokens that were not checked took no pass and tell nothing
    assert pacer.gain == pytest.approx(6.0, abs=0.1)
    assert pacer.plan(Pace(1.0, 10.0, 1.0, 50.0)).lag > before.lag


def test_a_span_is_what_is_consumed_meanwhile_and_a_pass_that_is_worth_its_rows() -> None:
    """By hand: passes of 10 + 0.25 w ms are widened to 40, take 20 ms, and make 2.5 tokens final."""
    plan = Pacer(256, START).plan(Pace(1.0, 10.0, 0.25, 80.0))
    assert plan == Plan(16, 55)  # 2.5 * (80 + 20 + 16) / 20 + 40 = 54.5


@given(st.floats(0.1, 50), st.floats(0.01, 5), st.lists(st.integers(1, 64), min_size=2, max_size=12))
def test_pass_times_are_split_into_passes_and_rows(pass_ms: float, row_ms: float, widths: list[int]) -> None:
    times = PassTimes()
    for width in widths:
        times.seen(width, pass_ms + row_ms * width)
    found_pass, found_row = times.split()
    assert found_pass >= 0
    assert found_row >= 0
    mean = (1 + max(widths)) / 2
    if max(widths) - min(widths) > 8:
        assert found_pass + found_row * mean == pytest.approx(pass_ms + row_ms * mean, rel=1e-3)
    if len(set(widths)) == 1:
        assert found_row == 0.0
    assert PassTimes().split() == (0.0, 0.0)
