"""Toy pictures of four tokens of eight codes, whose every law is known: for tests of exactness.

A :class:`LawTable` gives the logits after every prefix, so the joint law of a picture can be written
out. A :class:`TableSession` answers a strategy's passes from such a table over a pretended cache: it
remembers which ids its cells hold, so a strategy that trusts a stale cell gets the wrong law, as it
would from a model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from drive import answer_draft
from scipy.stats import chisquare
from torch import Tensor

import ciar.decoding.exchange as exchange
from ciar.decoding.codebook import Codebook
from ciar.decoding.options import law_of
from ciar.decoding.sampling import SamplingLaw, choose, to_law
from ciar.decoding.strategy import (
    CloudRun,
    DeviceLaw,
    DeviceRun,
    Gate,
    GrowTree,
    KeepPath,
    Pass,
    Proposal,
    Propose,
    Receive,
    Redraw,
    Send,
    TakeFeatures,
    TellFeatures,
    TreeOp,
    TreePass,
    get_strategy,
)
from ciar.noise import ACCEPT_LANE, FRESH_LANE, RESIDUAL_LANE, gumbel_table, uniform
from ciar.protocol.messages import Draft, Patch, Settings

CODES, LENGTH = 8, 4
#: Codes on a circle: the neighbours of a code are those beside it.
CODEBOOK = Codebook(
    torch.tensor([[math.cos(i * math.tau / CODES), math.sin(i * math.tau / CODES)] for i in range(CODES)])
)
#: Row of the first prefix of each length.
_FIRST = [(CODES**n - 1) // (CODES - 1) for n in range(LENGTH + 1)]


def row_of(prefix: Sequence[int]) -> int:
    """Row of a prefix in a table of all prefixes, by length and then in counting order."""
    row = 0
    for token in prefix:
        row = row * CODES + token
    return _FIRST[len(prefix)] + row


@dataclass(frozen=True)
class LawTable:
    """Logits after every prefix shorter than a picture: float32 [585, 8]."""

    logits: Tensor

    @classmethod
    def random(cls, seed: int, scale: float = 1.5) -> LawTable:
        generator = torch.Generator().manual_seed(seed)
        return cls(scale * torch.randn(_FIRST[LENGTH], CODES, generator=generator))

    def near(self, seed: int, scale: float = 0.8) -> LawTable:
        """A table that resembles this one: a device that is often right."""
        return LawTable(self.logits + LawTable.random(seed, scale).logits)

    def conditionals(self, law: SamplingLaw) -> np.ndarray:
        """Processed laws, float64 [585, 8]: the definition, written without the code under test."""
        z = self.logits.double().numpy()
        if law.temperature == 0:
            return np.eye(CODES)[z.argmax(1)]
        if law.entropy_heat:
            raw = np.exp(z) / np.exp(z).sum(1, keepdims=True)
            entropy = -(raw * np.log(raw)).sum(1, keepdims=True)
            z = z / (law.entropy_heat * np.exp(-entropy / law.entropy_scale) + law.entropy_floor)
        z = z / law.temperature
        keep = np.ones_like(z, dtype=bool)
        if law.top_k:
            keep &= z >= np.sort(z, axis=1)[:, [-law.top_k]]
        p = np.exp(z - z.max(1, keepdims=True)) * keep
        p /= p.sum(1, keepdims=True)
        for row in p:
            mass = 0.0
            for token in np.argsort(-row):
                if mass > law.top_p:
                    row[token] = 0.0
                mass += row[token]
        return p / p.sum(1, keepdims=True)

    def joint(self, law: SamplingLaw) -> np.ndarray:
        """Exact law of a whole picture, float64 [8, 8, 8, 8]."""
        p = self.conditionals(law)
        out = np.ones(1)
        for n in range(LENGTH):
            out = (out[:, None] * p[_FIRST[n] : _FIRST[n + 1]]).reshape(-1)
        return out.reshape((CODES,) * LENGTH)


class NoiseBank:
    """The product's own noise for many pictures at once; picture i has the positions from 4 i on."""

    def __init__(self, pictures: int, seed: int = 0) -> None:
        where = range(pictures * LENGTH)
        self.gumbels = torch.from_numpy(gumbel_table(seed, 0, where, CODES))
        self.accepts = uniform(seed, 0, np.arange(pictures * LENGTH), 0, ACCEPT_LANE)
        self.residuals = torch.from_numpy(gumbel_table(seed, 0, where, CODES, RESIDUAL_LANE))
        self.fresh = torch.from_numpy(
            uniform(seed, 0, np.arange(pictures * LENGTH)[:, None], np.arange(LENGTH + 1), FRESH_LANE)
        )


class BankNoise:
    """Noise of one picture, read from a bank."""

    def __init__(self, bank: NoiseBank, picture: int) -> None:
        self.bank, self.base = bank, picture * LENGTH

    def gumbel(self, start: int, count: int) -> Tensor:
        return self.bank.gumbels[self.base + start : self.base + start + count]

    def accept(self, position: int) -> float:
        return float(self.bank.accepts[self.base + position])

    def residual(self, position: int) -> Tensor:
        return self.bank.residuals[self.base + position]

    def fresh(self, start: int, count: int, draw: int) -> Tensor:
        return self.bank.fresh[self.base + start : self.base + start + count, draw]


class TableSession:
    """The cloud's side of one picture, with a table in place of a model."""

    def __init__(self, table: LawTable, run: CloudRun, device_laws: Tensor | None = None) -> None:
        self.table, self.run, self.device_laws = table, run, device_laws
        self.cells: list[int] = []
        self.passes: list[Pass] = []
        self.told: list[tuple[str, int]] = []  # what the device's drafter knows: format and features

    def answer(self, draft: Draft) -> list[Patch]:
        strategy = get_strategy(self.run.settings.strategy)
        return answer_draft(strategy, self.run, draft, self.run_pass, self.device_law, CODEBOOK, self.tree_op)

    def run_pass(self, request: Pass) -> Tensor:
        if not request.ids:
            return self.table.logits[:1]
        assert request.start <= len(self.cells), "a pass leaves a gap of cells"
        self.passes.append(request)
        # What lies behind the fed block is stale, and no later pass reads it before it is fed again.
        self.cells[request.start :] = request.ids
        ends = range(request.start + 1, len(self.cells) + 1)
        return self.table.logits[[row_of(self.cells[:end]) for end in ends]]

    def device_law(self, request: DeviceLaw) -> Tensor:
        assert self.device_laws is not None
        ends = range(request.position, request.position + request.count)
        return self.device_laws[[row_of(self.run.tokens[:end]) for end in ends]]

    def tree_op(self, op: TreeOp) -> Tensor | tuple[int, bytes] | None:
        if isinstance(op, TellFeatures):
            # One feature for the text, and one for each cell; two go into a frame.
            count = min(2, 1 + len(self.cells) - op.first)
            return count, bytes(range(op.first, op.first + count))
        if isinstance(op, GrowTree):
            return self.grow(op, self.run.tokens)
        if isinstance(op, TreePass):
            return self.tree_pass(op)
        assert op.known == len(self.cells)
        self.keep_path(op)
        return None

    def grow(self, op: GrowTree, known: list[int]) -> Tensor:
        """Laws of a drafter that is a table, too."""
        assert self.device_laws is not None
        if not op.ids:
            self.drafted: list[list[int]] = []
        for token, parent in zip(op.ids, op.parents, strict=True):
            self.drafted.append([*(self.drafted[parent] if parent >= 0 else []), token])
        paths = self.drafted[len(self.drafted) - len(op.ids) :] or [[]]
        return self.device_laws[[row_of([*known, *path]) for path in paths]]

    def tree_pass(self, op: TreePass) -> Tensor:
        """Laws by what a node's ancestors are; the tree's cells lie behind the known tokens'."""
        assert op.start == len(self.cells)
        assert op.ids, "the last known token is fed"
        self.passes.append(Pass(op.start, op.ids))
        self.cells += op.ids
        self.tree = op.nodes
        paths: list[list[int]] = []
        for token, parent in zip(op.nodes, op.parents, strict=True):
            paths.append([*(paths[parent] if parent >= 0 else []), token])
        rows = [row_of([*self.cells, *path]) for path in [[], *paths]]
        # Nothing comes after a whole picture.
        return torch.stack(
            [self.table.logits[row] if row < _FIRST[LENGTH] else torch.zeros(CODES) for row in rows]
        )

    def keep_path(self, op: KeepPath) -> None:
        self.cells += [self.tree[node] for node in op.nodes]


class NeverCertain:
    """A gate that uploads every token."""

    def certain(self, score: float) -> bool:
        return False

    def answered(self, accepted: bool) -> None:
        """Changes nothing."""


#: Given the tokens so far and the picture's noise, the next proposal.
Drafter = Callable[[list[int], BankNoise], int]


def drawing_from(laws: Tensor) -> Drafter:
    """A drafter that draws from processed laws [585, 8] under the picture's noise, as the device does."""
    return lambda tokens, noise: int(choose(laws[row_of(tokens)], noise.gumbel(len(tokens), 1)[0]))


def make_picture(
    table: LawTable,
    settings: Settings,
    noise: BankNoise,
    drafter: Drafter,
    *,
    gate_type: Callable[[], Gate] = NeverCertain,
    device_laws: Tensor | None = None,
    session_type: type[TableSession] = TableSession,
) -> tuple[DeviceRun, TableSession]:
    """Runs both halves of a strategy to the end of one picture."""
    law = law_of(settings)
    device = DeviceRun(settings, LENGTH, gate_type(), noise=noise)
    session = session_type(table, CloudRun(settings, law, LENGTH, CODES, noise), device_laws)
    patches: list[Patch] = []
    half = get_strategy(settings.strategy).device(device)
    reply: object = None
    while True:
        try:
            op = half.send(reply)
        except StopIteration:
            return device, session
        reply = None
        if isinstance(op, Propose):
            token = drafter(op.tokens, noise)
            told = math.nan if device_laws is None else float(device_laws[row_of(op.tokens), token])
            reply = Proposal(token, score=0.5, log_prob=told)
        elif isinstance(op, Redraw):
            assert device_laws is not None
            own = device_laws[row_of(op.tokens)]
            reply = exchange.redraw(op.law, own, noise.residual(len(op.tokens)))
        elif isinstance(op, TakeFeatures):
            assert list(op.data) == list(range(len(session.told), len(session.told) + len(op.data)))
            session.told += [(op.kind, number) for number in op.data]
        elif isinstance(op, GrowTree):
            # The drafter reads the features of the text and of every known token but the last.
            assert len(session.told) == len(device.tokens)
            reply = session.grow(op, device.tokens)
        elif isinstance(op, Send):
            assert isinstance(op.message, Draft)
            patches += session.answer(op.message)
        elif isinstance(op, Receive) and (op.wait or patches):
            reply = patches.pop(0)


def laws_of(table: LawTable, law: SamplingLaw) -> Tensor:
    """Processed laws of every prefix by the code under test, float32 [585, 8]."""
    return to_law(table.logits, law)


def law_p_value(pictures: np.ndarray, joint: np.ndarray) -> float:
    """How well pictures [n, 4] fit an exact joint law: a Bonferroni-corrected chi-square p-value.

    Tests the joint law of all four tokens, with cells under five expected counts put together, and
    the law of each pair of neighbours, where a small fault shows with fewer pictures. A picture that
    the law makes impossible gives 0.
    """
    n = len(pictures)
    index = tuple(pictures.T)
    if (joint[index] == 0).any():
        return 0.0
    counts = np.zeros_like(joint)
    np.add.at(counts, index, 1)
    views = [(counts.reshape(-1), joint.reshape(-1))]
    for first in range(LENGTH - 1):
        others = tuple(axis for axis in range(LENGTH) if axis not in (first, first + 1))
        views.append((counts.sum(others).reshape(-1), joint.sum(others).reshape(-1)))
    return min(1.0, len(views) * min(merged_p(count, n * p) for count, p in views))


def merged_p(observed: np.ndarray, expected: np.ndarray) -> float:
    order = np.argsort(-expected)
    observed, expected = observed[order], expected[order]
    # Walk up from the rarest cells, closing a group whenever it expects five.
    seen, due, rows = 0.0, 0.0, []
    for o, e in zip(observed[::-1], expected[::-1], strict=True):
        seen, due = seen + o, due + e
        if due >= 5:
            rows.append((seen, due))
            seen, due = 0.0, 0.0
    if due > 0:
        rows[-1] = (rows[-1][0] + seen, rows[-1][1] + due)
    if len(rows) < 2:
        return 1.0
    seen_counts, due_counts = np.array(rows).T
    return float(chisquare(seen_counts, due_counts * seen_counts.sum() / due_counts.sum()).pvalue)
