"""``cool-sd``: speculative sampling that is relaxed, more at the head of a draft than at its end."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from ciar.decoding.acceptance import Annealed, Rule
from ciar.decoding.options import Option
from ciar.decoding.strategies.speculative import Chain
from ciar.decoding.strategy import CloudRun, register


@register
class CoolSd(Chain):
    name = "cool-sd"
    summary = "speculative with acceptance relaxed by a weight that falls along the draft"
    source = "COOL-SD, arXiv 2601.09212"
    drift = "TV = sum((min(q, w p) - p)+) <= min(TV(p, q), w - 1) a token of weight w"
    grid = (
        "window=4", "window=8", "window=4,relaxation=1.5", "window=8,relaxation=1.5",
        "window=4,relaxation=2", "window=8,relaxation=2",
    )  # fmt: skip
    options = (
        Option("relaxation", 1.1, "mean weight of a draft's tokens, 1 = exact", low=1.0, high=1000.0),
        Option("decay", 0.7, "fall of the weights a token, 0 = none", high=20.0),
    )

    def rule(self, run: CloudRun) -> Generator[Any, Any, Rule]:
        yield from ()
        values = self.values(run.settings)
        return Annealed(values.real("relaxation"), values.real("decay"), run.settings.window)
