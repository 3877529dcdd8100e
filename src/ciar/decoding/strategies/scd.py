"""``scd``: coupled Jacobi decoding, the cloud alone. The picture is that of ``base``, in fewer passes.

A window of guesses slides over the picture. Each pass gives the cloud's choice at every position of
it under the picture's noise; right guesses become final and wrong ones better guesses. No device
model is needed, so this is the rival that a drafter has to beat.
"""

from __future__ import annotations

from typing import ClassVar

from ciar.decoding.halves import listen, stream
from ciar.decoding.jacobi import GUESS, Coupled
from ciar.decoding.options import Option
from ciar.decoding.strategy import CloudHalf, CloudRun, DeviceHalf, DeviceRun, Strategy, register
from ciar.protocol.messages import Draft, Settings


@register
class Scd(Strategy):
    name = "scd"
    summary = "the cloud alone verifies and repairs its own guesses until they are plain AR's"
    source = "coupled speculative Jacobi decoding, arXiv 2510.24211, with Gumbel noise"
    exact = True
    training = "none"
    uses_device = False
    options: ClassVar[tuple[Option, ...]] = (GUESS,)

    def allowance(self, settings: Settings) -> float:
        """Slack with which a guess stands."""
        return 0.0

    def device(self, run: DeviceRun) -> DeviceHalf:
        return listen(run)

    def cloud(self, run: CloudRun, draft: Draft) -> CloudHalf:
        settings = run.settings
        guess = self.values(settings).word("guess")
        window = Coupled(draft.start + draft.want, settings.window, self.allowance(settings), guess)
        return stream(run, draft, lambda: window.advance(run))
