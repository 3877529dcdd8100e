"""``code``: the cloud makes the first tokens, the device all others; nobody checks them.

Published for next-scale models (a large drafter for the coarse scales, a small refiner for the fine
ones); here as the CIAR paper compares it, in raster order: the first ``ceil(share * T)`` tokens come
from the cloud, in one request. The published variant with a refiner trained for its part is the same
strategy with another device model (docs/gates.md). Source: CoDe, arXiv 2411.17787; CIAR, arXiv
2603.25463.
"""

from __future__ import annotations

import math

from ciar.decoding.halves import make_patch
from ciar.decoding.options import Option
from ciar.decoding.strategy import (
    CloudHalf,
    CloudRun,
    Commit,
    DeviceHalf,
    DeviceRun,
    Proposal,
    Propose,
    Receive,
    Send,
    Strategy,
    register,
)
from ciar.decoding.verify import sample_own
from ciar.protocol.messages import Draft, Patch


@register
class Code(Strategy):
    name = "code"
    summary = "the cloud makes the first tokens, the device the rest; one round trip"
    source = "CoDe, arXiv 2411.17787; as in CIAR, arXiv 2603.25463"
    drift = "after the first tokens the device's law, unchecked"
    training = "device model; optionally one trained on the last tokens alone"
    grid = ("share=0.15", "share=0.5")
    options = (Option("share", 0.3, "share of the tokens that the cloud makes", high=1.0),)

    def device(self, run: DeviceRun) -> DeviceHalf:
        first = cloud_tokens(self.values(run.settings).real("share"), run.total)
        if len(run.tokens) < first:
            yield Send(Draft(run.next_step(), len(run.tokens), want=first - len(run.tokens)))
            patch: Patch = yield Receive()
            run.apply(patch)
            yield Commit(len(run.tokens))
        while len(run.tokens) < run.total:
            proposal: Proposal = yield Propose(run.tokens, scored=False)
            run.tokens.append(proposal.token)
            run.decided.append("device")
            yield Commit(len(run.tokens))

    def cloud(self, run: CloudRun, draft: Draft) -> CloudHalf:
        yield from sample_own(run, draft.want, "prefix")
        yield make_patch(run, draft, draft.start)


def cloud_tokens(share: float, total: int) -> int:
    """How many tokens the cloud makes: ``ceil(share * total)``, whatever the rounding of the product."""
    return math.ceil(round(share * total, 6))
