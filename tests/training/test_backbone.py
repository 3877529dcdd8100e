"""The backbone stage: caption dropout, the start from the codebook, and that it learns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tiny import TINY_GPT, tiny_gpt, tiny_text

from ciar.errors import DataError
from ciar.models.gpt import GPT
from ciar.training.backbone import (
    EMOJI_GPT,
    BackboneConfig,
    BackboneTask,
    Plan,
    drop_captions,
    start_from_codebook,
    with_noise,
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


def test_noise_replaces_codes_of_every_other_picture_by_codes_of_the_batch() -> None:
    codes = torch.arange(4000 * 16).view(4000, 16)
    fed = with_noise(codes, 0.3, torch.Generator().manual_seed(0))
    changed = (fed != codes).float().mean(dim=1)
    assert float((changed == 0).float().mean()) == pytest.approx(
        0.5 + 0.5 * 0.155, abs=0.03
    )  # and few by luck
    assert float(changed.mean()) == pytest.approx(0.3 / 4, abs=0.005)
    assert fed.max() < codes.numel()
    assert with_noise(codes, 0.0, torch.Generator()) is codes


def test_the_plan_is_the_law_of_each_regions_codes() -> None:
    """Against a slow reading: region by region, token by token."""
    torch.manual_seed(0)
    plan = Plan(dim=6, vocab_size=10, grid=8, regions=4, width=3)
    hidden, weights = torch.randn(2, 6), torch.rand(10) + 0.1
    codes = torch.randint(10, (2, 64))
    total = norm = 0.0
    with torch.no_grad():
        for row in range(2):
            said = plan.say(hidden[row]).view(16, 3)
            for y in range(8):
                for x in range(8):
                    code = int(codes[row, 8 * y + x])
                    law = plan.codes(F.silu(said[4 * (y // 2) + x // 2])).log_softmax(-1)
                    total -= float(weights[code] * law[code])
                    norm += float(weights[code])
        assert float(plan(hidden, codes, weights)) == pytest.approx(total / norm, rel=1e-5)


def test_the_plan_trains_how_the_text_is_read_and_leaves_nothing_in_the_model(tmp_path: Path) -> None:
    loop = LoopConfig(steps=2, warmup=1, log_every=1, eval_every=2)
    task = make_task(loop)
    features, mask = task.captions.fixed(task.train_index)
    hidden = task.model.train_hidden(features, mask, task.codes[task.train_index][:, :0])[:, 0]
    task.plan(hidden, task.codes[task.train_index], task.weights).backward()
    for weight in (task.model.cls_embedding.cap_proj.fc1.weight, task.model.blocks[0].attention.wqkv.weight):
        assert weight.grad is not None
        assert float(weight.grad.abs().max()) > 0
    assert task.model.output.weight.grad is None
    figures = train(task, loop, tmp_path)
    assert figures["loss"] == pytest.approx(figures["next"] + 0.5 * figures["plan"], rel=1e-4)
    assert not any("plan" in name for name in task.model.state_dict())


def test_a_checkpoint_without_a_plan_is_refused_in_a_sentence(tmp_path: Path) -> None:
    loop = LoopConfig(steps=1, warmup=1)
    task = make_task(loop)
    del task.modules["plan"]
    task.optimizers = task.optimizers[:2]
    train(task, loop, tmp_path)
    with pytest.raises(DataError, match="this run trains gpt, plan"):
        train(make_task(loop), loop, tmp_path)
