"""Windows that slide without a drafter: a pass gives better guesses for every position of the window.

``Coupled`` keeps each position's noise, so that a guess changes only where the law moved far enough,
and ends at plain AR's picture. ``Drawn`` draws afresh and judges what was drawn by an acceptance rule.
"""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor

from ciar.decoding.acceptance import Rule
from ciar.decoding.blocks import Blocks, Shape
from ciar.decoding.budget import Judge
from ciar.decoding.options import Option
from ciar.decoding.sampling import choose, draw, one_hot, residual
from ciar.decoding.strategy import CloudRun, Pass, Scatter
from ciar.decoding.verify import laws_from

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
        run: the session.
        end: position where it stops.
        shape: of the window.
        judge: which guesses stand; where only the cloud's own choice does, it ends at plain AR's tokens.
        guess: a choice of :data:`GUESS`.
    """

    def __init__(self, run: CloudRun, end: int, shape: Shape, judge: Judge, guess: str) -> None:
        self.end, self.judge, self.guess = end, judge, guess
        self.blocks = Blocks(run, shape)
        self.pending: list[int] = []
        self.met: set[int] = set()  # positions that were in a pass

    def advance(self, run: CloudRun) -> Generator[Pass | Scatter, Tensor, None]:
        """One pass; extends the session by at least one token."""
        first = len(run.tokens)
        positions = self.blocks.places(run, self.end)
        for position in range(first, positions[-1] + 1):
            place = position - first
            if place == len(self.pending):
                self.pending.append(first_guess(run, self.pending, self.guess))
            elif position not in self.met:
                # Guessed to fill a gap long ago; its neighbours are better by now.
                self.pending[place] = first_guess(run, self.pending[:place], self.guess)
        self.met.update(positions)
        final, fresh = yield from self.blocks.sweep(run, self.pending, self.judge)
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
        coupled: whether drafts behind the first that falls stay where their law allows it, by maximal
            coupling of the old law and the new (MC-SJD, arXiv 2510.24211); else all are drawn anew.
    """

    def __init__(self, end: int, width: int, rule: Rule, guess: str, *, coupled: bool = False) -> None:
        self.end, self.width, self.rule, self.guess, self.coupled = end, width, rule, guess, coupled
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
        if self.coupled and len(rest):
            old = torch.stack(self.laws[stand + 1 :]).to(rest.device)
            kept = torch.tensor(self.pending[stand + 1 :], device=rest.device)
            self.pending = recoupled(rest, old, kept, chance).tolist()
        else:
            self.pending = draw(rest, chance).tolist() if len(rest) else []
        self.laws = list(rest)

    def _stands(self, run: CloudRun, law: Tensor, depth: int) -> bool:
        chance = self.rule.accept(law, self.laws[depth].to(law.device), self.pending[depth], depth)
        return run.noise.accept(len(run.tokens) - len(self.pending) + depth) < chance


def recoupled(p: Tensor, q: Tensor, tokens: Tensor, chance: Tensor) -> Tensor:
    """Tokens drawn from q turned into tokens drawn from p, with as few changes as possible.

    A token stays with ``min(1, p / q)``, else one of the residual takes its place. What is left of the
    chance after the test is uniform again, and draws from the residual.

    Args:
        p, q: new and old laws, float32 [n, vocab].
        tokens: int64 [n], drawn from q.
        chance: float64 [n], uniform in (0, 1).
    """
    here = tokens[:, None]
    new, old = (law.gather(1, here)[:, 0].double() for law in (p, q))
    # A token that was not drawn from q goes, even where both laws exclude it.
    stays = torch.where(old > -torch.inf, (new - old).clamp_max(0.0).exp(), 0.0)
    rest = ((chance - stays) / (1.0 - stays).clamp_min(1e-12)).clamp(0.0, 1.0 - 1e-12)
    return torch.where(chance < stays, tokens, draw(residual(p, q), rest))
