"""Distils a device model into a backbone folder, of any family of cloud models.

The cloud model runs in the type that the folder stores, without gradients, a few positions at a time; so
neither laws nor activations of whole pictures are ever in memory. The interval feature map stays at its
start, which adds nothing: training it would need gradients through the cloud.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ciar.decoding.gate import gate_score, needs_radius, top_logits
from ciar.decoding.options import default_settings, law_of
from ciar.decoding.scorer import Scoring
from ciar.errors import CheckpointError, DataError, InputError
from ciar.files import read_json, write_json
from ciar.intervals.gates import share_threshold
from ciar.intervals.thresholds import ThresholdConfig
from ciar.models.bundle import EMBEDDED, Bundle, check_device, load_bundle
from ciar.models.checkpoint import MANIFEST
from ciar.models.device import DeviceConfig, DeviceModel
from ciar.models.families import for_decoding
from ciar.models.gpt import GPT, GPTConfig
from ciar.models.install import STORED, install_device
from ciar.models.text_features import PrecomputedTextEncoder
from ciar.protocol.messages import Settings
from ciar.training.bank import PromptBank
from ciar.training.device import DeviceTrainConfig, LossName, agreement, start_from, start_from_cloud
from ciar.training.distil import (
    DEVICE_LOOP,
    DistilConfig,
    Material,
    forget_rounds,
    teacher_sets,
    two_rounds,
)
from ciar.training.gate_thresholds import calibrate_thresholds
from ciar.training.loop import LoopConfig
from ciar.training.material import (
    Say,
    captioned_pictures,
    drawn_codes,
    encoded_pictures,
    given_codes,
    read_prompts,
    text_encoder,
)
from ciar.training.teacher import TeacherSet

#: Codes of the teacher's law that are kept where the backbone's own law keeps more, or all.
MOST_KEPT = 1024
#: Positions of a training batch; a logit of each code is in memory for every one of them.
_POSITIONS = 4096
#: Width of an attention head, where a trunk of its own width has to have one.
_HEAD_DIM = 64
#: File of a work folder that says what is learned there.
_RUN = "run.json"
_OF_ANOTHER = (
    "{} holds a run with other prompts, pictures, weights or settings. Choose another folder with --work, or "
    "begin anew with --no-resume."
)


@dataclass(frozen=True)
class FolderSources:
    """What the device model learns from.

    Attributes:
        prompts: file with a prompt on every line.
        features: folder of ``ciar encode``, of these prompts; without ``prompts``, its own are taken.
        codes: codes of real pictures, ``[prompts, tokens]``; None has the cloud draw a picture a prompt.
        data: folder of pictures with captions beside them, in place of prompts and codes.
    """

    prompts: Path | None = None
    features: Path | None = None
    codes: Path | None = None
    data: Path | None = None


@dataclass(frozen=True)
class FolderConfig:
    """How a folder's device model is made, beside what :class:`DistilConfig` says.

    Attributes:
        width: of the trunk; 0 is the cloud's, whose tensors it then begins with.
        teacher_top_k: codes of the teacher's law kept a position; 0 is what the backbone's law keeps, or
            :data:`MOST_KEPT`.
        score: the gate that a threshold is made for.
        budget: share of a picture's tokens that it uploads.
        calibrate: pictures that the threshold is set on; 0 makes none, and the budget is counted.
        rounds: how often they are made, at most.
        pictures: pictures that the cloud makes at a time.
    """

    width: int = 0
    teacher_top_k: int = 0
    score: str = "entropy"
    budget: float = 0.30
    calibrate: int = 8
    rounds: int = 2
    pictures: int = 8


def open_folder(folder: str, device: str, dtype: str | None = None) -> Bundle:
    """The backbone that a device model is made for; refuses what could not be written at the end.

    Raises:
        InputError: it is one that ships, or the device is not usable.
        DataError: the folder cannot be written.
        CheckpointError: it has no readable manifest.
    """
    check_device(device)
    bundle = load_bundle(folder, device, dtype)
    if EMBEDDED in bundle.folder.resolve().parents:
        raise InputError(
            f"{bundle.name} ships with ciar. Its device model is trained in a run folder: ciar train device "
            "--work DIR"
        )
    if not os.access(bundle.folder, os.W_OK):
        raise DataError(f"{bundle.folder} cannot be written, and the device model goes there.")
    _digest(bundle, "gpt")
    return bundle


def train_folder_device(
    bundle: Bundle,
    sources: FolderSources,
    work: Path,
    *,
    loop: LoopConfig = DEVICE_LOOP,
    loss: LossName = "coverage",
    sizes: DistilConfig | None = None,
    config: FolderConfig | None = None,
    resume: bool = True,
    say: Say = lambda words: None,
) -> dict[str, Any]:
    """Distils a device model, sets its threshold, and puts both into the backbone's folder.

    Args:
        bundle: of :func:`open_folder`.
        sources: prompts and pictures.
        work: for caches and checkpoints; a second call goes on there.
        sizes: of the distillation; guidance, law and kept codes are the backbone's.
        say: called with a few words before each step that takes time.

    Returns:
        Held-out agreement, the threshold, parameters, bytes of the teacher's cache.

    Raises:
        DataError: the prompts or codes are not usable, a folder cannot be written, or ``work`` holds a run
            of something else.
        InputError: sources that exclude each other, or a prompt of which nothing can be made.
        CheckpointError: the backbone has no text encoder, or the features are of another.
    """
    sizes, config = sizes or DistilConfig(), config or FolderConfig()
    work.mkdir(parents=True, exist_ok=True)
    defaults, gpt = bundle.defaults, bundle.gpt_config
    pictures, prompts = _asked(bundle, sources)
    weights = _digest(bundle, "gpt")
    base = replace(default_settings(defaults, "ciar"), injection=False)
    kept = config.teacher_top_k or min(defaults.top_k or MOST_KEPT, MOST_KEPT)
    kept = min(kept, gpt.vocab_size)
    sizes = replace(sizes, guidance=defaults.guidance, top_k=kept, law=law_of(base), rows=config.pictures)
    shape = _device_config(bundle, sizes, config)
    made_by = "given" if sources.codes else "encoded" if pictures else "drawn"
    settings_of = [shape.to_dict(), loss, loop.seed, repr(replace(sizes, rows=0))]
    _claim(work, [_captions_key(bundle, sources, prompts), weights, made_by, settings_of], resume)
    material = _material(bundle, sources, pictures, prompts, weights, work, sizes, config, loop.seed, say)
    _claim_codes(work, material.codes)
    say("asking the teacher")
    real, held = teacher_sets(material, sizes, work / "teacher")
    torch.manual_seed(loop.seed)
    device = DeviceModel(shape)
    if device.config.trunk.dim == gpt.dim:
        cloud = bundle.model
        if isinstance(cloud, GPT):
            start_from_cloud(device, cloud)
        else:
            start_from(device, bundle.family.seeds(cloud))
    device.to(bundle.device)
    batch = max(1, min(16, _POSITIONS // gpt.tokens))
    settings = DeviceTrainConfig(loss=loss, batch=batch, compile=bundle.device.type == "cuda")
    say("training the device model")
    figures = two_rounds(device, material, real, held, sizes, settings, loop, work, resume=resume)
    device = device.to(STORED).float().eval().requires_grad_(False)  # judged as it is stored
    for module in device.modules():
        if isinstance(module, GPT):
            module.fill_buffers()  # rotary tables are computed, not stored
    device.to(bundle.device)
    figures |= {f"held_{name}": value for name, value in agreement(device, held, material.captions).items()}
    say("setting the threshold")
    threshold = _threshold(device, material, held, base, config)
    made = replace(
        defaults, device="device", score=config.score, threshold=threshold, thresholds={},
        share=config.budget, injection=False,
    )  # fmt: skip
    install_device(bundle, device, made)
    cache = sum(p.stat().st_size for name in ("indices", "logits") for p in work.rglob(f"{name}.npy"))
    return figures | {
        "folder": str(bundle.folder),
        "parameters": sum(parameter.numel() for parameter in device.parameters()),
        "teacher_bytes": cache,
        "kept_codes": kept,
        "score": config.score,
        "threshold": threshold.to_dict(),
    }


def _claim(work: Path, told: object, resume: bool) -> None:
    """Ties a work folder to what is learned there, before anything is written into it.

    Args:
        told: everything that is known of the run before its pictures are.
        resume: False removes first what an earlier run has trained, so that a run which is stopped soon
            never goes on from that.

    Raises:
        DataError: a run of something else is to be gone on with.
    """
    key = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]
    path = work / _RUN
    before = read_json(path) if resume else {}
    if before.get("key", key) != key:
        raise DataError(_OF_ANOTHER.format(work))
    if not resume:
        forget_rounds(work)
    write_json(path, before | {"key": key})


def _claim_codes(work: Path, codes: Tensor) -> None:
    """The same for the pictures.

    Raises:
        DataError: the run that is gone on with has others.
    """
    found = hashlib.sha256(codes.numpy().tobytes()).hexdigest()[:16]
    state = read_json(work / _RUN)
    if state.get("codes", found) != found:
        raise DataError(_OF_ANOTHER.format(work))
    write_json(work / _RUN, state | {"codes": found})


def _asked(bundle: Bundle, sources: FolderSources) -> tuple[list[Path], list[str]]:
    """Pictures, where they are given as files, and prompts.

    Raises:
        DataError: there are none, or too few.
        InputError: sources that exclude each other.
    """
    if sources.data is not None and (sources.prompts or sources.codes):
        raise InputError("--data brings prompts and pictures. Leave --prompts and --codes out, or --data.")
    pictures: list[Path] = []
    if sources.data is not None:
        pictures, prompts = captioned_pictures(sources.data)
    else:
        prompts = _prompts(bundle, sources)
    if len(prompts) < 2:
        raise DataError("At least two prompts are needed: one to learn from and one to measure on.")
    return pictures, prompts


def _material(
    bundle: Bundle,
    sources: FolderSources,
    pictures: Sequence[Path],
    prompts: list[str],
    weights: str,
    work: Path,
    sizes: DistilConfig,
    config: FolderConfig,
    seed: int,
    say: Say,
) -> Material:
    say("reading the prompts")
    encoder = text_encoder(bundle, sources.features, prompts, work, say)
    for prompt in prompts:
        encoder.encode(prompt)  # what it cannot read is said now, and not when the teacher comes to it
    bank = PromptBank(prompts, encoder, bundle.device)
    cloud = for_decoding(bundle.model)
    if sources.codes is not None:
        codes = given_codes(sources.codes, len(prompts), bundle.gpt_config)
    elif pictures:
        say("encoding the pictures")
        codes = encoded_pictures(bundle, pictures, work / "encoded", _digest(bundle, "vq"))
    else:
        say("drawing the teacher's own pictures")
        # As before the device model was put into the folder, which leaves the features out.
        own = replace(default_settings(bundle.defaults, "base"), seed=seed, injection=False)
        codes = drawn_codes(
            cloud, bank, prompts, own, work / "codes", weights=weights, batch=config.pictures, say=say
        )
    order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(seed))
    kept = max(1, min(sizes.held, len(prompts) // 10))
    # The teacher's laws are those of these captions too, and pictures are named by their numbers alone.
    digest = f"{weights} {_captions_key(bundle, sources, prompts)}"
    return Material(cloud, codes, bank, order[kept:], order[:kept], digest)


def _captions_key(bundle: Bundle, sources: FolderSources, prompts: list[str]) -> str:
    """Names the captions as they are read."""
    told = json.dumps([prompts, bundle.text_config.to_dict(), sources.features is not None])
    return hashlib.sha256(told.encode()).hexdigest()


def _prompts(bundle: Bundle, sources: FolderSources) -> list[str]:
    if sources.prompts is not None:
        return read_prompts(sources.prompts)
    if sources.features is not None:
        encoder: object = PrecomputedTextEncoder(sources.features)
    else:
        encoder = bundle.text
    if not isinstance(encoder, PrecomputedTextEncoder):
        raise InputError(
            "Prompts are needed to learn from. Pass --prompts FILE, --features DIR of ciar encode, or --data "
            "DIR with pictures and captions."
        )
    return [entry["prompt"] for entry in encoder.entries.values()]


def _digest(bundle: Bundle, part: str) -> str:
    """Names the weights of a model, by the manifest, and what the cloud model runs in.

    Raises:
        CheckpointError: there is no readable manifest, which the device model could not be entered in.
    """
    try:
        entries = json.loads((bundle.folder / MANIFEST).read_text())
        return f"{entries[f'{part}.safetensors']['sha256'][:16]} {bundle.dtype}"
    except (OSError, ValueError, KeyError, TypeError):
        raise CheckpointError(f"{bundle.folder} has no readable {MANIFEST}. Convert it again.") from None


def _device_config(bundle: Bundle, sizes: DistilConfig, config: FolderConfig) -> DeviceConfig:
    cloud = bundle.gpt_config
    trunk: GPTConfig = replace(bundle.family.draft(cloud), n_layer=sizes.layers)
    if config.width and config.width != cloud.dim:
        if config.width % _HEAD_DIM:
            raise InputError(f"--width must be a multiple of {_HEAD_DIM}, not {config.width}.")
        trunk = replace(trunk, dim=config.width, n_head=config.width // _HEAD_DIM)
    trunk = replace(trunk, ffn_dim_multiplier=sizes.ffn_multiplier)
    reader: GPTConfig | None = None
    if isinstance(cloud, GPTConfig) and trunk.dim == cloud.dim and sizes.reader_layers:
        reader = replace(cloud, n_layer=min(sizes.reader_layers, cloud.n_layer))
    rank = sizes.radius_rank or None
    return DeviceConfig(trunk=trunk, radius_rank=rank, feature_dim=cloud.dim, reader=reader)


def _threshold(
    device: DeviceModel, material: Material, held: TeacherSet, base: Settings, config: FolderConfig
) -> ThresholdConfig:
    """The threshold of the gate at the budget, on pictures of the method itself."""
    tokens = device.config.trunk.tokens
    judged = max(tokens - math.floor(base.prefix_rate * tokens), 1)
    if not config.calibrate:
        return share_threshold(config.score, min(1.0, config.budget * tokens / judged))
    numbers = material.train_index[: config.calibrate].tolist()
    scores = held_scores(device, material, held, config.score)
    made = calibrate_thresholds(
        material, device, numbers, base, [Scoring(config.score)], config.budget, config.rounds,
        {config.score: scores},
    )  # fmt: skip
    return made[config.score]


@torch.inference_mode()
def held_scores(device: DeviceModel, material: Material, held: TeacherSet, score: str) -> np.ndarray:
    """Scores of a law's gate along held-out pictures, float32 [pictures, tokens]."""
    place = device.head.centre.weight.device
    out = []
    for row in range(len(held)):
        features, mask = (part.to(place) for part in material.captions.mixed(held.pictures[row : row + 1]))
        codes = held.codes[row : row + 1, :-1].to(place)
        hidden = device.train_hidden(features, mask, codes)[0]
        top = top_logits(device.head.centre_logits(hidden))
        radius = device.head.radius_at(hidden, top.indices) if needs_radius(score) else None
        out.append(gate_score(score, top, radius).float().cpu())
    return torch.stack(out).numpy()
