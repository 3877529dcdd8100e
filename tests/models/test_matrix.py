"""A frozen matrix: the same product, however it is kept."""

from __future__ import annotations

import pytest
import torch

from ciar.models.matrix import Matrix

FBGEMM = "fbgemm" in torch.backends.quantized.supported_engines


def weight_of(*, half: bool) -> torch.Tensor:
    weight = torch.randn(96, 64, generator=torch.Generator().manual_seed(0))
    return weight.half().float() if half else weight


@pytest.mark.parametrize("shape", [(64,), (1, 64), (7, 64), (2, 3, 64)])
@pytest.mark.parametrize("half", [True, False])
def test_it_is_the_product_with_the_transpose(shape: tuple[int, ...], half: bool) -> None:
    weight = weight_of(half=half)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    wanted = (x.double() @ weight.T.double()).float()
    torch.testing.assert_close(Matrix(weight)(x), wanted, atol=2e-5, rtol=0.0)


@pytest.mark.parametrize("half", [True, False])
def test_a_sum_rides_on_the_product(half: bool) -> None:
    weight = weight_of(half=half)
    x, base = torch.randn(5, 64), torch.randn(5, 96)
    kept = base.clone()
    matrix = Matrix(weight)
    torch.testing.assert_close(matrix.added(base, x), base + matrix(x), atol=1e-5, rtol=0.0)
    assert torch.equal(base, kept)


@pytest.mark.skipif(not FBGEMM, reason="this torch has no float16 products")
def test_float16_is_kept_only_where_no_number_changes() -> None:
    assert Matrix(weight_of(half=True)).packed
    assert not Matrix(weight_of(half=False)).packed
    too_large = weight_of(half=True)
    too_large[0, 0] = 1e6
    assert not Matrix(too_large).packed
    assert not Matrix(weight_of(half=True).half()).packed  # a model in float16 stays in float16


def test_without_float16_products_it_works_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(torch.backends.quantized), "supported_engines", ["qnnpack"], raising=False)
    if torch.backends.quantized.supported_engines != ["qnnpack"]:
        pytest.skip("this torch does not let its engines be replaced")
    matrix = Matrix(weight_of(half=True))
    assert not matrix.packed
    x = torch.randn(3, 64)
    torch.testing.assert_close(matrix(x), x @ weight_of(half=True).T, atol=1e-5, rtol=0.0)
