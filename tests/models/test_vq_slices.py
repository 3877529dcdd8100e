"""Wide layers in slices of rows: the numbers of the plain computation, within a bound of memory."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from golden_data import CLOSE, golden_vq, tensors

from ciar.models import vq_slices
from ciar.models.vq import VQConfig, VQModel

IO = tensors("llamagen_vq_tiny_io")
PROGRAM = """
import resource, torch
from ciar.models.vq import VQConfig, VQModel
torch.set_num_threads(1)
model = VQModel(VQConfig(image_size=512)).eval().requires_grad_(False)
with torch.inference_mode():
    picture = model.decode(torch.randint(16384, (1, 1024)))
assert picture.shape == (1, 3, 512, 512) and bool(picture.isfinite().all())
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


@pytest.mark.parametrize("numbers", [1, 2000, 5000])
def test_slices_give_the_reference_numbers(monkeypatch: pytest.MonkeyPatch, numbers: int) -> None:
    monkeypatch.setattr(vq_slices, "SLICE_NUMBERS", numbers)
    model = golden_vq()
    with torch.inference_mode():
        torch.testing.assert_close(model.decode(IO["in/indices"]), IO["decode/image"], **CLOSE)
        torch.testing.assert_close(model.encoder(IO["encode/x"]), IO["encode/encoder_out"], **CLOSE)


@pytest.mark.parametrize("patch", [1, 2])
def test_slices_of_a_larger_picture(monkeypatch: pytest.MonkeyPatch, patch: int) -> None:
    """96 px and more rows than a slice, of an odd number of slices; inputs are left as they were."""
    config = VQConfig(96 * patch, 32, 4, 32, (1, 2), 1, 32, patch=patch)
    torch.manual_seed(0)
    model = VQModel(config).eval()
    codes = torch.randint(32, (2, 48 * 48))
    images = torch.rand(2, 3, 96 * patch, 96 * patch) * 2 - 1
    kept = images.clone()
    with torch.inference_mode():
        plain, latents = model.decode(codes), model.latents(images)
        monkeypatch.setattr(vq_slices, "SLICE_NUMBERS", 40_000)
        torch.testing.assert_close(model.decode(codes), plain, atol=2e-5, rtol=0)
        torch.testing.assert_close(model.latents(images), latents, atol=2e-5, rtol=0)
    assert torch.equal(images, kept)


def test_training_is_not_sliced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vq_slices, "SLICE_NUMBERS", 1)
    model = golden_vq().requires_grad_(True)
    model.decode(IO["in/indices"]).square().mean().backward()
    assert model.decoder.conv_out.weight.grad is not None


@pytest.mark.slow
def test_a_picture_of_512_px_stays_under_1_5_gb() -> None:
    """Full size, random weights: the peak of a whole process, with torch and 0.29 GB of weights in it."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=280, check=True
    )
    assert int(done.stdout) < 1.5e9
