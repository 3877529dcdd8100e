"""``vvs``: speculative sampling that skips the verification of some rounds.

Between two verified chains the device keeps a short one unverified, as long as chains have stood on
average, and drafts on; one request then moves the picture on by two chains. The paper drafts trees
with an EAGLE head inside the cloud; here the device model drafts chains.
"""

from __future__ import annotations

from ciar.decoding.halves import ask, propose
from ciar.decoding.options import Option
from ciar.decoding.strategies.speculative import SpeculativeSampling
from ciar.decoding.strategy import DeviceHalf, DeviceRun, register


@register
class Vvs(SpeculativeSampling):
    name = "vvs"
    summary = "speculative that leaves a chain unverified now and then, never two in a row"
    source = "VVS, arXiv 2511.13587"
    exact = False
    drift = "TV(p, q) at a skipped token, none at the others"
    grid = ("window=4", "window=8", "window=4,every=2")
    options = (Option("every", 1, "verified chains for each that is skipped", low=1, high=1000),)

    def device(self, run: DeviceRun) -> DeviceHalf:
        every = self.values(run.settings).whole("every")
        verified = stood = 0
        while len(run.tokens) < run.total:
            start = len(run.tokens)
            due = verified and verified % every == 0
            skip = min(run.settings.window, stood // verified) if due else 0
            trusted = yield from propose(run, skip)
            drafted = yield from propose(run, run.settings.window)
            yield from ask(run, start, (True,) * len(trusted) + drafted)
            if drafted:
                verified += 1
                stood += run.decided[start:].count("accepted")
