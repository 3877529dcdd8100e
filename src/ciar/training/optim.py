"""Optimisers: Muon for the matrices inside the blocks, AdamW for everything else.

Muon replaces the gradient momentum of a matrix by its nearest orthogonal matrix; small transformers
need about two thirds of AdamW's samples. ``torch.optim.Muon`` orthogonalises in bfloat16, which is
slow on processors without bfloat16 units, and one matrix at a time; this one works in float32 on
stacks of equal shape.

Source: K. Jordan et al., Muon, https://kellerjordan.github.io/posts/muon; update scale of
arXiv 2502.16982, section 2.2.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

#: Coefficients of the quintic Newton-Schulz iteration.
_NS = (3.4445, -4.7750, 2.0315)


def orthogonalise(stack: Tensor, steps: int = 5) -> Tensor:
    """Nearest (semi-)orthogonal matrices, approximately. ``stack`` is [matrices, rows, columns]."""
    a, b, c = _NS
    transposed = stack.shape[-2] > stack.shape[-1]
    x = stack.transpose(-2, -1) if transposed else stack
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.transpose(-2, -1)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.transpose(-2, -1) if transposed else x


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum and AdamW-like update size (root mean square 0.2 times lr)."""

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(parameter)
                momentum = state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
                update = parameter.grad.lerp(momentum, group["momentum"])
                # A tall matrix (the fused wqkv, w1, w3) is orthogonalised square by square.
                parts = max(1, parameter.shape[0] // parameter.shape[1])
                if parameter.shape[0] % parameter.shape[1]:
                    parts = 1
                for target, piece in zip(parameter.chunk(parts), update.chunk(parts), strict=True):
                    by_shape[tuple(target.shape)].append((target, piece))
            for shape, pairs in by_shape.items():
                updates = orthogonalise(torch.stack([piece for _, piece in pairs]))
                scale = 0.2 * max(shape) ** 0.5
                for (target, _), update in zip(pairs, updates, strict=True):
                    target.mul_(1 - group["lr"] * group["weight_decay"])
                    target.sub_(update, alpha=group["lr"] * scale)


def make_optimizers(module: nn.Module, lr: float, weight_decay: float = 0.01) -> list[Any]:
    """Muon over the matrices in ``module.layers``, AdamW over the rest; of what is trained."""
    matrices: list[Tensor] = []
    rest: list[Tensor] = []
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        inside = ".layers." in f".{name}" and parameter.ndim == 2
        (matrices if inside else rest).append(parameter)
    optimizers: list[Any] = []
    if matrices:
        optimizers.append(Muon(matrices, lr=lr, weight_decay=weight_decay))
    if rest:
        optimizers.append(torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=weight_decay))
    return optimizers
