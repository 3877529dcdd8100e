"""``scd``: coupled Jacobi decoding, the cloud alone. The picture is that of ``base``, in fewer passes.

A window of guesses slides over the picture. Each pass gives the cloud's choice at every position of
it under the picture's noise; right guesses become final and wrong ones better guesses. No device
model is needed, so this is the rival that a drafter has to beat.
"""

from __future__ import annotations

from typing import ClassVar

from ciar.decoding.blocks import HEIGHT, INDENT, Shape
from ciar.decoding.budget import Judge, within
from ciar.decoding.halves import listen, stream
from ciar.decoding.jacobi import GUESS, Coupled
from ciar.decoding.options import Option
from ciar.decoding.strategy import CloudHalf, CloudRun, DeviceHalf, DeviceRun, Strategy, register
from ciar.protocol.messages import Draft


@register
class Scd(Strategy):
    name = "scd"
    summary = "the cloud alone verifies and repairs its own guesses until they are plain AR's"
    source = "coupled speculative Jacobi decoding, arXiv 2510.24211, with Gumbel noise"
    exact = True
    training = "none"
    uses_device = False
    options: ClassVar[tuple[Option, ...]] = (GUESS, HEIGHT, INDENT)
    grid: ClassVar[tuple[str, ...]] = ("window=16", "window=32", "window=64")

    def judge(self, run: CloudRun) -> Judge:
        """Which guesses stand."""
        return within([0.0] * run.total)

    def device(self, run: DeviceRun) -> DeviceHalf:
        return listen(run)

    def cloud(self, run: CloudRun, draft: Draft) -> CloudHalf:
        values = self.values(run.settings)
        shape = Shape(run.settings.window, values.whole("height"), values.whole("indent"))
        end = draft.start + draft.want
        window = Coupled(run, end, shape, self.judge(run), values.word("guess"))
        return stream(run, draft, lambda: window.advance(run))
