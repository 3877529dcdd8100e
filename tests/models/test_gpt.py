"""The transformer: what holds for any weights (reference numbers are in test_golden_gpt)."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from tiny import TINY_GPT, tiny_gpt

from ciar.models.gpt import GPT, GPTConfig, rotary_table, rotate, sequence_mask


@pytest.mark.parametrize(
    ("dim", "multiplier", "hidden"),
    [
        (768, None, 2048),
        (1024, None, 2816),
        (1280, None, 3584),
        (1536, None, 4096),
        (3200, None, 8704),
        (256, None, 768),
        (256, 2.0, 1536),
        (96, None, 256),
    ],
)
def test_feed_forward_width(dim: int, multiplier: float | None, hidden: int) -> None:
    assert GPTConfig(dim=dim, ffn_dim_multiplier=multiplier).ffn_hidden == hidden


def test_config_survives_json() -> None:
    assert GPTConfig.from_dict(json.loads(json.dumps(TINY_GPT.to_dict()))) == TINY_GPT


def test_parameters_of_the_public_model() -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig())
    count = sum(p.numel() for p in model.parameters())
    assert count == 777_923_840 - 120 * 2048  # the null caption is a buffer


@pytest.mark.parametrize(("kind", "cos"), [("zero", 0.0), ("identity", 1.0)])
def test_text_positions_of_the_table(kind: str, cos: float) -> None:
    config = replace(TINY_GPT, text_rotary=kind)
    table = rotary_table(config)
    assert table.shape == (config.text_len + config.tokens, config.head_dim // 2, 2)
    assert (table[: config.text_len, :, 0] == cos).all()
    assert (table[: config.text_len, :, 1] == 0).all()
    first_image = table[config.text_len]
    assert (first_image[:, 0] == 1).all()
    assert (first_image[:, 1] == 0).all()


def test_rotation_keeps_lengths_and_depends_on_the_offset() -> None:
    """Products of rotated vectors depend on how far apart the positions are, in rows and columns."""
    table = rotary_table(TINY_GPT)[TINY_GPT.text_len :]
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 16, generator=generator)
    x = rotate(q.expand(1, 1, 16, 16).clone(), table)
    y = rotate(k.expand(1, 1, 16, 16).clone(), table)
    torch.testing.assert_close(x.norm(dim=-1), q.norm().expand(1, 1, 16))
    product = (x @ y.transpose(-2, -1))[0, 0].view(4, 4, 4, 4)
    # Offset (1 row, 2 columns), from four places.
    found = [product[r + 1, c + 2, r, c] for r in range(2) for c in range(2)]
    torch.testing.assert_close(torch.stack(found), found[0].expand(4))
    assert (product[1, 2, 0, 0] - product[2, 1, 0, 0]).abs() > 1e-3


def test_sequence_mask() -> None:
    mask = sequence_mask(torch.tensor([[False, True], [True, True]]), 4)
    assert mask.shape == (2, 1, 4, 4)
    assert mask[0, 0].int().tolist() == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 1]]
    assert mask[1, 0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]


def test_a_row_of_padding_stays_finite() -> None:
    """A prompt without any valid row (known fault B3) must not become NaN."""
    model = tiny_gpt()
    mask = torch.zeros(1, 3, dtype=torch.bool)
    with torch.no_grad():
        hidden = model.train_hidden(torch.zeros(1, 3, 16), mask, torch.zeros(1, 4, dtype=torch.long))
    assert hidden.isfinite().all()
