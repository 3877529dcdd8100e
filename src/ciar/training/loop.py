"""The one training loop: seeded, resumable to the bit, with a JSON-lines log.

A stage is a :class:`Task`; the loop owns steps, learning rate, checkpoints and the log. All
randomness of step ``t`` comes from a generator seeded with (seed, t), so resuming needs the step
number, the weights and the optimiser state, and nothing else.
"""

from __future__ import annotations

import json
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ciar.errors import DataError, NumericalError

STATE_FILE = "state.pt"
STABLE_FILE = "state-before-decay.pt"


@dataclass(frozen=True)
class LoopConfig:
    """How long to train and how often to write.

    Attributes:
        steps: optimiser steps in all.
        warmup: steps of linear warm-up.
        decay: share of the steps, at the end, over which the rate falls linearly to zero.
        seed: of data order, augmentation and initialisation.
        log_every: steps between log lines.
        eval_every: steps between held-out evaluations.
        save_every_s: seconds between checkpoints.
        grad_clip: largest gradient norm (0 = no clipping).
    """

    steps: int = 1000
    warmup: int = 50
    decay: float = 0.4
    seed: int = 0
    log_every: int = 20
    eval_every: int = 200
    save_every_s: float = 180.0
    grad_clip: float = 1.0


class Task(ABC):
    """What one stage trains."""

    #: Modules whose weights are trained; saved and restored under these names.
    modules: dict[str, nn.Module]
    optimizers: list[torch.optim.Optimizer]

    @abstractmethod
    def loss(self, step: int, generator: torch.Generator) -> tuple[Tensor, dict[str, Any]]:
        """Loss of one batch, and figures for the log."""

    def after_step(self, step: int, generator: torch.Generator) -> None:  # noqa: B027
        """Called when the optimiser has stepped; most tasks have nothing to do."""

    def evaluate(self) -> dict[str, float]:
        """Held-out figures."""
        return {}


def rate_at(step: int, config: LoopConfig) -> float:
    """Learning-rate factor: linear warm-up, constant, linear decay (WSD)."""
    decay_steps = max(1, round(config.steps * config.decay))
    return min((step + 1) / max(1, config.warmup), 1.0, (config.steps - step) / decay_steps)


def batches(count: int, batch: int, seed: int, step: int) -> Tensor:
    """Indices of step ``step``: every epoch is a fresh permutation that depends on the seed alone."""
    start = step * batch
    out: list[Tensor] = []
    while batch > 0:
        epoch, offset = divmod(start, count)
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        taken = torch.randperm(count, generator=generator)[offset : offset + batch]
        out.append(taken)
        start += len(taken)
        batch -= len(taken)
    return torch.cat(out)


def train(task: Task, config: LoopConfig, out: Path, *, resume: bool = True) -> dict[str, Any]:
    """Trains a task to the end, or goes on from the last checkpoint in ``out``.

    Raises:
        NumericalError: the loss became NaN or infinite; the last checkpoint is kept.
        DataError: the checkpoint in ``out`` belongs to another setting.
    """
    out.mkdir(parents=True, exist_ok=True)
    step = _restore(task, config, out) if resume else 0
    (out / "config.json").write_text(json.dumps(asdict(config), indent=2) + "\n")
    base_rates = [[group.get("base_lr", group["lr"]) for group in o.param_groups] for o in task.optimizers]
    for optimizer, rates in zip(task.optimizers, base_rates, strict=True):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["base_lr"] = rate
    parameters = [p for o in task.optimizers for group in o.param_groups for p in group["params"]]
    decay_start = config.steps - round(config.steps * config.decay)
    saved_at = logged_at = time.monotonic()
    sums: dict[str, float] = {}
    summed = 0  # steps in the sums: fewer than log_every after a resumption and at the end
    last: dict[str, Any] = {}
    for module in task.modules.values():
        module.train()
    with (out / "log.jsonl").open("a") as log:
        while step < config.steps:
            generator = torch.Generator().manual_seed((config.seed << 32) + step)
            factor = rate_at(step, config)
            for optimizer in task.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = group["base_lr"] * factor
                optimizer.zero_grad(set_to_none=True)
            loss, figures = task.loss(step, generator)
            loss.backward()
            if config.grad_clip > 0:
                figures["grad_norm"] = torch.nn.utils.clip_grad_norm_(parameters, config.grad_clip)
            for optimizer in task.optimizers:
                optimizer.step()
            task.after_step(step, generator)
            step += 1
            summed += 1
            for name, value in {"loss": loss.detach(), **figures}.items():
                sums[name] = sums.get(name, 0.0) + float(value)
            if not sums["loss"] == sums["loss"] or abs(sums["loss"]) == float("inf"):
                raise NumericalError(
                    f"The loss became {sums['loss']} at step {step}. Lower the learning rate, or resume "
                    f"from the last checkpoint in {out}."
                )
            if step % config.log_every == 0 or step == config.steps:
                now = time.monotonic()
                last = {"step": step, "rate": factor, "seconds_a_step": (now - logged_at) / summed}
                last |= {name: total / summed for name, total in sums.items()}
                logged_at, sums, summed = now, {}, 0
                if step % config.eval_every == 0 or step == config.steps:
                    last |= {f"held_{name}": value for name, value in _evaluate(task).items()}
                    logged_at = time.monotonic()
                _write(log, last)
            if step == decay_start and config.decay > 0:
                _save(task, config, step, out / STABLE_FILE)
            if time.monotonic() - saved_at > config.save_every_s or step == config.steps:
                _save(task, config, step, out / STATE_FILE)
                saved_at = time.monotonic()
    return last


def read_log(out: Path) -> Iterator[dict[str, Any]]:
    """The lines of a run's log."""
    for line in (out / "log.jsonl").read_text().splitlines():
        yield json.loads(line)


def _write(log: Any, line: dict[str, Any]) -> None:
    text = json.dumps({k: round(v, 6) if isinstance(v, float) else v for k, v in line.items()})
    log.write(text + "\n")
    log.flush()
    sys.stderr.write(text + "\n")


@torch.no_grad()
def _evaluate(task: Task) -> dict[str, float]:
    for module in task.modules.values():
        module.eval()
    figures = task.evaluate()
    for module in task.modules.values():
        module.train()
    return figures


def _save(task: Task, config: LoopConfig, step: int, path: Path) -> None:
    state = {
        "step": step,
        "seed": config.seed,
        "modules": {name: module.state_dict() for name, module in task.modules.items()},
        "optimizers": [optimizer.state_dict() for optimizer in task.optimizers],
    }
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(path)  # a stop in the middle of a write never costs the last good checkpoint


def _restore(task: Task, config: LoopConfig, out: Path) -> int:
    path = out / STATE_FILE
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True, map_location="cpu")
    if state["seed"] != config.seed:
        raise DataError(
            f"{path} was trained with seed {state['seed']}, not {config.seed}. Use that seed to go "
            "on, another --out folder to start anew, or --no-resume to overwrite it."
        )
    if state["modules"].keys() != task.modules.keys():
        raise DataError(
            f"{path} holds {', '.join(sorted(state['modules']))}, and this run trains "
            f"{', '.join(sorted(task.modules))}. Go on with the settings that it was begun with, or begin "
            "anew with --no-resume."
        )
    for name, module in task.modules.items():
        module.load_state_dict(state["modules"][name])
    for optimizer, saved in zip(task.optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    return int(state["step"])
