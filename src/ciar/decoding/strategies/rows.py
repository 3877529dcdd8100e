"""``zipar`` and ``pjd``: several rows of the picture at once, the cloud alone, without training."""

from __future__ import annotations

from typing import ClassVar

from ciar.decoding.halves import listen, stream
from ciar.decoding.jacobi import GUESS
from ciar.decoding.options import Option
from ciar.decoding.rows import RowWindows
from ciar.decoding.strategy import CloudHalf, CloudRun, DeviceHalf, DeviceRun, Strategy, register
from ciar.protocol.messages import Draft, Settings

LEAD = Option(
    "lead", 8, "columns of a row that are decided before the next row opens; a whole row is exact", low=1
)


@register
class Zipar(Strategy):
    name = "zipar"
    summary = "the cloud alone makes several rows at once, a token of each in every pass"
    source = "ZipAR, arXiv 2412.04062"
    drift = "the law of a token without its context at the upper right, as far as it was not there yet"
    training = "none"
    uses_device = False
    options = (LEAD, GUESS)
    grid: ClassVar[tuple[str, ...]] = ("lead=4", "lead=12")

    def width(self, settings: Settings) -> int:
        """Guesses of a row's window."""
        return 1

    def device(self, run: DeviceRun) -> DeviceHalf:
        return listen(run)

    def cloud(self, run: CloudRun, draft: Draft) -> CloudHalf:
        values = self.values(run.settings)
        end = draft.start + draft.want
        width = self.width(run.settings)
        windows = RowWindows(run, end, width, values.whole("lead"), values.word("guess"))
        return stream(run, draft, lambda: windows.advance(run))


@register
class Pjd(Zipar):
    name = "pjd"
    summary = "zipar with a window of guesses in every row, repaired row by row"
    source = "parallel Jacobi decoding, arXiv 2606.05703, with coupled noise"
    grid = ("window=4", "window=8", "lead=4,window=8")

    def width(self, settings: Settings) -> int:
        return settings.window
