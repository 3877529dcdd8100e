"""A picture's noise as tensors: the same numbers as the pure function, lanes apart."""

from __future__ import annotations

import torch

from ciar.decoding.noise import PictureNoise
from ciar.noise import ACCEPT_LANE, RESIDUAL_LANE, gumbel, uniform


def test_numbers_are_those_of_the_pure_function() -> None:
    noise = PictureNoise(seed=2**64 - 1, image=3, total=16, vocab_size=64)
    expected = gumbel(2**64 - 1, 3, [[4], [5]], range(64))
    assert noise.gumbel(4, 2).tolist() == expected.tolist()
    assert noise.accept(9) == float(uniform(2**64 - 1, 3, 9, 0, ACCEPT_LANE))
    assert noise.residual(9).tolist() == gumbel(2**64 - 1, 3, 9, range(64), RESIDUAL_LANE).tolist()


def test_pictures_differ_by_seed_and_by_image() -> None:
    tables = [PictureNoise(s, i, 4, 8).gumbel(0, 4) for s, i in ((0, 0), (0, 1), (1, 0))]
    for a in range(3):
        for b in range(a):
            assert not torch.equal(tables[a], tables[b])


def test_the_global_generator_plays_no_part() -> None:
    torch.manual_seed(1)
    before = PictureNoise(5, 0, 4, 8).gumbel(0, 4).clone()
    torch.manual_seed(2)
    state = torch.get_rng_state()
    after = PictureNoise(5, 0, 4, 8)
    assert torch.equal(after.gumbel(0, 4), before)
    after.accept(0), after.residual(0)
    assert torch.equal(torch.get_rng_state(), state)
