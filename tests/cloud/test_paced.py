"""Tempo: the same decisions, at another model's speed."""

from __future__ import annotations

import math

import pytest
from drive import device_session, opening, picture_of

from ciar.cloud.paced import Tempo, pace
from ciar.cloud.sessions import Cloud
from ciar.device.paced import pace as pace_device
from ciar.errors import InputError
from ciar.models.bundle import Bundle

#: Far above what the tiny model needs by itself.
PASS_MS, ROW_MS = 20.0, 2.0


@pytest.fixture
def slow(tiny_bundle: Bundle) -> Cloud:
    return pace(Cloud(tiny_bundle), Tempo(PASS_MS, ROW_MS))


@pytest.mark.parametrize("strategy", ["base", "scd"])
def test_passes_last_as_long_as_asked_and_decide_the_same(
    tiny_cloud: Cloud, slow: Cloud, strategy: str
) -> None:
    tokens, own = picture_of(tiny_cloud, opening(strategy=strategy))
    paced, session = picture_of(slow, opening(strategy=strategy))
    assert paced == tokens
    slot = session._slot
    assert (slot.passes, slot.token_rows) == (own._slot.passes, own._slot.token_rows)
    # The prompt's pass counts as one position in the ledger and lasts as long as its text.
    text = int(tiny_cloud.bundle.text.encode("a red cat").mask.sum())
    asked = PASS_MS * slot.passes + ROW_MS * (slot.token_rows / 2 + text - 1)
    assert asked <= slot.milliseconds <= 1.5 * asked + 50
    assert own._slot.milliseconds < asked


def test_a_pass_that_is_slower_by_itself_is_not_slept_for(tiny_bundle: Bundle) -> None:
    cloud = pace(Cloud(tiny_bundle), Tempo())
    _, session = picture_of(cloud, opening())
    assert session._slot.passes == 16


@pytest.mark.parametrize("wrong", [(-1.0, 0.0), (math.nan, 0.0), (0.0, math.inf)])
def test_impossible_tempos_are_refused(wrong: tuple[float, float]) -> None:
    with pytest.raises(InputError, match="60000"):
        Tempo(*wrong)


def test_proposals_last_as_long_as_asked_and_are_the_same(tiny_bundle: Bundle) -> None:
    plain = device_session(tiny_bundle, None, opening(strategy="device-only")).run()
    session = pace_device(device_session(tiny_bundle, None, opening(strategy="device-only")), 10.0)
    paced = session.run()
    assert paced.tokens == plain.tokens
    assert paced.ledger.device_steps == plain.ledger.device_steps
    assert session.proposer.proposals == 16  # type: ignore[union-attr]
    assert 160.0 <= paced.ledger.device_ms <= 300.0
    assert session.run_state.pace.step_ms >= 10.0  # what the strategy is told, too


def test_a_session_without_a_device_model_stays_as_it_is(tiny_bundle: Bundle) -> None:
    session = device_session(tiny_bundle, None, opening(strategy="base"))
    assert pace_device(session, 10.0).proposer is None
