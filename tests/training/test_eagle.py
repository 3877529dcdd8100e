"""The EAGLE stage: its losses by hand, what it learns, how it resumes, and its place in the folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny import TINY_GPT
from tiny_run import write_tiny_data, write_tiny_stages

from ciar.models.bundle import load_bundle
from ciar.models.eagle import EagleModel
from ciar.pipeline import Pipeline
from ciar.training.assemble import assemble
from ciar.training.distil import load_inputs
from ciar.training.eagle import EagleTask, EagleTrainConfig, train_eagle
from ciar.training.loop import LoopConfig, read_log

CONFIG = EagleTrainConfig(batch=4, lr=2e-3, held=4, compile=False)
LOOP = LoopConfig(steps=6, warmup=1, log_every=1, eval_every=6, grad_clip=0.5)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    write_tiny_data(folder / "data", 40)
    write_tiny_stages(folder)
    (folder / "codes").mkdir()
    codes = np.random.default_rng(0).integers(0, 64, (40, 16)).astype(np.uint16)
    np.save(folder / "codes" / "codes.npy", codes)
    return folder


def stages(work: Path) -> dict[str, Path]:
    return {name: work / name for name in ("data", "text", "codes", "backbone")}


def task_of(work: Path, config: EagleTrainConfig = CONFIG) -> EagleTask:
    inputs = load_inputs(**stages(work))
    eagle = EagleModel(TINY_GPT)
    eagle.start_from(inputs.cloud)
    return EagleTask(eagle, inputs, config, LOOP)


def test_it_starts_as_the_sum_and_the_last_layer(work: Path) -> None:
    task = task_of(work)
    x, features = torch.randn(2, 3, 32), torch.randn(2, 3, 32)
    torch.testing.assert_close(task.eagle.merge(x, features), x + features)
    last = task.cloud.layers[-1].state_dict()
    assert all(torch.equal(value, last[name]) for name, value in task.eagle.layer.state_dict().items())


@torch.no_grad()
def test_losses_by_hand(work: Path) -> None:
    task = task_of(work)
    pictures, null = torch.arange(3), torch.tensor([False, True, False])
    x, hidden, mask = task.read(pictures, null)
    text = mask.shape[1]
    assert x.shape == hidden.shape == (3, text + 15, 32)
    # Features are those of the model's own teacher-forced pass, and the null caption is the second row's.
    features, _ = task.inputs.captions.mixed(pictures)
    features[1] = task.cloud.cls_embedding.uncond_embedding[-text:]
    codes = task.inputs.codes[pictures]
    torch.testing.assert_close(hidden[:, text - 1 :], task.cloud.train_hidden(features, mask, codes[:, :-1]))
    near, law = task.losses(x, hidden, mask, torch.zeros_like(hidden))
    estimate = task.eagle.estimate(task.cloud, x, hidden, mask)
    gap = (estimate - hidden[:, text:]).abs()
    by_hand = torch.where(gap < 1, 0.5 * gap.square(), gap - 0.5).mean()
    torch.testing.assert_close(near, by_hand)
    p, q = (task.cloud.head(h).double().softmax(-1) for h in (hidden[:, text:], estimate))
    torch.testing.assert_close(law, -(p * q.log()).sum(-1).mean().float())


@torch.no_grad()
def test_an_estimate_reads_no_later_token_and_no_padding(work: Path) -> None:
    task = task_of(work)
    x, hidden, mask = task.read(torch.tensor([0, 12, 38, 39]), torch.zeros(4, dtype=torch.bool))
    text = mask.shape[1]
    plain = task.eagle.estimate(task.cloud, x, hidden, mask)
    later_x, later_h = x.clone(), hidden.clone()
    later_x[:, text + 6 :] += 1.0  # token 6 on
    later_h[:, text + 5 :] += 1.0  # features that predict token 6 on
    changed = task.eagle.estimate(task.cloud, later_x, later_h, mask)
    torch.testing.assert_close(plain[:, :6], changed[:, :6])
    assert not torch.allclose(plain[:, 6], changed[:, 6])
    assert not mask.all()
    padded = torch.where(mask[:, :, None], 0.0, 5.0)
    noisy = [torch.cat([part[:, :text] + padded, part[:, text:]], dim=1) for part in (x, hidden)]
    torch.testing.assert_close(plain, task.eagle.estimate(task.cloud, *noisy, mask))


def test_it_learns_and_resumes_to_the_bit(work: Path, tmp_path: Path) -> None:
    figures = train_eagle(**stages(work), out=tmp_path / "a", loop=LOOP, config=CONFIG)
    assert set(figures) >= {"loss", "feature", "law", "held_greedy", "held_tv", "held_feature"}
    lines = list(read_log(tmp_path / "a"))
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert lines[0]["loss"] == pytest.approx(lines[0]["feature"] + 0.1 * lines[0]["law"], abs=1e-4)
    half = LoopConfig(steps=3, warmup=1, decay=0.0, log_every=1, eval_every=6, grad_clip=0.5)
    whole = LoopConfig(steps=6, warmup=1, decay=0.0, log_every=1, eval_every=6, grad_clip=0.5)
    train_eagle(**stages(work), out=tmp_path / "b", loop=half, config=CONFIG)
    train_eagle(**stages(work), out=tmp_path / "b", loop=whole, config=CONFIG)
    train_eagle(**stages(work), out=tmp_path / "c", loop=whole, config=CONFIG)
    resumed, straight = (load_file(tmp_path / name / "eagle.safetensors") for name in "bc")
    assert all(torch.equal(value, straight[name]) for name, value in resumed.items())


def test_a_drafter_is_packed_where_there_is_one(work: Path, tmp_path: Path) -> None:
    assemble(work, tmp_path / "without")
    assert not load_bundle(tmp_path / "without").has_eagle
    train_eagle(**stages(work), out=work / "eagle", loop=LOOP, config=CONFIG)
    sizes = assemble(work, tmp_path / "with")
    assert sizes["eagle.safetensors"] < (work / "eagle" / "eagle.safetensors").stat().st_size
    pipe = Pipeline.from_pretrained(tmp_path / "with")
    base, eagle = (pipe("a red cat", seed=2, strategy=name).tokens for name in ("base", "eagle2"))
    assert base == eagle
