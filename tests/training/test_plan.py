"""The plan: kinds of codes, and what a register says of its region."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ciar.errors import DataError
from ciar.training.plan import CodeClusters, Plan


def two_kinds(vocab: int = 10) -> CodeClusters:
    return CodeClusters(torch.arange(vocab) % 3, torch.tensor([0.2, 1.0, 0.5]))


def test_codes_that_look_alike_are_of_one_kind_and_common_kinds_weigh_less() -> None:
    generator = torch.Generator().manual_seed(0)
    centres = torch.eye(8)[:4]
    group = torch.arange(40) % 4
    codebook = F.normalize(centres[group] + 0.05 * torch.randn(40, 8, generator=generator), dim=-1)
    codes = torch.cat([torch.arange(40), torch.zeros(500, dtype=torch.int64)])  # code 0 is the white
    clusters = CodeClusters.of(codebook, codes, kinds=4)
    for one in range(4):
        assert len(clusters.kind[group == one].unique()) == 1
    assert len(clusters.kind.unique()) == 4
    assert int(clusters.weights.argmin()) == int(clusters.kind[0])
    assert float(clusters.weights.min()) == pytest.approx(510**-0.5)


def test_no_more_kinds_than_codes() -> None:
    clusters = CodeClusters.of(torch.eye(5), torch.arange(5))
    assert len(clusters.kind.unique()) == 5


def test_a_register_names_the_kind_of_every_token_of_its_region() -> None:
    """Against a slow reading: token by token."""
    torch.manual_seed(0)
    clusters = two_kinds()
    plan = Plan(dim=6, grid=8, registers=16, clusters=clusters, width=3)
    hidden, codes = torch.randn(2, 16, 6), torch.randint(10, (2, 64))
    total = norm = 0.0
    with torch.no_grad():
        for row in range(2):
            for y in range(8):
                for x in range(8):
                    register, place = 4 * (y // 2) + x // 2, 2 * (y % 2) + x % 2
                    said = plan.say(plan.norm(hidden[row, register]))[3 * place : 3 * place + 3]
                    law = plan.name(F.silu(said)).log_softmax(-1)
                    kind = int(clusters.kind[codes[row, 8 * y + x]])
                    total -= float(clusters.weights[kind] * law[kind])
                    norm += float(clusters.weights[kind])
        assert float(plan(hidden, codes)) == pytest.approx(total / norm, rel=1e-5)


@pytest.mark.parametrize("registers", [0, 2, 9, 144])
def test_registers_that_do_not_tile_the_picture_are_refused(registers: int) -> None:
    with pytest.raises(DataError, match=f"{registers} registers .* 16 x 16 tokens"):
        Plan(dim=6, grid=16, registers=registers, clusters=two_kinds())
