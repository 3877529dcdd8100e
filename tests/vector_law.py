"""The algorithms of chains and Jacobi windows over 200,000 toy pictures at once.

Written from the papers, position by position, with arrays in place of sessions; only the rules that
judge single tokens are the code under test. Where these have the exact law and the strategies give
their tokens, picture by picture under the same noise, the strategies have the exact law.
"""

from __future__ import annotations

import numpy as np
import torch
from table_cloud import _FIRST, CODES, LENGTH, LawTable, NoiseBank
from torch import Tensor

import ciar.decoding.acceptance as acceptance
from ciar.decoding.acceptance import Rule
from ciar.decoding.sampling import SamplingLaw, choose, draw, to_law


class RuleTable:
    """A rule's verdicts on every token after every prefix.

    Args:
        rule: the rule.
        p, q: laws of cloud and drafter, float32 [585, 8].
        depths: depths at which it differs.
    """

    def __init__(self, rule: Rule, p: Tensor, q: Tensor, depths: int = 1) -> None:
        self.p, self.q = p, q
        self.accept = torch.zeros(depths, len(p), CODES, dtype=torch.float64)
        self.redraw = torch.full((len(p), CODES, CODES), -torch.inf)
        for row in range(len(p)):
            for token in (q[row] > -torch.inf).nonzero()[:, 0].tolist():
                for depth in range(depths):
                    self.accept[depth, row, token] = rule.accept(p[row], q[row], token, depth)
                self.redraw[row, token] = rule.redraw(p[row], q[row], token)


def chain(
    bank: NoiseBank, table: RuleTable, window: int, count: int | None = None, confidence: float = 0.0
) -> np.ndarray:
    """Pictures by drafted chains of ``window`` tokens with a bonus: int64 [pictures, 4].

    A chain ends early behind a token that q gives less than ``confidence``.
    """
    gumbels = bank.gumbels.view(-1, LENGTH, CODES)[:count]
    residuals = bank.residuals.view(-1, LENGTH, CODES)[:count]
    accepts = torch.from_numpy(bank.accepts).view(-1, LENGTH)[:count]
    n = len(gumbels)
    prefix = torch.zeros(n, dtype=torch.long)
    depth = torch.zeros(n, dtype=torch.long)  # tokens of this chain that stand so far
    out = []
    for t in range(LENGTH):
        row = _FIRST[t] + prefix
        drafted = depth < window
        token = choose(table.q[row], gumbels[:, t])
        chance = table.accept[depth.clamp_max(len(table.accept) - 1), row, token]
        stands = accepts[:, t] < chance
        judged = torch.where(stands, token, choose(table.redraw[row, token], residuals[:, t]))
        token = torch.where(drafted, judged, choose(table.p[row], gumbels[:, t]))
        unsure = table.q[row].gather(1, token[:, None])[:, 0].exp() < confidence
        depth = torch.where(drafted & stands, torch.where(unsure, window, depth + 1), 0)
        prefix = prefix * CODES + token
        out.append(token)
    return torch.stack(out, dim=1).numpy()


def jacobi(
    bank: NoiseBank, p: Tensor, width: int, guess: str, count: int | None = None, coupled: bool = False
) -> np.ndarray:
    """Pictures by speculative Jacobi decoding: int64 [pictures, 4].

    With ``coupled``, drafts behind a rejected one are coupled to their new law as closely as can be.
    """
    residuals = bank.residuals.view(-1, LENGTH, CODES)[:count]
    accepts = torch.from_numpy(bank.accepts).view(-1, LENGTH)[:count]
    fresh = bank.fresh.view(-1, LENGTH, LENGTH + 1)[:count]
    n = len(residuals)
    tokens = torch.zeros(n, LENGTH, dtype=torch.long)
    source = torch.full((n, LENGTH), -2)  # row of the law that a token was drawn from; -1: guessed
    first = torch.zeros(n, dtype=torch.long)
    for k in range(1, LENGTH + 1):
        inside = torch.zeros(n, LENGTH, dtype=torch.bool)
        for t in range(LENGTH):
            inside[:, t] = (first <= t) & (t < first + width)
            new = inside[:, t] & (source[:, t] == -2)
            back = {"left": 1, "above": 2, "random": LENGTH}[guess]
            random = (fresh[:, t, 0] * CODES).long()
            tokens[new, t] = (tokens[:, t - back] if back <= t else random)[new]
            source[new, t] = -1
        prefix = torch.zeros(n, dtype=torch.long)
        rows = []
        for t in range(LENGTH):
            rows.append(_FIRST[t] + prefix)
            prefix = prefix * CODES + tokens[:, t]
        stood = torch.ones(n, dtype=torch.bool)
        for t in range(LENGTH):
            law, token = p[rows[t]], tokens[:, t]
            guessed = torch.full((n, CODES), -torch.inf).scatter(1, token[:, None], 0.0)
            old = torch.where((source[:, t] >= 0)[:, None], p[source[:, t]], guessed)
            ratio = (law - old).gather(1, token[:, None])[:, 0].double().exp()
            stands = accepts[:, t] < ratio
            judged = inside[:, t] & stood
            redrawn = judged & ~stands
            later = inside[:, t] & ~stood
            again = choose(acceptance.residual(law, old), residuals[:, t])
            tokens[redrawn, t] = again[redrawn]
            other = draw(law, fresh[:, t, k])
            if coupled:
                stays = ratio.clamp_max(1.0)
                left = ((fresh[:, t, k] - stays) / (1.0 - stays).clamp_min(1e-12)).clamp(0.0, 1.0 - 1e-12)
                moved = draw(acceptance.residual(law, old), left)
                other = torch.where(fresh[:, t, k] < stays, token, moved)
            tokens[later, t] = other[later]
            source[later, t] = rows[t][later]
            first += judged.long()
            stood &= ~redrawn
    assert (first == LENGTH).all()
    return tokens.numpy()


def static_tree(
    bank: NoiseBank, p: Tensor, q: Tensor, branch: int, depth: int, count: int | None = None
) -> np.ndarray:
    """Pictures by drawn trees, each judged in one round (EAGLE-1): int64 [pictures, 4].

    Siblings are drawn from q without replacement and judged in their order, each against what the
    rejection of those before it has left of p.
    """
    gumbels = bank.gumbels.view(-1, LENGTH, CODES)[:count]
    residuals = bank.residuals.view(-1, LENGTH, CODES)[:count]
    accepts = torch.from_numpy(bank.accepts).view(-1, LENGTH)[:count]
    fresh = bank.fresh.view(-1, LENGTH, LENGTH + 1)[:count]
    n = len(gumbels)
    prefix = choose(p[:1], gumbels[:, 0])
    out = [prefix]
    left = torch.full((n,), min(depth, LENGTH - 1))  # levels of the tree that are left
    shares = torch.full((n,), branch)
    for t in range(1, LENGTH):
        row = _FIRST[t] + prefix
        law, own = p[row], q[row]
        drafted = (own + gumbels[:, t]).argsort(dim=1, descending=True)
        found = torch.full((n,), -1)
        drafts = left > 0
        for i in range(branch):
            token = drafted[:, i]
            judged = drafts & (found < 0) & (i < shares)
            judged &= q[row].gather(1, token[:, None])[:, 0] > -torch.inf
            chance = (law - own).gather(1, token[:, None])[:, 0].double().exp()
            stands = (fresh[:, t, i] if i else accepts[:, t]) < chance
            found[judged & stands] = i
            falls = (judged & ~stands)[:, None]
            law = torch.where(falls, acceptance.residual(law, own), law)
            rest = own.scatter(1, token[:, None], -torch.inf).log_softmax(dim=1).nan_to_num(nan=-torch.inf)
            own = torch.where(falls, rest, own)
        stood = found >= 0
        noise = torch.where(drafts[:, None], residuals[:, t], gumbels[:, t])
        token = drafted.gather(1, found.clamp_min(0)[:, None])[:, 0]
        token = torch.where(stood, token, choose(law, noise))
        shares = torch.where(stood, shares // (found + 1).clamp_min(1), branch)
        left = torch.where(stood, left - 1, min(depth, LENGTH - 1 - t))
        prefix = prefix * CODES + token
        out.append(token)
    return torch.stack(out, dim=1).numpy()


def laws(table: LawTable, law: SamplingLaw) -> Tensor:
    """Processed laws of every prefix by the code under test, float32 [585, 8]."""
    return to_law(table.logits, law)


def first_token_law(pictures: np.ndarray) -> np.ndarray:
    """Frequencies of the first token, float64 [8]."""
    return np.bincount(pictures[:, 0], minlength=CODES) / len(pictures)
