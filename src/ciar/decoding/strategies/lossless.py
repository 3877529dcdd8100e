"""``lossless``: windows with allowance 0. The picture is the one that ``base`` gives for the seed.

The device drafts a window, the cloud verifies and repairs it, and whatever the drafter, the window
or the network, the tokens are those of plain AR: only the number of passes changes.
"""

from __future__ import annotations

from ciar.decoding.halves import ask, make_patch, propose
from ciar.decoding.strategy import CloudHalf, CloudRun, DeviceHalf, DeviceRun, Strategy, register
from ciar.decoding.verify import repair_window
from ciar.protocol.messages import Draft, Settings


class Windows(Strategy):
    """The device drafts windows and the cloud repairs them, each token within its allowance."""

    def asks_gate(self, settings: Settings) -> bool:
        """Whether the gate says which tokens are certain."""
        return False

    def allowances(self, settings: Settings, certain: tuple[bool, ...]) -> list[float]:
        """Slack allowed at each token of a window."""
        raise NotImplementedError

    def device(self, run: DeviceRun) -> DeviceHalf:
        gated = self.asks_gate(run.settings)
        while len(run.tokens) < run.total:
            start = len(run.tokens)
            certain = yield from propose(run, run.settings.window, ask_gate=gated)
            yield from ask(run, start, certain)
            for decider, sure in zip(run.decided[start:], certain, strict=True):
                if gated and not sure:
                    run.gate.answered(decider == "accepted")

    def cloud(self, run: CloudRun, draft: Draft) -> CloudHalf:
        guesses = list(draft.ids)
        window, _ = yield from repair_window(run, guesses, self.allowances(run.settings, draft.certain))
        run.decided += [
            "accepted" if kept == guess else "replaced" for kept, guess in zip(window, guesses, strict=True)
        ]
        yield make_patch(run, draft, draft.start)


@register
class Lossless(Windows):
    name = "lossless"
    summary = "device drafts windows, cloud repairs them until they are plain AR's"
    source = "drafter-invariant speculative decoding, arXiv 2408.07978; coupled Jacobi, arXiv 2510.24211"
    exact = True
    grid = ("window=8", "window=16", "window=32", "window=64")

    def allowances(self, settings: Settings, certain: tuple[bool, ...]) -> list[float]:
        return [0.0] * len(certain)
