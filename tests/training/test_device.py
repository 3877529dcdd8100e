"""Training the device model: its start, its two tasks, and the agreement that is reported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import TINY_GPT, tiny_gpt, tiny_text
from torch import Tensor

from ciar.intervals.scores import total_variation
from ciar.models.device import DeviceConfig, DeviceModel
from ciar.training import device as device_module
from ciar.training.captions import CaptionBank
from ciar.training.data.emoji import Icon
from ciar.training.device import DeviceTask, DeviceTrainConfig, FeatureTask, agreement, start_from_cloud
from ciar.training.loop import LoopConfig, train
from ciar.training.losses import Target, coverage_loss
from ciar.training.teacher import TeacherSet, build_teacher_set, guided_logits

ICONS = [Icon(name, "a", "train", ()) for name in ("red-cat", "dog", "smiling-sun", "car", "red-car", "cat")]
BANK = CaptionBank(ICONS, tiny_text())
CLOUD = tiny_gpt().requires_grad_(False)
PICTURES = torch.arange(24) % 6
CODES = torch.randint(64, (24, 16), generator=torch.Generator().manual_seed(0))
SETTINGS = DeviceTrainConfig(batch=8, lr=5e-3, compile=False)
LOOP = LoopConfig(steps=40, warmup=2, log_every=40, eval_every=40)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> TeacherSet:
    return build_teacher_set(CLOUD, CODES, PICTURES, BANK.mixed, 2.0, tmp_path_factory.mktemp("teacher"))


def fresh_device(layers: int = 1, multiplier: float | None = None) -> DeviceModel:
    torch.manual_seed(0)
    trunk = replace(TINY_GPT, n_layer=layers, ffn_dim_multiplier=multiplier)
    return DeviceModel(DeviceConfig(trunk=trunk, radius_rank=4, feature_dim=32, feature_hidden=8))


# --- the start ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("multiplier", [None, 2.0])
def test_it_starts_as_the_clouds_last_layer(multiplier: float | None) -> None:
    """Embeddings, one block and head of the cloud; a wider feed-forward starts silent."""
    device = fresh_device(multiplier=multiplier)
    start_from_cloud(device, CLOUD)
    one_layer = tiny_gpt()
    del one_layer.layers[0]
    features, mask = BANK.mixed([0, 1])
    with torch.no_grad():
        hidden = device.train_hidden(features, mask, CODES[:2])
        expected = one_layer.train_hidden(features, mask, CODES[:2])
        torch.testing.assert_close(hidden, expected, atol=1e-5, rtol=0.0)
        centre = device.head.centre_logits(hidden)
        torch.testing.assert_close(centre, one_layer.head(expected), atol=1e-4, rtol=0.0)
    if multiplier:
        assert device.trunk.config.ffn_hidden > TINY_GPT.ffn_hidden
        w1 = device.trunk.blocks[0].feed_forward.w1.weight[TINY_GPT.ffn_hidden :]
        assert w1.abs().max() > 0  # the new columns can learn


def test_the_reader_starts_as_the_clouds_lower_layers_and_only_its_output_is_trained(
    teacher: TeacherSet, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    config = DeviceConfig.for_cloud(TINY_GPT, radius_rank=4, reader=replace(TINY_GPT, n_layer=1))
    device = DeviceModel(config)
    start_from_cloud(device, CLOUD)
    assert device.reader is not None
    features, mask = BANK.mixed([0, 1])
    read = CLOUD.residual_of(CLOUD.embed_text(features), mask, 1)
    reader = device.reader.trunk
    torch.testing.assert_close(reader.residual_of(reader.embed_text(features), mask), read)
    before = {name: value.clone() for name, value in device.reader.state_dict().items()}
    train(DeviceTask(device, teacher, None, teacher, BANK, SETTINGS, LOOP), replace(LOOP, steps=2), tmp_path)
    changed = {n for n, value in device.reader.state_dict().items() if not torch.equal(value, before[n])}
    assert changed == {"out.weight"}


def test_two_layers_start_alike() -> None:
    device = fresh_device(layers=2)
    start_from_cloud(device, CLOUD, layer=0)
    first = CLOUD.layers[0].state_dict()
    for block in device.trunk.layers:
        for name, value in block.state_dict().items():
            assert torch.equal(value, first[name])


# --- distillation ----------------------------------------------------------------------------------------


def test_what_comes_before_the_first_learned_position_is_not_learned(teacher: TeacherSet) -> None:
    device = fresh_device()
    start_from_cloud(device, CLOUD)
    rows = torch.arange(4)
    features, mask = BANK.mixed(PICTURES[rows])
    target = teacher.target(rows)
    losses = {}
    for first in (0, 5, 15):
        task = DeviceTask(device, teacher, None, teacher, BANK, replace(SETTINGS, first=first), LOOP)
        losses[first], _ = task.batch_loss(features, mask, CODES[rows], *target)
    law = device.head(device.train_hidden(features, mask, CODES[rows, :-1]))
    losses = {first: loss.detach() for first, loss in losses.items()}
    for first, loss in losses.items():
        kept = Target(*(x.reshape(4, 16, -1)[:, first:].flatten(0, 1) for x in target))
        own = (x.detach()[:, first:].flatten(0, 1) for x in law)
        torch.testing.assert_close(loss, coverage_loss(*own, kept, SETTINGS.coverage)[0])
    assert len({round(float(loss), 6) for loss in losses.values()}) == 3


def test_agreement_is_the_definition(teacher: TeacherSet, monkeypatch: pytest.MonkeyPatch) -> None:
    device = fresh_device().eval()
    start_from_cloud(device, CLOUD)
    rows: list[int] = []
    hidden_of = device.train_hidden
    monkeypatch.setattr(device_module, "_AGREED", 5 * 16 + 3)
    monkeypatch.setattr(device, "train_hidden", lambda f, m, c: rows.append(len(c)) or hidden_of(f, m, c))
    found = agreement(device, teacher, BANK, batch=7)
    assert rows == [5, 5, 5, 5, 4]  # as many positions as may be in memory
    monkeypatch.undo()
    features, mask = BANK.mixed(PICTURES)
    with torch.no_grad():
        p = guided_logits(CLOUD, features, mask, CODES, 2.0)
        q = device.head.centre_logits(device.train_hidden(features, mask, CODES[:, :-1]))
    assert found["greedy"] == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).float().mean()), abs=1e-6)
    tv = total_variation(p.softmax(-1), q.softmax(-1)).mean()
    assert found["tv"] == pytest.approx(float(tv), abs=2e-3)  # the cache is float16
    ce = -(p.softmax(-1) * q.log_softmax(-1)).sum(-1).mean()
    assert found["ce"] == pytest.approx(float(ce), abs=1e-2)


@pytest.mark.parametrize("loss", ["coverage", "inter-dro"])
def test_it_comes_closer_to_the_cloud(teacher: TeacherSet, tmp_path: Path, loss: str) -> None:
    device = fresh_device()
    start_from_cloud(device, CLOUD)
    before = agreement(device, teacher, BANK)
    config = replace(SETTINGS, loss=loss)  # type: ignore[arg-type]
    task = DeviceTask(device, teacher, None, teacher, BANK, config, LOOP)
    figures = train(task, LOOP, tmp_path)
    assert figures["held_tv"] < before["tv"] - 0.05
    assert figures["held_ce"] < before["ce"]


def test_drifted_sequences_make_up_their_share(teacher: TeacherSet) -> None:
    seen: list[Tensor] = []

    class Watching(DeviceTask):
        def batch_loss(self, features: Tensor, mask: Tensor, codes: Tensor, *rest: Tensor):  # type: ignore[no-untyped-def]
            seen.append(codes)
            return super().batch_loss(features, mask, codes, *rest)

    drifted = TeacherSet(CODES + 0, PICTURES, teacher.indices, teacher.logits)
    drifted.codes = torch.full_like(CODES, 63)
    config = replace(SETTINGS, drift_share=0.25)
    task = Watching(fresh_device(), teacher, drifted, teacher, BANK, config, LOOP)
    loss, _ = task.loss(0, torch.Generator())
    assert loss.isfinite()
    assert int((seen[0] == 63).all(-1).sum()) == 2
    assert len(seen[0]) == 8


def test_radius_alone(teacher: TeacherSet, tmp_path: Path) -> None:
    device = fresh_device()
    start_from_cloud(device, CLOUD)
    before = {name: value.clone() for name, value in device.state_dict().items()}
    config = replace(SETTINGS, train_trunk=False)
    task = DeviceTask(device, teacher, None, teacher, BANK, config, LOOP)
    train(task, replace(LOOP, steps=3), tmp_path)
    changed = {name for name, value in device.state_dict().items() if not torch.equal(value, before[name])}
    assert changed
    assert all(name.startswith(("head.up", "head.down")) for name in changed), changed


# --- the feature map ---------------------------------------------------------------------------------------


def test_the_feature_map_learns_and_nothing_else_moves(teacher: TeacherSet, tmp_path: Path) -> None:
    device = fresh_device()
    start_from_cloud(device, CLOUD)
    before = {name: value.clone() for name, value in device.state_dict().items()}
    task = FeatureTask(device, CLOUD, teacher, BANK, 0.5, 2.0, replace(SETTINGS, lr=1e-2), LOOP)
    with torch.no_grad():
        first = task.evaluate()
    assert first["with"] == pytest.approx(first["without"], abs=1e-6)  # it starts silent
    figures = train(task, LOOP, tmp_path)
    assert figures["held_with"] < figures["held_without"]
    assert figures["held_without"] == pytest.approx(first["without"], abs=1e-5)
    for name, value in device.state_dict().items():
        assert torch.equal(value, before[name]) != name.startswith("phi."), name


def test_without_corruption_the_target_is_met(teacher: TeacherSet) -> None:
    """No swapped token: the cloud's law after the seen prefix is the clean one, its CE the entropy."""
    device = fresh_device()
    task = FeatureTask(device, CLOUD, teacher, BANK, 0.0, 2.0, SETTINGS, LOOP)
    rows = torch.arange(4)
    with torch.no_grad():
        loss = task.rows_loss(rows, torch.Generator().manual_seed(0), features_on=False)
    target = teacher.target(rows)
    entropy = -(target.log_probs.exp() * target.log_probs).sum(-1).mean()
    assert float(loss) == pytest.approx(float(entropy), abs=1e-2)
