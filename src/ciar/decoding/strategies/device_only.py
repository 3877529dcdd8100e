"""``device-only``: the device model makes the whole picture; no cloud at all."""

from __future__ import annotations

from ciar.decoding.strategy import Commit, DeviceHalf, DeviceRun, Proposal, Propose, Strategy, register


@register
class DeviceOnly(Strategy):
    name = "device-only"
    summary = "the device model alone, offline"
    source = "placement on the device, as in offline use"
    drift = "TV(p, q) at every token"
    uses_cloud = False

    def device(self, run: DeviceRun) -> DeviceHalf:
        while len(run.tokens) < run.total:
            proposal: Proposal = yield Propose(run.tokens, scored=False)
            run.tokens.append(proposal.token)
            run.decided.append("device")
            yield Commit(len(run.tokens))
