"""The transformer as it decodes: same numbers as the trained one, in any blocks, after any rollback."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import TINY_GPT, sharpen, tiny_device
from torch import Tensor

from ciar.models.gpt import GPT
from ciar.models.inference import InferenceGPT, fold_norms

EXACT = {"atol": 1e-5, "rtol": 0.0}


def model_of(seed: int, rotary: str = "identity") -> GPT:
    """Random weights, norms too: a fold that forgets one shows."""
    model = sharpen(GPT(replace(TINY_GPT, text_rotary=rotary)), seed).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(0.5 + torch.rand(parameter.shape, generator=generator))
    return model.requires_grad_(False)


def inputs(seed: int, text: int = 5, rows: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(rows, text, TINY_GPT.caption_dim, generator=generator)
    return features, torch.randint(64, (rows, 16), generator=generator)


@given(
    blocks=st.lists(st.integers(1, 6), min_size=1, max_size=6),
    rotary=st.sampled_from(["zero", "identity"]),
    seed=st.integers(0, 3),
)
@settings(max_examples=20, deadline=None)
def test_any_blocks_give_the_logits_of_one_pass(blocks: list[int], rotary: str, seed: int) -> None:
    """A verify of n tokens gives the same logits as n single steps."""
    model = model_of(seed, rotary)
    decoder = InferenceGPT(model)
    features, tokens = inputs(seed)
    whole = model.head(model.train_hidden(features, torch.ones(1, 5, dtype=torch.bool), tokens))[0]
    cache = decoder.new_cache(5, 1)
    out = [decoder.head(decoder.forward(decoder.embed_text(features), 3, cache))[0, -1:]]
    start = 0
    for count in blocks:
        part = tokens[:, start : start + count]
        if part.shape[1]:
            out.append(decoder.head(decoder.forward(decoder.embed_tokens(part), 8 + start, cache))[0])
        start += part.shape[1]
    torch.testing.assert_close(torch.cat(out), whole[: start + 1], **EXACT)


def test_a_rollback_leaves_no_trace() -> None:
    decoder = InferenceGPT(model_of(1))
    features, right = inputs(0, text=3, rows=2)
    wrong = (right + 1) % 64
    caches = [decoder.new_cache(3, 2), decoder.new_cache(3, 2)]
    for cache in caches:
        decoder.forward(decoder.embed_text(features), 5, cache)
    decoder.forward(decoder.embed_tokens(wrong), 8, caches[0])
    found = [decoder.forward(decoder.embed_tokens(right), 8, cache) for cache in caches]
    assert torch.equal(found[0], found[1])
    assert torch.equal(caches[0].cells, caches[1].cells)


def test_the_callers_tensors_are_left_alone() -> None:
    model = model_of(2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    decoder = InferenceGPT(model)
    features, tokens = inputs(2)
    cache = decoder.new_cache(5, 1)
    x = decoder.embed_text(features)
    kept = x.clone()
    decoder.forward(x, 3, cache)
    decoder.forward(decoder.embed_tokens(tokens), 8, cache)
    assert torch.equal(x, kept)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_weights_agree_with_the_trained_model(dtype: torch.dtype) -> None:
    """Weights of other types are not folded, which would round twice."""
    model = model_of(3).to(dtype)
    model.table = model_of(3).table  # the rotary table stays float32
    decoder = InferenceGPT(model)
    features, tokens = inputs(3)
    features = features.to(dtype)
    mask = torch.ones(1, 5, dtype=torch.bool)
    whole = model.head(model.train_hidden(features, mask, tokens))[0]
    cache = decoder.new_cache(5, 1)
    assert cache.cells.dtype == dtype
    decoder.forward(decoder.embed_text(features), 3, cache)
    logits = decoder.head(decoder.forward(decoder.embed_tokens(tokens), 8, cache))[0]
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, whole[1:], atol=0.15 if dtype == torch.bfloat16 else 0.02, rtol=0.0)


def test_a_device_trunk_ends_in_its_norm() -> None:
    model = tiny_device().requires_grad_(False)
    with torch.no_grad():
        model.trunk.norm.weight.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(0))
    decoder = InferenceGPT(model.trunk)
    features, tokens = inputs(4)
    whole = model.trunk.train_hidden(features, torch.ones(1, 5, dtype=torch.bool), tokens)
    cache = decoder.new_cache(5, 1)
    decoder.forward(decoder.embed_text(features), 3, cache)
    hidden = decoder.forward(decoder.embed_tokens(tokens), 8, cache)
    torch.testing.assert_close(hidden, whole[:, 1:], **EXACT)


def test_folded_norms_leave_the_model_as_it_was_and_weights_in_float16() -> None:
    model = model_of(4)
    features, tokens = inputs(4)
    mask = torch.ones(1, 5, dtype=torch.bool)
    before = model.head(model.train_hidden(features, mask, tokens))
    fold_norms(model)
    torch.testing.assert_close(model.head(model.train_hidden(features, mask, tokens)), before, **EXACT)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert (parameter == 1.0).all(), name
        else:
            parameter.copy_(parameter.half())
    decoder = InferenceGPT(model)
    assert all(layer.attention_norm is layer.ffn_norm is None for layer in decoder.layers)
    cache = decoder.new_cache(5, 1)
    decoder.forward(decoder.embed_text(features), 3, cache)
    found = decoder.head(decoder.forward(decoder.embed_tokens(tokens), 8, cache))
    torch.testing.assert_close(found, model.head(model.train_hidden(features, mask, tokens))[:, 1:], **EXACT)


def test_a_trunk_without_a_head_keeps_its_last_norm() -> None:
    trunk = tiny_device().trunk
    with torch.no_grad():
        trunk.norm.weight.fill_(0.5)
    assert (fold_norms(trunk).norm.weight == 0.5).all()
