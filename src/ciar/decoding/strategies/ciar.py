"""``ciar``: the paper's method, synchronous.

The cloud makes a short prefix. The device then goes on alone while its interval head is certain;
the first uncertain token goes up with the certain ones before it, and the cloud decides it.
Source: CIAR, arXiv 2603.25463.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import Any

from torch import Tensor

from ciar.decoding.halves import make_patch
from ciar.decoding.sampling import choose, residual
from ciar.decoding.strategy import (
    CloudHalf,
    CloudRun,
    Commit,
    DeviceHalf,
    DeviceLaw,
    DeviceRun,
    Proposal,
    Propose,
    Receive,
    Send,
    Strategy,
    register,
)
from ciar.decoding.verify import next_law, sample_own
from ciar.protocol.messages import Draft, Patch


@register
class Ciar(Strategy):
    name = "ciar"
    summary = "certain tokens stay on the device, uncertain ones go to the cloud one at a time"
    source = "CIAR, arXiv 2603.25463"
    drift = "TV(p, q) at a token that the device keeps; with injection, the features' effect besides"
    injects = True
    grid = ("share=0.15", "share=0.5", "score=entropy", "score=max-prob")

    def device(self, run: DeviceRun) -> DeviceHalf:
        prefix = math.floor(run.settings.prefix_rate * run.total)
        if len(run.tokens) < prefix:
            yield Send(Draft(run.next_step(), len(run.tokens), want=prefix - len(run.tokens)))
            yield from self._receive(run)
        known_to_cloud = len(run.tokens)
        features: list[bytes] = []
        while len(run.tokens) < run.total:
            proposal: Proposal = yield Propose(run.tokens)
            certain = run.gate.certain(proposal.score)
            run.tokens.append(proposal.token)
            run.decided.append("device")
            features.append(proposal.feature)
            if certain:
                yield Commit(len(run.tokens))
                continue
            ids = tuple(run.tokens[known_to_cloud:])
            flags = (True,) * (len(ids) - 1) + (False,)
            draft = Draft(run.next_step(), known_to_cloud, ids, flags, features=b"".join(features))
            yield Send(draft)
            yield from self._receive(run)
            run.gate.answered(run.decided[-1] == "accepted")
            known_to_cloud, features = len(run.tokens), []

    def _receive(self, run: DeviceRun) -> Generator[Any, Any, None]:
        patch: Patch = yield Receive()
        run.apply(patch)
        yield Commit(len(run.tokens))

    def cloud(self, run: CloudRun, draft: Draft) -> CloudHalf:
        if not draft.ids:
            yield from sample_own(run, draft.want, "prefix")
            yield make_patch(run, draft, draft.start)
            return
        run.tokens += draft.ids[:-1]
        run.decided += ["device"] * (len(draft.ids) - 1)
        law = yield from next_law(run, inject=run.settings.injection)
        if run.settings.action == "verify":
            yield from self._verify(run, draft.ids[-1], law)
        else:
            token = int(choose(law, run.noise.gumbel(len(run.tokens), 1)[0]))
            self._decide(run, token, accepted=token == draft.ids[-1])
        yield make_patch(run, draft, draft.start)

    def _verify(self, run: CloudRun, proposal: int, law: Tensor) -> Generator[DeviceLaw, Tensor, None]:
        """Speculative sampling (arXiv 2211.17192) against the cloud's copy of the device law."""
        position = len(run.tokens)
        device_law = (yield DeviceLaw(position))[0]
        p, q = float(law[proposal]), float(device_law[proposal])
        # A token that the device cannot have drawn is refused, even where both laws exclude it.
        ratio = math.exp(min(0.0, p - q)) if q > -math.inf else 0.0
        if run.noise.accept(position) < ratio:
            self._decide(run, proposal, accepted=True)
        else:
            redraw = residual(law, device_law)
            self._decide(run, int(choose(redraw, run.noise.residual(position))), accepted=False)

    def _decide(self, run: CloudRun, token: int, *, accepted: bool) -> None:
        run.tokens.append(token)
        run.decided.append("accepted" if accepted else "replaced")
