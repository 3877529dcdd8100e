"""The training loop: what it schedules, what it logs, and that a resumed run is the same to the bit."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from ciar.errors import DataError, NumericalError
from ciar.training.loop import (
    STABLE_FILE,
    STATE_FILE,
    LoopConfig,
    Task,
    batches,
    rate_at,
    read_log,
    train,
)
from ciar.training.optim import Muon

#: A checkpoint after every step.
OFTEN = LoopConfig(steps=12, warmup=3, decay=0.5, log_every=4, eval_every=8, save_every_s=-1.0)


class Regression(Task):
    """Learns a linear map, with noise from the step's generator and two optimisers."""

    def __init__(self, fails_at: int | None = None, poison_at: int | None = None) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
        self.modules = {"model": self.model}
        matrices = [p for p in self.model.parameters() if p.ndim == 2]
        rest = [p for p in self.model.parameters() if p.ndim < 2]
        self.optimizers = [Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]
        self.fails_at, self.poison_at = fails_at, poison_at
        self.after: list[int] = []
        self.modes: list[tuple[str, bool]] = []

    def loss(self, step: int, generator: torch.Generator) -> tuple[Tensor, dict[str, float | Tensor]]:
        if step == self.fails_at:
            raise KeyboardInterrupt
        self.modes.append(("loss", self.model.training))
        x = torch.randn(8, 4, generator=generator)
        loss = (self.model(x) - x[:, :2]).square().mean()
        if step == self.poison_at:
            loss = loss * math.nan
        return loss, {"step_number": float(step)}

    def after_step(self, step: int, generator: torch.Generator) -> None:
        self.after.append(step)

    def evaluate(self) -> dict[str, float]:
        self.modes.append(("evaluate", self.model.training))
        return {"weight": float(self.model[0].weight.detach().sum())}


def weights(task: Regression) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in task.model.state_dict().items()}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert torch.equal(value, b[name]), name


# --- schedules --------------------------------------------------------------------------------------


def test_rate_warms_up_holds_and_decays() -> None:
    config = LoopConfig(steps=100, warmup=10, decay=0.4)
    rates = [rate_at(step, config) for step in range(100)]
    assert rates[0] == 0.1
    assert rates[9:61] == [1.0] * 52
    assert rates[80] == pytest.approx(0.5)
    assert rates[99] == pytest.approx(1 / 40)
    assert all(a <= b for a, b in pairwise(rates[:11]))
    assert all(a >= b for a, b in pairwise(rates[60:]))


def test_rate_without_warm_up_and_decay() -> None:
    config = LoopConfig(steps=5, warmup=0, decay=0.0)
    assert [rate_at(step, config) for step in range(5)] == [1.0] * 5


@given(count=st.integers(1, 40), batch=st.integers(1, 50), seed=st.integers(0, 5))
def test_every_epoch_has_every_index_once(count: int, batch: int, seed: int) -> None:
    steps = 3 * count  # at least three epochs
    order = torch.cat([batches(count, batch, seed, step) for step in range(steps)])
    assert len(order) == steps * batch
    for epoch in order[: len(order) // count * count].view(-1, count):
        assert sorted(epoch.tolist()) == list(range(count))


def test_epochs_and_seeds_differ() -> None:
    epochs = [tuple(batches(50, 50, 0, step).tolist()) for step in range(3)]
    assert len(set(epochs)) == 3
    assert tuple(batches(50, 50, 1, 0).tolist()) not in epochs


# --- resumption ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("stopped", [1, 5, 6, 7, 11])
def test_a_stopped_run_ends_as_an_uninterrupted_one(tmp_path: Path, stopped: int) -> None:
    whole = Regression()
    figures = train(whole, OFTEN, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(Regression(fails_at=stopped), OFTEN, tmp_path / "cut")
    torch.manual_seed(123)  # nothing may depend on the global generator
    second = Regression()
    with torch.no_grad():
        second.model[0].weight.zero_()  # what is restored comes from the checkpoint alone
    resumed = train(second, OFTEN, tmp_path / "cut")
    assert_same(weights(second), weights(whole))
    assert second.after == list(range(stopped, 12))
    for name in ("step", "rate", "held_weight", "step_number", "loss"):
        if stopped <= 8 or name not in ("step_number", "loss"):
            assert resumed[name] == figures[name], name


def test_a_finished_run_does_nothing_more(tmp_path: Path) -> None:
    first = Regression()
    train(first, OFTEN, tmp_path)
    again = Regression()
    assert train(again, OFTEN, tmp_path) == {}
    assert again.after == []
    assert_same(weights(again), weights(first))
    anew = Regression()
    train(anew, OFTEN, tmp_path, resume=False)
    assert anew.after == list(range(12))
    assert_same(weights(anew), weights(first))


def test_more_steps_go_on_from_the_end(tmp_path: Path) -> None:
    train(Regression(), OFTEN, tmp_path)
    longer = Regression()
    train(longer, LoopConfig(steps=15, warmup=3, save_every_s=-1.0), tmp_path)
    assert longer.after == [12, 13, 14]


def test_another_seed_is_refused(tmp_path: Path) -> None:
    train(Regression(), OFTEN, tmp_path)
    with pytest.raises(DataError, match="seed 0, not 1"):
        train(Regression(), LoopConfig(steps=12, seed=1), tmp_path)


def test_the_rate_of_a_resumed_run_is_not_scaled_twice(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(Regression(fails_at=2), OFTEN, tmp_path)
    task = Regression()
    train(task, OFTEN, tmp_path)
    assert [group["base_lr"] for o in task.optimizers for group in o.param_groups] == [0.02, 0.01]


def test_weights_before_the_decay_are_kept(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(Regression(fails_at=6), OFTEN, tmp_path)
    at_six = torch.load(tmp_path / STATE_FILE, weights_only=True)
    train(Regression(), OFTEN, tmp_path)
    stable = torch.load(tmp_path / STABLE_FILE, weights_only=True)
    assert stable["step"] == at_six["step"] == 6
    assert_same(stable["modules"]["model"], at_six["modules"]["model"])
    assert torch.load(tmp_path / STATE_FILE, weights_only=True)["step"] == 12
    assert not list(tmp_path.glob("*.partial"))


def test_checkpoints_are_rare_by_default(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(Regression(fails_at=5), LoopConfig(steps=12, decay=0.1), tmp_path)
    assert not (tmp_path / STATE_FILE).exists()


# --- the log and failures -------------------------------------------------------------------------------


def test_log_lines_average_their_own_steps(tmp_path: Path) -> None:
    config = LoopConfig(steps=10, warmup=1, log_every=4, eval_every=8)
    last = train(Regression(), config, tmp_path)
    lines = list(read_log(tmp_path))
    assert [line["step"] for line in lines] == [4, 8, 10]
    assert [line["step_number"] for line in lines] == [1.5, 5.5, 8.5]
    assert ["held_weight" in line for line in lines] == [False, True, True]
    assert all(line["grad_norm"] > 0 and line["seconds_a_step"] > 0 for line in lines)
    assert last["step_number"] == 8.5


def test_modes(tmp_path: Path) -> None:
    task = Regression()
    train(task, OFTEN, tmp_path)
    assert {mode for mode in task.modes if mode[0] == "loss"} == {("loss", True)}
    assert [mode for mode in task.modes if mode[0] == "evaluate"] == [("evaluate", False)] * 2


def test_gradients_are_clipped(tmp_path: Path) -> None:
    class Steep(Regression):
        def loss(self, step: int, generator: torch.Generator) -> Any:
            loss, figures = super().loss(step, generator)
            return loss * 1e4, figures

        def after_step(self, step: int, generator: torch.Generator) -> None:
            total = torch.stack([p.grad.norm() for p in self.model.parameters() if p.grad is not None])
            assert total.norm() <= 0.5 + 1e-4

    train(Steep(), LoopConfig(steps=3, grad_clip=0.5), tmp_path)


def test_nan_stops_and_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(NumericalError, match=r"nan at step 8.*learning rate"):
        train(Regression(poison_at=7), OFTEN, tmp_path)
    state = torch.load(tmp_path / STATE_FILE, weights_only=True)
    assert state["step"] == 7
    assert all(value.isfinite().all() for value in state["modules"]["model"].values())
