"""``base``: plain AR in the cloud, one pass a token. The yard-stick of every other strategy."""

from __future__ import annotations

from ciar.decoding.strategy import (
    CloudHalf,
    CloudRun,
    Commit,
    DeviceHalf,
    DeviceRun,
    Receive,
    Send,
    Strategy,
    register,
)
from ciar.decoding.verify import sample_own
from ciar.ledger import DECIDERS
from ciar.protocol.messages import Draft, Patch

#: Tokens between two patches, so that a preview can grow while the cloud goes on.
CHUNK = 16


@register
class Base(Strategy):
    name = "base"
    summary = "plain AR in the cloud, one pass a token"
    source = "LlamaGen, arXiv 2406.06525"
    exact = True
    uses_device = False

    def device(self, run: DeviceRun) -> DeviceHalf:
        """Asks for everything at once and takes the patches as they come."""
        yield Send(Draft(run.next_step(), len(run.tokens), want=run.total - len(run.tokens)))
        while len(run.tokens) < run.total:
            patch: Patch = yield Receive(critical=not run.tokens)
            run.apply(patch)
            yield Commit(len(run.tokens))

    def cloud(self, run: CloudRun, draft: Draft) -> CloudHalf:
        end = draft.start + draft.want
        while len(run.tokens) < end:
            start = len(run.tokens)
            yield from sample_own(run, min(CHUNK, end - start), "prefix")
            yield make_patch(run, draft, start)


def make_patch(run: CloudRun, draft: Draft, start: int) -> Patch:
    """The patch that tells the device all tokens from ``start`` on."""
    return Patch(
        step=draft.step,
        start=start,
        ids=tuple(run.tokens[start:]),
        decided=tuple(DECIDERS.index(d) for d in run.decided[start:]),
        horizon=len(run.tokens),
    )
