"""The first measurement of a cloud: a few tokens of the picture, in passes of two widths.

One token alone tells the round trip; three more, and a window behind them, tell what a pass and its rows
cost. They are verified without an allowance, so they are the first tokens of plain AR, and a plan that is
exact goes on from them: the probe costs little more than a connection.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ciar.errors import ProtocolError
from ciar.ledger import Ledger
from ciar.protocol.messages import Cost, Draft, Open, Opened, Patch
from ciar.transport.base import Transport

#: Tokens that are asked for one by one, behind the first.
NARROW = 3
#: Guesses of the window behind them.
WIDE = 32


@dataclass(frozen=True)
class Probed:
    """What a probe left.

    Attributes:
        tokens: the picture's first tokens, plain AR's.
        ledger: what they cost; it has no deciders and counts no tokens.
    """

    tokens: list[int]
    ledger: Ledger


def probe(transport: Transport, opening: Open) -> Probed:
    """Makes the first tokens of a picture on a session of its own.

    Args:
        transport: the way to the cloud, metered.
        opening: the picture; of options it may hold only those that every strategy takes.

    Raises:
        CloudUnavailable: nobody answers.
        CiarError: whatever the cloud reports.
    """
    settings = replace(opening.settings, strategy="lossless", injection=False)
    ledger, tokens = Ledger(), list[int]()
    connection = transport.connect()
    try:
        connection.send(replace(opening, settings=settings, history=(), history_decided=()))
        opened = connection.receive()
        if not isinstance(opened, Opened):
            raise ProtocolError(f"The cloud answered Open with {type(opened).__name__}. Connect again.")
        _count(ledger, Cost(opened.passes, opened.token_rows, opened.cloud_ms))
        widths = [1] * (1 + NARROW)
        # At most half of what is left, so that there is something to plan.
        widths.append(max(1, min(WIDE, (opened.tokens - len(widths)) // 2)))
        drafts: list[Draft] = []
        for step, width in enumerate(widths):
            drafts.append(Draft(step, sum(widths[:step]), (0,) * width, (False,) * width))
        # The first is answered before the others leave, and they leave together: two round trips.
        for sent in (drafts[:1], drafts[1:]):
            for draft in sent:
                if draft.start + len(draft.ids) <= opened.tokens:
                    connection.send(draft)
            for draft in sent:
                if draft.start + len(draft.ids) <= opened.tokens:
                    patch = connection.receive()
                    if not isinstance(patch, Patch) or patch.start != len(tokens) or not patch.ids:
                        raise ProtocolError("The cloud's patch does not answer the draft. Connect again.")
                    tokens += patch.ids
                    _count(ledger, patch.cost)
    finally:
        connection.close()
    ledger.round_trips = 1 + len(widths)
    ledger.critical_round_trips = 3
    ledger.bytes_up, ledger.bytes_down = connection.bytes_up, connection.bytes_down
    return Probed(tokens, ledger)


def _count(ledger: Ledger, cost: Cost) -> None:
    ledger.cloud_passes += cost.passes
    ledger.token_rows += cost.token_rows
    ledger.cloud_ms += cost.cloud_ms
