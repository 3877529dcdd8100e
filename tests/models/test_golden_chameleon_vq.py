"""Chameleon's image decoder against reference numbers of the public implementation (tests/golden)."""

from __future__ import annotations

import pytest
import torch
from golden_data import CLOSE, described, tensors
from tiny_chameleon import VQ

from ciar.models import vq_slices
from ciar.models.chameleon_vq import ChameleonVQ, to_pixels
from ciar.models.checkpoint import load_strict
from ciar.models.presets import PRESETS

IO = tensors("chameleon_vqgan_decoder_tiny_io")


@pytest.fixture(scope="module")
def model() -> ChameleonVQ:
    model = ChameleonVQ(VQ)
    load_strict(model, tensors("chameleon_vqgan_decoder_tiny"), "golden")
    return model.eval().requires_grad_(False)


def test_codes_are_used_as_they_are_stored(model: ChameleonVQ) -> None:
    latents = model.quantize.embedding(IO["in/indices"]).view(2, 4, 4, 32).permute(0, 3, 1, 2)
    assert torch.equal(latents, IO["decode/z_q"])


def test_decode(model: ChameleonVQ) -> None:
    image = model.decode(IO["in/indices"])
    torch.testing.assert_close(image, IO["decode/image"], **CLOSE)
    assert (to_pixels(image).int() - IO["decode/uint8"].int()).abs().max() <= 1
    assert torch.equal(to_pixels(IO["decode/image"]), IO["decode/uint8"])


def test_decode_in_slices(model: ChameleonVQ, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vq_slices, "SLICE_NUMBERS", 1)
    with torch.inference_mode():
        torch.testing.assert_close(model.decode(IO["in/indices"]), IO["decode/image"], **CLOSE)


def test_full_size_names_and_shapes() -> None:
    """The decoder half of the public tokenizer; the encoder half is not built."""
    listed = described("full_size_shapes")["chameleon_vqgan"]["keys"]
    half = {n: s for n, s in listed.items() if not n.startswith(("encoder.", "quant_conv."))}
    assert PRESETS["anole-7b"].vq_shapes == half
    assert len([name for name in half if name.startswith("decoder.")]) == 164
    assert PRESETS["anole-7b"].vq.grid == PRESETS["anole-7b"].gpt.grid == 32
