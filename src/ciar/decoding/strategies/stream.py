"""``ciar-stream``: the device drafts without waiting, the cloud repairs what has arrived.

Drafts leave while earlier ones are on their way. The cloud takes all that have come, verifies them in
one pass, puts its own token where one exceeds its allowance, keeps the later ones as guesses and sweeps
again; its patches say what is final and what it guesses behind that. The device lays them over its
tokens and goes on. Only a cap on the unverified span ever makes it wait. Source: DESIGN section 2;
drafter-invariant speculative decoding, arXiv 2408.07978; coupled Jacobi, arXiv 2510.24211.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from ciar.decoding.blocks import HEIGHT, INDENT, Blocks, Shape
from ciar.decoding.budget import Budget, budgeted, within
from ciar.decoding.halves import listen, make_patch, stream
from ciar.decoding.jacobi import GUESS, Coupled
from ciar.decoding.options import Option, OptionValues
from ciar.decoding.pending import Pending
from ciar.decoding.strategies.slack import BUDGET
from ciar.decoding.strategy import (
    CloudHalf,
    CloudRun,
    Commit,
    DeviceHalf,
    DeviceRun,
    Drain,
    Receive,
    Send,
    Strategy,
    register,
)
from ciar.decoding.streaming import Streaming
from ciar.decoding.verify import sample_own
from ciar.protocol.messages import Draft


@register
class Stream(Strategy):
    name = "ciar-stream"
    summary = "the device drafts without waiting, the cloud repairs what has arrived and answers with patches"
    source = "streamed windows with repair; arXiv 2603.25463, 2408.07978, 2510.24211"
    drift = (
        "none with exact; at most 1 - exp(-allowance) with slack, graded and budget, and with budget at most "
        "budget on average over a picture; TV(p, q) at a certain token with trust and trust-budget"
    )
    streams = True
    options = (
        Option(
            "policy",
            "exact",
            "what a draft is allowed: nothing, the allowance, anything where certain, by its score, or what "
            "is left of a budget",
            choices=("exact", "slack", "trust", "graded", "budget", "trust-budget"),
        ),
        Option(
            "allowance",
            2.0,
            "slack in nats: what slack allows, graded the surest token, and the budget at most",
            high=1e6,
        ),
        BUDGET,
        Option("audit", 0.02, "share of the certain tokens that are checked all the same", high=1),
        Option(
            "risk",
            0.5,
            "how often a certain token is not the cloud's choice, before audits tell; trust-budget spends it",
            low=0.01,
            high=1,
        ),
        Option(
            "fill",
            "device",
            "who guesses: the device, or nobody, as guess of scd",
            choices=("device", *GUESS.choices),
        ),
        HEIGHT,
        INDENT,
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
        if values.word("fill") != "device":
            yield from listen(run)
            return
        prefix = math.floor(run.settings.prefix_rate * run.total)
        if len(run.tokens) < prefix:
            yield Send(Draft(run.next_step(), len(run.tokens), want=prefix - len(run.tokens)))
            run.merge((yield Receive()))
            yield Commit(len(run.tokens))
        yield from Streaming(run, values).go()

    def cloud(self, run: CloudRun, draft: Draft) -> CloudHalf:
        values = self.values(run.settings)
        if values.word("fill") != "device":
            yield from self._alone(run, draft, values)
            return
        if draft.want:
            yield from self._prefix(run, draft.want, values.word("prefix"))
            yield make_patch(run, draft, draft.start)
            return
        if run.kept is None:
            pending = Pending(len(run.tokens), budget=budget_of(run, values))
            run.kept = pending, Blocks(run, shape_of(run, values))
        pending, blocks = run.kept
        self._take(run, pending, draft, values)
        worth = min(values.whole("burst"), run.settings.window)
        swept, going = 0, True
        while going:
            newer: list[Draft] = yield Drain()
            for one in newer:
                self._take(run, pending, one, values)
            swept += yield from pending.advance(run, blocks)
            waited_for = len(run.tokens) < pending.until
            # While the device goes on, a few guesses are better verified together with what comes next.
            going = bool(pending.guesses) and (waited_for or len(pending.guesses) >= worth)
            met = pending.told < pending.until <= len(run.tokens)
            if (met or not going or swept >= values.whole("sweeps")) and len(run.tokens) > pending.told:
                swept = 0
                yield pending.patch(run)

    def _take(self, run: CloudRun, pending: Pending, draft: Draft, values: OptionValues) -> None:
        """Puts a draft among the guesses, each with what it is allowed; draws which are audited."""
        sure = [draft.start + place for place, flag in enumerate(draft.certain) if flag]
        audited = {position for position in sure if run.noise.accept(position) < values.real("audit")}
        pending.take(run, draft, allowances(draft, values, audited))
        if values.word("policy") == "trust-budget":
            pending.audited |= audited
            pending.trusted |= set(sure) - audited

    def _prefix(self, run: CloudRun, count: int, how: str) -> CloudHalf:
        if how == "passes":
            yield from sample_own(run, count)
            return
        end = len(run.tokens) + count
        window = Coupled(run, end, Shape(run.settings.window), within([0.0] * run.total), "left")
        while len(run.tokens) < end:
            yield from window.advance(run)

    def _alone(self, run: CloudRun, draft: Draft, values: OptionValues) -> CloudHalf:
        """The row without a drafter: the same windows, filled by nobody."""
        prefix = math.floor(run.settings.prefix_rate * run.total)
        if len(run.tokens) < prefix:
            yield from self._prefix(run, prefix - len(run.tokens), values.word("prefix"))
            yield make_patch(run, draft, draft.start)
        run.kept = budget_of(run, values)
        policy, judge = values.word("policy"), within([0.0] * run.total)
        if policy == "slack":
            judge = within([values.real("allowance")] * run.total)
        elif run.kept is not None:
            judge = budgeted(run.kept)
        window = Coupled(run, run.total, shape_of(run, values), judge, values.word("fill"))
        yield from stream(run, draft, lambda: window.advance(run))


def budget_of(run: CloudRun, values: OptionValues) -> Budget | None:
    """A fresh budget for the tokens that are not known yet, where the policy spends one."""
    if "budget" not in values.word("policy"):
        return None
    rest = run.total - len(run.tokens)
    return Budget(values.real("budget"), rest, values.real("allowance"), values.real("risk"))


def shape_of(run: CloudRun, values: OptionValues) -> Shape:
    """The shape of a pass's window."""
    return Shape(run.settings.window, values.whole("height"), values.whole("indent"))


def allowances(draft: Draft, values: OptionValues, audited: Collection[int] = ()) -> list[float]:
    """What each token of a draft is allowed.

    Args:
        draft: the draft.
        values: the strategy's options.
        audited: positions of certain tokens that are checked all the same.

    Returns:
        Slack for each, infinite being not checked at all; under a budget the share of its allowance.
    """
    most = values.real("allowance")
    # A device that tells no levels is sure of nothing.
    levels = draft.levels or bytes(len(draft.ids))
    match values.word("policy"):
        case "exact":
            return [0.0] * len(draft.ids)
        case "slack":
            return [most] * len(draft.ids)
        case "trust":
            flags = enumerate(draft.certain, draft.start)
            return [math.inf if sure and position not in audited else 0.0 for position, sure in flags]
        case "graded":
            return [most * level / 255 for level in levels]
        case _:
            return [level / 255 for level in levels]
