"""The backbone stage: caption dropout, the start from the codebook, and that it learns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tiny import TINY_GPT, tiny_gpt, tiny_text

from ciar.errors import DataError
from ciar.models.gpt import GPT
from ciar.models.text import StaticTextEncoder
from ciar.training.backbone import (
    EMOJI_GPT,
    BackboneConfig,
    BackboneTask,
    drop_captions,
    fit_null_caption,
    start_from_codebook,
    with_noise,
)
from ciar.training.captions import CaptionBank, indices_of
from ciar.training.data.emoji import Icon
from ciar.training.loop import LoopConfig, train
from ciar.training.text import make_registers

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


def make_task(loop: LoopConfig, registers: int = 4, plan_first: int = 0) -> BackboneTask:
    text = tiny_text()
    rows = make_registers(registers, text.caption_dim)
    config = BackboneConfig(
        batch=8, plan_batch=8, plan_first=plan_first, plan_layers=1, lr=5e-3, compile=False
    )
    codes = torch.randint(8, (len(ICONS), 16), generator=torch.Generator().manual_seed(2))
    return BackboneTask(
        codes,
        CaptionBank(ICONS, StaticTextEncoder(text.vocabulary, text.table, text.text_len, rows)),
        indices_of(ICONS, "train"),
        indices_of(ICONS, "held_name"),
        CODEBOOK,
        TINY_GPT,
        config,
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


def test_the_plan_trains_how_the_text_is_read_and_leaves_nothing_in_the_model(tmp_path: Path) -> None:
    loop = LoopConfig(steps=2, warmup=1, log_every=1, eval_every=2)
    task = make_task(loop)
    features, mask = task.captions.fixed(task.train_index)
    task.plan_loss(features, mask, task.codes[task.train_index]).backward()
    for weight in (task.model.cls_embedding.cap_proj.fc1.weight, task.model.blocks[0].attention.wqkv.weight):
        assert weight.grad is not None
        assert float(weight.grad.abs().max()) > 0
    # Read half-way: what is behind has no part in it.
    assert task.model.blocks[1].attention.wqkv.weight.grad is None
    assert task.model.output.weight.grad is None
    figures = train(task, loop, tmp_path)
    assert figures["loss"] == pytest.approx(figures["next"] + 0.5 * figures["plan"], rel=1e-4)
    assert not any("plan" in name for name in task.model.state_dict())


def test_the_plan_alone_at_first_leaves_the_upper_blocks_as_they_were(tmp_path: Path) -> None:
    loop = LoopConfig(steps=2, warmup=1, log_every=1)
    task = make_task(loop, plan_first=2)
    upper, lower = (task.model.blocks[i].attention.wqkv.weight.detach().clone() for i in (1, 0))
    figures = train(task, loop, tmp_path)
    assert figures["loss"] == figures["plan"]
    assert "next" not in figures
    assert torch.equal(task.model.blocks[1].attention.wqkv.weight, upper)
    assert not torch.equal(task.model.blocks[0].attention.wqkv.weight, lower)


def test_without_registers_there_is_no_plan() -> None:
    task = make_task(LoopConfig(), registers=0)
    assert set(task.modules) == {"gpt"}
    _, figures = task.loss(0, torch.Generator())
    assert float(figures["plan"]) == 0.0
    with pytest.raises(DataError, match="first 2 steps are to learn the plan"):
        make_task(LoopConfig(), registers=0, plan_first=2)


def test_a_longer_null_caption_keeps_what_an_older_model_had_of_it() -> None:
    model = tiny_gpt()
    name = "cls_embedding.uncond_embedding"
    old = {name: torch.randn(5, 16), "other": torch.ones(1)}
    fitted = fit_null_caption(old, model)
    assert fitted[name].shape == (8, 16)
    assert torch.equal(fitted[name][-5:], old[name])
    assert torch.equal(fitted[name][:3], model.cls_embedding.uncond_embedding[:3])
    longer = {name: torch.randn(9, 16)}
    assert fit_null_caption(longer, model) is longer  # left to the strict check


def test_a_checkpoint_without_a_plan_is_refused_in_a_sentence(tmp_path: Path) -> None:
    loop = LoopConfig(steps=1, warmup=1)
    task = make_task(loop)
    del task.modules["plan"]
    task.optimizers = task.optimizers[:2]
    train(task, loop, tmp_path)
    with pytest.raises(DataError, match="this run trains gpt, plan"):
        train(make_task(loop), loop, tmp_path)
