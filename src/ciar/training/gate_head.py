"""Trains the learned gate: from what the device model says, how far the cloud's law is from its own.

The positions come from real training pictures, which the table of scores never looks at.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ciar.decoding.gate import LAW_SCORES, top_logits
from ciar.decoding.oracle import distance
from ciar.decoding.sampling import SamplingLaw
from ciar.decoding.scorer import learned_inputs
from ciar.intervals.learned import LearnedGate
from ciar.models.device import DeviceModel
from ciar.training.distil import Inputs
from ciar.training.teacher import guided_logits

#: Steps of the training, positions a step, and learning rate.
STEPS, POSITIONS, RATE = 600, 4096, 3e-3


@torch.inference_mode()
def examples(
    inputs: Inputs, device: DeviceModel, rows: Tensor, *, guidance: float, law: SamplingLaw, batch: int = 8
) -> tuple[Tensor, Tensor]:
    """What the gate reads and what it should say, at every position of some pictures.

    Args:
        rows: int64 [pictures] numbers of the pictures.

    Returns:
        float32 [positions, dim + summary] and the total variations, float32 [positions].
    """
    read: list[Tensor] = []
    wanted: list[Tensor] = []
    for part in rows.split(batch):
        codes = inputs.codes[part]
        features, mask = inputs.captions.mixed(part)
        cloud = guided_logits(inputs.cloud, features, mask, codes, guidance)
        hidden = device.train_hidden(features, mask, codes[:, :-1])
        centre = device.head.centre_logits(hidden)
        top = top_logits(centre)
        read.append(learned_inputs(hidden, top, device.head.radius_at(hidden, top.indices)).flatten(0, 1))
        wanted.append(distance(cloud, centre, law).flatten())
    return torch.cat(read).clone(), torch.cat(wanted).clone()


def fit_gate(read: Tensor, wanted: Tensor, *, seed: int = 0, steps: int = STEPS) -> LearnedGate:
    """A gate that predicts the total variation: cross-entropy against it as a soft label.

    Args:
        read: float32 [positions, dim + summary].
        wanted: float32 [positions], 0 to 1.
        seed: of weights and batches.
        steps: optimiser steps.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        gate = LearnedGate(read.shape[-1] - len(LAW_SCORES), len(LAW_SCORES))
    gate.standardise(read)
    optimiser = torch.optim.AdamW(gate.parameters(), lr=RATE, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, RATE, total_steps=steps)
    for _ in range(steps):
        chosen = torch.randint(len(read), (min(POSITIONS, len(read)),), generator=generator)
        loss = F.binary_cross_entropy_with_logits(gate.logits(read[chosen]), wanted[chosen].clamp(0.0, 1.0))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    return gate.eval().requires_grad_(False)
