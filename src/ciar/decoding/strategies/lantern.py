"""``lantern`` and ``lantern++``: a drafted token may count the mass of its nearest codes as its own.

Chains drafted by the device model take the place of the papers' trees drafted by an EAGLE head; the
acceptance rule, which is what relaxes the law, is theirs.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, ClassVar, cast

from ciar.decoding.acceptance import Neighbourhood, RedrawKind, Rule
from ciar.decoding.codebook import Codebook
from ciar.decoding.options import Option
from ciar.decoding.strategies.speculative import Chain
from ciar.decoding.strategy import AskCodebook, CloudRun, register

REDRAW = Option(
    "redraw",
    "paper",
    "law after a rejection: without token and counted codes, without all neighbours, or the residual",
    choices=("paper", "code", "optimal"),
)


@register
class Lantern(Chain):
    name = "lantern"
    summary = "speculative whose tokens count the mass of their nearest codes as their own"
    source = "LANTERN, arXiv 2410.03355, section 4"
    drift = "mass of at most bound moves to a certain draft; with redraw optimal, TV = sum((min(q, p~) - p)+)"
    relative: ClassVar[bool] = False
    grid = ("window=4", "window=8", "window=4,bound=0.2", "window=8,bound=0.2", "window=4,redraw=optimal")
    options = (
        Option("neighbours", 1000, "nearest codes that are looked at", low=1, high=65535),
        Option("bound", 0.1, "largest mass that is counted", high=1.0),
        REDRAW,
    )

    def rule(self, run: CloudRun) -> Generator[Any, Any, Rule]:
        codebook: Codebook = yield AskCodebook()
        values = self.values(run.settings)
        kind = cast(RedrawKind, values.word("redraw"))
        # A codebook smaller than the default has fewer neighbours to look at.
        count = min(values.whole("neighbours"), run.vocab_size - 1)
        return Neighbourhood(codebook, count, values.real("bound"), relative=self.relative, kind=kind)


@register
class LanternPlusPlus(Lantern):
    name = "lantern++"
    summary = "lantern with the counted mass bounded by a multiple of the token's own"
    source = "LANTERN++, arXiv 2502.06352"
    drift = "mass of at most (bound - 1) p(x) moves; with redraw optimal, TV = sum((min(q, p~) - p)+)"
    relative = True
    grid = (
        "window=4", "window=8", "window=4,neighbours=5,bound=10", "window=4,neighbours=5,bound=20",
        "window=4,redraw=optimal",
    )  # fmt: skip
    options = (
        Option("neighbours", 10, "nearest codes that are looked at", low=1, high=65535),
        Option("bound", 5.0, "largest mass of token and counted codes in multiples of the token's", low=1.0),
        REDRAW,
    )
