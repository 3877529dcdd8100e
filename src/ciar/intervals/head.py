"""The interval head: a hidden state to centre logits and radii (the paper's Inter-Head, DESIGN section 3).

Knows nothing of the trunk that made the hidden state, nor of how the intervals are used.
Source: CIAR, arXiv 2603.25463.
"""

from __future__ import annotations

from collections.abc import Callable
from math import expm1, log

import torch.nn.functional as F
from torch import Tensor, nn

from ciar.errors import InputError
from ciar.intervals.scores import DraftLaw


class IntervalHead(nn.Module):
    """``centre = W_c h``, ``radius = softplus(W_r h + b_r)``.

    W_r is full (``up.weight``) or of low rank (``up.weight @ down.weight``): a full one doubles the
    head's cost, and a radius has far less to say than a logit. ``up`` starts at zero and the bias where
    softplus is 1, so that an untrained head has radius 1 everywhere.

    Args:
        dim: width of the hidden state.
        vocab_size: tokens.
        rank: rank of W_r; None = full.

    Raises:
        InputError: a size is below 1.
    """

    def __init__(self, dim: int, vocab_size: int, rank: int | None = None) -> None:
        super().__init__()
        for name, size in (("dim", dim), ("vocab_size", vocab_size), ("rank", rank)):
            if size is not None and size < 1:
                raise InputError(f"{name} must be at least 1, not {size}.")
        self.centre = nn.Linear(dim, vocab_size, bias=False)
        #: How the centre's matrix is multiplied once it is frozen; None is as it is trained.
        self.product: Callable[[Tensor], Tensor] | None = None
        nn.init.normal_(self.centre.weight, std=0.02)
        self.down = nn.Identity() if rank is None else nn.Linear(dim, rank, bias=False)
        self.up = nn.Linear(dim if rank is None else rank, vocab_size)
        nn.init.zeros_(self.up.weight)
        nn.init.constant_(self.up.bias, log(expm1(1.0)))

    def forward(self, hidden: Tensor) -> DraftLaw:
        """The law of the next token.

        Args:
            hidden: [..., dim], in the weights' dtype.

        Returns:
            Centre logits and radii, float32 [..., vocab_size].
        """
        return DraftLaw(self.centre_logits(hidden), self.radii(hidden))

    def radii(self, hidden: Tensor) -> Tensor:
        """Radii alone: [..., dim] to float32 [..., vocab_size]."""
        raised: Tensor = self.up(self.down(hidden))
        return F.softplus(raised.float())

    def centre_logits(self, hidden: Tensor) -> Tensor:
        """Centre logits alone: [..., dim] to float32 [..., vocab_size]."""
        logits: Tensor = (self.product or self.centre)(hidden)
        return logits.float()

    def radius_at(self, hidden: Tensor, indices: Tensor) -> Tensor:
        """Radii of some tokens, at the price of these tokens alone.

        Args:
            hidden: [..., dim], in the weights' dtype.
            indices: int64 [..., K] token ids; leading axes as those of ``hidden``.

        Returns:
            float32 [..., K]; what :meth:`forward` gives there, up to the order of summation.
        """
        rows = F.embedding(indices, self.up.weight)  # [..., K, dim or rank]
        reduced: Tensor = self.down(hidden)
        raised = (rows @ reduced.unsqueeze(-1)).squeeze(-1) + self.up.bias[indices]
        return F.softplus(raised.float())
