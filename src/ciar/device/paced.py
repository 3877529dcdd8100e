"""A device whose steps take as long as another model's; see :mod:`ciar.cloud.paced`."""

from __future__ import annotations

import time

from ciar.decoding.strategy import Proposal
from ciar.device.session import DeviceSession, Proposer


class PacedProposer(Proposer):
    """A proposer whose proposals take at least so long.

    Args:
        proposer: what proposes; its models are shared.
        step_ms: how long a proposal lasts, in milliseconds.

    Attributes:
        proposals: how many were made.
    """

    def __init__(self, proposer: Proposer, step_ms: float) -> None:
        vars(self).update(vars(proposer))
        self.step_ms, self.proposals = step_ms, 0

    def propose(self, tokens: list[int], scored: bool = True, chance: bool = False) -> Proposal:
        began = time.perf_counter()
        found = super().propose(tokens, scored, chance)
        self.proposals += 1
        _sleep_until(began + self.step_ms / 1e3)
        return found


def pace(session: DeviceSession, step_ms: float) -> DeviceSession:
    """Gives a session's device a tempo; returns the same session, one without a device model unchanged."""
    if session.proposer is not None:
        session.proposer = PacedProposer(session.proposer, step_ms)
    return session


def _sleep_until(moment_s: float) -> None:
    left_s = moment_s - time.perf_counter()
    if left_s > 0:
        time.sleep(left_s)
