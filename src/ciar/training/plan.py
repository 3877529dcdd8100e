"""The plan: what the text rows of a backbone must know before the first code is drawn.

After every caption stand *registers*, rows that say nothing (``StaticTextEncoder.registers``). In
training each of them must name, for every token of its own region, the kind of code that stands there,
half-way up the model; so the blocks above find the whole picture beside the caption. This costs a tenth
of a pass over the picture, because no picture is fed. Nothing of it remains in the model's files: the
registers are plain rows of caption features.

Registers as room to compute in: Darcet et al., arXiv 2309.16588.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ciar.errors import DataError
from ciar.models.gpt import RMSNorm


@dataclass(frozen=True)
class CodeClusters:
    """Codes that look alike, as one kind.

    Attributes:
        kind: int64 [vocab], the kind of each code.
        weights: float32 [kinds]; common kinds, white above all, are worth less.
    """

    kind: Tensor
    weights: Tensor

    @classmethod
    def of(cls, codebook: Tensor, codes: Tensor, kinds: int = 256, rounds: int = 20) -> CodeClusters:
        """K-means over the codebook, each code as heavy as the root of its use.

        Args:
            codebook: [codes, dim] unit rows.
            codes: int64, any shape, of the pictures that are learned.
        """
        vocab = len(codebook)
        kinds = min(kinds, vocab)
        rows = codebook.float()
        used = torch.bincount(codes.flatten(), minlength=vocab).float()
        heavy = used.sqrt() + 1e-3
        centres = rows[heavy.topk(kinds).indices]
        kind = torch.zeros(vocab, dtype=torch.int64)
        for _ in range(rounds):
            kind = (rows @ centres.T - 0.5 * centres.square().sum(-1)).argmax(-1)
            total = torch.zeros(kinds).index_add_(0, kind, heavy)
            sums = torch.zeros_like(centres).index_add_(0, kind, heavy[:, None] * rows)
            centres = torch.where(total[:, None] > 0, sums / total.clamp_min(1e-9)[:, None], centres)
        counts = torch.zeros(kinds).index_add_(0, kind, used)
        return cls(kind, counts.clamp_min(1.0).rsqrt())


class Plan(nn.Module):
    """Kinds of codes, read off the registers.

    Args:
        dim: width of the backbone.
        grid: tokens of the picture's edge.
        registers: a square number whose root divides ``grid``; register i has region i, row by row.
        clusters: the kinds.
        width: numbers that one token is said in.

    Raises:
        DataError: the registers do not tile the picture.
    """

    kind: Tensor
    weights: Tensor

    def __init__(self, dim: int, grid: int, registers: int, clusters: CodeClusters, width: int = 64) -> None:
        super().__init__()
        side = math.isqrt(registers)
        if side * side != registers or side == 0 or grid % side:
            raise DataError(
                f"{registers} registers of the text encoder do not tile a picture of {grid} x {grid} tokens. "
                "Train a text encoder with a square number of registers whose root divides the edge."
            )
        self.registers, self.side, self.cell = registers, side, grid // side
        self.norm = RMSNorm(dim, 1e-5)
        self.say = nn.Linear(dim, self.cell**2 * width)
        self.name = nn.Linear(width, len(clusters.weights))
        self.register_buffer("kind", clusters.kind, persistent=False)
        self.register_buffer("weights", clusters.weights, persistent=False)

    def forward(self, hidden: Tensor, codes: Tensor) -> Tensor:
        """Mean weighted cross-entropy of the kinds, nats a token.

        Args:
            hidden: [rows, registers, dim], the residual stream at the registers.
            codes: int64 [rows, tokens].
        """
        rows, side, cell = len(codes), self.side, self.cell
        said = self.say(self.norm(hidden)).unflatten(-1, (cell**2, -1))  # [rows, registers, cell^2, width]
        logits = self.name(F.silu(said)).float()  # [rows, registers, cell^2, kinds]
        square = self.kind[codes].view(rows, side, cell, side, cell)
        wanted = square.transpose(2, 3).reshape(rows, self.registers, cell**2)
        return F.cross_entropy(logits.flatten(0, 2), wanted.flatten(), weight=self.weights)
