"""Rows in parallel: scattered passes against the uncached model, and pictures against slow readings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from drive import device_session, opening, picture_of
from torch import Tensor

from ciar.cloud.engine import CloudEngine
from ciar.cloud.sessions import Cloud
from ciar.decoding.noise import PictureNoise
from ciar.decoding.sampling import SamplingLaw, choose, guide, to_law
from ciar.decoding.strategy import Pass, Scatter
from ciar.models.bundle import Bundle
from ciar.transport.inprocess import InProcessTransport

GRID, TOTAL, VOCAB = 4, 16, 64
PROMPT = "a smiling cat"


def uncached(bundle: Bundle, tokens: list[int], visible: Tensor) -> Tensor:
    """Guided logits [16, 64] at scale 3 by the training model under a mask of image positions, no cache."""
    text = bundle.text.encode(PROMPT)
    model, valid = bundle.gpt, int(text.mask.sum())
    null = model.cls_embedding.uncond_embedding[-valid:]
    outs = []
    for features in (text.features[text.mask], null):
        x = torch.cat([model.embed_text(features[None]), model.embed_tokens(torch.tensor([tokens]))], dim=1)
        mask = torch.ones(valid + TOTAL, valid + TOTAL, dtype=torch.bool).tril()
        mask[valid:, valid:] = visible
        table = model.table[model.config.text_len - valid :][: valid + TOTAL]
        for block in model.blocks:
            q, k, v = block.attention.project(block.attention_norm(x), table)
            x = block.finish(x, F.scaled_dot_product_attention(q, k, v, attn_mask=mask))
        outs.append(model.head(model.norm(x))[0, valid:])
    return guide(outs[0], outs[1], 3.0)


def test_scattered_passes_equal_the_uncached_model(tiny_bundle: Bundle) -> None:
    """Every second position first, then the rest; each sees a random part of what is before it."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCAB, (TOTAL,), generator=generator).tolist()
    even, odd = list(range(0, TOTAL, 2)), list(range(1, TOTAL, 2))
    visible = (torch.rand(TOTAL, TOTAL, generator=generator) < 0.6).tril()
    visible[even] &= torch.arange(TOTAL) % 2 == 0  # the odd ones are not there yet
    visible |= torch.eye(TOTAL, dtype=torch.bool)
    engine = CloudEngine(tiny_bundle.gpt)
    text = tiny_bundle.text.encode(PROMPT)
    slot = engine.open(text, None, 3.0, text)
    with torch.no_grad():
        expected = uncached(tiny_bundle, tokens, visible)
    for part in (even, odd):
        found = engine.run_scattered(slot, Scatter(tuple(part), [tokens[i] for i in part], visible[part]))
        torch.testing.assert_close(found, expected[part], atol=1e-4, rtol=0)
    assert (slot.passes, slot.token_rows) == (3, 2 * (1 + TOTAL))


@pytest.mark.parametrize("negative", [None, "a red car with a smiling dog sunglasses"])
def test_a_scattered_block_equals_a_plain_pass(tiny_bundle: Bundle, negative: str | None) -> None:
    """Consecutive positions that see everything before them; padding of the shorter prompt is hidden."""
    engine = CloudEngine(tiny_bundle.gpt)
    text = tiny_bundle.text.encode("cat")
    away = tiny_bundle.text.encode(negative) if negative else None
    tokens = [5, 9, 2, 60, 33, 7]
    one, two = (engine.open(text, away, 3.0, text) for _ in range(2))
    causal = torch.ones(TOTAL, TOTAL, dtype=torch.bool).tril()
    expected = engine.run(one, Pass(0, tokens))
    found = engine.run_scattered(two, Scatter(tuple(range(6)), tokens, causal[:6]))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def made(bundle: Bundle, cloud: Cloud, name: str, **values: Any) -> Any:
    options = tuple(values.pop("options", {}).items())
    message = opening(PROMPT, name, options=options, **values)
    return device_session(bundle, InProcessTransport(cloud), message).run()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("name", "window"), [("zipar", 1), ("pjd", 2), ("pjd", 4)])
@pytest.mark.parametrize("guess", ["left", "above", "random"])
def test_with_a_whole_rows_lead_it_is_plain_ar(
    tiny_bundle: Bundle, tiny_cloud: Cloud, seed: int, name: str, window: int, guess: str
) -> None:
    options = {"lead": GRID, "guess": guess}
    found = made(tiny_bundle, tiny_cloud, name, seed=seed, window=window, options=options)
    assert found.tokens == picture_of(tiny_cloud, opening(PROMPT, seed=seed))[0]
    assert found.ledger.cloud_passes <= TOTAL


@pytest.mark.parametrize("lead", [1, 2, 3])
def test_zipar_takes_a_row_and_a_lead_for_each_other(
    tiny_bundle: Bundle, tiny_cloud: Cloud, lead: int
) -> None:
    """C + (R - 1) s passes: the first token of all comes with the prefill."""
    found = made(tiny_bundle, tiny_cloud, "zipar", seed=1, options={"lead": lead})
    assert found.ledger.cloud_passes == GRID + (GRID - 1) * lead


def slow_zipar(bundle: Bundle, seed: int, lead: int) -> list[int]:
    """ZipAR read slowly: no cache; what each token saw is written down and computed again every time."""
    noise = PictureNoise(seed, 0, TOTAL, VOCAB)
    tokens: list[int] = [0] * TOTAL
    known = torch.zeros(TOTAL, dtype=torch.bool)
    sees = torch.eye(TOTAL, dtype=torch.bool)
    law = to_law(uncached_first(bundle), SamplingLaw())
    tokens[0], known[0] = int(choose(law, noise.gumbel(0, 1)[0])), True
    fed: set[int] = set()
    while not known.all():
        done = known.view(GRID, GRID).sum(1).tolist()
        rows = [r for r in range(GRID) if done[r] < GRID and (r == 0 or done[r - 1] >= lead)]
        targets = [r * GRID + done[r] for r in rows]
        now = known.clone()
        for position in range(TOTAL):
            stand_in = position + 1 in targets and not known[position]
            if stand_in:  # the row above has not ended: its newest token, by the default guess
                last = max(p for p in range(position) if p // GRID == position // GRID and now[p])
                tokens[position] = tokens[last]
            if stand_in or (now[position] and position not in fed):
                sees[position] = now & (torch.arange(TOTAL) <= position)
                sees[position, position] = True
                if not stand_in:
                    fed.add(position)
        logits = uncached(bundle, tokens, sees)
        for target in targets:
            law = to_law(logits[target - 1], SamplingLaw())
            tokens[target] = int(choose(law, noise.gumbel(target, 1)[0]))
            known[target] = True
    return tokens


def uncached_first(bundle: Bundle) -> Tensor:
    text = bundle.text.encode(PROMPT)
    engine = CloudEngine(bundle.gpt)
    return engine.open(text, None, 3.0, text).prefill


@pytest.mark.parametrize("lead", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_zipar_equals_its_slow_reading(tiny_bundle: Bundle, tiny_cloud: Cloud, lead: int, seed: int) -> None:
    found = made(tiny_bundle, tiny_cloud, "zipar", seed=seed, options={"lead": lead})
    with torch.no_grad():
        assert found.tokens == slow_zipar(tiny_bundle, seed, lead)


def test_wider_windows_take_fewer_passes(tiny_bundle: Bundle, tiny_cloud: Cloud) -> None:
    """With a cold law guesses are often right; never more passes than ZipAR at the same lead."""
    for seed in range(4):
        values: dict[str, Any] = {"seed": seed, "temperature": 0.0, "options": {"lead": 2}}
        one = made(tiny_bundle, tiny_cloud, "zipar", **values).ledger
        wide = made(tiny_bundle, tiny_cloud, "pjd", window=4, **values).ledger
        assert wide.cloud_passes <= one.cloud_passes
        assert wide.token_rows >= 2 * TOTAL
