"""The first measurement of a cloud: a few tokens of the picture, in passes of two widths.

One token alone tells the round trip; three more, and a window behind them, tell what a pass and its rows
cost. They are verified without an allowance, so they are the first tokens of plain AR, and a plan that is
exact goes on from them: the probe costs little more than a connection.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ciar.errors import CloudUnavailable, ProtocolError
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

    A connection that is lost once the session is open is made anew, once.

    Args:
        transport: the way to the cloud, metered.
        opening: the picture; of options it may hold only those that every strategy takes.

    Raises:
        CloudUnavailable: nobody answers, or the connection was lost twice.
        CiarError: whatever the cloud reports.
    """
    ledger = Ledger()
    try:
        return Probed(_exchange(transport, opening, ledger), ledger)
    except CloudUnavailable:
        if not ledger.round_trips:  # nobody is there
            raise
        return Probed(_exchange(transport, opening, ledger), ledger)


def widths_of(tokens: int) -> list[int]:
    """Tokens of each draft of a probe: single ones and a window, and always something left to plan.

    Args:
        tokens: of a picture, at least 1.
    """
    singles = min(1 + NARROW, tokens - 1)
    # At most half of what is left.
    wide = min(WIDE, (tokens - singles) // 2) if singles > NARROW else 0
    return [1] * singles + [wide] * (wide > 0)


def _exchange(transport: Transport, opening: Open, ledger: Ledger) -> list[int]:
    """One attempt: the picture's first tokens; what it spends is added to the ledger as it goes."""
    settings = replace(opening.settings, strategy="lossless", injection=False)
    tokens: list[int] = []
    connection = transport.connect()
    try:
        connection.send(replace(opening, settings=settings, history=(), history_decided=()))
        opened = connection.receive()
        if not isinstance(opened, Opened):
            raise ProtocolError(f"The cloud answered Open with {type(opened).__name__}. Connect again.")
        _count(ledger, Cost(opened.passes, opened.token_rows, opened.cloud_ms))
        ledger.round_trips += 1
        ledger.critical_round_trips += 1
        widths = widths_of(opened.tokens)
        drafts: list[Draft] = []
        for step, width in enumerate(widths):
            drafts.append(Draft(step, sum(widths[:step]), (0,) * width, (False,) * width))
        # The first is answered before the others leave, and they leave together: two round trips.
        for sent in (drafts[:1], drafts[1:]):
            for draft in sent:
                connection.send(draft)
            for _ in sent:
                patch = connection.receive()
                if not isinstance(patch, Patch) or patch.start != len(tokens) or not patch.ids:
                    raise ProtocolError("The cloud's patch does not answer the draft. Connect again.")
                tokens += patch.ids
                _count(ledger, patch.cost)
                ledger.round_trips += 1
            ledger.critical_round_trips += bool(sent)
    finally:
        connection.close()
        ledger.bytes_up += connection.bytes_up
        ledger.bytes_down += connection.bytes_down
    return tokens


def _count(ledger: Ledger, cost: Cost) -> None:
    ledger.cloud_passes += cost.passes
    ledger.token_rows += cost.token_rows
    ledger.cloud_ms += cost.cloud_ms
