"""The learned gate: a small head that predicts how far the device's law is from the cloud's.

Reads the device's hidden state and a summary of its law (other scores, mostly) and gives the expected
total variation, 0 to 1. Knows neither where the summary comes from nor how it is trained.
Source: acceptance heads such as SpecDec++'s (arXiv 2405.19715), with total variation as the target.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class LearnedGate(nn.Module):
    """``sigmoid(W_2 silu(W_1 [h, s] + b_1) + b_2)`` on standardised inputs.

    Args:
        dim: width of the hidden state.
        summary: numbers in the summary of the law.
        hidden: width of the layer between.
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, dim: int, summary: int, hidden: int = 32) -> None:
        super().__init__()
        inputs = dim + summary
        self.register_buffer("mean", torch.zeros(inputs))
        self.register_buffer("scale", torch.ones(inputs))
        self.first = nn.Linear(inputs, hidden)
        self.last = nn.Linear(hidden, 1)

    def standardise(self, inputs: Tensor) -> None:
        """Takes mean and deviation of the inputs [rows, dim + summary] from training positions."""
        self.mean.copy_(inputs.mean(0))
        self.scale.copy_(inputs.std(0, correction=0).clamp_min(1e-6))

    def logits(self, inputs: Tensor) -> Tensor:
        """[..., dim + summary] to the logit of the expected total variation, float32 [...]."""
        x = (inputs.float() - self.mean) / self.scale
        out: Tensor = self.last(nn.functional.silu(self.first(x)))
        return out.squeeze(-1)

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., dim + summary] to the expected total variation, float32 [...]."""
        return self.logits(inputs).sigmoid()
