"""``lossless``: windows with allowance 0. The picture is the one that ``base`` gives for the seed.

The device drafts a window, the cloud verifies and repairs it, and whatever the drafter, the window
or the network, the tokens are those of plain AR: only the number of passes changes.
"""

from __future__ import annotations

from ciar.decoding.strategies.base import make_patch
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
from ciar.decoding.verify import repair_window
from ciar.protocol.messages import Draft, Patch


@register
class Lossless(Strategy):
    name = "lossless"
    summary = "device drafts windows, cloud repairs them until they are plain AR's"
    source = "drafter-invariant speculative decoding, arXiv 2408.07978; coupled Jacobi, arXiv 2510.24211"
    exact = True

    def device(self, run: DeviceRun) -> DeviceHalf:
        while len(run.tokens) < run.total:
            start = len(run.tokens)
            while len(run.tokens) < min(start + run.settings.window, run.total):
                proposal: Proposal = yield Propose(run.tokens)
                run.tokens.append(proposal.token)
            ids = tuple(run.tokens[start:])
            yield Send(Draft(run.next_step(), start, ids, (False,) * len(ids)))
            patch: Patch = yield Receive()
            run.apply(patch)
            yield Commit(len(run.tokens))

    def cloud(self, run: CloudRun, draft: Draft) -> CloudHalf:
        guesses = list(draft.ids)
        window, _ = yield from repair_window(run, guesses, [0.0] * len(guesses))
        run.decided += [
            "accepted" if kept == guess else "replaced" for kept, guess in zip(window, guesses, strict=True)
        ]
        yield make_patch(run, draft, draft.start)
