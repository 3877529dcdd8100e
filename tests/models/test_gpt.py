"""The transformer: what holds for any weights (reference numbers are in test_golden_gpt)."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import TINY_GPT, sharpen, tiny_gpt

from ciar.models.device import new_cache
from ciar.models.gpt import GPT, GPTConfig, causal_mask, rotary_table, rotate, sequence_mask

EXACT = {"atol": 1e-5, "rtol": 0.0}


@pytest.mark.parametrize(
    ("dim", "multiplier", "hidden"),
    [(768, None, 2048), (1024, None, 2816), (1280, None, 3584), (1536, None, 4096), (3200, None, 8704)]
    + [(256, None, 768), (256, 2.0, 1536), (96, None, 256)],
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


def test_causal_mask() -> None:
    assert causal_mask(2, 4, torch.device("cpu"))[0, 0].tolist() == [
        [True, True, True, False],
        [True, True, True, True],
    ]


def test_sequence_mask() -> None:
    mask = sequence_mask(torch.tensor([[False, True], [True, True]]), 4)
    assert mask.shape == (2, 1, 4, 4)
    assert mask[0, 0].int().tolist() == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 1]]
    assert mask[1, 0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]


@given(
    blocks=st.lists(st.integers(1, 6), min_size=1, max_size=6),
    rotary=st.sampled_from(["zero", "identity"]),
    seed=st.integers(0, 3),
)
@settings(max_examples=20, deadline=None)
def test_any_blocks_give_the_logits_of_one_pass(blocks: list[int], rotary: str, seed: int) -> None:
    """A verify of n tokens gives the same logits as n single steps."""
    model = sharpen(GPT(replace(TINY_GPT, text_rotary=rotary)), seed).eval()
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(1, 5, TINY_GPT.caption_dim, generator=generator)
    tokens = torch.randint(64, (1, 16), generator=generator)
    with torch.no_grad():
        whole = model.head(model.train_hidden(features, torch.ones(1, 5, dtype=torch.bool), tokens))[0]
        cache = new_cache(model, 5, 1)
        out = [model.head(model(model.embed_text(features), 3, cache))[0, -1:]]
        start = 0
        for count in blocks:
            part = tokens[:, start : start + count]
            if part.shape[1] == 0:
                break
            out.append(model.head(model(model.embed_tokens(part), 8 + start, cache))[0])
            start += part.shape[1]
    torch.testing.assert_close(torch.cat(out), whole[: start + 1], **EXACT)


def test_a_rollback_leaves_no_trace() -> None:
    model = tiny_gpt()
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(2, 3, TINY_GPT.caption_dim, generator=generator)
    wrong, right = torch.randint(64, (2, 2, 16), generator=generator)
    with torch.no_grad():
        caches = [new_cache(model, 3, 2), new_cache(model, 3, 2)]
        for cache in caches:
            model(model.embed_text(features), 5, cache)
        model(model.embed_tokens(wrong), 8, caches[0])
        found = [model(model.embed_tokens(right), 8, cache) for cache in caches]
    assert torch.equal(found[0], found[1])
    assert torch.equal(caches[0].keys, caches[1].keys)


def test_a_row_of_padding_stays_finite() -> None:
    """A prompt without any valid row (known fault B3) must not become NaN."""
    model = tiny_gpt()
    mask = torch.zeros(1, 3, dtype=torch.bool)
    with torch.no_grad():
        hidden = model.train_hidden(torch.zeros(1, 3, 16), mask, torch.zeros(1, 4, dtype=torch.long))
    assert hidden.isfinite().all()
