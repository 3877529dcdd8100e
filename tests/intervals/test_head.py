"""The interval head: shapes, start values, names of its weights, and the price-saving path."""

from __future__ import annotations

import pytest
import torch

from ciar.errors import InputError
from ciar.intervals.head import IntervalHead


def trained_head(rank: int | None) -> IntervalHead:
    torch.manual_seed(0)
    head = IntervalHead(48, 300, rank)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return head


@pytest.mark.parametrize("rank", [None, 8])
def test_it_starts_with_radius_one(rank: int | None) -> None:
    law = IntervalHead(48, 300, rank)(torch.randn(2, 5, 48))
    assert law.centre.shape == law.radius.shape == (2, 5, 300)
    torch.testing.assert_close(law.radius, torch.ones(2, 5, 300), atol=1e-6, rtol=0)


@pytest.mark.parametrize("rank", [None, 8])
@pytest.mark.parametrize("shape", [(), (7,), (2, 5)])
def test_radius_at_is_the_gather_of_forward(rank: int | None, shape: tuple[int, ...]) -> None:
    head = trained_head(rank)
    hidden = torch.randn(*shape, 48)
    law = head(hidden)
    indices = law.centre.topk(17, dim=-1).indices
    got = head.radius_at(hidden, indices)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, law.radius.gather(-1, indices), rtol=1e-5, atol=1e-5)
    repeated = torch.full((*shape, 3), 299)
    torch.testing.assert_close(
        head.radius_at(hidden, repeated), law.radius[..., [299, 299, 299]], rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("rank", [None, 8])
def test_forward_is_the_formula(rank: int | None) -> None:
    head = trained_head(rank)
    hidden = torch.randn(4, 48)
    law = head(hidden)
    weights = head.state_dict()
    matrix = weights["up.weight"] if rank is None else weights["up.weight"] @ weights["down.weight"]
    torch.testing.assert_close(law.centre, hidden @ weights["centre.weight"].T)
    assert torch.equal(head.centre_logits(hidden), law.centre)
    raised = hidden @ matrix.T + weights["up.bias"]
    torch.testing.assert_close(law.radius, (1 + raised.double().exp()).log().float(), rtol=1e-4, atol=1e-5)
    assert (law.radius >= 0).all()


def test_names_and_sizes_of_the_weights() -> None:
    low, full = (IntervalHead(48, 300, rank).state_dict() for rank in (8, None))
    shapes = {name: tuple(weight.shape) for name, weight in low.items()}
    assert shapes == {
        "centre.weight": (300, 48),
        "down.weight": (8, 48),
        "up.weight": (300, 8),
        "up.bias": (300,),
    }
    assert {name: tuple(weight.shape) for name, weight in full.items()} == {
        "centre.weight": (300, 48),
        "up.weight": (300, 48),
        "up.bias": (300,),
    }


@pytest.mark.parametrize("rank", [None, 8])
def test_bf16_weights_give_float32_laws(rank: int | None) -> None:
    head = trained_head(rank).bfloat16()
    hidden = torch.randn(3, 48).bfloat16()
    law = head(hidden)
    assert law.centre.dtype == law.radius.dtype == torch.float32
    indices = law.centre.topk(9, dim=-1).indices
    torch.testing.assert_close(
        head.radius_at(hidden, indices), law.radius.gather(-1, indices), rtol=0.02, atol=0.02
    )


@pytest.mark.parametrize("rank", [None, 8])
def test_every_weight_learns(rank: int | None) -> None:
    head = trained_head(rank)
    law = head(torch.randn(6, 48))
    (law.centre.square().mean() + law.radius.mean()).backward()
    for name, parameter in head.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("sizes", [(0, 8, None), (8, 0, None), (8, 8, 0)])
def test_sizes_below_one_are_refused(sizes: tuple[int, int, int | None]) -> None:
    with pytest.raises(InputError, match="at least 1"):
        IntervalHead(*sizes)
