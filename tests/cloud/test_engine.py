"""The engine: guidance in every special case, padding of two prompts, costs, sessions kept apart."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny_text
from torch import Tensor

from ciar.cloud.engine import CloudEngine, Slot
from ciar.decoding.strategy import Pass
from ciar.models.bundle import Bundle
from ciar.models.text import TextFeatures

TEXT = tiny_text()
SHORT, LONG = TEXT.encode("cat"), TEXT.encode("a red car with a smiling dog sunglasses")
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 53, 58, 9, 7, 9, 3, 23]
EXACT = {"atol": 1e-4, "rtol": 0.0}


@pytest.fixture(scope="module")
def engine(tiny_bundle: Bundle) -> CloudEngine:
    return CloudEngine(tiny_bundle.gpt)


def alone(bundle: Bundle, text: TextFeatures, features: Tensor | None = None) -> Tensor:
    """Logits [16, 64] of one prompt without guidance, padding or cache."""
    valid = text.features[text.mask] if features is None else features
    mask = torch.ones(1, len(valid), dtype=torch.bool)
    with torch.no_grad():
        return bundle.gpt.head(bundle.gpt.train_hidden(valid[None], mask, torch.tensor([TOKENS])))[0]


def whole(engine: CloudEngine, slot: Slot) -> Tensor:
    return torch.cat([slot.prefill[None], engine.run(slot, Pass(0, TOKENS))])


@pytest.mark.parametrize("scale", [0.0, 0.5, 1.0, 3.0, 7.5])
@pytest.mark.parametrize("text", [SHORT, LONG], ids=["1 word", "8 words"])
def test_guidance_against_the_null_caption(
    tiny_bundle: Bundle, engine: CloudEngine, text: TextFeatures, scale: float
) -> None:
    """Known fault B6: 0 is unconditional, 1 computes no second row, between them the formula holds."""
    slot = engine.open(text, None, scale, text)
    logits = whole(engine, slot)
    valid = int(text.mask.sum())
    conditional = alone(tiny_bundle, text)
    null = alone(tiny_bundle, text, tiny_bundle.gpt.cls_embedding.uncond_embedding[-valid:])
    torch.testing.assert_close(logits, null + scale * (conditional - null), **EXACT)
    rows = 1 if scale == 1.0 else 2
    assert slot.cache.rows == rows
    assert (slot.passes, slot.token_rows) == (2, rows * (1 + len(TOKENS)))
    assert slot.milliseconds > 0


@pytest.mark.parametrize(("text", "negative"), [(SHORT, LONG), (LONG, SHORT), (SHORT, SHORT)])
def test_negative_prompt_of_another_length(
    tiny_bundle: Bundle, engine: CloudEngine, text: TextFeatures, negative: TextFeatures
) -> None:
    """Known fault B2: the padding of the shorter prompt must not leak."""
    logits = whole(engine, engine.open(text, negative, 3.0, text))
    away = alone(tiny_bundle, negative)
    expected = away + 3.0 * (alone(tiny_bundle, text) - away)
    torch.testing.assert_close(logits, expected, **EXACT)


def test_sessions_do_not_disturb_each_other(engine: CloudEngine) -> None:
    """Known fault B1: passes of two sessions in turn give what each gives alone, bit for bit."""
    expected = [whole(engine, engine.open(text, None, 3.0, text)) for text in (SHORT, LONG)]
    slots = [engine.open(text, None, 3.0, text) for text in (SHORT, LONG)]
    found: list[list[Tensor]] = [[slot.prefill[None]] for slot in slots]
    for i, token in enumerate(TOKENS):
        for slot, out in zip(slots, found, strict=True):
            out.append(engine.run(slot, Pass(i, [token])))
    for out, want in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.cat(out), want, **EXACT)


def test_a_pass_without_ids_is_the_prefill_and_costs_nothing(engine: CloudEngine) -> None:
    slot = engine.open(SHORT, None, 3.0, SHORT)
    assert torch.equal(engine.run(slot, Pass(0, [])), slot.prefill[None])
    assert (slot.passes, slot.token_rows) == (1, 2)


def test_features_are_added_to_the_embeddings(engine: CloudEngine, tiny_bundle: Bundle) -> None:
    plain = engine.run(engine.open(SHORT, None, 3.0, SHORT), Pass(0, TOKENS))
    zero = torch.zeros(len(TOKENS), 32)
    silent = engine.run(engine.open(SHORT, None, 3.0, SHORT), Pass(0, TOKENS), zero)
    assert torch.equal(plain, silent)
    # Adding the difference of two embeddings is feeding the other token.
    table = tiny_bundle.gpt.tok_embeddings.weight
    swapped = zero.clone()
    swapped[4] = table[60] - table[TOKENS[4]]
    found = engine.run(engine.open(SHORT, None, 3.0, SHORT), Pass(0, TOKENS), swapped)
    other = [*TOKENS[:4], 60, *TOKENS[5:]]
    expected = engine.run(engine.open(SHORT, None, 3.0, SHORT), Pass(0, other))
    torch.testing.assert_close(found, expected, **EXACT)
    assert (found[4:] - plain[4:]).abs().max() > 0.1


def test_a_rollback_reads_no_stale_cell(engine: CloudEngine) -> None:
    slot = engine.open(LONG, SHORT, 3.0, LONG)
    expected = whole(engine, slot)
    engine.run(slot, Pass(5, [60] * 10))
    again = engine.run(slot, Pass(5, TOKENS[5:]))
    torch.testing.assert_close(again, expected[6:], atol=1e-5, rtol=0.0)
