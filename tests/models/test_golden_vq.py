"""The VQ tokenizer against reference numbers of the public implementation (tests/golden)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from golden_data import CLOSE, described, golden_vq, tensors

from ciar.models.vq import VQConfig, VQModel, from_uint8, to_uint8

IO = tensors("llamagen_vq_tiny_io")


@pytest.fixture(scope="module")
def model() -> VQModel:
    return golden_vq()


def test_lookup_normalises(model: VQModel) -> None:
    codes = F.embedding(IO["in/indices"], model.quantize.unit_codes())  # [2, 16, 8]
    latents = codes.view(2, 4, 4, 8).permute(0, 3, 1, 2)
    torch.testing.assert_close(latents, IO["decode/z_q"], **CLOSE)
    torch.testing.assert_close(model.post_quant_conv(latents), IO["decode/post_quant"], **CLOSE)


def test_decode(model: VQModel) -> None:
    image = model.decode(IO["in/indices"])
    torch.testing.assert_close(image, IO["decode/image"], **CLOSE)
    difference = to_uint8(image).int() - IO["decode/uint8"].int()
    assert difference.abs().max() <= 1
    assert torch.equal(to_uint8(IO["decode/image"]), IO["decode/uint8"])


def test_encode(model: VQModel) -> None:
    torch.testing.assert_close(model.encoder(IO["encode/x"]), IO["encode/encoder_out"], **CLOSE)
    codes = model.encode(IO["encode/x"])
    assert codes.flatten().tolist() == IO["encode/indices"].tolist()
    chosen = F.embedding(codes, model.quantize.unit_codes()).view(2, 4, 4, 8).permute(0, 3, 1, 2)
    torch.testing.assert_close(chosen, IO["encode/quant"], **CLOSE)


def test_full_size_names_and_shapes() -> None:
    expected = dict(described("full_size_shapes")["llamagen_vq16"]["keys"])
    expected.pop("quantize.codebook_used", None)  # a usage counter that nothing reads
    with torch.device("meta"):
        own = {k: list(v.shape) for k, v in VQModel(VQConfig()).state_dict().items()}
    assert own == expected


def test_scaling_the_codebook_changes_nothing(model: VQModel) -> None:
    scaled = golden_vq()
    scaled.quantize.embedding.weight.mul_(torch.linspace(0.5, 2.0, 512)[:, None])
    torch.testing.assert_close(scaled.decode(IO["in/indices"]), model.decode(IO["in/indices"]), **CLOSE)
    assert torch.equal(scaled.encode(IO["encode/x"]), model.encode(IO["encode/x"]))


def test_pixels_survive_the_round_trip() -> None:
    pixels = torch.arange(256, dtype=torch.uint8).view(1, 16, 16, 1).expand(1, 16, 16, 3)
    assert torch.equal(to_uint8(from_uint8(pixels)), pixels)
    beyond = torch.tensor([-3.0, -1.0, 1.0, 3.0]).view(1, 1, 1, 4).expand(1, 3, 1, 4)
    assert to_uint8(beyond)[0, 0, :, 0].tolist() == [0, 0, 255, 255]


@pytest.mark.parametrize(
    ("config", "downscale", "grid"),
    [
        (VQConfig(), 16, 16),
        (VQConfig(image_size=512), 16, 32),
        (VQConfig(image_size=128, channel_multipliers=(1, 2), patch=4), 8, 16),
    ],
)
def test_sizes(config: VQConfig, downscale: int, grid: int) -> None:
    assert (config.downscale, config.grid) == (downscale, grid)
    assert VQConfig.from_dict(config.to_dict()) == config


def test_a_patch_is_folded_and_unfolded() -> None:
    """With a patch the picture keeps its size: 16 px, 2 x 2 tokens of 8 px."""
    config = VQConfig(16, 32, 4, 32, (1, 1), 1, 32, patch=4)
    torch.manual_seed(0)
    model = VQModel(config).eval()
    codes = model.encode(torch.rand(3, 3, 16, 16) * 2 - 1)
    assert codes.shape == (3, 4)
    assert model.decode(codes).shape == (3, 3, 16, 16)
