"""``picospec``: ``dssd`` with a device that drafts on while its last draft is in flight.

The next draft begins where the last one ends, so a draft that stands whole brings no token of the cloud's
own; the next one is ready and leaves at once. After a rejection what was drafted ahead is thrown away.
"""

from __future__ import annotations

from ciar.decoding.exchange import draft_told, judge_told, send_told, take_told
from ciar.decoding.strategy import CloudHalf, CloudRun, DeviceHalf, DeviceRun, Receive, Strategy, register
from ciar.protocol.messages import Draft, Patch


@register
class PicoSpec(Strategy):
    name = "picospec"
    summary = "dssd that drafts on while the last draft is in flight"
    source = "PicoSpec, arXiv 2603.19133"
    grid = ("window=2", "window=4", "window=8")
    exact = True

    def device(self, run: DeviceRun) -> DeviceHalf:
        known = len(run.tokens)
        ahead: list[int] = []
        told_ahead: list[float] = []
        while len(run.tokens) < run.total:
            told = told_ahead
            run.tokens += ahead
            if not told:
                told = yield from draft_told(run, run.tokens, run.settings.window)
            yield send_told(run, known, told)
            end = len(run.tokens)
            longer = list(run.tokens)
            told_ahead = yield from draft_told(run, longer, run.settings.window)
            ahead = longer[end:]
            patch: Patch = yield Receive()
            known = yield from take_told(run, patch)
            if known < end:
                run.discarded += len(ahead)
                ahead, told_ahead = [], []
        if known < run.total:
            yield send_told(run, known, [])

    def cloud(self, run: CloudRun, draft: Draft) -> CloudHalf:
        return judge_told(run, draft, bonus=False)
