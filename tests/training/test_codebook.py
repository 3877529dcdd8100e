"""Unused codes are spent where they help most, and nothing else moves."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ciar.training.codebook import inherit_rows, refill, split_codes

GENERATOR = torch.Generator


def clusters(centres: Tensor, each: int, spread: float, seed: int = 0) -> Tensor:
    """Unit vectors around centres, [centres * each, dim]."""
    noise = torch.randn(len(centres), each, centres.shape[1], generator=GENERATOR().manual_seed(seed))
    return F.normalize(centres[:, None] + spread * noise, dim=-1).flatten(0, 1)


@pytest.fixture(name="crowded")
def _crowded() -> tuple[Tensor, Tensor, Tensor]:
    """Codes 0 and 1 stand for one tight cluster each, code 2 for two far ones; code 3 is unused."""
    centres = F.normalize(torch.randn(4, 8, generator=GENERATOR().manual_seed(1)), dim=-1)
    latents = clusters(centres, 200, 0.02)
    codes = torch.tensor([0, 1, 2, 2]).repeat_interleave(200)
    book = torch.stack([centres[0], centres[1], F.normalize(centres[2] + centres[3], dim=0), -centres[0]])
    return book, latents, codes


def test_the_crowded_code_is_split_into_its_two_clusters(crowded: tuple[Tensor, Tensor, Tensor]) -> None:
    book, latents, codes = crowded
    new, after, parents = refill(book, latents, codes, rate=0.0)
    assert parents == {3: 2}
    assert len(after[400:600].unique()) == len(after[600:].unique()) == 1
    assert after[400] != after[600]
    assert torch.equal(after[:400], codes[:400])
    torch.testing.assert_close(new[:2], book[:2])
    error = (new[after] - latents).square().sum(-1).mean()
    assert error < 0.1 * (book[codes] - latents).square().sum(-1).mean()


def test_the_gain_is_the_distance_saved_less_the_price_of_the_entropy(
    crowded: tuple[Tensor, Tensor, Tensor],
) -> None:
    _, latents, codes = crowded
    rate = 0.01
    split = split_codes(latents, codes, 4, rate)
    inside = codes == 2
    whole = F.normalize(latents[inside].sum(0), dim=0)
    before = (latents[inside] - whole).square().sum()
    halves = split.children[2][split.side[inside]]
    after = (latents[inside] - halves).square().sum()
    nats = 400 * torch.tensor(2.0).log()  # two equal halves
    torch.testing.assert_close(split.gain[2], before - after - rate * nats, rtol=1e-3, atol=1e-3)
    assert split.gain[3] == -torch.inf, "an unused code cannot be split"


def test_a_full_codebook_is_left_alone() -> None:
    centres = F.normalize(torch.randn(4, 8, generator=GENERATOR().manual_seed(2)), dim=-1)
    latents = clusters(centres, 100, 0.1)
    codes = torch.arange(4).repeat_interleave(100)
    new, after, parents = refill(centres, latents, codes, rate=0.002)
    assert not parents
    assert torch.equal(after, codes)
    assert torch.equal(new, centres)


def test_too_few_latents_to_split_end_the_refilling() -> None:
    centres = F.normalize(torch.randn(4, 8, generator=GENERATOR().manual_seed(3)), dim=-1)
    latents = clusters(centres[:1], 10, 0.1)
    _, after, parents = refill(centres, latents, torch.zeros(10, dtype=torch.int64), rate=0.0)
    assert not parents
    assert not after.any()


def test_all_dead_codes_are_used_when_there_is_enough_to_split() -> None:
    latents = F.normalize(torch.randn(8000, 8, generator=GENERATOR().manual_seed(4)), dim=-1)
    book = F.normalize(torch.randn(64, 8, generator=GENERATOR().manual_seed(5)), dim=-1)
    codes = (latents @ book[:20].T).argmax(-1)
    new, after, parents = refill(book, latents, codes, rate=0.0)
    assert len(after.unique()) == 64
    assert set(parents) == set(range(20, 64))
    assert set(parents.values()) <= set(range(20)), "the ancestor is a code that was in use before"
    torch.testing.assert_close(new.norm(dim=-1), torch.ones(64))


def test_refilled_codes_start_as_their_parents() -> None:
    tensors = {
        "tok_embeddings.weight": torch.arange(12.0).view(4, 3),
        "output.weight": torch.arange(12.0).view(4, 3) + 100,
        "norm.weight": torch.ones(3),
    }
    out = inherit_rows(tensors, {3: 1, 0: 1})
    for name in ("tok_embeddings.weight", "output.weight"):
        assert torch.equal(out[name][3], tensors[name][1])
        assert torch.equal(out[name][0], tensors[name][1])
        assert torch.equal(out[name][2], tensors[name][2])
    assert out["norm.weight"] is tensors["norm.weight"]
    assert tensors["output.weight"][3, 0] == 109, "the given weights stay as they are"


def test_weights_stay_as_they_are_where_nothing_was_refilled() -> None:
    tensors = {"tok_embeddings.weight": torch.ones(4, 3), "output.weight": torch.zeros(4, 3)}
    out = inherit_rows(tensors, {})
    assert all(torch.equal(out[name], tensors[name]) for name in tensors)
