"""Several rows of the picture at once: a row begins before the one above it has ended.

A token far to the upper right matters little, so a row may start when the row above has a lead of some
columns. Every open row has a window of guesses; one pass serves all windows, with a mask under which a
guess sees what is decided everywhere before it and, of the guesses, those of its own row alone, so that
errors do not spread from row to row. Sources: ZipAR, arXiv 2412.04062; PJD, arXiv 2606.05703.
"""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor

from ciar.decoding.sampling import choose, to_law
from ciar.decoding.strategy import CloudRun, Pass, Scatter


class RowWindows:
    """Windows over the open rows of one picture, under the picture's noise.

    A guess stands where it is the cloud's choice; the first that is not is replaced by it and decided,
    and later ones are better guesses for the next pass. With a window of one this is ZipAR. With a lead
    of a whole row, one row is open at a time and the picture is plain AR's.

    Args:
        run: the session; what it knows is decided.
        end: position where it stops.
        width: guesses of a row's window.
        lead: columns of a row that must be decided before the next one opens; more than a row's are
            a row's.
        guess: a choice of :data:`ciar.decoding.jacobi.GUESS`.
    """

    def __init__(self, run: CloudRun, end: int, width: int, lead: int, guess: str) -> None:
        self.end, self.width, self.guess = end, width, guess
        self.grid = run.grid
        self.lead = min(lead, self.grid)
        #: Tokens by position, decided ones and guesses; None where there is neither.
        self.tokens: list[int | None] = [*run.tokens, *[None] * (run.total - len(run.tokens))]
        self.decided = torch.zeros(run.total, dtype=torch.bool)
        self.decided[: len(run.tokens)] = True
        self.fresh = torch.ones(run.total, dtype=torch.bool)  # cells that do not hold their decided token
        self.fresh[: run.fed] = False

    def advance(self, run: CloudRun) -> Generator[Pass | Scatter, Tensor, None]:
        """One pass; extends the session by at least one token."""
        if not self.decided[0]:  # predicted by the text, which the prefill has read
            law = to_law((yield Pass(0, [])), run.law, what="the cloud model at position 0")
            self._decide(0, int(choose(law, run.noise.gumbel(0, 1))[0]))
        windows = [self._window(run, row) for row in self._open_rows()]
        if windows:
            yield from self._pass(run, windows)
        while len(run.tokens) < self.end and self.decided[len(run.tokens)]:
            token = self.tokens[len(run.tokens)]
            assert token is not None
            run.tokens.append(token)
            run.decided.append("prefix")

    def _pass(self, run: CloudRun, windows: list[range]) -> Generator[Scatter, Tensor, None]:
        positions, visible = self._feed(run, windows)
        ids = [self.tokens[p] for p in positions]
        logits = yield Scatter(tuple(positions), [i for i in ids if i is not None], visible)
        place = {position: row for row, position in enumerate(positions)}
        self.fresh[[p for p in positions if self.decided[p]]] = False
        for window in windows:
            rows = [place[p - 1] for p in window]
            law = to_law(logits[rows], run.law, what=f"the cloud model at positions {window.start} on")
            choices: list[int] = choose(law, run.noise.gumbel(window.start, len(window))).tolist()
            standing = True
            for position, choice in zip(window, choices, strict=True):
                stands = self.tokens[position] == choice
                if standing:
                    self._decide(position, choice)
                    # The guess that stands was fed, unless it is the window's last.
                    self.fresh[position] = not (stands and position in place)
                else:
                    self.tokens[position] = choice
                standing = standing and stands

    def _decide(self, position: int, token: int) -> None:
        self.tokens[position] = token
        self.decided[position] = True

    def _open_rows(self) -> list[int]:
        done = self.decided.view(self.grid, self.grid).sum(dim=1).tolist()
        return [
            row
            for row in range(self.grid)
            if done[row] < self.grid and (row == 0 or done[row - 1] >= self.lead)
            if row * self.grid + done[row] < self.end
        ]

    def _window(self, run: CloudRun, row: int) -> range:
        """Positions of a row's window, each with a guess."""
        first = row * self.grid + int(self.decided.view(self.grid, self.grid)[row].sum())
        window = range(first, min(first + self.width, (row + 1) * self.grid, self.end))
        for position in window:
            if self.tokens[position] is None:
                self.tokens[position] = self._first_guess(run, position)
        return window

    def _first_guess(self, run: CloudRun, position: int) -> int:
        here = [t for t in self.tokens[position - position % self.grid : position] if t is not None]
        left = here[-1] if here else None
        above = self.tokens[position - self.grid] if position >= self.grid else None
        near = {"left": (left, above), "above": (above, left), "random": ()}[self.guess]
        for token in near:
            if token is not None:
                return token
        return int(float(run.noise.fresh(position, 1, 0)[0]) * run.vocab_size)

    def _feed(self, run: CloudRun, windows: list[range]) -> tuple[list[int], Tensor]:
        """What is fed: decided tokens whose cells are stale, and what each window's laws rest on."""
        feed = set((self.decided & self.fresh).nonzero()[:, 0].tolist())
        owner: dict[int, range] = {}
        for window in windows:
            before = window.start - 1
            if self.tokens[before] is None:  # the end of the row above: a stand-in until it is known
                self.tokens[before] = self._first_guess(run, before)
            feed |= {before, *window[:-1]}
            owner |= dict.fromkeys(window, window)
        # A decided row's last token is fed with nothing behind it in the end.
        positions = sorted(p for p in feed if p < self.end - 1 or p in owner)
        visible = self.decided.repeat(len(positions), 1)
        for row, position in enumerate(positions):
            mine = owner.get(position)
            if mine is not None:
                visible[row, mine.start : position] = True
                visible[row, mine.start - 1] = True
            visible[row, position] = True
            visible[row, position + 1 :] = False
        return positions, visible


def scattered_mask(request: Scatter, text: int, text_mask: Tensor | None, rows: int) -> Tensor:
    """The mask of a scattered pass: bool [rows, 1, n, text + last position + 1].

    Args:
        request: the pass.
        text: text cells.
        text_mask: bool [rows, text], or None when no row has padding.
        rows: rows of the cache.
    """
    length = max(request.positions) + 1
    visible = request.visible[None, :, :length].expand(rows, -1, -1)
    seen = torch.ones(rows, text, dtype=torch.bool) if text_mask is None else text_mask
    n = len(request.positions)
    both = torch.cat([seen[:, None].expand(-1, n, -1), visible.to(seen.device)], dim=2)
    return both[:, None]
