"""``sjd`` and ``gsd``: speculative Jacobi decoding, the cloud alone; its own last laws are the drafter."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, ClassVar

from ciar.decoding.acceptance import Grouped, Rule, Speculative
from ciar.decoding.codebook import Codebook
from ciar.decoding.halves import listen, stream
from ciar.decoding.jacobi import GUESS, Drawn
from ciar.decoding.options import Option
from ciar.decoding.strategy import (
    AskCodebook,
    CloudHalf,
    CloudRun,
    DeviceHalf,
    DeviceRun,
    Strategy,
    register,
)
from ciar.protocol.messages import Draft


@register
class Sjd(Strategy):
    name = "sjd"
    summary = "the cloud alone judges tokens drawn from its laws of the pass before"
    source = "speculative Jacobi decoding, arXiv 2410.01699, section 3"
    exact = True
    training = "none"
    uses_device = False
    options: ClassVar[tuple[Option, ...]] = (GUESS,)
    grid: ClassVar[tuple[str, ...]] = ("window=8", "window=16", "window=32", "window=16,guess=above")

    coupled: ClassVar[bool] = False

    def rule(self, run: CloudRun) -> Generator[Any, Any, Rule]:
        """When a draft stands."""
        yield from ()
        return Speculative()

    def device(self, run: DeviceRun) -> DeviceHalf:
        return listen(run)

    def cloud(self, run: CloudRun, draft: Draft) -> CloudHalf:
        rule = yield from self.rule(run)
        guess = self.values(run.settings).word("guess")
        window = Drawn(draft.start + draft.want, run.settings.window, rule, guess, coupled=self.coupled)
        yield from stream(run, draft, lambda: window.advance(run))


@register
class McSjd(Sjd):
    name = "mc-sjd"
    summary = "sjd whose drafts behind a rejected one stay where their new law allows it"
    source = "maximally coupled SJD, arXiv 2510.24211; also the continuation of SJD-PAC, arXiv 2603.18599"
    coupled = True


@register
class Gsd(Sjd):
    name = "gsd"
    summary = "sjd whose tokens stand for the group of codes of nearly their rank"
    source = "grouped speculative decoding, arXiv 2508.07747, section 4"
    exact = False
    grid = ("window=16,group=4", "window=16", "window=32,group=4", "window=32", "window=32,group=25")
    drift = "TV of sum(q f) + rest, f = min(1, p(C) / q(C)): grows with the group"
    options = (
        GUESS,
        Option("group", 14, "codes of a group beside the token itself", low=2, high=1024),
        Option("near", 0.15, "largest difference in probability within a group", high=1),
        Option("reach", 0.5, "largest distance of codes within a group; codes have length 1", high=100),
    )

    def rule(self, run: CloudRun) -> Generator[Any, Any, Rule]:
        codebook: Codebook = yield AskCodebook()
        values = self.values(run.settings)
        return Grouped(codebook, values.whole("group"), values.real("near"), values.real("reach"))
