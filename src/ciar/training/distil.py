"""The device stage from folders to weights: teacher caches, two rounds of distillation, feature map.

Round one learns from the teacher on real pictures. Its device model then continues real prefixes by
itself, and round two learns from the teacher on those too, half of each batch: the contexts that the
device meets when it runs on its own tokens.
"""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ciar.decoding.sampling import SamplingLaw
from ciar.models.checkpoint import load_strict, read_tensors, save_tensors
from ciar.models.device import DeviceConfig, DeviceModel
from ciar.models.family import CloudModel
from ciar.models.gpt import GPT, GPTConfig
from ciar.models.text import StaticTextEncoder
from ciar.training.bank import Captions
from ciar.training.caches import save_array
from ciar.training.captions import CaptionBank, indices_of, load_captions
from ciar.training.device import (
    DeviceTask,
    DeviceTrainConfig,
    FeatureTask,
    LossName,
    agreement,
    start_from_cloud,
)
from ciar.training.loop import LoopConfig, train
from ciar.training.teacher import TEACHER_TOP_K, TeacherSet, build_teacher_set, drifted_sequences

#: Loop of the emoji device model: the second, longer round.
DEVICE_LOOP = LoopConfig(steps=3000, warmup=50, decay=0.5, eval_every=250)


@dataclass(frozen=True)
class DistilConfig:
    """Sizes of the device stage.

    Attributes:
        guidance: scale of the teacher's law.
        real: most real sequences in the teacher cache.
        drifted: sequences continued by the device itself.
        held: held-out sequences that agreement is measured on.
        first_share: share of the steps that the first round takes.
        ffn_multiplier: widens the device's feed-forward.
        layers: transformer layers of the device.
        reader_layers: of the cloud's layers, the lower ones that read the prompt for the device; 0 is none.
        radius_rank: rank of the radius head; 0 is full.
        feature_steps: steps of the feature map's training (0 = none).
        finish_from: share of the tokens, the first ones, that the device does not learn.
        top_k: codes of the teacher's law kept a position; 0 is ``TEACHER_TOP_K``.
        law: what the device's own continuations are drawn by; None is the codes that are kept.
        rows: sequences that the teacher runs at a time.
    """

    guidance: float = 3.0
    real: int = 8000
    drifted: int = 1536
    held: int = 96
    first_share: float = 0.3
    ffn_multiplier: float | None = 2.0
    layers: int = 1
    reader_layers: int = 4
    radius_rank: int = 64
    feature_steps: int = 60
    finish_from: float = 0.0
    top_k: int = 0
    law: SamplingLaw | None = None
    rows: int = 16


@dataclass
class Material:
    """What is distilled.

    Attributes:
        cloud: the teacher, as it was trained or as it is decoded with.
        codes: int64 [pictures, tokens].
        captions: of the pictures.
        train_index, held_index: int64, numbers of pictures to learn from and to measure on.
        weights: digest of the teacher's weights; "" is not known.
    """

    cloud: GPT | CloudModel
    codes: Tensor
    captions: Captions
    train_index: Tensor
    held_index: Tensor
    weights: str = ""


@dataclass
class Inputs(Material):
    """What the stage reads from the run folder."""

    cloud: GPT
    captions: CaptionBank


def load_inputs(data: Path, text: Path, codes: Path, backbone: Path) -> Inputs:
    """Cloud model, codes and captions of a run folder's stages."""
    icons = load_captions(data)
    config = GPTConfig.from_dict(json.loads((backbone / "gpt.json").read_text()))
    cloud = GPT(config)
    load_strict(cloud, read_tensors(backbone / "gpt.safetensors"), backbone / "gpt.safetensors")
    return Inputs(
        cloud.eval().requires_grad_(False),
        torch.from_numpy(np.load(codes / "codes.npy").astype(np.int64)),
        CaptionBank(icons, StaticTextEncoder.load(text)),
        indices_of(icons, "train"),
        indices_of(icons, "held_name", "held_pair"),
    )


def teacher_sets(inputs: Material, config: DistilConfig, out: Path) -> tuple[TeacherSet, TeacherSet]:
    """Teacher caches of real training sequences and of held-out ones."""
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(inputs.train_index), generator=generator)[: config.real]
    chosen = inputs.train_index[order]
    held_order = torch.randperm(len(inputs.held_index), generator=generator)[: config.held]
    held = inputs.held_index[held_order]
    sets = [
        build_teacher_set(
            inputs.cloud,
            inputs.codes[rows],
            rows,
            inputs.captions.mixed,
            config.guidance,
            out / name,
            batch=config.rows,
            top_k=config.top_k,
            weights=inputs.weights,
        )
        for name, rows in (("held", held), ("real", chosen))
    ]
    return sets[1], sets[0]


def drifted_set(inputs: Material, device: DeviceModel, config: DistilConfig, out: Path) -> TeacherSet:
    """Teacher cache of sequences that the device model continued itself."""
    generator = torch.Generator().manual_seed(1)
    pick = torch.randint(len(inputs.train_index), (config.drifted,), generator=generator)
    rows = inputs.train_index[pick]
    law = config.law or SamplingLaw(top_k=min(TEACHER_TOP_K, inputs.cloud.config.vocab_size))
    path = out / "codes.npy"
    if not path.exists():
        out.mkdir(parents=True, exist_ok=True)
        parts = [
            drifted_sequences(device, *inputs.captions.mixed(part), inputs.codes[part], law, generator)
            for part in rows.split(max(1, min(128, 2**15 // inputs.cloud.config.tokens)))
        ]
        save_array(path, torch.cat(parts).numpy().astype(np.uint16))
    codes = torch.from_numpy(np.load(path).astype(np.int64))
    return build_teacher_set(
        inputs.cloud, codes, rows, inputs.captions.mixed, config.guidance, out,
        batch=config.rows, top_k=config.top_k, weights=inputs.weights,
    )  # fmt: skip


def distil_config(profile: str) -> DistilConfig:
    """Sizes of a profile: ``emoji`` or ``tiny``."""
    if profile == "tiny":
        return DistilConfig(real=8, drifted=8, held=4, radius_rank=8, feature_steps=2, reader_layers=1)
    return DistilConfig()


def train_device(
    *,
    data: Path,
    text: Path,
    codes: Path,
    backbone: Path,
    out: Path,
    loop: LoopConfig = DEVICE_LOOP,
    loss: LossName = "coverage",
    profile: str = "emoji",
    resume: bool = True,
    config: DistilConfig | None = None,
    general: Path | None = None,
) -> dict[str, Any]:
    """Distils a device model and writes ``device.safetensors`` and ``device.json`` into ``out``.

    Args:
        general: folder of a finished device stage to begin with, and whose teacher cache to use.

    Returns:
        The last figures: held-out greedy agreement, total variation, cross-entropy, and the feature
        map's cross-entropy with and without features.
    """
    tiny = profile == "tiny"
    config = config or distil_config(profile)
    inputs = load_inputs(data, text, codes, backbone)
    first = math.ceil(round(config.finish_from * inputs.cloud.config.tokens, 6))
    settings = DeviceTrainConfig(loss=loss, batch=4 if tiny else 16, compile=not tiny, first=first)
    trunk = replace(inputs.cloud.config, n_layer=config.layers, ffn_dim_multiplier=config.ffn_multiplier)
    depth = min(config.reader_layers, inputs.cloud.config.n_layer)
    device_config = DeviceConfig(
        trunk=trunk,
        radius_rank=config.radius_rank or None,
        feature_dim=inputs.cloud.config.dim,
        reader=replace(inputs.cloud.config, n_layer=depth) if depth else None,
    )
    torch.manual_seed(loop.seed)
    device = DeviceModel(device_config)
    start_from_cloud(device, inputs.cloud)
    if general is not None:
        path = general / "device.safetensors"
        load_strict(device, read_tensors(path), path)
    real, held = teacher_sets(inputs, config, (general or out) / "teacher")
    figures = two_rounds(device, inputs, real, held, config, settings, loop, out, resume=resume)
    same = resume and not figures  # nothing was trained, so the feature map still belongs to the device
    figures |= {f"held_{name}": value for name, value in agreement(device, held, inputs.captions).items()}
    if config.feature_steps:
        if not same:
            shutil.rmtree(out / "features", ignore_errors=True)  # of an earlier device
        small = replace(settings, batch=8)
        figures |= train_features(device, inputs, real, config, small, loop, out, resume=same)
    save_device(device, out)
    return figures


def two_rounds(
    device: DeviceModel,
    inputs: Material,
    real: TeacherSet,
    held: TeacherSet,
    config: DistilConfig,
    settings: DeviceTrainConfig,
    loop: LoopConfig,
    out: Path,
    *,
    resume: bool = True,
) -> dict[str, Any]:
    """Trains a device model on real sequences, then on its own continuations as well.

    Args:
        resume: False forgets first what was trained in ``out``.

    Returns:
        The last figures of the log; none when both rounds were finished before.
    """
    if not resume:
        forget_rounds(out)
    round_one = max(1, round(loop.steps * config.first_share))
    if (out / "round-1" / "device.safetensors").exists() and resume:
        load_strict(device, read_tensors(out / "round-1" / "device.safetensors"), out / "round-1")
    else:
        task = DeviceTask(device, real, None, held, inputs.captions, settings, loop)
        train(task, replace(loop, steps=round_one), out / "round-1", resume=resume)
        save_tensors(device, out / "round-1" / "device.safetensors")
    drifted = drifted_set(inputs, device.eval(), config, out / "drifted")
    task = DeviceTask(device, real, drifted, held, inputs.captions, settings, loop)
    figures = train(task, replace(loop, steps=loop.steps - round_one), out / "round-2", resume=resume)
    device.eval()
    return figures


def forget_rounds(out: Path) -> None:
    """Removes what :func:`two_rounds` left, so that a run that begins anew never goes on from it.

    The teacher's caches stay: they know by themselves what they belong to.
    """
    for name in ("round-1", "round-2", "drifted"):
        shutil.rmtree(out / name, ignore_errors=True)


def train_features(
    device: DeviceModel,
    inputs: Inputs,
    clean: TeacherSet,
    config: DistilConfig,
    settings: DeviceTrainConfig,
    loop: LoopConfig,
    out: Path,
    *,
    resume: bool = True,
) -> dict[str, Any]:
    """Trains the interval feature map; returns its cross-entropy with and without features."""
    task = FeatureTask(device, inputs.cloud, clean, inputs.captions, 0.3, config.guidance, settings, loop)
    short = LoopConfig(steps=config.feature_steps, warmup=10, seed=loop.seed, eval_every=config.feature_steps)
    figures = train(task, short, out / "features", resume=resume)
    return {f"features_{k}": v for k, v in figures.items() if k in ("held_with", "held_without")}


def save_device(device: DeviceModel, out: Path, stem: str = "device") -> None:
    """Writes a device model's weights and sizes."""
    save_tensors(device, out / f"{stem}.safetensors")
    (out / f"{stem}.json").write_text(json.dumps(device.config.to_dict(), indent=2) + "\n")


def load_device(folder: Path, stem: str = "device") -> DeviceModel:
    """Reads what :func:`save_device` wrote."""
    config = DeviceConfig.from_dict(json.loads((folder / f"{stem}.json").read_text()))
    device = DeviceModel(config)
    path = folder / f"{stem}.safetensors"
    load_strict(device, read_tensors(path), path)
    return device.eval()
