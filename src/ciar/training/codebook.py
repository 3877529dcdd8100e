"""Gives codes that no picture uses to where they help most.

A trained codebook has dead codes. Each is spent on splitting a code in use in two: the split is a
two-means of the latents that the code stands for, and the splits with the best trade of distortion
against entropy (``rate``, as in :func:`ciar.training.tokenizer.assign`) are made first. Everything else
stays as it is, so a model that was trained on the old codes can go on with the new ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

#: A code with fewer latents than this is not split.
_FEWEST = 32


@dataclass(frozen=True)
class Split:
    """Every code's best division in two.

    Attributes:
        children: float32 [codes, 2, dim] unit vectors.
        side: int64 [latents] 0 or 1, which child each latent goes to.
        gain: float32 [codes] squared distance saved less the price of the entropy added; -inf where a
            code cannot be divided.
    """

    children: Tensor
    side: Tensor
    gain: Tensor


def split_codes(latents: Tensor, codes: Tensor, size: int, rate: float, rounds: int = 8) -> Split:
    """Divides every code's latents by two-means, started along their main direction.

    Args:
        latents: float32 [latents, dim] unit vectors.
        codes: int64 [latents], the code of each.
        size: codes in the codebook.
        rate: squared distance that one nat is worth.
    """
    dim = latents.shape[1]
    count = torch.bincount(codes, minlength=size).float()
    mean = _sums(latents, codes, size) / count.clamp_min(1.0)[:, None]
    away = latents - mean[codes]
    outer = torch.zeros(size, dim, dim)
    for part in _parts(len(latents)):
        outer.index_add_(0, codes[part], away[part, :, None] * away[part, None, :])
    main = torch.linalg.eigh(outer).eigenvectors[:, :, -1]  # [size, dim], largest variance
    side = ((away * main[codes]).sum(-1) > 0).long()
    for _ in range(rounds):
        children = F.normalize(_sums(latents, 2 * codes + side, 2 * size), dim=-1).view(size, 2, dim)
        side = (latents[:, None, :] * children[codes]).sum(-1).argmax(-1)
    both = torch.bincount(2 * codes + side, minlength=2 * size).view(size, 2).float()
    children = _sums(latents, 2 * codes + side, 2 * size).view(size, 2, dim)
    # For unit vectors the squared distances to the best unit centre sum to 2 (count - |sum|).
    saved = 2.0 * (children.norm(dim=-1).sum(1) - (mean * count[:, None]).norm(dim=-1))
    share = both / count.clamp_min(1.0)[:, None]
    nats = -(both * share.clamp_min(1e-12).log()).sum(1)
    gain = saved - rate * nats
    gain[(count < _FEWEST) | (both.min(dim=1).values < _FEWEST // 4)] = -torch.inf
    return Split(F.normalize(children, dim=-1), side, gain)


@torch.no_grad()
def refill(
    codebook: Tensor, latents: Tensor, codes: Tensor, rate: float
) -> tuple[Tensor, Tensor, dict[int, int]]:
    """Spends the unused codes on splits, best first.

    Args:
        codebook: float32 [codes, dim] unit rows.
        latents: float32 [latents, dim] unit vectors of the training pictures.
        codes: int64 [latents], what they are given now.
        rate: squared distance that one nat is worth.

    Returns:
        The new codebook, the new codes, and for each refilled code the code that it was split from.
    """
    codebook, codes = codebook.clone(), codes.clone()
    parents: dict[int, int] = {}
    while True:
        dead = (torch.bincount(codes, minlength=len(codebook)) == 0).nonzero().squeeze(1)
        split = split_codes(latents, codes, len(codebook), rate)
        # Half at a time, so that a crowded code can be split again.
        order = split.gain.argsort(descending=True)[: max(1, (len(dead) + 1) // 2)]
        order = order[split.gain[order].isfinite()]
        if not len(dead) or not len(order):
            return codebook, codes, parents
        target = torch.full((len(codebook),), -1)
        for new, old in zip(dead.tolist(), order.tolist(), strict=False):
            codebook[old], codebook[new] = split.children[old]
            target[old] = new
            parents[new] = parents.get(old, old)
        moves = (target[codes] >= 0) & (split.side == 1)
        codes[moves] = target[codes[moves]]


def inherit_rows(tensors: dict[str, Tensor], parents: dict[int, int]) -> dict[str, Tensor]:
    """A backbone's weights in which every refilled code starts as the code that it was split from."""
    new = torch.tensor(list(parents), dtype=torch.int64)
    old = torch.tensor(list(parents.values()), dtype=torch.int64)
    out = dict(tensors)
    for name in ("tok_embeddings.weight", "output.weight"):
        out[name] = tensors[name].clone()
        out[name][new] = tensors[name][old]
    return out


def _sums(latents: Tensor, codes: Tensor, size: int) -> Tensor:
    return torch.zeros(size, latents.shape[1]).index_add_(0, codes, latents)


def _parts(count: int, size: int = 1 << 18) -> Iterator[slice]:
    """Slices of bounded length, so that outer products of all latents never exist at once."""
    for start in range(0, count, size):
        yield slice(start, start + size)
