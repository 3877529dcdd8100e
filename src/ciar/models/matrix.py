"""A frozen matrix as a few rows are multiplied by it.

With one to some dozens of rows a product takes as long as its matrix takes to be read. Weights that
ship in float16 are therefore kept in float16 where a processor can multiply them so: half the bytes,
the same numbers, sums in float32. Elsewhere the matrix lies inputs first, which is the faster order at
few rows; ``W @ x.T`` is faster from eight rows on and slower at two.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Matrix:
    """``x -> x @ weight.T`` for a weight that no longer changes.

    Args:
        weight: [outputs, inputs]; copied.
    """

    def __init__(self, weight: Tensor) -> None:
        self.outputs, self.inputs = weight.shape
        self._packed = _packed(weight)
        self._weight = weight.T.contiguous() if self._packed is None else weight.new_empty(0)

    @property
    def packed(self) -> bool:
        """Whether it lies in float16 and is multiplied in float32."""
        return self._packed is not None

    def in_memory(self) -> Tensor:
        """What a product reads of memory: the weight as it lies there; of a packed one, a tensor as large."""
        if self._packed is None:
            return self._weight
        return torch.ones(self.outputs, self.inputs, dtype=torch.float16)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., inputs] to [..., outputs], in the dtype of the weight."""
        if self._packed is None:
            return x @ self._weight
        flat: Tensor = torch.ops.quantized.linear_dynamic_fp16(x.reshape(-1, self.inputs), self._packed)
        return flat.view(*x.shape[:-1], self.outputs)

    def added(self, base: Tensor, x: Tensor) -> Tensor:
        """``base + self(x)``; base [rows, outputs], x [rows, inputs]."""
        return torch.addmm(base, x, self._weight) if self._packed is None else self(x).add_(base)


def _packed(weight: Tensor) -> Any:
    """The weight as fbgemm takes it; None where that would change a number or is not to be had."""
    if weight.dtype != torch.float32 or weight.device.type != "cpu":
        return None
    half = weight.half()
    if not torch.equal(half.float(), weight):
        return None
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        return None
    try:
        return torch.ops.quantized.linear_prepack_fp16(weight.contiguous(), None)
    except (AttributeError, RuntimeError):  # a torch without these operations
        return None
