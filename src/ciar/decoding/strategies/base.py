"""``base``: plain AR in the cloud, one pass a token. The yard-stick of every other strategy."""

from __future__ import annotations

from ciar.decoding.halves import CHUNK, listen, make_patch, stream
from ciar.decoding.strategy import CloudHalf, CloudRun, DeviceHalf, DeviceRun, Strategy, register
from ciar.decoding.verify import sample_own
from ciar.protocol.messages import Draft

__all__ = ["CHUNK", "Base", "make_patch"]


@register
class Base(Strategy):
    name = "base"
    summary = "plain AR in the cloud, one pass a token"
    source = "LlamaGen, arXiv 2406.06525"
    exact = True
    training = "none"
    uses_device = False

    def device(self, run: DeviceRun) -> DeviceHalf:
        return listen(run)

    def cloud(self, run: CloudRun, draft: Draft) -> CloudHalf:
        return stream(run, draft, lambda: sample_own(run, 1))
