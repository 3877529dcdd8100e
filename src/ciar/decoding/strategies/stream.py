"""``ciar-stream``: the device drafts without waiting, the cloud repairs what has arrived.

Drafts leave while earlier ones are on their way. The cloud takes all that have come, verifies them in
one pass, puts its own token where one exceeds its allowance, keeps the later ones as guesses and sweeps
again; its patches say what is final and what it guesses behind that. The device lays them over its
tokens and goes on. Only a cap on the unverified span ever makes it wait. Source: DESIGN section 2;
drafter-invariant speculative decoding, arXiv 2408.07978; coupled Jacobi, arXiv 2510.24211.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Generator
from typing import Any

from ciar.decoding.halves import make_patch
from ciar.decoding.jacobi import Coupled
from ciar.decoding.options import Option, OptionValues
from ciar.decoding.pacing import Pacer, Plan
from ciar.decoding.pending import Pending
from ciar.decoding.strategy import (
    CloudHalf,
    CloudRun,
    Commit,
    DeviceHalf,
    DeviceRun,
    Drain,
    Proposal,
    Propose,
    Receive,
    Send,
    Strategy,
    register,
)
from ciar.decoding.verify import sample_own
from ciar.protocol.messages import Draft, Patch

#: Drafts that may be on their way at once, beside those that end a row: servers let 64 messages wait.
_IN_FLIGHT = 24


@register
class Stream(Strategy):
    name = "ciar-stream"
    summary = "the device drafts without waiting, the cloud repairs what has arrived and answers with patches"
    source = "streamed windows with repair; arXiv 2603.25463, 2408.07978, 2510.24211"
    drift = (
        "none with exact; at most 1 - exp(-allowance) with slack and graded; TV(p, q) at a certain token "
        "with trust"
    )
    streams = True
    options = (
        Option(
            "policy",
            "exact",
            "what a draft is allowed: nothing, the allowance, anything where certain, or by its score",
            choices=("exact", "slack", "trust", "graded"),
        ),
        Option("allowance", 2.0, "slack that slack allows, and graded the surest token, in nats", high=1e6),
        Option("burst", 8, "tokens with which a draft leaves", low=1, high=1024),
        Option("uncertain", 0, "uncertain tokens with which a draft leaves; 0 is any number", high=1024),
        Option("lag", 64, "most tokens that were drafted and are not final", low=1, high=65536),
        Option("sweeps", 2, "sweeps between two patches", low=1, high=1024),
        Option(
            "prefix",
            "sweeps",
            "how the cloud makes the prefix: sweeps over guesses, or a pass a token; the tokens are the same",
            choices=("sweeps", "passes"),
        ),
        Option(
            "pace",
            "fixed",
            "auto sets burst and lag from the times and the agreement that are measured",
            choices=("fixed", "auto"),
        ),
    )

    def device(self, run: DeviceRun) -> DeviceHalf:
        values = self.values(run.settings)
        prefix = math.floor(run.settings.prefix_rate * run.total)
        if len(run.tokens) < prefix:
            yield Send(Draft(run.next_step(), len(run.tokens), want=prefix - len(run.tokens)))
            run.merge((yield Receive()))
            yield Commit(len(run.tokens))
        yield from _Streaming(run, values).go()

    def cloud(self, run: CloudRun, draft: Draft) -> CloudHalf:
        values = self.values(run.settings)
        if draft.want:
            yield from self._prefix(run, draft, values.word("prefix"))
            return
        if run.kept is None:
            run.kept = Pending(len(run.tokens))
        pending: Pending = run.kept
        pending.take(run, draft, allowances(draft, values))
        worth = min(values.whole("burst"), run.settings.window)
        swept, going = 0, True
        while going:
            newer: list[Draft] = yield Drain()
            for one in newer:
                pending.take(run, one, allowances(one, values))
            swept += yield from pending.advance(run, run.settings.window)
            waited_for = len(run.tokens) < pending.until
            # While the device goes on, a few guesses are better verified together with what comes next.
            going = bool(pending.guesses) and (waited_for or len(pending.guesses) >= worth)
            met = pending.told < pending.until <= len(run.tokens)
            if (met or not going or swept >= values.whole("sweeps")) and len(run.tokens) > pending.told:
                swept = 0
                yield pending.patch(run)

    def _prefix(self, run: CloudRun, draft: Draft, how: str) -> CloudHalf:
        if how == "passes":
            yield from sample_own(run, draft.want)
        else:
            window = Coupled(draft.start + draft.want, run.settings.window, 0.0, "left")
            while len(run.tokens) < window.end:
                yield from window.advance(run)
        yield make_patch(run, draft, draft.start)


def allowances(draft: Draft, values: OptionValues) -> list[float]:
    """Slack allowed at each token of a draft; infinite is not checked at all."""
    most = values.real("allowance")
    match values.word("policy"):
        case "exact":
            return [0.0] * len(draft.ids)
        case "slack":
            return [most] * len(draft.ids)
        case "trust":
            return [math.inf if sure else 0.0 for sure in draft.certain]
        case _:
            # A device that tells no levels is sure of nothing.
            return [most * level / 255 for level in draft.levels or bytes(len(draft.ids))]


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


class _Streaming:
    """The device's part behind the prefix.

    Args:
        run: the picture; its tokens are final when this begins.
        values: the strategy's options.
    """

    def __init__(self, run: DeviceRun, values: OptionValues) -> None:
        self.run = run
        self.uncertain = values.whole("uncertain")
        self.graded = values.word("policy") == "graded"
        self.gated = values.word("policy") == "trust" or self.uncertain > 0
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
            if enough or doubtful or self.span >= self.plan.lag or end % self.grid == 0 or end == run.total:
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
            if self.gated and not self.certain[place - self.first]:
                run.gate.answered(run.decided[place] == "accepted")
        if self.pacer is not None:
            self.pacer.seen(final, patch.cost.passes)
            self.plan = self.pacer.plan(run.pace)
        yield Commit(len(run.decided))
