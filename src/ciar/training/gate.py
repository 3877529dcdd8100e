"""Measures every score on held-out pictures and calibrates the gate that ships.

Two questions are asked of a score, position by position, on real held-out pictures: does it tell where
the cloud would decide otherwise under the same noise (AUROC), and how far the device's law is from the
cloud's on the tokens that it keeps (mean total variation of the 70 % with the lowest score). The
threshold is then set on pictures made by the method itself, from prompts kept apart for calibration.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ciar.decoding.batch import Batch
from ciar.decoding.gate import SCORE_NAMES, gate_score, top_logits
from ciar.decoding.sampling import SamplingLaw, choose, to_law
from ciar.decoding.strategy import get_strategy
from ciar.intervals.calibration import auroc, bootstrap, kept_mean
from ciar.intervals.scores import total_variation
from ciar.intervals.thresholds import ThresholdConfig
from ciar.models.device import DeviceModel
from ciar.protocol.messages import Settings
from ciar.training.captions import CaptionBank
from ciar.training.distil import Inputs, load_device, load_inputs
from ciar.training.teacher import guided_logits

#: Share of the tokens kept when laws are compared.
KEEP = 0.7
#: Prompts that the threshold is calibrated on; evaluation leaves their names out.
CALIBRATION_PICTURES = 64


@dataclass
class GateRecords:
    """What was measured at each position.

    Attributes:
        scores: by name, float [pictures, tokens].
        differs: bool [pictures, tokens]; the cloud's choice is another under the same noise.
        tv: float [pictures, tokens] total variation between the laws.
        greedy: bool [pictures, tokens]; same most likely code.
    """

    scores: dict[str, np.ndarray]
    differs: np.ndarray
    tv: np.ndarray
    greedy: np.ndarray


@torch.inference_mode()
def record(
    inputs: Inputs,
    device: DeviceModel,
    rows: Tensor,
    *,
    guidance: float,
    law: SamplingLaw,
    seed: int = 0,
    batch: int = 8,
) -> GateRecords:
    """Teacher-forced scores, disagreements and total variations on real pictures.

    Args:
        rows: int64 [pictures] numbers of held-out pictures.
    """
    generator = torch.Generator().manual_seed(seed)
    out: dict[str, list[Tensor]] = {name: [] for name in (*SCORE_NAMES, "differs", "tv", "greedy")}
    for part in rows.split(batch):
        codes = inputs.codes[part]
        features, mask = inputs.captions.mixed(part)
        cloud = guided_logits(inputs.cloud, features, mask, codes, guidance)
        hidden = device.trunk.train_hidden(features, mask, codes[:, :-1])
        centre = device.head.centre_logits(hidden)
        cloud_law = to_law(cloud, law, what="the cloud model")
        device_law = to_law(centre, law, what="the device model")
        noise = -torch.empty_like(centre).exponential_(generator=generator).log()
        top = top_logits(centre)
        radius = device.head.radius_at(hidden, top.indices)
        for name in SCORE_NAMES:
            out[name].append(gate_score(name, top, radius))
        out["differs"].append(choose(cloud_law, noise) != choose(device_law, noise))
        out["tv"].append(total_variation(cloud_law.exp(), device_law.exp()))
        out["greedy"].append(cloud.argmax(-1) == centre.argmax(-1))
    joined = {name: torch.cat(parts).numpy() for name, parts in out.items()}
    return GateRecords(
        {name: joined[name] for name in SCORE_NAMES}, joined["differs"], joined["tv"], joined["greedy"]
    )


def score_table(records: GateRecords, resamples: int = 500) -> dict[str, dict[str, Any]]:
    """AUROC and kept total variation of every score, with bootstrap intervals over pictures."""
    table: dict[str, dict[str, Any]] = {}
    for name, scores in records.scores.items():
        kept = bootstrap(
            lambda s, t: kept_mean(s, t, KEEP), list(scores), list(records.tv), resamples=resamples
        )
        table[name] = {
            "auroc": auroc(scores, records.differs),
            "kept_tv": kept.value,
            "kept_tv_low": kept.lower,
            "kept_tv_high": kept.upper,
        }
        if name != "entropy":
            gain = bootstrap(
                lambda s, e, t: kept_mean(e, t, KEEP) - kept_mean(s, t, KEEP),
                list(scores),
                list(records.scores["entropy"]),
                list(records.tv),
                resamples=resamples,
            )
            table[name] |= {"gain": gain.value, "gain_low": gain.lower, "gain_high": gain.upper}
    table["oracle"] = {
        "auroc": auroc(records.tv, records.differs),
        "kept_tv": kept_mean(records.tv, records.tv, KEEP),
    }
    return table


def calibrate_threshold(
    inputs: Inputs,
    device: DeviceModel,
    captions: list[int],
    base: Settings,
    score: str,
    share: float,
    rounds: int = 4,
) -> float:
    """The fixed threshold at which the method itself uploads ``share`` of a picture's tokens.

    The device's contexts depend on the threshold, so it is set on the method's own pictures, by a few
    rounds of secant steps in the quantile.
    """
    features, mask = inputs.captions.mixed(captions)
    strategy = get_strategy("ciar")
    settings = [Settings(**{**base.__dict__, "seed": 10_000 + i}) for i in range(len(captions))]
    seen: list[float] = []
    threshold, quantile = 0.0, 1.0 - share
    for number in range(rounds):
        gates = [_Recorder(threshold if number else 1e-3, seen) for _ in settings]
        before = len(seen)
        pictures = Batch(inputs.cloud, device, features, mask, settings, strategy, list(gates), score).run()
        fresh = seen[before:]
        uploaded = float(np.mean([p.ledger.upload_share for p in pictures]))
        if number and abs(uploaded - share) < 0.005:
            break
        if number:
            quantile = min(0.995, max(0.02, quantile + (uploaded - share)))
        threshold = float(np.quantile(fresh, quantile))
    return threshold


class _Recorder:
    """A fixed threshold that remembers the scores that it saw."""

    def __init__(self, value: float, seen: list[float]) -> None:
        self.value, self.seen = value, seen

    def certain(self, score: float) -> bool:
        self.seen.append(score)
        return score < self.value

    def answered(self, accepted: bool) -> None:
        """Changes nothing."""


def calibration_split(captions: CaptionBank, train_index: Tensor, count: int) -> list[int]:
    """Numbers of the pictures whose captions calibrate; evaluation leaves their names out."""
    generator = torch.Generator().manual_seed(77)
    order = torch.randperm(len(train_index), generator=generator)[:count]
    return [int(i) for i in train_index[order]]


def calibrate_gate(
    *,
    data: Path,
    text: Path,
    codes: Path,
    backbone: Path,
    device: Path,
    out: Path,
    budget: float = 0.3,
    pictures: int = 64,
    seed: int = 0,
    guidance: float = 3.0,
    top_k: int = 128,
) -> dict[str, Any]:
    """Writes ``gate.json`` into ``out``: the table of scores, the chosen one, and its threshold."""
    inputs = load_inputs(data, text, codes, backbone)
    model = load_device(device)
    law = SamplingLaw(top_k=min(top_k, inputs.cloud.config.vocab_size))
    held = inputs.held_index[:: max(1, len(inputs.held_index) // max(pictures, 2))]
    records = record(inputs, model, held, guidance=guidance, law=law, seed=seed)
    table = score_table(records)
    gates = {name: row for name, row in table.items() if name != "oracle"}
    best = min(gates, key=lambda name: gates[name]["kept_tv"])
    base = Settings("ciar", guidance=guidance, top_k=law.top_k)
    chosen = calibration_split(inputs.captions, inputs.train_index, min(pictures, CALIBRATION_PICTURES))
    threshold = calibrate_threshold(inputs, model, chosen, base, best, budget)
    document = {
        "scores": table,
        "greedy_agreement": float(records.greedy.mean()),
        "mean_tv": float(records.tv.mean()),
        "sampled_agreement": 1.0 - float(records.differs.mean()),
        "pictures": len(held),
        "score": best,
        "threshold": ThresholdConfig(kind="fixed", value=threshold).to_dict(),
        "budget": budget,
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "gate.json").write_text(json.dumps(document, indent=2) + "\n")
    return document
