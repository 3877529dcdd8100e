"""What the cloud knows of positions behind the verified horizon: guesses, repaired sweep by sweep.

Drafts join the guesses as they come; each pass judges all of them at once, makes at least one final,
and gives better guesses for the others. Source: DESIGN section 2; coupled Jacobi, arXiv 2510.24211.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ciar.decoding.blocks import Blocks
from ciar.decoding.budget import Budget, budgeted, within
from ciar.decoding.strategy import CloudRun, Pass, Scatter
from ciar.errors import ProtocolError
from ciar.ledger import DECIDERS, Decider
from ciar.protocol.messages import Draft, Patch


@dataclass
class Pending:
    """Guesses of one session at the positions after its final tokens.

    Attributes:
        told: horizon of the last patch.
        drafted: what the device drafted at each position.
        guesses: what is guessed there now; other than ``drafted`` where the cloud knows better.
        allowances: slack with which each position's guess stands, infinite is not checked at all; or, under a
            budget, the share of the budget's allowance that it gets.
        budget: what the picture may spend, where that decides.
        trusted: positions that may stand unchecked if the budget pays for it.
        audited: certain positions that are checked to see how good the gate is.
        step: the last draft that was taken.
        until: horizon that the device waits for; at or below the last one told when it does not wait.
        stale: drafted tokens that were dropped, because the cloud already knew better.
        changed: end of the guesses that were changed since the last patch.
    """

    told: int
    drafted: list[int] = field(default_factory=list)
    guesses: list[int] = field(default_factory=list)
    allowances: list[float] = field(default_factory=list)
    budget: Budget | None = None
    trusted: set[int] = field(default_factory=set)
    audited: set[int] = field(default_factory=set)
    step: int = -1
    until: int = 0
    stale: int = 0
    changed: int = 0

    def take(self, run: CloudRun, draft: Draft, allowances: Sequence[float]) -> None:
        """Adds a draft's tokens to the guesses.

        A token that is drafted again takes the place of the old one, unless its position is final or the
        cloud has changed the guess there: then it is stale.

        Raises:
            ProtocolError: the draft leaves a gap.
        """
        first = len(run.tokens)
        if draft.start > first + len(self.guesses):
            raise ProtocolError(
                f"The draft starts at {draft.start} but drafts end at {first + len(self.guesses)}. Resume "
                "with the history."
            )
        for place, token, allowance in zip(
            range(draft.start - first, draft.start - first + len(draft.ids)),
            draft.ids,
            allowances,
            strict=True,
        ):
            if place == len(self.guesses):
                self.drafted.append(token)
                self.guesses.append(token)
                self.allowances.append(allowance)
            elif place < 0 or self.guesses[place] != self.drafted[place]:
                self.stale += 1
            else:
                self.drafted[place] = self.guesses[place] = token
                self.allowances[place] = allowance
        self.step, self.until = draft.step, draft.until

    def advance(self, run: CloudRun, blocks: Blocks) -> Generator[Pass | Scatter, Tensor, int]:
        """One sweep; extends the session by at least one token, if there is any guess.

        Args:
            run: the session.
            blocks: of which positions each pass is.

        Returns:
            How many passes it took: none where only tokens that are not checked were left.
        """
        self._settle_unchecked(run)
        if not self.guesses:
            return 0
        first, before = len(run.tokens), list(self.guesses)
        if self.budget is None:
            judge = within(self.allowances)
        else:
            judge = budgeted(
                self.budget, self.allowances.__getitem__, lambda place: first + place in self.audited
            )
        final, fresh = yield from blocks.sweep(run, before, judge)
        for place in range(final, len(fresh)):
            if fresh[place] != before[place]:
                self.changed = max(self.changed, first + place + 1)
        self.guesses[:] = fresh
        if self.budget is not None:
            # The device's own token counts, which a sweep may have repaired before this one.
            for place in range(final):
                if first + place in self.audited:
                    self.budget.audited(fresh[place] == self.drafted[place])
        self._settle(run, final)
        self._settle_unchecked(run)
        return 1

    def patch(self, run: CloudRun) -> Patch:
        """The tokens that became final since the last patch, and better guesses behind them.

        Guesses are left out while the device waits for more than this patch tells: it drafts nothing until
        then, and a later patch has better ones.
        """
        horizon = len(run.tokens)
        count = max(0, self.changed - horizon) if horizon >= self.until else 0
        decided = [DECIDERS.index(d) for d in run.decided[self.told :]]
        decided += [DECIDERS.index(self._decider(place)) for place in range(count)]
        ids = (*run.tokens[self.told :], *self.guesses[:count])
        start, self.told = self.told, horizon
        if count:
            self.changed = 0
        return Patch(self.step, start, ids, tuple(decided), horizon)

    def _settle_unchecked(self, run: CloudRun) -> None:
        """Unchecked tokens right behind the horizon are final without a pass."""
        if self.budget is None:
            bounds = (place for place, allowed in enumerate(self.allowances) if allowed != math.inf)
            self._settle(run, next(bounds, len(self.allowances)))
            return
        while self.guesses and len(run.tokens) in self.trusted and self.guesses[0] == self.drafted[0]:
            if not self.budget.trust(self.allowances[0]):
                break
            self._settle(run, 1, "device")

    def _settle(self, run: CloudRun, count: int, decider: Decider | None = None) -> None:
        run.tokens += self.guesses[:count]
        run.decided += [decider or self._decider(place) for place in range(count)]
        del self.guesses[:count], self.drafted[:count], self.allowances[:count]

    def _decider(self, place: int) -> Decider:
        if self.allowances[place] == math.inf:
            return "device"
        return "accepted" if self.guesses[place] == self.drafted[place] else "replaced"
