"""What tests of laws share: toy laws, 200,000 pictures' noise, strategies driven picture by picture."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from table_cloud import BankNoise, Drafter, LawTable, NoiseBank, drawing_from, law_p_value, make_picture
from torch import Tensor
from vector_law import laws

from ciar.decoding.sampling import SamplingLaw
from ciar.protocol.messages import Settings

FITS, MISFITS = 1e-3, 1e-6
MANY = 200_000
PLAIN = SamplingLaw()
ALL_THREE = SamplingLaw(temperature=0.7, top_k=5, top_p=0.9)
#: Laws of cloud and drafter.
PAIRS: dict[str, tuple[SamplingLaw, SamplingLaw]] = {
    "plain, plain": (PLAIN, PLAIN),
    "cold, top-k": (SamplingLaw(temperature=0.7), SamplingLaw(top_k=3)),
    "top-k, hot": (SamplingLaw(top_k=4), SamplingLaw(temperature=1.5)),
    "all three, top-p": (ALL_THREE, SamplingLaw(top_p=0.7)),
    "plain, greedy": (PLAIN, SamplingLaw(temperature=0.0)),
    "entropy, plain": (SamplingLaw(entropy_heat=2.5), PLAIN),
}
CLOUD = LawTable.random(1)
#: Devices that are right sometimes, always and never.
DEVICES = {
    "sometimes": CLOUD.near(2, scale=1.5),
    "always": CLOUD,
    "never": LawTable(-3.0 * CLOUD.logits),
}


@lru_cache(maxsize=1)
def bank() -> NoiseBank:
    return NoiseBank(MANY)


def settings_of(strategy: str, law: SamplingLaw = PLAIN, window: int = 3, **options: Any) -> Settings:
    heat = {"entropy_heat": law.entropy_heat} if law.entropy_heat else {}
    return Settings(
        strategy,
        temperature=law.temperature,
        top_k=law.top_k,
        top_p=law.top_p,
        window=window,
        options=tuple((options | heat).items()),
    )


def driven(
    settings: Settings, q: Tensor, count: int = 150, drafter: Drafter | None = None, **values: Any
) -> np.ndarray:
    """Pictures by the strategy itself."""
    noise = values.pop("noise", BankNoise)
    made = (
        make_picture(CLOUD, settings, noise(bank(), i), drafter or drawing_from(q), device_laws=q, **values)
        for i in range(count)
    )
    return np.array([device.tokens for device, _ in made])


P, Q = laws(CLOUD, PLAIN), laws(DEVICES["sometimes"], PLAIN)

WRONG_RESIDUALS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "whole law": lambda p, q: p,
    "wrong sign": lambda p, q: (q.exp() - p.exp()).clamp_min(1e-9).log().log_softmax(-1),
    "absolute": lambda p, q: (p.exp() - q.exp()).abs().clamp_min(1e-9).log().log_softmax(-1),
}


def chain_misfit(count: int = 800, name: str = "speculative", **values: Any) -> bool:
    q = values.pop("q", laws(DEVICES["sometimes"], ALL_THREE))
    found = driven(settings_of(name, ALL_THREE), q, count, **values)
    return law_p_value(found, CLOUD.joint(ALL_THREE)) < MISFITS
