"""Verification shared by both sides: the device tells how likely its tokens were, the cloud its law.

The cloud needs no copy of the device model: a draft says the log-probability of each of its tokens, which
is all that the acceptance test reads. Where a token falls, the patch carries the cloud's law of that
position, and the device, which knows its own law whole, draws from the residual. Source: DSSD, arXiv
2507.12000; PicoSpec, arXiv 2603.19133.
"""

from __future__ import annotations

import struct
from collections.abc import Generator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ciar.decoding.acceptance import ratio
from ciar.decoding.halves import make_patch
from ciar.decoding.sampling import choose, residual
from ciar.decoding.strategy import CloudHalf, CloudRun, Commit, DeviceRun, Proposal, Propose, Redraw, Send
from ciar.decoding.verify import laws_from
from ciar.errors import ProtocolError
from ciar.protocol.messages import Draft, LawRow, Patch


def pack_law(law: Tensor) -> LawRow:
    """A law, float32 [vocab] log-probabilities, as it travels: whole, so that the residual is exact."""
    inside = (law > -torch.inf).nonzero()[:, 0]
    values = law[inside].cpu().numpy().astype("<f4").tobytes()
    return LawRow(() if len(inside) == len(law) else tuple(inside.tolist()), values)


def unpack_law(row: LawRow, vocab_size: int) -> Tensor:
    """What :func:`pack_law` packed: float32 [vocab].

    Raises:
        ProtocolError: the row does not belong to so many codes.
    """
    values = torch.from_numpy(np.frombuffer(row.log_probs, dtype="<f4").astype(np.float32))
    ids = torch.tensor(row.ids or range(len(values)))
    if len(ids) != len(values) or not len(ids) or int(ids.max()) >= vocab_size:
        raise ProtocolError(f"The cloud's patch holds a law that is none of {vocab_size} codes.")
    if not row.ids and len(values) != vocab_size:
        raise ProtocolError(f"The cloud's patch holds a law of {len(values)} codes, not {vocab_size}.")
    law = torch.full((vocab_size,), -torch.inf)
    law[ids] = values
    return law


def redraw(row: LawRow, own: Tensor, noise: Tensor) -> int:
    """The token that takes a rejected one's place.

    Args:
        row: the cloud's law of the position.
        own: float32 [vocab], the law that the rejected token was drawn from.
        noise: float32 [vocab] Gumbel variates of the position's redraw.

    Raises:
        ProtocolError: the law does not fit.
    """
    law = unpack_law(row, len(own)).to(own.device)
    return int(choose(residual(law, own), noise))


def draft_told(run: DeviceRun, tokens: list[int], count: int) -> Generator[Any, Any, list[float]]:
    """Drafts the next ``count`` tokens, or as many as are left, behind ``tokens``, which it extends.

    Returns:
        The log-probability of each drafted token.
    """
    told: list[float] = []
    for _ in range(min(count, run.total - len(tokens))):
        proposal: Proposal = yield Propose(tokens, scored=False, chance=True)
        tokens.append(proposal.token)
        told.append(proposal.log_prob)
    return told


def send_told(run: DeviceRun, known: int, told: list[float]) -> Send:
    """The draft of all tokens from ``known`` on; those before the last ``told`` were drawn after a rejection.

    Args:
        known: tokens that the cloud knows.
        told: log-probabilities of the drafted ones, at the end.
    """
    ids = tuple(run.tokens[known:])
    own = len(ids) - len(told)
    chances = struct.pack(f"<{len(ids)}f", *[0.0] * own, *told)
    certain = (True,) * own + (False,) * len(told)
    return Send(Draft(run.next_step(), known, ids, certain, log_probs=chances))


def take_told(run: DeviceRun, patch: Patch) -> Generator[Any, Any, int]:
    """Applies a patch, and draws in a rejected token's place.

    Returns:
        How many tokens the cloud knows: all but the one that was drawn here.
    """
    run.apply(patch)
    known = len(run.tokens)
    if patch.law.log_probs:
        token: int = yield Redraw(run.tokens, patch.law)
        run.tokens.append(token)
        run.decided.append("replaced")
        run.discarded -= 1  # the rejected one was judged
    yield Commit(len(run.tokens))
    return known


def judge_told(run: CloudRun, draft: Draft, *, bonus: bool) -> CloudHalf:
    """Cloud half: judges a draft by what it tells of its tokens.

    Args:
        bonus: whether a token of the cloud's own follows a draft that stands whole.

    Raises:
        ProtocolError: the draft does not tell how likely its tokens were.
    """
    if len(draft.log_probs) != 4 * len(draft.ids):
        raise ProtocolError(
            f"Strategy {run.settings.strategy!r} needs the log-probability of each drafted token, and the "
            "draft has none. Run the same version on both sides."
        )
    drawn = draft.certain.index(False) if False in draft.certain else len(draft.ids)
    run.tokens += draft.ids[:drawn]
    run.decided += ["replaced"] * drawn
    guesses, told = draft.ids[drawn:], struct.unpack(f"<{len(draft.ids)}f", draft.log_probs)[drawn:]
    if not guesses:
        yield make_patch(run, draft, draft.start)
        return
    first, count = len(run.tokens), len(guesses)
    bonus = bonus and first + count < run.total
    run.tokens += guesses
    p = yield from laws_from(run, first, count + bonus)
    stand = 0
    while stand < count and run.noise.accept(first + stand) < ratio(
        float(p[stand, guesses[stand]]), told[stand]
    ):
        stand += 1
    del run.tokens[first + stand :]
    run.decided += ["accepted"] * stand
    run.fed = min(run.fed, first + stand)
    if stand == count and bonus:
        run.tokens.append(int(choose(p[count], run.noise.gumbel(first + count, 1)[0])))
        run.decided.append("prefix")
    patch = make_patch(run, draft, draft.start)
    yield patch if stand == count else replace(patch, law=pack_law(p[stand]))
