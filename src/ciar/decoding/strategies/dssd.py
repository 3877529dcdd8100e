"""``dssd``: speculative sampling whose two halves each keep their own law.

A draft carries its tokens and how likely each was; the cloud tests them and needs no copy of the device
model. Where one falls, the cloud's law of that position comes down, and the device draws in its place.
"""

from __future__ import annotations

from ciar.decoding.exchange import draft_told, judge_told, send_told, take_told
from ciar.decoding.strategy import CloudHalf, CloudRun, DeviceHalf, DeviceRun, Receive, Strategy, register
from ciar.protocol.messages import Draft, Patch


@register
class Dssd(Strategy):
    name = "dssd"
    summary = (
        "speculative whose rejected tokens are drawn anew by the device, from the law that the cloud sends"
    )
    source = "DSSD, arXiv 2507.12000"
    grid = ("window=2", "window=4", "window=8")
    exact = True

    def device(self, run: DeviceRun) -> DeviceHalf:
        known = len(run.tokens)
        while len(run.tokens) < run.total:
            told = yield from draft_told(run, run.tokens, run.settings.window)
            yield send_told(run, known, told)
            patch: Patch = yield Receive()
            known = yield from take_told(run, patch)
        if known < run.total:  # the last token is the device's; the cloud is told, and no answer awaited
            yield send_told(run, known, [])

    def cloud(self, run: CloudRun, draft: Draft) -> CloudHalf:
        return judge_told(run, draft, bonus=True)
