"""Windows over several rows: their shape, and plain AR's pictures whatever it is."""

from __future__ import annotations

from typing import Any

import pytest
from drive import device_session, opening, picture_of
from hypothesis import given
from hypothesis import settings as profile
from hypothesis import strategies as st
from stream_world import World, play

from ciar.cloud.sessions import Cloud
from ciar.decoding.blocks import Blocks, Shape
from ciar.decoding.jacobi import GUESS
from ciar.decoding.timeline import Link
from ciar.models.bundle import Bundle
from ciar.protocol.messages import Settings
from ciar.transport.inprocess import InProcessTransport

PROMPT = "a smiling cat"


def test_a_window_reaches_over_rows() -> None:
    # Rows of eight; the horizon is at row 1, column 3.
    assert Shape(16).parts(11, 64, 8) == (16, [])
    assert Shape(8, 2).parts(11, 64, 8) == (4, [19, 20, 21, 22])
    assert Shape(8, 2, indent=2).parts(11, 64, 8) == (4, [17, 18, 19, 20])
    assert Shape(9, 3, indent=4).parts(11, 64, 8) == (3, [16, 17])
    assert Shape(64, 4).parts(11, 64, 8) == (5, [*range(19, 24), *range(27, 32), *range(35, 40)])
    # The last row, and a row below that nothing is guessed of, leave the width to the first part.
    assert Shape(8, 4).parts(59, 64, 8) == (5, [])
    assert Shape(8, 2).parts(11, 18, 8) == (7, [])
    assert Shape(3, 8).parts(0, 64, 8) == (1, [8, 16])


@given(st.integers(1, 70), st.integers(1, 9), st.integers(0, 9), st.integers(0, 63), st.data())
def test_windows_are_no_wider_than_they_may_be(
    width: int, height: int, indent: int, first: int, data: st.DataObject
) -> None:
    end = data.draw(st.integers(first + 1, 64))
    count, below = Shape(width, height, indent).parts(first, end, 8)
    assert count >= 1
    assert count + len(below) <= width
    assert sorted(set(below)) == below
    assert first + count <= end
    assert all((first // 8 + 1) * 8 <= position < end for position in below)
    assert not below or first % 8 + count <= 8


@profile(max_examples=60)
@given(
    st.integers(0, 1000),
    st.integers(1, 40),
    st.integers(1, 8),
    st.integers(0, 8),
    st.sampled_from(GUESS.choices),
)
def test_scd_gives_plain_ar_whatever_the_shape(
    seed: int, window: int, height: int, indent: int, guess: str
) -> None:
    world = World(1, grid=6)
    options = (("height", height), ("indent", indent), ("guess", guess))
    settings = Settings("scd", seed=seed, window=window, options=options)
    one, _ = play(world, settings, Link())
    assert one.device.tokens == world.plain(settings)


def test_fault_a_verdict_that_rests_on_a_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above sees a token that is final though the one before it was replaced."""
    right = Blocks.sweep

    def lenient(self: Blocks, run: Any, guesses: list[int], judge: Any) -> Any:
        final, fresh = yield from right(self, run, guesses, judge)
        return min(final + 1, len(fresh)), fresh

    monkeypatch.setattr(Blocks, "sweep", lenient)
    world = World(1, grid=6)
    made = [Settings("scd", seed=seed, window=12, options=(("height", 3),)) for seed in range(8)]
    wrong = [play(world, settings, Link())[0].device.tokens != world.plain(settings) for settings in made]
    assert sum(wrong) >= 4


@pytest.mark.parametrize("name", ["scd", "ciar-stream"])
@pytest.mark.parametrize("shape", [{"height": 2}, {"height": 4, "indent": 1}, {"height": 3, "indent": 2}])
@pytest.mark.parametrize("window", [4, 16])
def test_a_model_with_a_cache_gives_plain_ar_too(
    tiny_bundle: Bundle, tiny_cloud: Cloud, name: str, shape: dict[str, int], window: int
) -> None:
    wire = InProcessTransport(tiny_cloud)
    for seed in range(3):
        extra = {"lag": 16, "burst": 16} if name == "ciar-stream" else {}
        message = opening(PROMPT, name, seed=seed, window=window, options=tuple((shape | extra).items()))
        found = device_session(tiny_bundle, wire, message, threshold=0.9).run()
        assert found.tokens == picture_of(tiny_cloud, opening(PROMPT, seed=seed))[0]
        assert found.ledger.cloud_passes <= 17


def test_rows_below_save_passes_where_the_part_at_the_horizon_stays_as_wide() -> None:
    """In a picture that hangs on the token above more than on the one to the left."""
    world = World(2, grid=8)
    world.tables[0] *= 0.3
    world.tables[1] *= 1.5
    passes = {}
    for window, height in ((8, 1), (32, 4)):
        made = [Settings("scd", seed=s, window=window, options=(("height", height),)) for s in range(6)]
        passes[height] = sum(play(world, settings, Link())[0].passes for settings in made)
    assert passes[4] < passes[1]
