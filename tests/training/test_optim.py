"""Muon: its matrices become orthogonal, its steps have a known size, and it learns."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_gpt
from torch import nn

from ciar.training.optim import Muon, make_optimizers, orthogonalise


@given(rows=st.integers(2, 24), columns=st.integers(2, 24), seed=st.integers(0, 20))
def test_singular_values_come_close_to_one(rows: int, columns: int, seed: int) -> None:
    """For matrices whose smallest singular value is not negligible (5 steps lift it by about 3.4 each)."""
    generator = torch.Generator().manual_seed(seed)
    u, _, v = torch.linalg.svd(torch.randn(3, rows, columns, generator=generator), full_matrices=False)
    values = 0.05 + torch.rand(3, min(rows, columns), generator=generator)
    stack = u @ (values.unsqueeze(-1) * v)
    out = orthogonalise(stack)
    assert out.shape == stack.shape
    assert ((torch.linalg.svdvals(out) - 1).abs() < 0.35).all()
    # The singular vectors stay: the result is the nearest orthogonal matrix, not any.
    torch.testing.assert_close(out, u @ v, atol=0.35, rtol=0.0)


def test_gaussian_gradients() -> None:
    """The iteration's coefficients trade exactness for speed: values between 0.65 and 1.2, not 1."""
    generator = torch.Generator().manual_seed(0)
    for shape in ((4, 64, 256), (4, 256, 64)):
        values = torch.linalg.svdvals(orthogonalise(torch.randn(shape, generator=generator)))
        assert values.min() > 0.65
        assert values.max() < 1.2


def test_scale_of_the_gradient_does_not_matter() -> None:
    stack = torch.randn(2, 8, 12, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(orthogonalise(stack * 1e-3), orthogonalise(stack), atol=1e-3, rtol=1e-3)
    assert (orthogonalise(torch.zeros(1, 4, 4)) == 0).all()


def test_the_size_of_a_step() -> None:
    """Root mean square 0.2 of the learning rate, like AdamW's, whatever the shape."""
    for shape in ((32, 32), (16, 64), (64, 24)):
        weight = nn.Parameter(torch.zeros(shape))
        weight.grad = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        Muon([weight], lr=0.1).step()
        assert weight.detach().square().mean().sqrt() == pytest.approx(0.02, rel=0.25)


def test_parts_of_a_fused_projection_are_apart() -> None:
    """A wqkv of three square parts steps like three matrices."""
    gradients = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(0))
    fused = nn.Parameter(torch.zeros(24, 8))
    fused.grad = gradients.flatten(0, 1)
    apart = [nn.Parameter(torch.zeros(8, 8)) for _ in range(3)]
    for parameter, gradient in zip(apart, gradients, strict=True):
        parameter.grad = gradient.clone()
    Muon([fused], lr=0.1).step()
    Muon(apart, lr=0.1).step()
    torch.testing.assert_close(fused.data, torch.cat([p.data for p in apart]), atol=1e-6, rtol=1e-5)


def test_it_solves_a_quadratic() -> None:
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(12, 8, generator=generator)
    weight = nn.Parameter(torch.zeros(12, 8))
    optimizer = Muon([weight], lr=0.05)
    first = float(target.square().sum())
    for step in range(200):
        optimizer.param_groups[0]["lr"] = 0.2 * (1 - step / 200)
        optimizer.zero_grad()
        (weight - target).square().sum().backward()
        optimizer.step()
    assert float((weight - target).square().sum().detach()) < 1e-2 * first


def test_weight_decay_shrinks() -> None:
    weight = nn.Parameter(torch.ones(4, 4))
    weight.grad = torch.zeros(4, 4)
    Muon([weight], lr=0.5, weight_decay=0.2).step()
    torch.testing.assert_close(weight.data, torch.full((4, 4), 0.9))


def test_a_parameter_without_gradient_is_left_alone() -> None:
    weight = nn.Parameter(torch.ones(4, 4))
    Muon([weight], lr=0.5, weight_decay=0.2).step()
    assert (weight == 1).all()


def test_matrices_of_the_blocks_go_to_muon() -> None:
    model = tiny_gpt()
    model.norm.weight.requires_grad_(False)
    muon, adam = make_optimizers(model, 1e-3)
    inside = {id(p) for name, p in model.named_parameters() if "layers." in name and p.ndim == 2}
    assert {id(p) for p in muon.param_groups[0]["params"]} == inside
    others = {id(p) for p in adam.param_groups[0]["params"]}
    assert not inside & others
    assert id(model.tok_embeddings.weight) in others
    assert len(inside) + len(others) == sum(p.requires_grad for p in model.parameters())
