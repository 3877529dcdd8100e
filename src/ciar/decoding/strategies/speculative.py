"""``speculative``: the device drafts a chain, the cloud accepts or redraws. The law is the cloud's.

Ids alone travel: the law that the device drew from is recomputed by the cloud's own copy of it.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, ClassVar

from ciar.decoding.acceptance import Rule, Speculative
from ciar.decoding.halves import ask, make_patch, propose
from ciar.decoding.strategy import CloudHalf, CloudRun, DeviceHalf, DeviceRun, Strategy, register
from ciar.decoding.verify import verify_chain
from ciar.protocol.messages import Draft


class Chain(Strategy):
    """The device drafts chains of ``window`` tokens; a rule says which of them stand.

    Tokens at the head of a draft that the device vouches for are taken as they are.
    """

    def rule(self, run: CloudRun) -> Generator[Any, Any, Rule]:
        """When a drafted token stands."""
        raise NotImplementedError

    def device(self, run: DeviceRun) -> DeviceHalf:
        while len(run.tokens) < run.total:
            start = len(run.tokens)
            certain = yield from propose(run, run.settings.window)
            yield from ask(run, start, certain)

    def cloud(self, run: CloudRun, draft: Draft) -> CloudHalf:
        rule = yield from self.rule(run)
        trusted = draft.certain.index(False) if False in draft.certain else len(draft.ids)
        run.tokens += draft.ids[:trusted]
        run.decided += ["device"] * trusted
        if trusted < len(draft.ids):
            yield from verify_chain(run, list(draft.ids[trusted:]), rule)
        yield make_patch(run, draft, draft.start)


@register
class SpeculativeSampling(Chain):
    name = "speculative"
    summary = "device drafts chains, cloud accepts or redraws each token so that the law stays its own"
    source = "speculative sampling, arXiv 2211.17192, algorithm 1"
    grid: ClassVar[tuple[str, ...]] = ("window=2", "window=4", "window=8")
    exact = True

    def rule(self, run: CloudRun) -> Generator[Any, Any, Rule]:
        yield from ()
        return Speculative()
