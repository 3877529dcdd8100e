"""Halves that strategies share: how the device asks and listens, how the cloud tells what it decided."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from ciar.decoding.strategy import (
    CloudHalf,
    CloudRun,
    Commit,
    DeviceHalf,
    DeviceRun,
    Proposal,
    Propose,
    Receive,
    Send,
)
from ciar.ledger import DECIDERS
from ciar.protocol.messages import Draft, Patch

#: Tokens between two patches, so that a preview can grow while the cloud goes on.
CHUNK = 16


def make_patch(run: CloudRun, draft: Draft, start: int) -> Patch:
    """The patch that tells the device all tokens from ``start`` on."""
    return Patch(
        step=draft.step,
        start=start,
        ids=tuple(run.tokens[start:]),
        decided=tuple(DECIDERS.index(d) for d in run.decided[start:]),
        horizon=len(run.tokens),
    )


def listen(run: DeviceRun) -> DeviceHalf:
    """Device half without a device model: asks for everything at once and takes the patches as they come."""
    if len(run.tokens) == run.total:  # resumed behind its last token
        return
    yield Send(Draft(run.next_step(), len(run.tokens), want=run.total - len(run.tokens)))
    first = True
    while len(run.tokens) < run.total:
        patch: Patch = yield Receive(critical=first)
        first = False
        run.apply(patch)
        yield Commit(len(run.tokens))


def stream(run: CloudRun, draft: Draft, advance: Callable[[], Generator[Any, Any, None]]) -> CloudHalf:
    """Cloud half without a device model: goes on to the end of what is wanted, with a patch now and then.

    Args:
        run: the session.
        draft: what was asked for.
        advance: one pass or so; extends the session by at least one token and never beyond the draft.
    """
    end = draft.start + draft.want
    told = len(run.tokens)
    while len(run.tokens) < end:
        yield from advance()
        if len(run.tokens) - told >= CHUNK or len(run.tokens) == end:
            yield make_patch(run, draft, told)
            told = len(run.tokens)


def propose(run: DeviceRun, count: int, *, ask_gate: bool = False) -> Generator[Any, Any, tuple[bool, ...]]:
    """Drafts the next ``count`` tokens, or as many as are left, and returns which are certain.

    Args:
        ask_gate: whether the gate is asked; without it nothing is certain.
    """
    certain: list[bool] = []
    for _ in range(min(count, run.total - len(run.tokens))):
        proposal: Proposal = yield Propose(run.tokens, scored=ask_gate)
        run.tokens.append(proposal.token)
        certain.append(ask_gate and run.gate.certain(proposal.score))
    return tuple(certain)


def ask(run: DeviceRun, start: int, certain: tuple[bool, ...]) -> Generator[Any, Any, Patch]:
    """Sends the drafted tokens from ``start`` on, and takes the answer."""
    yield Send(Draft(run.next_step(), start, tuple(run.tokens[start:]), certain))
    patch: Patch = yield Receive()
    run.apply(patch)
    yield Commit(len(run.tokens))
    return patch
