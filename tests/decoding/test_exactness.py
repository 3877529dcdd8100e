"""Exactness on toy pictures of four tokens of eight codes, whose joint law is written out.

``base`` has exactly the cloud's law; ``lossless`` gives the tokens of ``base`` for any drafter and any
window, so it has that law too; speculative sampling (``ciar`` that uploads everything and verifies)
has it with other tokens. All seeds are fixed, so every p-value below is a number, not a chance: a
right implementation stays above 1e-3, and the planted faults at the end all fall below 1e-6.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from table_cloud import (
    CODES,
    LENGTH,
    BankNoise,
    Drafter,
    LawTable,
    NoiseBank,
    TableSession,
    drawing_from,
    law_p_value,
    laws_of,
    make_picture,
    row_of,
)
from torch import Tensor

import ciar.decoding.strategies.ciar as ciar_strategy
import ciar.decoding.verify as verify
from ciar.decoding.sampling import SamplingLaw, choose, slack, to_law
from ciar.decoding.strategy import Pass
from ciar.protocol.messages import Settings

#: A right implementation's p-value is above the first, a planted fault's below the second.
FITS, MISFITS = 1e-3, 1e-6
PLAIN = SamplingLaw()
LAWS = {
    "plain": PLAIN,
    "cold": SamplingLaw(temperature=0.7),
    "top-k": SamplingLaw(top_k=5),
    "top-p": SamplingLaw(top_p=0.9),
    "all three": SamplingLaw(temperature=0.7, top_k=5, top_p=0.9),
}
CLOUD = LawTable.random(1)
DEVICE = CLOUD.near(2, scale=1.5)


def settings_of(strategy: str, law: SamplingLaw, **values: Any) -> Settings:
    return Settings(
        strategy,
        temperature=law.temperature,
        top_k=law.top_k,
        top_p=law.top_p,
        prefix_rate=0.0,
        **values,
    )


@lru_cache(maxsize=1)
def big_bank() -> NoiseBank:
    return NoiseBank(200_000)


@lru_cache(maxsize=16)
def plain_ar(law: SamplingLaw, seed: int = 0) -> np.ndarray:
    """200,000 pictures by plain AR, vectorised: int64 [200000, 4]."""
    gumbels = big_bank().gumbels.view(-1, LENGTH, CODES)
    conditionals = laws_of(CLOUD, law)
    rows = torch.zeros(len(gumbels), dtype=torch.long)
    out, offset, size = [], 0, 1
    for position in range(LENGTH):
        token = choose(conditionals[offset + rows], gumbels[:, position])
        out.append(token)
        rows, offset, size = rows * CODES + token, offset + size, size * CODES
    return torch.stack(out, dim=1).numpy()


def pictures(
    settings: Settings,
    count: int,
    drafter: Drafter,
    *,
    device_laws: Tensor | None = None,
    noise: Callable[[NoiseBank, int], BankNoise] = BankNoise,
    **values: Any,
) -> np.ndarray:
    bank = big_bank()
    made = (
        make_picture(CLOUD, settings, noise(bank, i), drafter, device_laws=device_laws, **values)
        for i in range(count)
    )
    return np.array([device.tokens for device, _ in made])


def test_the_toy_laws_are_what_the_product_computes() -> None:
    for law in LAWS.values():
        ours = to_law(CLOUD.logits, law).exp().double().numpy()
        np.testing.assert_allclose(ours, CLOUD.conditionals(law), atol=1e-6)
        assert CLOUD.joint(law).sum() == pytest.approx(1.0)


@pytest.mark.parametrize("name", LAWS)
def test_sampling_has_the_exact_joint_law(name: str) -> None:
    assert law_p_value(plain_ar(LAWS[name]), CLOUD.joint(LAWS[name])) > FITS


@pytest.mark.parametrize("name", LAWS)
def test_base_is_plain_ar(name: str) -> None:
    found = pictures(settings_of("base", LAWS[name]), 500, drawing_from(laws_of(DEVICE, PLAIN)))
    np.testing.assert_array_equal(found, plain_ar(LAWS[name])[:500])


DRAFTERS: dict[str, Callable[[SamplingLaw], Drafter]] = {
    "always right": lambda law: drawing_from(laws_of(CLOUD, law)),
    "sometimes right": lambda law: drawing_from(laws_of(DEVICE, law)),
    # One code beside what plain AR would take after these tokens.
    "never right": lambda law: (
        lambda tokens, noise: (drawing_from(laws_of(CLOUD, law))(tokens, noise) + 1) % CODES
    ),
}


@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize("window", [1, 2, 3, 4])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_lossless_is_plain_ar(name: str, window: int, drafter: str) -> None:
    """Token for token, so the law is exact whatever the drafter."""
    law = LAWS[name]
    count = 300 if name == "plain" else 60
    found = pictures(settings_of("lossless", law, window=window), count, DRAFTERS[drafter](law))
    np.testing.assert_array_equal(found, plain_ar(law)[:count])


@pytest.mark.parametrize(("name", "window"), [("plain", 3), ("all three", 4)])
def test_lossless_has_the_exact_joint_law(name: str, window: int) -> None:
    """The same, said as a law: no reference to plain AR's tokens."""
    law = LAWS[name]
    found = pictures(settings_of("lossless", law, window=window), 4000, drawing_from(laws_of(DEVICE, law)))
    assert law_p_value(found, CLOUD.joint(law)) > FITS


@pytest.mark.parametrize("name", ["plain", "all three"])
def test_speculative_sampling_has_the_exact_joint_law(name: str) -> None:
    law = LAWS[name]
    laws = laws_of(DEVICE, law)
    settings = settings_of("ciar", law, action="verify")
    found = pictures(settings, 4000, drawing_from(laws), device_laws=laws)
    assert law_p_value(found, CLOUD.joint(law)) > FITS
    # And it is no plain AR in disguise: it keeps the device's token where it may.
    assert (found != plain_ar(law)[:4000]).any()


def test_speculative_sampling_with_a_device_that_is_the_cloud() -> None:
    """p = q up to rounding: always accepted, the residual law is never asked for a zero mass."""
    exact, noisy = laws_of(CLOUD, PLAIN), laws_of(CLOUD.near(3, scale=1e-6), PLAIN)
    settings = settings_of("ciar", PLAIN, action="verify")
    for laws in (exact, noisy):
        for i in range(200):
            device, _ = make_picture(
                CLOUD, settings, BankNoise(big_bank(), i), drawing_from(laws), device_laws=laws
            )
            assert device.decided == ["accepted"] * LENGTH
            assert device.tokens == plain_ar(PLAIN)[i].tolist()


@pytest.mark.parametrize("name", LAWS)
def test_replacing_everything_is_plain_ar(name: str) -> None:
    law = LAWS[name]
    found = pictures(settings_of("ciar", law), 100, drawing_from(laws_of(DEVICE, law)))
    np.testing.assert_array_equal(found, plain_ar(law)[:100])


def test_trusted_tokens_drift_by_the_distance_of_the_laws() -> None:
    """A token that the device keeps has the device's law: one step away by TV(p, q), no more."""
    law = PLAIN
    q_laws = laws_of(DEVICE, law)
    settings = settings_of("device-only", law)
    found = pictures(settings, 20_000, drawing_from(q_laws))[:, 0]
    p, q = CLOUD.conditionals(law)[0], DEVICE.conditionals(law)[0]
    drift = 0.5 * np.abs(p - q).sum()
    assert drift > 0.1
    measured = np.bincount(found, minlength=CODES) / len(found)
    # Mean absolute deviation of eight frequencies of 20,000 draws is under 0.01 in all.
    assert 0.5 * np.abs(measured - p).sum() == pytest.approx(drift, abs=0.01)
    assert 0.5 * np.abs(measured - q).sum() < 0.01


def test_a_certain_token_is_followed_by_the_clouds_law() -> None:
    """First token certain, the others not: joint law q(x0) p(x1 | x0) p(x2 | x0 x1) ..."""
    laws = laws_of(DEVICE, PLAIN)
    joint = CLOUD.joint(PLAIN)
    p, q = CLOUD.conditionals(PLAIN)[0], DEVICE.conditionals(PLAIN)[0]
    mixed = joint * (q / p)[:, None, None, None]

    class FirstCertain:
        def __init__(self) -> None:
            self.asked = 0

        def certain(self, score: float) -> bool:
            self.asked += 1
            return self.asked == 1

        def answered(self, accepted: bool) -> None:
            """Changes nothing."""

    for action in ("replace", "verify"):
        found = pictures(
            settings_of("ciar", PLAIN, action=action),
            2000,
            drawing_from(laws),
            device_laws=laws,
            gate_type=FirstCertain,
        )
        assert law_p_value(found, mixed) > FITS
        assert law_p_value(found, joint) < MISFITS


# --- planted faults: the statistics above must see each of them -----------------------------------


def lossless_tokens() -> np.ndarray:
    return pictures(settings_of("lossless", PLAIN, window=3), 1000, drawing_from(laws_of(DEVICE, PLAIN)))


def verified_tokens(count: int = 1000, **values: Any) -> np.ndarray:
    law = LAWS["all three"]
    laws = laws_of(DEVICE, law)
    values = {"device_laws": laws, "drafter": drawing_from(laws)} | values
    return pictures(settings_of("ciar", law, action="verify"), count, **values)


def misfit(found: np.ndarray, law: SamplingLaw) -> bool:
    return law_p_value(found, CLOUD.joint(law)) < MISFITS


def test_fault_one_token_too_many_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    def lenient(law: Tensor, noise: Tensor, proposal: Tensor) -> Tensor:
        gap = slack(law, noise, proposal)
        bad = (gap > 0).nonzero()
        if len(bad):
            gap[bad[0]] = 0.0
        return gap

    monkeypatch.setattr(verify, "slack", lenient)
    assert misfit(lossless_tokens(), PLAIN)


def test_fault_noise_of_the_neighbour(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verdicts of a window that are read one position off."""
    monkeypatch.setattr(verify, "slack", lambda law, noise, ids: slack(law, noise, ids).roll(1))
    assert misfit(lossless_tokens(), PLAIN)


def test_fault_a_stale_cell_is_kept() -> None:
    """A rollback that does not overwrite its first cell: later laws follow the rejected guess."""

    class Stale(TableSession):
        def run_pass(self, request: Pass) -> Tensor:
            if request.start < len(self.cells):
                kept = self.cells[request.start]
                request = Pass(request.start, [kept, *request.ids[1:]])
            return super().run_pass(request)

    found = pictures(
        settings_of("lossless", PLAIN, window=3),
        1000,
        drawing_from(laws_of(DEVICE, PLAIN)),
        session_type=Stale,
    )
    assert misfit(found, PLAIN)


def test_fault_redraw_from_the_whole_law(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ciar_strategy, "residual", lambda p, q: p)
    assert misfit(verified_tokens(), LAWS["all three"])


def test_fault_residual_of_the_wrong_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    def reversed_sign(p: Tensor, q: Tensor) -> Tensor:
        return (q.exp() - p.exp()).clamp_min(0.0).log()

    monkeypatch.setattr(ciar_strategy, "residual", reversed_sign)
    assert misfit(verified_tokens(), LAWS["all three"])


def test_fault_raw_law_of_the_device() -> None:
    """The verifier takes the device's law before top-k and temperature (known fault A2)."""
    assert misfit(verified_tokens(device_laws=DEVICE.logits.log_softmax(-1)), LAWS["all three"])


def test_fault_greedy_drafts_with_a_soft_law() -> None:
    """Drafts chosen by argmax, judged by the law that they were not drawn from (known fault A1)."""
    best = laws_of(DEVICE, LAWS["all three"])
    assert misfit(
        verified_tokens(drafter=lambda tokens, noise: int(best[row_of(tokens)].argmax())), LAWS["all three"]
    )


@pytest.mark.parametrize("lane", ["residual", "accept"])
def test_fault_shared_noise(lane: str) -> None:
    """The redraw, or the acceptance test, reads the noise that the proposal was drawn with."""

    class Shared(BankNoise):
        def residual(self, position: int) -> Tensor:
            return super().gumbel(position, 1)[0] if lane == "residual" else super().residual(position)

        def accept(self, position: int) -> float:
            largest = float(super().gumbel(position, 1).max())
            return float(np.exp(-np.exp(-largest))) if lane == "accept" else super().accept(position)

    assert misfit(verified_tokens(3000, noise=Shared), LAWS["all three"])


def test_fault_other_temperature_in_the_cloud() -> None:
    """A law that is off by a tenth in temperature is seen."""
    found = pictures(settings_of("base", SamplingLaw(temperature=0.9)), 4000, drawing_from(CLOUD.logits))
    assert misfit(found, PLAIN)
