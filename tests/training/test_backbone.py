"""The backbone stage: caption dropout, the start from the codebook, and that it learns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tiny import TINY_GPT, tiny_gpt, tiny_text

from ciar.models.gpt import GPT
from ciar.training.backbone import (
    EMOJI_GPT,
    BackboneConfig,
    BackboneTask,
    drop_captions,
    start_from_codebook,
)
from ciar.training.captions import CaptionBank, indices_of
from ciar.training.data.emoji import Icon
from ciar.training.loop import LoopConfig, train

ICONS = [
    Icon(name, "a", "held_name" if name == "sun" else "train", ("red",))
    for name in ("cat", "dog", "car", "sun", "sunglasses")
] * 4
CODEBOOK = F.normalize(torch.randn(64, 8, generator=torch.Generator().manual_seed(0)), dim=-1)


def test_the_size_that_ships() -> None:
    with torch.device("meta"):
        count = sum(p.numel() for p in GPT(EMOJI_GPT).parameters())
    assert 8e6 <= count <= 20e6
    assert EMOJI_GPT.tokens == 256


def test_whole_captions_are_dropped_and_their_padding_stays() -> None:
    model = tiny_gpt()
    features = torch.randn(4000, 3, 16, generator=torch.Generator().manual_seed(0))
    dropped = drop_captions(model, features, 0.1, torch.Generator().manual_seed(1))
    null = model.cls_embedding.uncond_embedding[-3:]
    is_null = (dropped == null).flatten(1).all(-1)
    # Four standard deviations of a share of 4,000.
    assert float(is_null.float().mean()) == pytest.approx(0.1, abs=0.019)
    assert torch.equal(dropped[~is_null], features[~is_null])
    assert torch.equal(drop_captions(model, features, 0.0, torch.Generator()), features)


def test_codes_that_look_alike_start_alike() -> None:
    torch.manual_seed(0)
    model = tiny_gpt()
    codebook = CODEBOOK.clone()
    codebook[1] = codebook[0] + 0.001
    start_from_codebook(model, codebook)
    for weight in (model.tok_embeddings.weight, model.output.weight):
        similarity = F.cosine_similarity(weight[0], weight, dim=-1)
        assert similarity[1] > similarity[2:].max()


def make_task(loop: LoopConfig) -> BackboneTask:
    codes = torch.randint(8, (len(ICONS), 16), generator=torch.Generator().manual_seed(2))
    return BackboneTask(
        codes,
        CaptionBank(ICONS, tiny_text()),
        indices_of(ICONS, "train"),
        indices_of(ICONS, "held_name"),
        CODEBOOK,
        TINY_GPT,
        BackboneConfig(batch=8, lr=5e-3, compile=False),
        loop,
    )


def test_it_learns_which_codes_there_are(tmp_path: Path) -> None:
    """Eight codes of 64 occur: the held-out loss falls from log 64 towards log 8."""
    loop = LoopConfig(steps=60, warmup=3, log_every=60, eval_every=60)
    task = make_task(loop)
    before = task.evaluate()["loss"]
    figures = train(task, loop, tmp_path)
    assert before == pytest.approx(4.16, abs=0.3)
    assert figures["held_loss"] < 2.7


def test_the_held_loss_does_not_depend_on_batches() -> None:
    task = make_task(LoopConfig())
    index = torch.arange(20)
    assert task.held_loss(index, batch=3) == pytest.approx(task.held_loss(index, batch=20), abs=1e-5)


def test_a_batch_is_a_function_of_the_step() -> None:
    tasks = [make_task(LoopConfig(seed=1)) for _ in range(2)]
    losses = []
    for task in tasks:
        torch.manual_seed(len(losses))
        losses.append(float(task.loss(3, torch.Generator().manual_seed(9))[0].detach()))
    assert losses[0] == losses[1]
