"""Packs a run folder into a backbone folder that pipelines and servers load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from ciar.decoding.scorer import learned_file, load_learned
from ciar.errors import DataError
from ciar.intervals.gates import share_threshold
from ciar.intervals.thresholds import ThresholdConfig
from ciar.models.bundle import Defaults, write_config
from ciar.models.checkpoint import load_strict, read_tensors, save_tensors, write_manifest
from ciar.models.device import DeviceModel
from ciar.models.eagle import EagleModel
from ciar.models.gpt import GPT, GPTConfig
from ciar.models.inference import fold_norms
from ciar.models.text import StaticTextEncoder
from ciar.models.vq import VQConfig, VQModel
from ciar.training.distil import load_device
from ciar.training.teacher import TEACHER_TOP_K
from ciar.training.tokenizer import tokenizer_home


def assemble(work: Path, out: Path, name: str = "emoji", guidance: float = 3.0) -> dict[str, Any]:
    """Writes the backbone folder ``out`` from the stages in ``work``.

    Weights are stored as float16: half the bytes, and closer to float32 than bfloat16 for weights of
    this size. Without a gate stage the score is entropy, and a running
    quantile holds the uploads at the default share.

    Returns:
        Sizes in bytes by file.

    Raises:
        DataError: a stage has not been run.
    """
    for path in ("tokenizer/vq.json", "backbone/gpt.json", "device/device.json", "text/text.json"):
        if not (work / path).is_file():
            stage = path.split("/")[0]
            raise DataError(f"{work / path} does not exist. Run first: ciar train {stage} --work {work}")
    out.mkdir(parents=True, exist_ok=True)
    for optional in ("eagle.safetensors", "device-finish.safetensors", learned_file(out).name):
        (out / optional).unlink(missing_ok=True)  # an older backbone's would be taken for this one's
    home = tokenizer_home(work)
    vq_config = VQConfig.from_dict(json.loads((home / "vq.json").read_text()))
    gpt_config = GPTConfig.from_dict(json.loads((work / "backbone/gpt.json").read_text()))
    vq, gpt = VQModel(vq_config), GPT(gpt_config)
    load_strict(vq, read_tensors(home / "vq.safetensors"), home)
    load_strict(gpt, read_tensors(work / "backbone/gpt.safetensors"), work / "backbone")
    device = load_device(work / "device")
    fold_trunks(device)
    save_tensors(vq, out / "vq.safetensors", torch.float16)
    save_tensors(gpt, out / "gpt.safetensors", torch.float16)
    save_tensors(device, out / "device.safetensors", torch.float16)
    StaticTextEncoder.load(work / "text").save(out)
    drafter = work / "eagle/eagle.safetensors"
    if drafter.is_file():
        eagle = EagleModel(gpt_config)
        load_strict(eagle, read_tensors(drafter), drafter)
        save_tensors(eagle, out / "eagle.safetensors", torch.float16)
    gate = work / "gate/gate.json"
    judged = share_threshold("entropy", Defaults().judged_share)
    chosen: dict[str, Any] = {"score": "entropy", "threshold": judged.to_dict()}
    if gate.is_file():
        chosen = json.loads(gate.read_text())
    learned = work / "gate/gate.safetensors"
    if learned.is_file():  # float32: it is small, and standardises its inputs
        save_tensors(load_learned(learned, device), learned_file(out))
    defaults = Defaults(
        guidance=guidance,
        top_k=min(TEACHER_TOP_K, gpt_config.vocab_size),
        score=chosen["score"],
        threshold=ThresholdConfig.from_dict(chosen["threshold"]),
        thresholds={n: ThresholdConfig.from_dict(one) for n, one in chosen.get("thresholds", {}).items()},
        share=chosen.get("budget", 0.30),
        injection=chosen.get("injection", True),
    )
    devices = {"device": device.config}
    if (work / "device-finish/device.json").is_file():
        finish = load_device(work / "device-finish")
        fold_trunks(finish)
        save_tensors(finish, out / "device-finish.safetensors", torch.float16)
        devices["device-finish"] = finish.config
    write_config(out, name, gpt_config, vq_config, devices, defaults)
    write_manifest(out)
    return {path.name: path.stat().st_size for path in sorted(out.iterdir()) if path.is_file()}


def fold_trunks(device: DeviceModel) -> None:
    """Folds the norms of a device model's layers, in place: its matrices can then stay in float16."""
    fold_norms(device.trunk)
    if device.reader is not None:
        fold_norms(device.reader.trunk)
