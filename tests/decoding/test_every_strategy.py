"""Every registered strategy on the tiny backbone: over the wire, in batches, resumed, with honest counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from drive import device_session, opening, picture_of

from ciar.cloud.sessions import Cloud
from ciar.decoding.batch import Batch
from ciar.decoding.codebook import Codebook
from ciar.decoding.strategy import Strategy, all_strategies, get_strategy
from ciar.errors import InputError
from ciar.intervals.thresholds import ThresholdConfig
from ciar.models.bundle import Bundle
from ciar.protocol.messages import Settings
from ciar.transport.inprocess import InProcessTransport

PROMPT = "a smiling cat"
EVERY = [pytest.param(strategy, id=strategy.name) for strategy in all_strategies()]
CLOUDED = [pytest.param(strategy, id=strategy.name) for strategy in all_strategies() if strategy.uses_cloud]
#: Strategies whose pictures are those of base, not their law alone.
SAME_AS_BASE = {"adt-tree", "eagle2", "lossless", "scd", "ciar-stream"}


@pytest.mark.parametrize("strategy", EVERY)
def test_a_picture_over_the_wire(tiny_bundle: Bundle, tiny_cloud: Cloud, strategy: Strategy) -> None:
    wire = InProcessTransport(tiny_cloud)
    message = opening(PROMPT, strategy.name, seed=3, window=5)
    result = device_session(tiny_bundle, wire, message, threshold=0.9).run()
    again = device_session(tiny_bundle, wire, message, threshold=0.9).run()
    assert result.tokens == again.tokens
    ledger = result.ledger
    counts = ledger.counts
    assert len(result.tokens) == len(ledger.decided) == 16
    assert ledger.critical_round_trips <= ledger.round_trips
    if strategy.uses_cloud:
        assert ledger.cloud_passes <= 17
        assert ledger.token_rows >= 2 * ledger.cloud_passes
        assert ledger.accept_length == (16 - counts["device"]) / ledger.cloud_passes
    if strategy.uses_device:
        # A drafted token is kept, judged or discarded; each costs at least one step but the last.
        drafted = counts["device"] + counts["accepted"] + counts["replaced"] + ledger.discarded
        assert ledger.device_steps >= drafted - max(1, ledger.round_trips)
    else:
        assert counts["prefix"] == 16
        assert ledger.device_steps == ledger.discarded == 0
    if strategy.name in SAME_AS_BASE:
        assert result.tokens == picture_of(tiny_cloud, opening(PROMPT, seed=3))[0]


@pytest.mark.parametrize("strategy", EVERY)
def test_a_batch_gives_the_pictures_of_the_wire(
    tiny_bundle: Bundle, tiny_cloud: Cloud, strategy: Strategy
) -> None:
    """Tokens, deciders and costs; the batch runs the same halves on models that it shares."""
    text = tiny_bundle.text.encode(PROMPT)
    made = [Settings(strategy.name, seed=seed, window=5) for seed in (3, 4)]
    pictures = Batch(
        tiny_bundle.gpt,
        tiny_bundle.device_model,
        torch.stack([text.features] * 2),
        torch.stack([text.mask] * 2),
        made,
        strategy,
        [ThresholdConfig("fixed", value=0.9).start(16) for _ in made],
        codebook=Codebook(tiny_bundle.vq.quantize.unit_codes().detach()),
        eagle=tiny_bundle.eagle,
    ).run()
    wire = InProcessTransport(tiny_cloud)
    for settings, picture in zip(made, pictures, strict=True):
        message = opening(PROMPT, strategy.name, seed=settings.seed, window=5)
        alone = device_session(tiny_bundle, wire, message, threshold=0.9).run()
        assert picture.tokens == alone.tokens
        assert picture.ledger.decided == alone.ledger.decided
        assert picture.ledger.discarded == alone.ledger.discarded
        if alone.ledger.round_trips > 1:
            assert picture.ledger.cloud_passes == alone.ledger.cloud_passes
            assert picture.ledger.token_rows == alone.ledger.token_rows


@pytest.mark.parametrize("strategy", CLOUDED)
def test_a_picture_can_be_taken_up_again(tiny_bundle: Bundle, tiny_cloud: Cloud, strategy: Strategy) -> None:
    """From any tokens that are final; strategies under the picture's noise give the same picture."""
    wire = InProcessTransport(tiny_cloud)
    message = opening(PROMPT, strategy.name, seed=6, window=4)
    whole = device_session(tiny_bundle, wire, message, threshold=0.9).run()
    for cut in (1, 7, 15):
        session = device_session(tiny_bundle, wire, message, threshold=0.9)
        session.run_state.tokens[:] = whole.tokens[:cut]
        session.run_state.decided[:] = whole.ledger.decided[:cut]
        resumed = session.run()
        assert resumed.tokens[:cut] == whole.tokens[:cut]
        assert len(resumed.tokens) == 16
        if strategy.name in SAME_AS_BASE | {"base"}:
            assert resumed.tokens == whole.tokens


@pytest.mark.parametrize("strategy", EVERY)
def test_each_says_how_far_it_drifts_and_what_it_needs(strategy: Strategy) -> None:
    assert strategy.exact != bool(strategy.drift)
    assert strategy.training


def test_an_unknown_option_is_refused_on_both_sides(tiny_bundle: Bundle, tiny_cloud: Cloud) -> None:
    values: dict[str, Any] = {"options": (("alowance", 1.0),)}
    with pytest.raises(InputError, match="Did you mean allowance"):
        tiny_cloud.open(opening(PROMPT, "slack", **values))
    text = tiny_bundle.text.encode(PROMPT)
    gates = [ThresholdConfig("fixed", value=0.9).start(16)]
    features, mask = text.features[None], text.mask[None]
    with pytest.raises(InputError, match="Did you mean allowance"):
        Batch(
            tiny_bundle.gpt, None, features, mask, [Settings("slack", **values)], get_strategy("slack"), gates
        )


def test_a_batch_without_codes_says_so(tiny_bundle: Bundle) -> None:
    text = tiny_bundle.text.encode(PROMPT)
    gates = [ThresholdConfig("fixed", value=0.9).start(16)]
    features, mask = text.features[None], text.mask[None]
    batch = Batch(tiny_bundle.gpt, None, features, mask, [Settings("gsd")], get_strategy("gsd"), gates)
    with pytest.raises(InputError, match="needs the tokenizer's codebook"):
        batch.run()


def test_adaptive_temperature_goes_with_any_strategy(tiny_bundle: Bundle, tiny_cloud: Cloud) -> None:
    """The device's fast path must not be taken, and lossless is still base."""
    wire = InProcessTransport(tiny_cloud)
    hot: dict[str, Any] = {"options": (("entropy_heat", 2.5),), "top_k": 8, "seed": 2}
    base = picture_of(tiny_cloud, opening(PROMPT, "base", **hot))[0]
    assert base != picture_of(tiny_cloud, opening(PROMPT, "base", top_k=8, seed=2))[0]
    for name in SAME_AS_BASE:
        message = opening(PROMPT, name, **hot)
        assert device_session(tiny_bundle, wire, message).run().tokens == base
