"""The drafter: any walk over token lists gives the states of a fresh run, and feeds only what changed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_device, tiny_text

from ciar.decoding.drafter import Drafter
from ciar.models.device import DeviceTrunk

MODEL = tiny_device()
TRUNK = DeviceTrunk(MODEL)
TEXT = tiny_text().encode("a smiling cat")
TOKENS = st.lists(st.integers(0, 2), max_size=16)


@given(walk=st.lists(TOKENS, min_size=1, max_size=8))
@settings(deadline=None, max_examples=30)
def test_any_walk_gives_the_states_of_a_fresh_run(walk: list[list[int]]) -> None:
    drafter = Drafter(MODEL, TRUNK, TEXT)
    expected_steps, before = 0, list[int]()
    for tokens in walk:
        same = next((i for i, (a, b) in enumerate(zip(before, tokens, strict=False)) if a != b), None)
        common = min(len(before), len(tokens)) if same is None else same
        expected_steps += len(tokens) - common
        hidden = drafter.hidden(tokens)
        torch.testing.assert_close(hidden, Drafter(MODEL, TRUNK, TEXT).hidden(tokens), atol=1e-5, rtol=0)
        before = tokens
    assert drafter.steps == expected_steps


def test_states_are_those_of_the_uncached_forward() -> None:
    drafter = Drafter(MODEL, TRUNK, TEXT)
    tokens = torch.randint(64, (1, 15), generator=torch.Generator().manual_seed(0))
    drafter.feed(tokens[0].tolist())
    valid = int(TEXT.mask.sum())
    with torch.no_grad():
        whole = MODEL.train_hidden(
            TEXT.features[None, -valid:], torch.ones(1, valid, dtype=torch.bool), tokens
        )
    torch.testing.assert_close(drafter.states[:16], whole[0], atol=1e-5, rtol=0)


def test_features_belong_to_the_state_that_predicted_the_token() -> None:
    drafter = Drafter(MODEL, TRUNK, TEXT)
    drafter.feed([3, 1, 4, 1])
    with torch.no_grad():
        expected = MODEL.features(drafter.states[1:3])
    assert torch.equal(drafter.features(1, 2), expected)
    assert expected.abs().max() > 1e-3


def test_the_callers_list_is_not_kept() -> None:
    drafter = Drafter(MODEL, TRUNK, TEXT)
    tokens = [1, 2]
    drafter.feed(tokens)
    tokens.append(3)
    assert drafter.fed == [1, 2]


@pytest.mark.parametrize("prompt", ["cat", "a red car with a smiling dog sunglasses"])
def test_padding_of_the_prompt_takes_no_cells(prompt: str) -> None:
    text = tiny_text().encode(prompt)
    assert Drafter(MODEL, TRUNK, text).cache.cells.shape[4] == int(text.mask.sum()) + 16
