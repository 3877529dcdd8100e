"""Windows over several rows: positions of the next rows are guessed and repaired before this row ends.

What depends on what in a picture is near in two dimensions, so a window that reaches down, not along, may
bring better guesses. Tokens become final at the verified horizon alone, in raster order, with all before
them fed; a window's part in a lower row rests on what is there of the rows above, so its verdicts are
guesses until the horizon comes by. So without an allowance the picture is plain AR's, whatever the shape.
The idea of repairing several rows at once is that of PJD, arXiv 2606.05703, which makes such verdicts
final (:mod:`ciar.decoding.rows`).
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import Tensor

from ciar.decoding.budget import Judge
from ciar.decoding.options import Option
from ciar.decoding.sampling import choose, slack, to_law
from ciar.decoding.strategy import CloudRun, Pass, Scatter
from ciar.decoding.verify import sweep

HEIGHT = Option("height", 1, "rows of the picture that the window reaches over; 1 is raster order", low=1)
INDENT = Option(
    "indent", 0, "columns by which each row of the window begins before the one above it", high=256
)


@dataclass(frozen=True)
class Shape:
    """Which positions a pass judges.

    Attributes:
        width: the most positions.
        height: rows that they are shared out to, evenly; 1 is raster order.
        indent: columns by which each row's part begins before the part above it.
    """

    width: int
    height: int = 1
    indent: int = 0

    def parts(self, first: int, end: int, grid: int) -> tuple[int, list[int]]:
        """The part at the horizon, and the rest of the window.

        Args:
            first: the horizon.
            end: no position from here on; beyond ``first``.
            grid: tokens of a row.

        Returns:
            How many consecutive positions from ``first`` on, at least 1, and positions of lower rows, rising.
            Where there are none, the first part has the whole width.
        """
        row, column = divmod(first, grid)
        share = max(1, self.width // self.height)
        below = [
            (row + k) * grid + c
            for k in range(1, min(self.height, self.width))
            for c in range(max(0, column - k * self.indent), min(grid, column - k * self.indent + share))
        ]
        below = [position for position in below if position < end]
        if not below:
            return min(self.width, end - first), []
        return min(share, grid - column), below


class Blocks:
    """Sweeps of one session over windows of a shape.

    Args:
        run: the session.
        shape: of the windows.
    """

    def __init__(self, run: CloudRun, shape: Shape) -> None:
        self.shape = shape
        self._cells = torch.zeros(run.total, dtype=torch.bool)  # cells that were ever fed

    def places(self, run: CloudRun, end: int) -> list[int]:
        """Positions of the next pass, where guesses reach to ``end``."""
        first = len(run.tokens)
        count, below = self.shape.parts(first, end, run.grid)
        return [*range(first, first + count), *below]

    def sweep(
        self, run: CloudRun, guesses: list[int], judge: Judge
    ) -> Generator[Pass | Scatter, Tensor, tuple[int, list[int]]]:
        """One sweep over the window's part of the guesses; see :func:`ciar.decoding.verify.sweep`.

        Args:
            run: the session; unchanged but for ``fed``.
            guesses: tokens of the positions after the known ones, at least one.
            judge: which of them stand.

        Returns:
            How many positions are final, at least 1, and the tokens of all positions of ``guesses``.
        """
        first = len(run.tokens)
        count, below = self.shape.parts(first, first + len(guesses), run.grid)
        if not below:
            final, fresh = yield from sweep(run, guesses[:count], judge)
            return final, fresh + guesses[count:]
        law = yield from self._laws(run, guesses, count, below)
        positions = [*range(first, first + count), *below]
        noise = torch.cat([run.noise.gumbel(first, count), *(run.noise.gumbel(p, 1) for p in below)])
        here = torch.tensor([guesses[p - first] for p in positions], device=law.device)
        gaps: list[float] = slack(law, noise, here).tolist()
        choices: list[int] = choose(law, noise).tolist()
        places = [p - first for p in positions]
        stands = judge(places[:count], gaps[:count], True) + judge(places[count:], gaps[count:], False)
        fresh = list(guesses)
        for place, choice, ok in zip(places, choices, stands, strict=True):
            if not ok:
                fresh[place] = choice
        changed = next((i for i in range(count) if not stands[i]), None)
        if changed is None:
            return count, fresh
        run.fed = min(run.fed, first + changed)
        return changed + 1, fresh

    def _laws(
        self, run: CloudRun, guesses: list[int], count: int, below: list[int]
    ) -> Generator[Pass | Scatter, Tensor, Tensor]:
        """Laws of the first ``count`` positions and of those below: float32 [n, vocab]."""
        first = len(run.tokens)
        tokens = run.tokens + guesses
        end = first + count - 1  # what is fed before here is exact: it sees all that is before it
        start = min(run.fed, max(first - 1, 0))
        positions = sorted({*range(start, end), *(p - 1 for p in below)})
        self._cells[:end] = True
        self._cells[positions] = True
        visible = self._cells.repeat(len(positions), 1)
        for row, position in enumerate(positions):
            visible[row, position + 1 :] = False
        pieces: list[Tensor] = []
        if first == 0:
            pieces.append((yield Pass(0, [])))
        logits = yield Scatter(tuple(positions), [tokens[p] for p in positions], visible)
        row_of = {position: row for row, position in enumerate(positions)}
        wanted = [*range(max(first, 1), first + count), *below]
        pieces.append(logits[[row_of[p - 1] for p in wanted]])
        run.fed = end
        return to_law(torch.cat(pieces), run.law, what=f"the cloud model at positions {first} on")
