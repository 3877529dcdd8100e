"""The device's part of streaming: when a draft leaves, when it waits, what it makes of patches."""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Generator
from typing import Any

from ciar.decoding.options import OptionValues
from ciar.decoding.pacing import Pacer, Plan
from ciar.decoding.strategy import Commit, DeviceHalf, DeviceRun, Proposal, Propose, Receive, Send
from ciar.protocol.messages import Draft, Patch

#: Drafts that may be on their way at once, beside those that end a row: servers let 64 messages wait.
_IN_FLIGHT = 24


class Levels:
    """How sure the device is of a token among those of its picture so far, whatever its score's scale."""

    def __init__(self) -> None:
        self._seen: list[float] = []

    def level(self, score: float) -> int:
        """0 to 255: the share of the earlier tokens whose score was larger, so that were less certain."""
        larger = len(self._seen) - bisect_right(self._seen, score)
        level = 255 * larger // len(self._seen) if self._seen else 0
        insort(self._seen, score)
        return level


class Streaming:
    """The device's part of ``ciar-stream``, behind the prefix.

    Args:
        run: the picture; its tokens are final when this begins.
        values: the strategy's options.
    """

    def __init__(self, run: DeviceRun, values: OptionValues) -> None:
        self.run = run
        self.uncertain = values.whole("uncertain")
        policy = values.word("policy")
        self.trusts = policy in ("trust", "trust-budget")
        self.graded = policy in ("graded", "budget", "trust-budget")
        self.gated = self.trusts or self.uncertain > 0
        self.grid = math.isqrt(run.total)
        self.plan = Plan(values.whole("burst"), values.whole("lag"))
        self.pacer = Pacer(run.total, self.plan) if values.word("pace") == "auto" else None
        self.levels = Levels()
        self.first = len(run.tokens)
        self.certain: list[bool] = []  # from ``first`` on

    @property
    def span(self) -> int:
        """Tokens that were drafted and are not final."""
        return len(self.run.tokens) - len(self.run.decided)

    def go(self) -> DeviceHalf:
        """Drafts and sends to the end of the picture; patches are applied as they come."""
        run = self.run
        while len(run.decided) < run.total:
            draft = yield from self._draft()
            yield Send(draft)
            while len(run.decided) < draft.until:
                if not (yield from self._look()):
                    patch: Patch = yield Receive()
                    yield from self._take(patch)

    def _draft(self) -> Generator[Any, Any, Draft]:
        """Drafts until it is time to send."""
        run, start = self.run, len(self.run.tokens)
        levels = bytearray()
        least = math.ceil(self.plan.lag / _IN_FLIGHT)
        uncertain = 0
        while True:
            yield from self._look()
            proposal: Proposal = yield Propose(run.tokens, scored=self.gated or self.graded)
            run.tokens.append(proposal.token)
            sure = self.gated and run.gate.certain(proposal.score)
            uncertain += not sure
            self.certain.append(sure)
            if self.graded:
                levels.append(self.levels.level(proposal.score))
            end = len(run.tokens)
            enough = end - start >= max(self.plan.burst, least)
            doubtful = 0 < self.uncertain <= uncertain and end - start >= least
            # Who asks for the whole picture in a draft gets it, whatever its rows.
            row_ends = end % self.grid == 0 and self.plan.burst < run.total
            if enough or doubtful or self.span >= self.plan.lag or row_ends or end == run.total:
                break
        ids = tuple(run.tokens[start:])
        flags = tuple(self.certain[start - self.first :])
        return Draft(run.next_step(), start, ids, flags, levels=bytes(levels), until=self._until())

    def _until(self) -> int:
        """The horizon to wait for: room for a whole draft, or the end of the picture; 0 is no wait."""
        run, end = self.run, len(self.run.tokens)
        if end == run.total:
            return run.total
        if self.span < self.plan.lag:
            return 0
        return min(end, max(end - self.plan.lag, 0) + min(self.plan.burst, self.plan.lag))

    def _look(self) -> Generator[Any, Any, bool]:
        """Applies the patches that have come; whether there were any."""
        found = False
        while len(self.run.decided) < self.run.total:
            patch: Patch | None = yield Receive(critical=False, wait=False)
            if patch is None:
                break
            yield from self._take(patch)
            found = True
        return found

    def _take(self, patch: Patch) -> Generator[Any, Any, None]:
        run, known = self.run, len(self.run.decided)
        final = run.merge(patch)
        if not final:
            return
        for place in range(known, known + final):
            decider = run.decided[place]
            if not self.gated or (self.certain[place - self.first] and not self.trusts):
                continue
            if decider != "device":  # of certain tokens those that were audited, or that the budget left
                run.gate.answered(decider == "accepted")
        if self.pacer is not None:
            self.pacer.seen(final, patch.cost.passes)
            self.plan = self.pacer.plan(run.pace)
        yield Commit(len(run.decided))
