"""Windows that slide without a drafter: a pass gives better guesses for every position of the window.

``Coupled`` keeps each position's noise, so that a guess changes only where the law moved far enough,
and ends at plain AR's picture. ``Drawn`` draws afresh and judges what was drawn by an acceptance rule.
"""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor

from ciar.decoding.acceptance import Rule
from ciar.decoding.options import Option
from ciar.decoding.sampling import choose, draw, one_hot
from ciar.decoding.strategy import CloudRun, Pass
from ciar.decoding.verify import laws_from, sweep

#: How a position that enters a window is first guessed.
GUESS = Option(
    "guess",
    "left",
    "first guess of a position: its left neighbour, the token above, or any token",
    choices=("left", "above", "random"),
)


def first_guess(run: CloudRun, pending: list[int], kind: str) -> int:
    """A guess for the position after the known tokens and the window's.

    Args:
        run: the session.
        pending: the window's tokens so far.
        kind: a choice of :data:`GUESS`; where there is no such neighbour, any token.
    """
    position = len(run.tokens) + len(pending)
    back = {"left": 1, "above": run.grid, "random": position + 1}[kind]
    if back <= len(pending):
        return pending[-back]
    if back <= position:
        return run.tokens[position - back]
    return int(float(run.noise.fresh(position, 1, 0)[0]) * run.vocab_size)


class Coupled:
    """A sliding window of coupled Jacobi iteration (SCD, arXiv 2510.24211) under the picture's noise.

    Args:
        end: position where it stops.
        width: positions of the window.
        allowance: slack with which a guess stands; 0 ends at plain AR's tokens.
        guess: a choice of :data:`GUESS`.
    """

    def __init__(self, end: int, width: int, allowance: float, guess: str) -> None:
        self.end, self.guess = end, guess
        self.allowances = torch.full((width,), allowance)
        self.pending: list[int] = []

    def advance(self, run: CloudRun) -> Generator[Pass, Tensor, None]:
        """One pass; extends the session by at least one token."""
        room = min(len(self.allowances), self.end - len(run.tokens))
        while len(self.pending) < room:
            self.pending.append(first_guess(run, self.pending, self.guess))
        final, fresh = yield from sweep(run, self.pending, self.allowances[:room])
        run.tokens += fresh[:final]
        run.decided += ["prefix"] * final
        self.pending = fresh[final:]


class Drawn:
    """A sliding window of speculative Jacobi decoding (SJD, arXiv 2410.01699).

    The draft of a position is drawn from its law in the pass before; the law of a first guess is that
    guess alone.

    Args:
        end: position where it stops.
        width: positions of the window.
        rule: when a draft stands.
        guess: a choice of :data:`GUESS`.
    """

    def __init__(self, end: int, width: int, rule: Rule, guess: str) -> None:
        self.end, self.width, self.rule, self.guess = end, width, rule, guess
        self.pending: list[int] = []
        self.laws: list[Tensor] = []
        self.passes = 0

    def advance(self, run: CloudRun) -> Generator[Pass, Tensor, None]:
        """One pass; extends the session by at least one token."""
        first = len(run.tokens)
        while len(self.pending) < min(self.width, self.end - first):
            token = first_guess(run, self.pending, self.guess)
            self.pending.append(token)
            self.laws.append(one_hot(token, run.vocab_size))
        count = len(self.pending)
        run.tokens += self.pending
        law = yield from laws_from(run, first, count)
        stand = 0
        while stand < count and self._stands(run, law[stand], stand):
            stand += 1
        del run.tokens[first + stand :]
        run.fed = min(run.fed, first + stand)
        if stand < count:
            redraw = self.rule.redraw(law[stand], self.laws[stand].to(law.device), self.pending[stand])
            run.tokens.append(int(choose(redraw, run.noise.residual(first + stand))))
        run.decided += ["prefix"] * (len(run.tokens) - first)
        self.passes += 1
        rest = law[stand + 1 :]
        # Drawn again at every pass, so with other chance at every pass: draw 0 is the first guess's.
        chance = run.noise.fresh(first + stand + 1, len(rest), self.passes)
        self.pending = draw(rest, chance).tolist() if len(rest) else []
        self.laws = list(rest)

    def _stands(self, run: CloudRun, law: Tensor, depth: int) -> bool:
        chance = self.rule.accept(law, self.laws[depth].to(law.device), self.pending[depth], depth)
        return run.noise.accept(len(run.tokens) - len(self.pending) + depth) < chance
