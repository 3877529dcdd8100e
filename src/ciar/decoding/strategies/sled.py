"""``sled``: speculative sampling whose device stops a draft behind a token that it is not sure of.

The unsure token is part of the draft. So whether a position is drafted depends on tokens that the cloud
has judged, and the law stays the cloud's; a draft without it would hold likely tokens by choice. The method's
other half, a server that verifies drafts of many devices in one pass, is the server's batching.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import Any

from ciar.decoding.halves import ask
from ciar.decoding.options import Option
from ciar.decoding.strategies.speculative import SpeculativeSampling
from ciar.decoding.strategy import DeviceHalf, DeviceRun, Proposal, Propose, register


@register
class Sled(SpeculativeSampling):
    name = "sled"
    summary = "speculative whose drafts end where the device is not sure, at the window at the latest"
    source = "SLED, arXiv 2506.09397"
    options = (Option("confidence", 0.1, "a draft ends behind a token less likely than this", high=1.0),)
    grid = ("window=8,confidence=0.05", "window=8", "window=16,confidence=0.02", "window=16")

    def device(self, run: DeviceRun) -> DeviceHalf:
        confidence = self.values(run.settings).real("confidence")
        least = math.log(confidence) if confidence > 0.0 else -math.inf
        while len(run.tokens) < run.total:
            start = len(run.tokens)
            yield from draft_while_sure(run, run.settings.window, least)
            yield from ask(run, start, (False,) * (len(run.tokens) - start))


def draft_while_sure(run: DeviceRun, most: int, least: float) -> Generator[Any, Any, None]:
    """Drafts up to ``most`` tokens, the last of them the first whose log-probability is below ``least``."""
    for _ in range(min(most, run.total - len(run.tokens))):
        proposal: Proposal = yield Propose(run.tokens, scored=False, chance=True)
        run.tokens.append(proposal.token)
        if proposal.log_prob < least:
            return
